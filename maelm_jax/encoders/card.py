"""Writes the model card of an exported folder: how to load it, its settings and measured results.

Every figure comes from the files of the run.
"""

import string

from maelm_jax.encoders import decoder_file, verify
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.encoders.export import Written
from maelm_jax.encoders.source import EncoderSource
from maelm_jax.training import metrics

CARD = string.Template("""\
# $name

A text encoder $made with maelm_jax.

| | |
|---|---|
$table

## Loading

$loading

## Verification

$verification
""")

# {export format: about loading the folder}.
LOADING = {
    "huggingface": string.Template("""\
```python
import torch
from transformers import $auto, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("$name")
model = $auto.from_pretrained("$name").eval()
with torch.no_grad():
    output = model(**tokenizer(["A sentence."], truncation=True, return_tensors="pt"))
```

Use `$output`.$notes The tokenizer reads `$mask`, `$bos` and its other special tokens in a text as \
tokens. maelm_jax reads them as text, as `tokenizer(text, split_special_tokens=True)` does.

ONNX (`pip install onnx onnxscript onnxruntime`), after the lines above:

```python
import onnxruntime

example = tokenizer(["A sentence.", "Two."], padding=True, return_tensors="pt")
inputs = {name: example[name] for name in ("input_ids", "attention_mask")}
axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}
torch.onnx.export(
    model, (), "model.onnx", kwargs=inputs, output_names=[$names], dynamic_shapes=axes,
    dynamo=True, external_data=False,
)
session = onnxruntime.InferenceSession("model.onnx")
output = session.run(None, {name: value.numpy() for name, value in inputs.items()})
```

transformers.js, with that file as `$name/onnx/model.onnx`:

```js
import { AutoModel, AutoTokenizer, env } from "@huggingface/transformers";

env.localModelPath = "./"; // the folder that holds $name
env.allowRemoteModels = false;
const tokenizer = await AutoTokenizer.from_pretrained("$name");
const model = await AutoModel.from_pretrained("$name", { dtype: "fp32" });
const { input_ids, attention_mask } = tokenizer(["A sentence."], { truncation: true });
const output = await model({ input_ids, attention_mask });
```"""),
    "reference": string.Template("""\
`model.pt` has the layout of the checkpoints of the published implementation (yumeng5/MAE-LM): \
`args` with the architecture, `model` with the state dict and its tied copies. It holds no \
training state. The implementation itself has not been run on this file."""),
}
NO_POOLER = " If the class has a pooler, `pooler_output` and its weights are not trained."
DECODER = string.Template(
    " $file holds the decoder and the prediction head, which transformers does not read: its "
    '`pipeline("fill-mask")` and `AutoModelForMaskedLM` answer from a random head. '
    '`maelm_jax.load_encoder("$name").fill_mask` predicts masked tokens.'
)
NO_TOKENIZER = string.Template(
    " There is no tokenizer.json, because no Hugging Face tokenizer gives this vocabulary's ids: "
    "instead of `AutoTokenizer`, use `SentencePieceProcessor` with `$name/sentencepiece.model`, "
    "and put the id $bos before and $eos after those of a text."
)
# {end of the name of a stock class: its outputs that a user reads}.
OUTPUTS = {
    "MaskedLM": ("logits",),
    "SequenceClassification": ("logits",),
    "TokenClassification": ("logits",),
    "QuestionAnswering": ("start_logits", "end_logits"),
}
# Where the stock class computes something else than training did.
SPANS = (
    "also at the question, the separators and padding, where no answer can begin or end: training "
    "ruled these out, the class does not"
)
WORDS = (
    "the label of a word is that of its first token. Give the words as one text with a space "
    "between two: with `is_split_into_words=True`, a byte-level tokenizer gives other ids than in "
    "training"
)


def render(
    format: str,
    name: str,
    source: EncoderSource,
    encoder: Encoder,
    written: Written,
    has_tokenizer_json: bool,
    verification: list[verify.Report] | str,
) -> str:
    """Returns the model card of the folder `name` as Markdown.

    `verification` has the comparisons with JAX, or says why there were none.
    """
    own, vocabulary = encoder.model.encoder, encoder.vocabulary
    is_pretraining = source.experiment is not None and not source.results
    is_mae_lm = is_pretraining and encoder.model.decoder is not None
    rows = {
        "architecture": f"{written.architecture}: {own.layers} layers of width {own.width}, "
        f"{own.heads} heads, feed-forward {own.feed_forward}, {own.positions} positions, "
        f"relative buckets {own.relative_buckets}",
        "parameters": f"{written.parameters:,} in this folder",
        "longest input": f"{encoder.length} tokens",
    }
    if source.experiment is None:
        rows["converted from"] = f"`{source.path}`"
    elif source.results:
        rows |= _describe_fine_tuning(source, written.architecture)
    else:
        rows |= _describe_pretraining(source)
    head = next((head for head in OUTPUTS if written.architecture.endswith(head)), "")
    outputs = OUTPUTS.get(head, ("last_hidden_state",))
    notes = NO_POOLER if not head and "pooler/kernel" not in encoder.params else ""
    if any(path.startswith("decoder/") for path in encoder.params):
        notes += DECODER.substitute(file=decoder_file.FILE, name=name)
    if not has_tokenizer_json:
        notes += NO_TOKENIZER.substitute(name=name, bos=vocabulary.bos, eos=vocabulary.eos)
    loading = LOADING[format].substitute(
        name=name,
        auto=f"AutoModelFor{head}" if head else "AutoModel",
        output="` and `".join(f"output.{name}" for name in outputs),
        names=", ".join(f'"{name}"' for name in outputs),
        notes=notes,
        mask=vocabulary.pieces[vocabulary.mask],
        bos=vocabulary.pieces[vocabulary.bos],
    )
    tags = "tags: [mae-lm]\n" if is_mae_lm else ""
    front = f"---\nlibrary_name: transformers\n{tags}---\n\n" if format == "huggingface" else ""
    return front + CARD.substitute(
        name=name,
        made="trained" if source.experiment else "converted",
        table="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        loading=loading,
        verification=_describe_verification(verification),
    )


