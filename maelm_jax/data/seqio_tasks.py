"""Sources as seqio Tasks and Mixtures, and the text of TFDS datasets and seqio Tasks.

TensorFlow and seqio are imported inside the functions, so that prepared rows can be read on a
machine that has neither.
"""

import hashlib
import importlib
import logging
import os
import typing

from maelm_jax import config
from maelm_jax.data import sources
from maelm_jax.data import vocabulary as vocabularies

SPLIT = "train"
# Fields that can hold the text. The first one that a record has is used.
FIELDS = ("text", "targets_pretokenized", "targets")  # of seqio Tasks
# wikipedia and c4 have `text`, pg19 has `book_text`.
TFDS_FIELDS = ("text", "book_text", "content", "document", "article")


def _seqio():
    """The seqio module. Raises Unavailable if it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import seqio
    except ImportError as error:
        raise sources.Unavailable(
            f"tfds: and seqio: sources need seqio and TensorFlow ({error}); "
            "pip install 'maelm_jax[data]'") from error
    return seqio


def seqio_vocabulary(vocabulary: vocabularies.Vocabulary):
    """The vocabulary as a seqio.Vocabulary.

    seqio's base class takes 0 as the padding id and stops decoding at the first `</s>`. This class
    has the vocabulary's padding id and decodes all ids.
    """
    seqio = _seqio()
    import tensorflow

    class SeqioVocabulary(seqio.Vocabulary):
        bos_id = property(lambda self: vocabulary.bos)
        eos_id = property(lambda self: vocabulary.eos)
        pad_id = property(lambda self: vocabulary.pad)
        unk_id = property(lambda self: vocabulary.unk)
        mask_id = property(lambda self: vocabulary.mask)
        _base_vocab_size = property(lambda self: vocabulary.size)

        def _encode(self, s):
            return vocabulary.encode(s)

        def _decode(self, ids):
            return vocabulary.decode(ids)

        def decode(self, ids):
            return vocabulary.decode([int(i) for i in ids])

        def _encode_tf(self, s):
            def encode(value):
                return tensorflow.constant(
                    vocabulary.encode(value.numpy().decode("utf-8")), tensorflow.int32)

            ids = tensorflow.py_function(encode, [s], tensorflow.int32)
            ids.set_shape([None])
            return ids

        def _decode_tf(self, ids):
            return tensorflow.py_function(
                lambda row: vocabulary.decode(row.numpy().tolist()), [ids], tensorflow.string)

        def decode_tf(self, ids):
            return self._decode_tf(ids)

        def __eq__(self, other):
            return getattr(other, "fingerprint", None) == vocabulary.fingerprint

        def __hash__(self):
            return hash(vocabulary.fingerprint)

        fingerprint = vocabulary.fingerprint

    return SeqioVocabulary()


def register(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> str:
    """Registers each source as a seqio Task and all of them as a Mixture by their rates.

    A `seqio:` source is a Task already and enters the Mixture unchanged. The other Tasks give
    examples with `targets` (ids) and `targets_pretokenized` (one document).

    Args:
        corpus: The sources and their rates.
        vocabulary: Turns text into ids.

    Returns:
        The name of the Mixture.
    """
    seqio = _seqio()
    rates = sources.rates(corpus)
    key = hashlib.sha256(f"{vocabulary.fingerprint} {corpus}".encode()).hexdigest()[:12]
    names = []
    for source, rate in rates.items():
        name = source.removeprefix("seqio:")
        if name == source:
            name = f"maelm_{key}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        if name not in seqio.TaskRegistry.names():
            seqio.TaskRegistry.add(
                name,
                source=seqio.FunctionDataSource(_dataset_function(source, corpus), splits=[SPLIT]),
                preprocessors=[seqio.preprocessors.tokenize],
                output_features={
                    "targets": seqio.Feature(seqio_vocabulary(vocabulary), add_eos=False)
                },
            )
        names.append((name, rate))
    mixture = f"maelm_{key}"
    if mixture not in seqio.MixtureRegistry.names():
        seqio.MixtureRegistry.add(mixture, names)
    return mixture


def _dataset_function(source: str, corpus: config.Corpus) -> typing.Callable:
    def dataset(split, shuffle_files, seed=None):
        import tensorflow

        del split, shuffle_files, seed  # there is one split, in one order
        signature = {"targets": tensorflow.TensorSpec((), tensorflow.string)}
        examples = lambda: (  # noqa: E731
            {"targets": text} for text in sources.documents(source, corpus))
        return tensorflow.data.Dataset.from_generator(examples, output_signature=signature)

    return dataset


def _task(source: str, corpus: config.Corpus):
    """The Task of a `seqio:` name. Raises ConfigError if the name or a module is unknown."""
    seqio = _seqio()
    name = source.removeprefix("seqio:")
    for module in corpus.task_modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise config.ConfigError(
                f"Corpus.task_modules: {module!r} cannot be imported ({error}); "
                "install it or set PYTHONPATH") from error
    if name not in seqio.TaskRegistry.names() and name not in seqio.MixtureRegistry.names():
        modules = ", ".join(corpus.task_modules) or "none"
        raise config.ConfigError(
            f"seqio knows no Task or Mixture {name!r} (modules imported: {modules}); "
            "name its module in Corpus.task_modules")
    return seqio.get_mixture_or_task(name)


def members(source: str, corpus: config.Corpus) -> dict[str, float]:
    """The members of a seqio Mixture.

    Returns:
        {"seqio:TASK": rate}, or {source: 1.0} for a Task. The rates sum to 1.
    """
    task = _task(source, corpus)
    if not hasattr(task, "tasks"):
        return {source: 1.0}
    weights = {f"seqio:{part.name}": float(task.get_rate(part)) for part in task.tasks}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _builder(source: str, corpus: config.Corpus):
    """The TFDS builder of a prepared dataset. Raises Unavailable if it cannot be made ready."""
    _seqio()
    import tensorflow_datasets

    name = source.removeprefix("tfds:")
    where = corpus.tfds_data_dir or tensorflow_datasets.core.constants.DATA_DIR
    missing = f"TFDS dataset {name!r} is not in {where} and cannot be downloaded"
    remedy = (
        f"where there is a network run `tfds build {name} --data_dir=DIR`, copy DIR here, "
        f"set Corpus.tfds_data_dir; {sources.WITHOUT}")
    try:
        builder = tensorflow_datasets.builder(name, data_dir=corpus.tfds_data_dir)
        if builder.is_prepared() or _download(builder):
            return builder
    except Exception as error:  # TFDS raises many types, including network errors
        reason = " ".join(str(error).split())[:160]
        raise sources.Unavailable(
            f"{missing} ({type(error).__name__}: {reason}); {remedy}") from error
    raise sources.Unavailable(f"{missing}; {remedy}")


def _download(builder) -> bool:
    logging.getLogger(__name__).info("downloading %s", builder.info.full_name)
    builder.download_and_prepare()
    return builder.is_prepared()


def _tfds_source(source: str, corpus: config.Corpus):
    """The dataset as a seqio.TfdsDataSource of a fixed version."""
    builder = _builder(source, corpus)
    name, version = builder.info.full_name.rsplit("/", 1)
    if SPLIT not in builder.info.splits:
        raise config.ConfigError(
            f"TFDS dataset {name!r} has no split {SPLIT!r}, only {', '.join(builder.info.splits)}")
    return _seqio().TfdsDataSource(
        f"{name}:{version}", tfds_data_dir=corpus.tfds_data_dir, splits=[SPLIT], read_only=True)


def records(source: str, corpus: config.Corpus, split: str) -> list[dict] | None:
    """All records of one split of a TFDS dataset, in the order of the files.

    Args:
        source: `tfds:NAME`.
        corpus: Holds the folder of TFDS datasets.
        split: The split's name.

    Returns:
        The records as NumPy values, or None if the dataset has no such split.
    """
    builder = _builder(source, corpus)
    if split not in builder.info.splits:
        return None
    return list(builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator())


def shard_count(source: str, corpus: config.Corpus) -> int:
    """The number of parts that the source can be read in. A part is one or more files."""
    if source.startswith("tfds:"):
        return max(len(_tfds_source(source, corpus).list_shards(SPLIT)), 1)
    task = _task(source, corpus)
    if SPLIT not in task.splits:
        raise config.ConfigError(
            f"seqio Task {task.name!r} has no split {SPLIT!r}, only {', '.join(task.splits)}")
    return max(len(task.source.list_shards(SPLIT)), 1)


def identity(source: str, corpus: config.Corpus) -> str:
    """What identifies the text of a source.

    For a TFDS dataset it is the name, the version and the sizes. For a Task it is the name, the
    number of examples and the file names, because seqio knows no more about the text.
    """
    if source.startswith("tfds:"):
        info = _builder(source, corpus).info
        return (
            f"{info.full_name} {info.splits[SPLIT].num_examples} "
            f"{info.splits[SPLIT].num_bytes} {info.splits[SPLIT].shard_lengths}")
    task = _task(source, corpus)
    return (
        f"{task.name} {task.num_input_examples(SPLIT)} "
        f"{[os.path.basename(str(name)) for name in task.source.list_shards(SPLIT)]}")


def texts(source: str, corpus: config.Corpus, index: int, count: int) -> typing.Iterator[str]:
    """The texts of one part of a source, in the order of the files.

    Args:
        source: `tfds:NAME` or `seqio:NAME`.
        corpus: Holds the folder of TFDS datasets and the modules of Tasks.
        index: Number of the part, from 0.
        count: Number of parts.

    Raises:
        ConfigError: The records have no text field.
    """
    seqio = _seqio()
    part = seqio.ShardInfo(index=index, num_shards=count) if count > 1 else None
    if source.startswith("tfds:"):
        dataset = _tfds_source(source, corpus).get_dataset(SPLIT, shuffle=False, shard_info=part)
        decoder, fields = None, TFDS_FIELDS
    else:
        task = _task(source, corpus)
        dataset = task.get_dataset(
            sequence_length=None, split=SPLIT, shuffle=False, shard_info=part, num_epochs=1)
        decoder, fields = task.output_features.get("targets"), FIELDS
    found = [field for field in fields if field in dataset.element_spec]
    if not found:
        raise config.ConfigError(
            f"{source}: no text field among {', '.join(dataset.element_spec)}; "
            f"one of {', '.join(fields)} is needed")
    for example in dataset.as_numpy_iterator():
        value = example[found[0]]
        yield (
            value.decode("utf-8", "replace")
            if isinstance(value, bytes)
            else decoder.vocabulary.decode([int(i) for i in value]))
