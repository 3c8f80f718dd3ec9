"""The Trainer of transformers, on the batches that this project trains on."""

import functools
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import batches, input_format, task_data

EVALUATION_ROWS = 64


class Task(typing.NamedTuple):
    """A task as both programs get it."""

    experiment: config.Experiment
    data: task_data.TaskData
    pad: int

    def train_batches(self, seed: int) -> list[batches.Batch]:
        """The batches that this project trains on with this seed, in order."""
        grid = self.experiment.finetune.grid
        sizes = batches.padded_lengths(
            self.data.train.lengths, input_format.length_of(self.experiment)
        )
        planned = batches.Batches(self.data.train, sizes, grid.batch_size, self.pad, seed)
        return [planned.batch(step) for step in range(planned.per_epoch * grid.epochs)]

    def dev_batches(self) -> list[batches.Batch]:
        """The examples of the dev set in order."""
        (dev,) = self.data.dev.values()
        count = len(dev.features.ids)
        size = int(dev.features.lengths.max())
        return [
            batches.pack(
                dev.features.select(np.arange(first, min(first + EVALUATION_ROWS, count))),
                size,
                EVALUATION_ROWS,
                self.pad,
                0,
            )
            for first in range(0, count, EVALUATION_ROWS)
        ]

    def score(self, logits: np.ndarray) -> float:
        """The main metric of the scores of the dev set [examples, classes]."""
        (dev,) = self.data.dev.values()
        return dev.score(np.asarray(logits, np.float32))[self.data.main]


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

    grid, updates = task.experiment.finetune.grid, task.experiment.optimizer
    transformers.set_seed(seed)  # the new classifier is drawn before the Trainer sets its seed
    settings = transformers.AutoConfig.from_pretrained(encoder)
    settings.num_labels = task.data.head.classes
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
            learning_rate=grid.learning_rate,
            warmup_steps=round(grid.warmup * len(train)),
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
        data_collator=functools.partial(inputs_of, task.experiment.model.token_types > 1),
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
