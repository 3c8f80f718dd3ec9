"""Pretrain text encoders in JAX whose encoder never reads [MASK] (MAE-LM).

`load_encoder` loads any pretrained encoder, `load_classifier` a fine-tuned classifier of texts.
docs/api.md says what later versions keep.
"""

__all__ = ["__version__", "load_classifier", "load_encoder"]
__version__ = "1.0.0"


def load_encoder(path, step: int | None = None):
    """Loads a pretrained encoder (`maelm_jax.encoders.opened.OpenedModel`).

    Args:
        path: A workdir, an export in any format, a folder of stock transformers, or a checkpoint of
            the published code with its vocabulary beside it. Or a name on the Hub, ORG/NAME or
            ORG/NAME@REVISION.
        step: The step of a workdir's checkpoint; None for the newest.

    Raises:
        ConfigError: There is no such encoder, or it cannot be computed here.
    """
    from maelm_jax.encoders import opened  # imports JAX

    return opened.load_model(path, step)


def load_classifier(path):
    """Loads a classifier of texts (`maelm_jax.finetuning.classifier.Classifier`).

    `load_classifier(path).predict(texts)` gives labels and probabilities.

    Args:
        path: The workdir of a fine-tuned run, its export, or a folder of stock transformers for
            sequence classification. Or a name on the Hub, ORG/NAME or ORG/NAME@REVISION.

    Raises:
        ConfigError: There is no such classifier, or it cannot be computed here.
    """
    from maelm_jax.finetuning import classifier  # imports JAX

    return classifier.Classifier.load(path)
