"""Reads documents from TFRecord and ArrayRecord files, whose records are tf.train.Example."""

import typing

from maelm_jax import config
from maelm_jax.data import file_access, seqio_tasks
from maelm_jax.data.documents import BadFile

BATCH_RECORDS = 1024  # records in memory at a time


def tfrecord_documents(path: str, feature: str) -> typing.Iterator[str]:
    """Reads the documents of a TFRecord file from a feature of text."""
    tensorflow = seqio_tasks.import_tensorflow()
    count = 0
    with file_access.local_copy(path) as local:
        try:
            for record in tensorflow.data.TFRecordDataset(local).as_numpy_iterator():
                count += 1
                yield _text(path, record, feature)
        except tensorflow.errors.OpError as error:
            raise _damaged(path, error) from error
    if count == 0:
        raise _empty(path)


def array_record_documents(path: str, feature: str) -> typing.Iterator[str]:
    """Reads the documents of an ArrayRecord file from a feature of text."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise config.ConfigError(
            f"ArrayRecord files need array_record ({error}); pip install 'maelm_jax[data]'"
        ) from error
    seqio_tasks.import_tensorflow()
    with file_access.local_copy(path) as local:
        try:
            reader = array_record_module.ArrayRecordReader(local)
            count = reader.num_records()
            for start in range(0, count, BATCH_RECORDS):
                for record in reader.read(start, min(start + BATCH_RECORDS, count)):
                    yield _text(path, record, feature)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, BadFile):
                raise
            raise _damaged(path, error) from error
    if count == 0:
        raise _empty(path)


def _text(path: str, record: bytes, feature: str) -> str:
    """Returns the text of one record."""
    import tensorflow
    from google.protobuf import message

    try:
        features = tensorflow.train.Example.FromString(record).features.feature
    except message.DecodeError as error:
        raise BadFile(f"{path}: a record is no tf.train.Example; convert the file") from error
    if feature not in features:
        known = ", ".join(sorted(features))[:200]
        raise BadFile(f"{path}: no feature {feature!r} (it has {known}); set Corpus.text_column")
    values = features[feature].bytes_list.value
    if len(values) != 1:
        raise BadFile(f"{path}: feature {feature!r} does not hold one text; set Corpus.text_column")
    try:
        return values[0].decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: feature {feature!r} is not UTF-8 text; convert the file") from error


def _empty(path: str) -> BadFile:
    return BadFile(f"{path}: holds no record; remove it, or fetch it again")


def _damaged(path: str, error: Exception) -> BadFile:
    reason = " ".join(str(error).split())[:200]
    return BadFile(f"{path}: damaged records ({reason}); fetch the file again")
