"""The sentence tasks as values, and their examples: those of GLUE, and the task `own`."""

import dataclasses
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import labelled_data
from maelm_jax.finetuning.labels import AnyOf, Labels, OneOf, Score, Value
from maelm_jax.finetuning.task import Splits

OWN = "own"
YES_NO = OneOf(("0", "1"))
ENTAILED = OneOf(("entailment", "not_entailment"))
DIAGNOSTIC = "AX"  # GLUE's diagnostic set in a submission; a model of MNLI predicts it
DIAGNOSTIC_FILES = ("AX/AX.tsv", "AX/diagnostic.tsv", "diagnostic/diagnostic.tsv")
# Columns of text that a file of one's own may have, if `CustomTask.columns` names none.
USUAL_COLUMNS = (("text", "text2"), ("sentence1", "sentence2"), ("text",), ("sentence",))
MOST_FOUND_LABELS = 100  # more different labels than these must be named: they may be scores
HELD_OUT = 10  # without a dev file, one of so many examples is held out
HELD_OUT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    """What tells one sentence task from another."""

    name: str
    folder: str  # in GLUE's distribution
    texts: tuple[str, ...]  # columns of the text, one or two
    label: str  # column of the label
    kind: Labels = YES_NO  # class i is kind.names[i] in the files, and i in TFDS
    metrics: tuple[str, ...] = ("accuracy",)  # the first one is the score
    fields: tuple[str, ...] = ()  # fields of the text in TFDS, where they differ from `texts`
    parts: tuple[str, ...] = ("",)  # the X of dev_X.tsv and test_X.tsv, "" for dev.tsv and test.tsv
    headless: tuple[str, ...] = ()  # columns of the published files, if these have no header line
    skips_broken: bool = False  # the published training and dev files have rows cut in two

    def submission(self, part: str) -> str:
        """Returns the name of a test set's predictions in a submission to GLUE, without `.tsv`."""
        return self.folder + {"matched": "-m", "mismatched": "-mm"}.get(part, "")


_PAIR = ("sentence1", "sentence2")
_MNLI = OneOf(("entailment", "neutral", "contradiction"))
_F1, _MCC, _CORRELATIONS = ("accuracy", "f1"), ("mcc", "accuracy"), ("spearman", "pearson")
_COLA = ("source", "label", "mark", "sentence")  # columns
SPECS = {
    spec.name: spec
    for spec in (
        Spec("cola", "CoLA", ("sentence",), "label", metrics=_MCC, headless=_COLA),
        Spec("sst2", "SST-2", ("sentence",), "label"),
        Spec("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", metrics=_F1, fields=_PAIR),
        Spec("stsb", "STS-B", _PAIR, "score", Score(high=5.0), metrics=_CORRELATIONS),
        Spec(
            "qqp", "QQP", ("question1", "question2"), "is_duplicate", metrics=_F1, skips_broken=True
        ),
        Spec(
            name="mnli",
            folder="MNLI",
            texts=_PAIR,
            label="gold_label",
            kind=_MNLI,
            fields=("premise", "hypothesis"),
            parts=("matched", "mismatched"),
        ),
        Spec("qnli", "QNLI", ("question", "sentence"), "label", ENTAILED),
        Spec("rte", "RTE", _PAIR, "label", ENTAILED),
        Spec("wnli", "WNLI", _PAIR, "label"),
    )
}


def spec_of(name: str, custom: config.CustomTask) -> Spec:
    """Returns the values of a task. `custom`, which is `completed`, defines the task `own`."""
    if name != OWN:
        return SPECS[name]
    if custom.score_range:
        low, high = custom.score_range
        kind = Score(low=low, high=high)
    elif custom.label_separator is not None:
        kind = AnyOf(custom.labels, custom.label_separator)
    else:
        kind = OneOf(custom.labels)
    return Spec(OWN, OWN, custom.columns, custom.label, kind, metrics=kind.metrics)


class Example(typing.NamedTuple):
    """One example of a sentence task."""

    texts: tuple[str, ...]  # one or two
    label: Value | None  # None: not read
    number: int  # of the row in its file, from 0


def completed(settings: config.Finetune) -> config.Finetune:
    """Returns the settings with the columns and labels of the training file of the task `own`.

    Raises:
        ConfigError: There is no training file, or no column of text, or the labels are not clear.
    """
    custom = settings.custom
    path = labelled_data.existing_file("Finetune.train_file", settings.train_file)
    if not custom.columns:
        header = labelled_data.columns_of(path)
        usual = [columns for columns in USUAL_COLUMNS if set(columns) <= set(header)]
        if not usual:
            raise config.ConfigError(
                f"{path}: no column is named text, sentence, or sentence1 and sentence2; it has "
                f"{', '.join(header)[:200]}. Name one or two columns with CustomTask.columns"
            )
        custom = dataclasses.replace(custom, columns=usual[0])
    if not custom.labels and not custom.score_range:
        rows = labelled_data.read(path, (*custom.columns, custom.label), exact=True)
        names = set()
        for row in rows:
            names |= {*row.names(custom.label, custom.label_separator)}
            if "" in names:
                raise config.ConfigError(
                    f"{row.location}: the field {custom.label!r} is empty. Give a label"
                )
        if not 2 <= len(names) <= MOST_FOUND_LABELS:
            raise config.ConfigError(
                f"{path}: the column {custom.label!r} has {len(names)} different labels. Name all "
                "labels with CustomTask.labels, or give CustomTask.score_range=(LOWEST, HIGHEST) "
                "if they are scores"
            )
        custom = dataclasses.replace(custom, labels=labelled_data.sort_labels(names))
    return dataclasses.replace(settings, custom=custom)


