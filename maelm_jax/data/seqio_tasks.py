"""Reads the text of TFDS datasets and seqio Tasks.

TensorFlow and seqio are imported inside the functions, so that prepared rows can be read on a
machine that has neither.
"""

import os
import socket
import typing
import urllib.request

from maelm_jax import own_parts
from maelm_jax.config import ConfigError, Corpus
from maelm_jax.data import readers

SPLIT = "train"
NETWORK_HOST = "storage.googleapis.com"  # TFDS looks there first; a name that any network knows
OWN_TEXT = "Train on your own text with --gin.TEXT_FILES='books/*.txt' (tiny.gin needs none)"
PUBLISHED_FILES = "Give the published files with --gin.DATA_DIR=FOLDER"
# Fields that can hold the text, after Corpus.text_field. The first one that a record has is used.
FIELDS = ("text", "targets_pretokenized", "targets")  # of seqio Tasks
# wikipedia and c4 have `text`, pg19 has `book_text`.
TFDS_FIELDS = ("text", "book_text", "content", "document", "article")


def is_dataset(source: str) -> bool:
    """Returns whether a source is a TFDS dataset or a seqio Task."""
    return source.startswith(("tfds:", "seqio:"))


def _task(source: str, corpus: Corpus):
    """Returns the Task of a `seqio:` name. Raises ConfigError if it or a module is unknown."""
    seqio = readers.load_module("seqio")
    name = source.removeprefix("seqio:")
    for module in corpus.task_modules:
        own_parts.import_module("Corpus.task_modules", module)
    if name not in seqio.TaskRegistry.names() and name not in seqio.MixtureRegistry.names():
        modules = ", ".join(corpus.task_modules) or "none"
        raise ConfigError(
            f"seqio knows no Task or Mixture {name!r} (modules imported: {modules}); "
            "name its module in Corpus.task_modules"
        )
    task = seqio.get_mixture_or_task(name)
    if SPLIT not in task.splits:
        raise ConfigError(
            f"seqio Task {name!r} has no split {SPLIT!r}, only {', '.join(task.splits)}"
        )
    return task


def members(source: str, corpus: Corpus) -> dict[str, float]:
    """Returns the members of a seqio Mixture.

    Returns:
        {"seqio:TASK": rate}, or {source: 1.0} for a Task. The rates sum to 1.
    """
    task = _task(source, corpus)
    if not hasattr(task, "tasks"):
        return {source: 1.0}
    weights = {f"seqio:{part.name}": float(task.get_rate(part)) for part in task.tasks}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _builder(source: str, instead: str):
    """Returns the builder of a prepared TFDS dataset. Raises Unavailable if there is none.

    `instead` says what the user can do without the dataset.
    """
    tensorflow_datasets = readers.load_module("tensorflow_datasets")
    name = source.removeprefix("tfds:")
    try:
        builder = tensorflow_datasets.builder(name)
        if not builder.is_prepared():
            if not _has_network():
                raise ConnectionError(f"this machine cannot look up {NETWORK_HOST}")
            builder.download_and_prepare()
        return builder
    except Exception as error:  # TFDS raises many types, including network errors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise readers.Unavailable(
            f"TFDS dataset {name!r} is not in {tensorflow_datasets.core.constants.DATA_DIR} and "
            f"cannot be downloaded ({reason}). {instead}, or where there is a network run `tfds "
            f"build {name} --data_dir=DIR`, copy DIR here, and set TFDS_DATA_DIR=DIR"
        ) from error


def _has_network() -> bool:
    """Returns whether this machine looks up names of the internet, or has a proxy that does.

    Without this check, TFDS tries each address for minutes.
    """
    # Beside the proxies, `no_proxy` is listed as "no".
    has_proxy = {"http", "https", "all"} & urllib.request.getproxies().keys()
    try:
        return bool(has_proxy or socket.getaddrinfo(NETWORK_HOST, 443))
    except OSError:
        return False


def _training_builder(source: str):
    """Returns the builder of a dataset. Raises ConfigError if it has no training split."""
    builder = _builder(source, OWN_TEXT)
    if SPLIT not in builder.info.splits:
        raise ConfigError(
            f"TFDS dataset {builder.info.full_name!r} has no split {SPLIT!r}, only "
            f"{', '.join(builder.info.splits)}. Name another dataset in Corpus.sources"
        )
    return builder


def records(source: str, split: str) -> list[dict] | None:
    """Returns all records of a split of `tfds:NAME`, as NumPy values in the order of the files.

    The result is None if the dataset has no such split.
    """
    builder = _builder(source, PUBLISHED_FILES)
    if split not in builder.info.splits:
        return None
    return list(builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator())


def shard_count(source: str, corpus: Corpus) -> int:
    """Returns the number of parts that a source can be read in. A part is one or more files."""
    if source.startswith("tfds:"):
        return _training_builder(source).info.splits[SPLIT].num_shards
    return max(len(_task(source, corpus).source.list_shards(SPLIT)), 1)


def identity(source: str, corpus: Corpus) -> str:
    """Returns what identifies the text of a source.

    For a TFDS dataset it is the name, the version and the sizes. For a Task it is the name, the
    number of examples and the file names, with the sizes and times of local files. seqio knows no
    more about the text, and nothing of a change in the code of the Task.
    """
    if source.startswith("tfds:"):
        info = _training_builder(source).info
        split = info.splits[SPLIT]
        return f"{info.full_name} {split.num_examples} {split.num_bytes} {split.shard_lengths}"
    task = _task(source, corpus)
    shards = [str(shard) for shard in task.source.list_shards(SPLIT)]
    names = [os.path.basename(shard) for shard in shards]
    files = [os.stat(shard) for shard in shards if os.path.isfile(shard)]
    versions = [(file.st_size, file.st_mtime_ns) for file in files]
    return f"{task.name} {task.num_input_examples(SPLIT)} {names} {versions}"


def texts(source: str, corpus: Corpus, index: int, count: int) -> typing.Iterator[str]:
    """Yields the texts of part `index` of `count` of a source, in the order of the files.

    Raises ConfigError if the records have no text field.
    """
    if source.startswith("tfds:"):
        dataset = _training_builder(source).as_dataset(
            split=f"{SPLIT}[{index}shard]", shuffle_files=False
        )
        feature, fields = None, TFDS_FIELDS
    else:
        task = _task(source, corpus)
        seqio = readers.load_module("seqio")
        part = seqio.ShardInfo(index=index, num_shards=count) if count > 1 else None
        dataset = task.get_dataset(
            sequence_length=None, split=SPLIT, shuffle=False, shard_info=part, num_epochs=1
        )
        feature, fields = task.output_features.get("targets"), FIELDS
    fields = (*corpus.listed("text_field"), *fields)
    field = next((field for field in fields if field in dataset.element_spec), None)
    if field is None:
        raise ConfigError(
            f"{source}: no text field among {', '.join(dataset.element_spec)}; "
            "name one in Corpus.text_field"
        )
    for example in dataset.as_numpy_iterator():
        value = example[field]
        if isinstance(value, bytes):
            yield value.decode("utf-8", "replace")
        elif feature is None:
            raise ConfigError(f"{source}: the field {field!r} holds no text. Set Corpus.text_field")
        else:
            yield feature.vocabulary.decode([int(i) for i in value])
