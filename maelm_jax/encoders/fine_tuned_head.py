"""The head of a fine-tuned run, as a stock task model names it."""

import dataclasses
import typing

import numpy as np

from maelm_jax.config import ConfigError

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
QUESTION_ANSWERING = "ForQuestionAnswering"
TOKEN_CLASSIFICATION = "ForTokenClassification"
MODULES = ("classifier", "span", "token")  # the top-level modules of the parameters of heads


@dataclasses.dataclass(frozen=True)
class FineTunedHead:
    """The head of a fine-tuned run.

    The parameters are `classifier` (dense, out), `span` (one linear map to start and end) or
    `token` (out). Those of ModernBERT are dense, norm and out in every head.

    Attributes:
        task_class: The end of the name of the stock class.
        labels: The names of the classes in order; empty for regression and question answering.
        has_several_labels: Whether a text can have several of them, or none.
    """

    task_class: str
    labels: tuple[str, ...] = ()
    has_several_labels: bool = False

    @classmethod
    def of(
        cls, params: dict[str, np.ndarray], results: dict[str, typing.Any]
    ) -> "FineTunedHead | None":
        """Returns the head among the parameters {path: array}; None for a pretraining run.

        Args:
            params: The parameters.
            results: The results.json of the run, which has the names of the classes.

        Raises:
            ConfigError: `results` does not hold one name for each class.
        """
        if "span/kernel" in params or "span/out/kernel" in params:
            return cls(QUESTION_ANSWERING)
        task_class, bias = SEQUENCE_CLASSIFICATION, params.get("classifier/out/bias")
        if "token/out/bias" in params:
            task_class, bias = TOKEN_CLASSIFICATION, params["token/out/bias"]
        if bias is None:
            return None
        classes, labels = len(bias), tuple(results.get("labels", ()))
        if classes > 1 and len(labels) != classes:
            raise ConfigError(
                f"the fine-tuned head has {classes} classes, results.json names {len(labels)}: "
                f"{', '.join(labels) or 'none'}"
            )
        if classes == 1:
            return cls(task_class)
        return cls(task_class, labels, results.get("label_separator") is not None)

    def config_entries(self) -> dict[str, typing.Any]:
        """Returns the entries of config.json that describe the head."""
        if self.task_class == QUESTION_ANSWERING:
            return {}
        if not self.labels:
            return {
                "id2label": {"0": "score"},
                "label2id": {"score": 0},
                "problem_type": "regression",
            }
        entries = {
            "id2label": {str(index): label for index, label in enumerate(self.labels)},
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }
        if self.task_class == SEQUENCE_CLASSIFICATION:
            number = "multi" if self.has_several_labels else "single"
            entries["problem_type"] = f"{number}_label_classification"
        return entries
