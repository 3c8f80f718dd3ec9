"""Fine-tune on SST-2 for one epoch with transformers alone, as a user of it would.

`finetune_vs_transformers.py --seconds` runs this program in turns with this project. It tokenises a
sample, pads each batch to its longest text, and evaluates twice. It prints the accuracies.

    python benchmarks/sst2_trainer.py MiniLM glue_data 2000 32 5e-5
"""

import argparse
import lzma
import pathlib
import random
import tempfile

import transformers


def read(data_dir: str, split: str) -> list[list[str]]:
    """Returns the text and the label of each example."""
    (path,) = pathlib.Path(data_dir, "SST-2").glob(f"{split}.tsv*")
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file][1:]


def accuracy(result: transformers.EvalPrediction) -> dict[str, float]:
    """Returns the metric of an evaluation."""
    return {"accuracy": float((result.predictions.argmax(1) == result.label_ids).mean())}


def main(encoder: str, data_dir: str, examples: str, batch_size: str, learning_rate: str):
    """Fine-tunes, and prints the accuracies."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    rows = {"train": random.Random(0).sample(read(data_dir, "train"), int(examples))}
    rows["dev"] = read(data_dir, "dev")
    sets = {
        split: [tokenizer(text) | {"label": int(label)} for text, label in of_split]
        for split, of_split in rows.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            transformers.AutoModelForSequenceClassification.from_pretrained(encoder),
            transformers.TrainingArguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=int(batch_size),
                per_device_eval_batch_size=64,
                learning_rate=float(learning_rate),
                eval_strategy="steps",
                eval_steps=0.5,  # of all steps
                save_strategy="no",
                report_to=[],
            ),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            train_dataset=sets["train"],
            eval_dataset=sets["dev"],
            compute_metrics=accuracy,
        )
        trainer.train()
        evaluations = [line for line in trainer.state.log_history if "eval_accuracy" in line]
        print([line["eval_accuracy"] for line in evaluations])


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    for name in ("encoder", "data_dir", "examples", "batch_size", "learning_rate"):
        flags.add_argument(name)
    main(**vars(flags.parse_args()))
