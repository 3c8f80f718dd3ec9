"""The Trainer of transformers, on the batches that this project trains on."""

import functools
import pathlib
import typing

import numpy as np

from maelm_jax.finetuning import batches, grid, session

EVALUATION_ROWS = 64


class Task(typing.NamedTuple):
    """A task as both programs get it."""

    planned: grid.Planned
    session: session.Session

    def train_batches(self, seed: int) -> list[batches.Batch]:
        """The batches that this project trains on with this seed, in order."""
        runs = grid.all_runs(self.planned, self.session)
        (settings,) = [settings for settings in runs if settings.run.seed == seed]
        run = session.Run(self.session, settings, self.planned.encoder, pathlib.Path())
        return [run.batches.batch(step) for step in range(run.total_steps)]

    def dev_batches(self) -> list[batches.Batch]:
        """The examples of the dev set in order."""
        (dev,) = self.session.data.dev.values()
        count, pad = len(dev.features.ids), self.session.vocabulary.pad
        longest = int(dev.features.lengths.max())
        return [
            batches.pack(
                dev.features.select(np.arange(first, min(first + EVALUATION_ROWS, count))),
                longest,
                EVALUATION_ROWS,
                pad,
                0,
            )
            for first in range(0, count, EVALUATION_ROWS)
        ]

    def score(self, logits: np.ndarray) -> float:
        """The main metric of the scores of the dev set [examples, classes]."""
        scores = self.session.score({"": np.asarray(logits, np.float32)})
        return scores[self.session.main_metric]


def create(encoder: str, task: Task, folder: pathlib.Path, seed: int, dropout: bool = True):
    """Returns the Trainer of transformers for a task.

    Args:
        encoder: A stock folder, with or without a classifier.
        task: What it trains on.
        folder: A folder for what the Trainer writes.
        seed: Seed of the batches, of a new classifier and of dropout.
        dropout: False trains without dropout, True with that of the folder.
    """
    import transformers

    experiment = task.planned.experiment
    grid_settings, updates = experiment.finetune.grid, experiment.optimizer
    transformers.set_seed(seed)  # the new classifier is drawn before the Trainer sets its seed
    settings = transformers.AutoConfig.from_pretrained(encoder)
    settings.num_labels = max(len(task.session.task.labels), 1)
    if not dropout:
        rates = [name for name in vars(settings) if "dropout" in name]
        vars(settings).update(dict.fromkeys(rates, 0.0))
    train = task.train_batches(seed)
    return transformers.Trainer(
        transformers.AutoModelForSequenceClassification.from_pretrained(encoder, config=settings),
        transformers.TrainingArguments(
            str(folder),
            seed=seed,
            max_steps=len(train),
            learning_rate=grid_settings.learning_rate,
            warmup_steps=round(grid_settings.warmup * len(train)),
            weight_decay=updates.weight_decay,
            adam_beta1=updates.b1,
            adam_beta2=updates.b2,
            adam_epsilon=updates.eps,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            # An item of the datasets is a whole batch.
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            train_sampling_strategy="sequential",
        ),
        data_collator=functools.partial(inputs_of, experiment.encoder.token_types > 1),
        train_dataset=train,
    )


def inputs_of(has_types: bool, items: list[batches.Batch]) -> dict:
    """The one batch of `items` as a model of transformers takes it, without the rows that fill up.

    Args:
        has_types: The encoder reads token types.
        items: One batch.
    """
    import torch

    (batch,) = items
    count = int(batch.weights.sum())
    ids, lengths, second = batch.ids[:count], batch.lengths[:count], batch.context[:count]
    slots = np.arange(ids.shape[1])
    mask = slots < lengths[:, None]
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": batch.targets[:count]}
    if has_types:
        arrays["token_type_ids"] = mask & (slots >= second[:, None]) & (second > 0)[:, None]
    return {
        name: torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "biu" else array.dtype))
        for name, array in arrays.items()
    }
