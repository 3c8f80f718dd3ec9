"""Steps and learning rates of one fine-tuning run."""

import dataclasses

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning.batches import Batches
from maelm_jax.training import optimizers


class Schedule:
    """Batches, steps and learning rates of one run.

    Args:
        batches: The batches of the run.
        settings: Settings with one value of each hyper-parameter.
    """

    def __init__(self, batches: Batches, settings: config.Finetune):
        self.batches = batches
        self.total_steps = batches.per_epoch * settings.grid.epochs
        self.warmup_steps = round(settings.grid.warmup * self.total_steps)
        self.eval_every = -(-batches.per_epoch // settings.evaluations)  # steps
        self.learning_rate = settings.grid.learning_rate  # its peak
        self.tokens_per_step = int(batches.features.lengths.sum()) / batches.per_epoch  # mean

    def learning_rates(self, settings: config.Optimizer) -> np.ndarray:
        """The learning rate of every step, float32: warm-up, then linear to 0."""
        of_run = dataclasses.replace(
            settings,
            schedule="linear",
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
        )
        return optimizers.learning_rates(of_run, self.total_steps)

    def flops_per_step(self, model: config.Model) -> float:
        """Mean model FLOPs of a step, without padding. See training.flops.flops_terms."""
        per_layer = 4 * model.width**2
        per_layer += model.feed_forward_kernels * model.width * model.feed_forward
        lengths = self.batches.features.lengths.astype(np.float64)
        of_epoch = (6.0 * per_layer * lengths + 12.0 * model.width * lengths**2).sum()
        return model.layers * float(of_epoch) / self.batches.per_epoch
