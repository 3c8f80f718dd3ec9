"""The settings of the optimizer, in pretraining and in fine-tuning."""

import typing

from maelm_jax.settings import Count, LearningRate, Settings, ShareBelowOne, declare, setting


@declare
class Optimizer(Settings):
    """AdamW as in the published code, or Muon. The learning rate rises linearly to its peak."""

    kind: typing.Literal["adamw", "muon"] = setting(
        "adamw",
        "Rule that updates the weight matrices of the layers. AdamW updates all other "
        "parameters. Fine-tuning accepts AdamW only.",
    )
    learning_rate: LearningRate = setting(5e-4, "Peak learning rate of AdamW. It is what runs log.")
    muon_learning_rate: LearningRate = setting(
        2e-3, "Peak learning rate of the matrices that Muon updates."
    )
    warmup_steps: Count = setting(
        10_000,
        "Steps in which the rate rises from 0 to its peak. More steps than the run has "
        "count as those of the run.",
        "steps",
    )
    schedule: typing.Literal["linear", "wsd"] = setting(
        "linear",
        "After the warm-up, the rate falls to 0 over all other steps (linear) or over "
        "the last ones (wsd).",
    )
    decay_share: ShareBelowOne = setting(
        0.1, "With wsd, the share of all steps in which the rate falls."
    )
    b1: ShareBelowOne = setting(0.9, "Decay of Adam's first moment.")
    b2: ShareBelowOne = setting(0.98, "Decay of Adam's second moment.")
    eps: float = setting(1e-6, "Added to the denominator of Adam's update.", ge=1e-30, le=1)
    weight_decay: float = setting(0.01, "Decoupled from the gradient.", ge=0, le=100)
    decay_norms_and_biases: bool = setting(
        True, "False exempts biases and the scales of LayerNorms from the decay."
    )
    clip_norm: float = setting(2.0, "Largest norm of the gradient. 0 is no limit.", ge=0, le=1e9)
    ema_decay: ShareBelowOne = setting(
        0.0,
        "Decay, a step, of the average of the weights that is evaluated and exported. 0 is "
        "none. Not in fine-tuning.",
    )
    freeze_encoder_steps: Count = setting(
        0,
        "First steps in which the weights of the encoder do not change. Fine-tuning ignores "
        "this setting.",
        "steps",
    )
