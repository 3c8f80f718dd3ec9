"""The sentence tasks: those of GLUE, and the task `own` of the user in the same form."""

import dataclasses

import numpy as np

from maelm_jax import config

OWN = "own"
YES_NO = ("0", "1")
ENTAILED = ("entailment", "not_entailment")
DIAGNOSTIC = "AX"  # GLUE's diagnostic set in a submission; a model of MNLI predicts it
DIAGNOSTIC_STEMS = ("AX", "diagnostic")  # names of its file


@dataclasses.dataclass(frozen=True)
class Task:
    """One task. A task without labels is a regression."""

    name: str
    folder: str  # in GLUE's distribution
    sentences: tuple[str, ...]  # columns of the text, one or two
    label: str  # column of the label
    labels: tuple[str, ...] = YES_NO  # class i is labels[i] in the files, and i in TFDS
    label_separator: str | None = None  # between the labels of a text; None: each text has one
    score_range: tuple[float, float] = (0.0, 1.0)  # lowest and highest score, in a regression
    metrics: tuple[str, ...] = ("accuracy",)  # the first one is the score
    selected_by: tuple[str, ...] = ()  # see TaskData.selected_by
    fields: tuple[str, ...] = ()  # fields of the text in TFDS, where they differ from `sentences`
    parts: tuple[str, ...] = ("",)  # the X of dev_X.tsv and test_X.tsv, "" for dev.tsv and test.tsv
    headless: tuple[str, ...] = ()  # columns of the published files, if these have no header line
    signature: str | None = None  # a column that the published files of no other task have
    broken_rows: bool = False  # the published training file has rows cut in two; they are left out

    @property
    def tfds(self) -> str:
        """Name of the dataset in TFDS."""
        return f"glue/{self.name}"

    def normalise_scores(self, scores: np.ndarray) -> np.ndarray:
        """Scores as the model learns them, float32 from 0 to 1. This changes no correlation."""
        low, high = self.score_range
        return ((scores - low) / (high - low)).astype(np.float32)

    def denormalise_scores(self, outputs: np.ndarray) -> np.ndarray:
        """The inverse of `normalise_scores`, clipped to the range of the scores."""
        low, high = self.score_range
        return np.clip(low + outputs.astype(np.float64) * (high - low), low, high)

    def submission(self, part: str) -> str:
        """Name of the predictions of a test set in a submission to GLUE, without `.tsv`."""
        return self.folder + {"matched": "-m", "mismatched": "-mm"}.get(part, "")


TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            "CoLA",
            ("sentence",),
            "label",
            metrics=("mcc", "accuracy"),
            headless=("source", "label", "mark", "sentence"),
        ),
        Task("sst2", "SST-2", ("sentence",), "label"),
        Task(
            "mrpc",
            "MRPC",
            ("#1 String", "#2 String"),
            "Quality",
            metrics=("accuracy", "f1"),
            fields=("sentence1", "sentence2"),
            signature="#1 String",
        ),
        Task(
            "stsb",
            "STS-B",
            ("sentence1", "sentence2"),
            "score",
            labels=(),
            score_range=(0.0, 5.0),
            metrics=("spearman", "pearson"),
            selected_by=("pearson", "spearman"),
            signature="old_index",
        ),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            "is_duplicate",
            metrics=("accuracy", "f1"),
            signature="question1",
            broken_rows=True,
        ),
        Task(
            "mnli",
            "MNLI",
            ("sentence1", "sentence2"),
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            fields=("premise", "hypothesis"),
            parts=("matched", "mismatched"),
            signature="pairID",
        ),
        Task("qnli", "QNLI", ("question", "sentence"), "label", ENTAILED, signature="question"),
        Task("rte", "RTE", ("sentence1", "sentence2"), "label", ENTAILED),
        Task("wnli", "WNLI", ("sentence1", "sentence2"), "label"),
    )
}


def task_of(name: str, custom: config.CustomTask) -> Task:
    """The task of this name. `custom` defines the task `own`."""
    if name != OWN:
        return TASKS[name]
    own = Task(OWN, "", custom.columns, custom.label, custom.labels, custom.label_separator)
    if custom.score_range:
        like = TASKS["stsb"]
        return dataclasses.replace(
            own, score_range=custom.score_range, metrics=like.metrics, selected_by=like.selected_by
        )
    if custom.label_separator is not None:
        return dataclasses.replace(own, metrics=("micro_f1", "macro_f1", "exact_match"))
    second = "f1" if len(custom.labels) == 2 else "macro_f1"
    return dataclasses.replace(own, metrics=("accuracy", second))