def read_rows(
    spec: Spec,
    path: pathlib.Path | str,
    needed: tuple[str, ...],
    broken: list[str] | None = None,
) -> list[labelled_data.Row]:
    """Reads the rows of a file of a task, as `labelled_data.read`."""
    return labelled_data.read(path, needed, spec.headless, spec.name == OWN, broken)


def read_table(
    spec: Spec,
    path: pathlib.Path | str,
    labelled: bool,
    notes: list[str],
    skip_broken: bool = False,
) -> list[Example]:
    """Reads a file of a task, and adds notes for the user to `notes`.

    Without `labelled`, the label column can be missing. With `skip_broken`, a line with too few
    columns is left out, and noted.

    Raises:
        ConfigError: The file is not as expected. The message names file and line.
    """
    needed = (*spec.texts, spec.label) if labelled else spec.texts
    broken = [] if skip_broken else None
    rows = read_rows(spec, path, needed, broken)
    examples = [
        Example(
            tuple(map(row.text, spec.texts)),
            spec.kind.read(row, spec.label) if labelled else None,
            number,
        )
        for number, row in enumerate(rows)
    ]
    if broken:
        notes.append(f"{path}: {len(broken)} lines with missing columns left out")
    if empty := sum(not all(example.texts) for example in examples):
        notes.append(f"{path}: {empty} examples with an empty text, kept")
    return examples


def _file_name(split: str, part: str) -> str:
    return f"{split}_{part}" if part else split


def find_files(spec: Spec, settings: config.Finetune) -> tuple:
    """Returns the training file, and {part of the dev set: its file, or None if there is none}.

    Raises:
        ConfigError: The training file or every dev file is missing.
    """
    if spec.name == OWN:
        dev = {}
        if settings.dev_file is not None:
            dev[""] = labelled_data.existing_file("Finetune.dev_file", settings.dev_file)
        return labelled_data.existing_file("Finetune.train_file", settings.train_file), dev

    def find(name: str) -> pathlib.Path | None:
        return labelled_data.find_file(settings.data_dir, f"{spec.folder}/{name}.tsv")

    train = find("train")
    dev = {part: find(_file_name("dev", part)) for part in spec.parts}
    if train is None or not any(dev.values()):
        absent = "train.tsv" if train is None else "dev file"
        raise config.ConfigError(
            f"{spec.name}: no {absent} in {settings.data_dir} ({spec.folder}/, also in its glue/). "
            "Give the folder with --gin.DATA_DIR=FOLDER, or other tasks with --gin.Finetune.tasks"
        )
    return train, dev


def read(spec: Spec, settings: config.Finetune, notes: list[str]) -> Splits:
    """Reads the data of a task from its files, or from TFDS if there is no `data_dir`.

    Raises:
        ConfigError: The training data or every dev set is missing, or a file is not as expected.
    """
    if spec.name != OWN and settings.data_dir is None:
        train = _read_tfds(spec, "train")
        dev = {part: _read_tfds(spec, _file_name("validation", part)) for part in spec.parts}
    else:
        train_path, dev_paths = find_files(spec, settings)
        train = read_table(spec, train_path, True, notes, spec.skips_broken)
        if not dev_paths:
            return _hold_out(train, notes)
        dev = {
            part: path and read_table(spec, path, True, notes, spec.skips_broken)
            for part, path in dev_paths.items()
        }
    notes += [f"no {_file_name('dev', part)}" for part, examples in dev.items() if not examples]
    return Splits(train, {part: examples for part, examples in dev.items() if examples})


def _hold_out(examples: list[Example], notes: list[str]) -> Splits:
    """Divides the examples of a training file without a dev file."""
    if len(examples) < HELD_OUT:
        raise config.ConfigError(
            f"Finetune.dev_file is missing, and the training file has only {len(examples)} "
            "examples. Give --gin.DEV_FILE=FILE"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(examples))
    held_out = set(order[: len(examples) // HELD_OUT].tolist())
    notes.append(
        f"no DEV_FILE: scored on {len(held_out):,} of the {len(examples):,} examples of the "
        "training file, trained on the others"
    )
    train = [example for example in examples if example.number not in held_out]
    dev = [example for example in examples if example.number in held_out]
    return Splits(train, {"": dev})


def _read_tfds(spec: Spec, split: str, name: str | None = None) -> list[Example] | None:
    """Returns a split in the order of GLUE's files, which numbers predictions. TFDS shuffles it.

    `name` is the dataset; None: that of the task. Returns None when it does not have the split.
    """
    records = labelled_data.tfds_records(f"glue/{name or spec.name}", split)
    return records and [
        Example(
            tuple(record[field].strip() for field in spec.fields or spec.texts),
            record["label"].item(),
            number,
        )
        for number, record in enumerate(sorted(records, key=lambda record: int(record["idx"])))
    ]


def read_tests(spec: Spec, settings: config.Finetune, notes: list[str]) -> dict[str, list[Example]]:
    """Returns the test sets of a task of GLUE that can be found, without labels.

    Returns:
        {name of its predictions in a submission to GLUE: examples}.

    Raises:
        ConfigError: A file is not as expected.
    """

    def find(split: str, *names: str, dataset: str | None = None) -> list[Example] | None:
        if settings.data_dir is None:
            return _read_tfds(spec, split, dataset)
        path = labelled_data.find_file(settings.data_dir, *names)
        return path and read_table(spec, path, False, notes)

    tests = {}
    for part in spec.parts:
        name = _file_name("test", part)
        tests[spec.submission(part)] = find(name, f"{spec.folder}/{name}.tsv")
    if spec.name == "mnli":
        tests[DIAGNOSTIC] = find("test", *DIAGNOSTIC_FILES, dataset="ax")
    return {name: examples for name, examples in tests.items() if examples}
