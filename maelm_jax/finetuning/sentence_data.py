"""Training, dev and test sets of the sentence tasks, from files or from TFDS."""

import os
import pathlib
import typing

from maelm_jax import config
from maelm_jax.finetuning import files, glue, sentence_files
from maelm_jax.finetuning.sentence_files import Examples

TRAIN = "train"
DIAGNOSTIC_FILES = tuple(
    f"{folder}/{stem}.tsv" for folder in glue.DIAGNOSTIC_STEMS for stem in glue.DIAGNOSTIC_STEMS
)


class SentenceData(typing.NamedTuple):
    """What `load` reads."""

    train: Examples
    dev: dict[str, Examples]  # by part, see glue.Task


def load(task: glue.Task, settings: config.Finetune, corpus: config.Corpus) -> SentenceData:
    """Reads the data of a task from the files in `settings.data_dir`, or from TFDS if it is None.

    A note of the training examples names a dev set that is missing while there is another.

    Raises:
        ConfigError: The training data or every dev set is missing, or a file is not as expected.
    """
    names = _file_names(task)
    if task.name != glue.OWN and settings.data_dir is None:
        source = f"TFDS dataset {task.tfds}"
        splits = {
            part: _read_split(task, name.replace("dev", "validation"), corpus)
            for part, name in names.items()
        }
        _require(task, splits, source)
    else:
        source = _folders(task, settings)
        splits = {
            part: path
            and sentence_files.read(
                task, path, labelled=True, skip_broken_rows=task.broken_rows and part == TRAIN
            )
            for part, path in locate(task, settings).items()
        }
    train = splits.pop(TRAIN)
    train.notes += [f"no {names[part]} in {source}" for part, dev in splits.items() if dev is None]
    return SentenceData(train, {part: dev for part, dev in splits.items() if dev is not None})


def locate(task: glue.Task, settings: config.Finetune) -> dict[str, pathlib.Path | None]:
    """The files of a task.

    Returns:
        {TRAIN or part of the dev set: file, or None if there is none}.

    Raises:
        ConfigError: The training data or every dev set is missing.
    """
    custom = settings.custom
    if task.name == glue.OWN:
        named = {TRAIN: custom.train_file, "": custom.dev_file}
        paths = {part: pathlib.Path(path).expanduser() for part, path in named.items()}
        if absent := [str(path) for path in paths.values() if not os.path.isfile(path)]:
            raise config.ConfigError(
                f"own: no file {' or '.join(absent)}. "
                "Correct CustomTask.train_file or CustomTask.dev_file."
            )
        return paths
    paths = {
        part: files.locate(settings.data_dir, f"{task.folder}/{name}.tsv")
        for part, name in _file_names(task).items()
    }
    _require(task, paths, _folders(task, settings))
    return paths


def _file_names(task: glue.Task) -> dict[str, str]:
    """{TRAIN or part of the dev set: name of its file, without ending}."""
    return {TRAIN: TRAIN} | {part: _with_part("dev", part) for part in task.parts}


def _with_part(name: str, part: str) -> str:
    return f"{name}_{part}" if part else name


def _folders(task: glue.Task, settings: config.Finetune) -> str:
    packings = "also packed as .gz, .xz or .zst"
    return f"{settings.data_dir} ({task.folder}/, also in its glue/; .tsv, {packings})"


def _require(task: glue.Task, by_part: dict, source: str):
    """Raises ConfigError when the training data or every dev set in `by_part` is missing."""
    names = _file_names(task)
    absent = []
    if by_part[TRAIN] is None:
        absent = [TRAIN]
    elif not any(by_part[part] for part in task.parts):
        absent = [names[part] for part in task.parts]
    if absent:
        raise config.ConfigError(
            f"{task.name}: no {' or '.join(absent)} in {source}. "
            "Give the folder with --gin.DATA_DIR=FOLDER."
        )


def _read_split(task: glue.Task, split: str, corpus: config.Corpus) -> Examples | None:
    """A split of the task's TFDS dataset; None when the dataset does not have it."""
    records = _records(task.tfds, split, corpus)
    if records is None:
        return None
    sentences = [
        tuple(record[name].strip() for name in task.fields or task.sentences) for record in records
    ]
    labels = sentence_files.label_array(task, [record["label"] for record in records])
    return sentence_files.note_empty(Examples(sentences, labels), f"{task.tfds} {split}")


def _records(name: str, split: str, corpus: config.Corpus) -> list[dict] | None:
    """Records in the order of GLUE's files, which numbers the predictions. TFDS shuffles them."""
    records = files.records(name, split, corpus)
    return records and sorted(records, key=_index)


def _index(record: dict) -> int:
    return int(record["idx"])


def diagnostic(settings: config.Finetune, corpus: config.Corpus) -> Examples | None:
    """GLUE's diagnostic set, or None when it is missing. A model of MNLI predicts its labels."""
    if settings.data_dir is None:
        try:
            records = _records("glue/ax", "test", corpus)
        except config.ConfigError:  # TFDS cannot give it, and MNLI does not need it
            return None
        if records is None:
            return None
        pairs = [(record["premise"].strip(), record["hypothesis"].strip()) for record in records]
        return Examples(pairs, None)
    path = files.locate(settings.data_dir, *DIAGNOSTIC_FILES)
    return sentence_files.read(glue.TASKS["mnli"], path, labelled=False) if path else None


def tests(task: glue.Task, settings: config.Finetune, corpus: config.Corpus) -> dict[str, Examples]:
    """The test sets of a task of GLUE that can be found, without labels.

    Returns:
        {name of its predictions in a submission to GLUE: examples}.

    Raises:
        ConfigError: A file is not as expected.
    """
    examples_by_name = {}
    for part in task.parts:
        name = _with_part("test", part)
        if settings.data_dir is None:
            examples = _read_split(task, name, corpus)
        else:
            path = files.locate(settings.data_dir, f"{task.folder}/{name}.tsv")
            examples = path and sentence_files.read(task, path, labelled=False)
        if examples:
            examples_by_name[task.submission(part)] = examples
    if task.name == "mnli" and (examples := diagnostic(settings, corpus)):
        examples_by_name[glue.DIAGNOSTIC] = examples
    return examples_by_name