def _describe_pretraining(source: EncoderSource) -> dict[str, str]:
    """Returns the table entries of a pretraining run: {name: text}."""
    experiment = source.experiment
    run, corpus, objective = experiment.run, experiment.corpus, experiment.objective
    masking = objective.masking
    heldout_rate = experiment.evaluated.objective.masking.rate
    started = run.continue_from or run.init_from
    lines = [line for line in metrics.read(source.workdir) if line["step"] <= source.step]
    trained = [line for line in lines if "loss" in line][-1:]
    evaluated = [line for line in lines if "eval_loss" in line][-1:]
    losses = [f"{line['loss']:.4f} (batch of step {line['step']})" for line in trained]
    losses += [
        f"held-out, at mask rate {heldout_rate:g}, {line['eval_loss']:.4f} "
        f"with accuracy {line['eval_accuracy']:.3f} (step {line['step']})"
        for line in evaluated
    ]
    decoder = "There is no decoder"
    if experiment.decoder:
        layers = experiment.decoder.layers
        decoder = f"A decoder of {layers} layer(s), not of the encoder, puts [MASK] back"
    return {
        "objective": f"{objective.title}: {masking.rate:.0%} of the tokens are masked, by "
        f"{masking.unit}. {objective.encoder_mask_fraction:.0%} of these are in the encoder's "
        "input, "
        f"where {masking.random_fraction:.0%} become random tokens and "
        f"{masking.keep_fraction:.0%} stay. {decoder}",
        "corpus": "; ".join(f"`{name}` {rate:.0%}" for name, rate in corpus.rates.items()),
        "started from": f"`{started}`" if started else "random weights",
        "steps": f"{source.step:,} of {run.train_steps:,}, each of {run.batch_size} rows of "
        f"{corpus.sequence_length} tokens",
        "loss, nats a predicted token": "; ".join(losses) or "not recorded",
    }


def _describe_fine_tuning(source: EncoderSource, architecture: str) -> dict[str, str]:
    """Returns the table entries of a fine-tuned run: {name: text}."""
    results = source.results
    rows = {
        "fine-tuned on": results.get("task", "not recorded"),
        "started from": f"`{results.get('init_from', 'not recorded')}`",
        "steps": f"{source.step:,}",
    }
    if results.get("score") is not None:
        evaluated_on = ", ".join(results["evaluated_on"].values())
        rows["score"] = f"{results['main_metric']} {results['score']:.4f} on {evaluated_on}"
    if architecture.endswith("QuestionAnswering"):
        rows["logits"] = SPANS
        threshold = results.get("best", {}).get("best_f1_threshold")
        if threshold is not None:  # SQuAD 2.0
            rows["no answer"] = (
                "if the score of the first token minus that of the best span is above "
                f"{threshold:.7g}. A score is the start logit plus the end logit"
            )
    elif architecture.endswith("TokenClassification"):
        rows["logits"] = WORDS
    elif results.get("label_separator") is not None:
        rows["logits"] = "one for each label. A text has the labels whose logit is above 0"
    elif not results.get("labels"):
        rows["output"] = "the score as it was trained, from 0 to 1 (STS-B: score / 5)"
        if results.get("task") == "own":
            low, high = source.experiment.finetune.custom.score_range
            rows["output"] += f"; a score of the files is {low:.7g} + output * {high - low:.7g}"
    return rows


def _describe_verification(verification: list[verify.Report] | str) -> str:
    if isinstance(verification, str):
        return f"Not verified when this was written: {verification}."
    compared = "; ".join(
        f"{subject} {difference:.2g} (largest value {largest:.3g})"
        for subject, difference, largest in verification
    )
    return (
        "The folder was read back and compared with JAX on real text, in float32; the tokenizer's "
        f"ids, if it has one, were the same. Largest differences: {compared}."
    )
