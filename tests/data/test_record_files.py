"""TFRecord and ArrayRecord files of tf.train.Example: the same documents; what is wrong is one line."""

import pytest

from maelm_jax import config
from maelm_jax.data import sources

tf = pytest.importorskip("tensorflow")
module = pytest.importorskip("array_record.python.array_record_module")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: of TensorFlow

TEXTS = [f"Document {number}.\nIts second line, naïve." for number in range(1500)]


def read(pattern, **settings):
    return list(sources.documents_of(f"files:{pattern}", config.Corpus(rows_dir="nowhere", **settings)))


def example(*texts: bytes, feature="text") -> bytes:
    values = tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))
    return tf.train.Example(features=tf.train.Features(feature={feature: values})).SerializeToString()


def write(path, records):
    if "tfrecord" in path.name:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    else:
        writer = module.ArrayRecordWriter(str(path), "group_size:7")
        for record in records:
            writer.write(record)
        writer.close()


NAMES = ["a.tfrecord", "a.tfrecord-00000-of-00001", "a.array_record", "a.arrayrecord"]


@pytest.mark.parametrize("name", NAMES)
def test_the_documents_come_back_in_order(tmp_path, name):
    write(tmp_path / name, [example(text.encode(), feature="body") for text in TEXTS])
    assert read(tmp_path / "a.*", text_column="body") == TEXTS


@pytest.mark.parametrize("name", ["a.tfrecord", "a.array_record"])
@pytest.mark.parametrize(
    "record,message",
    [
        (example(b"x", feature="body"), r"no feature 'text' \(it has body\); set Corpus\.text_column"),
        (example(b"x", b"y"), "does not hold one text"),
        (example(b"\xff\xfe"), "not UTF-8"),
        (b"\xff\xff\xff no example", r"no tf\.train\.Example"),
    ],
    ids=["feature", "two texts", "not UTF-8", "no example"],
)
def test_a_record_of_another_form_is_one_line(tmp_path, name, record, message):
    write(tmp_path / name, [record])
    with pytest.raises(config.ConfigError, match=message) as caught:
        read(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.array_record"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:200] + bytes(100) + data[300:],
        lambda data: b"no records" * 99,
    ],
    ids=["cut", "zeros", "other"],
)
def test_damaged_records_are_named(tmp_path, name, damage):
    write(tmp_path / name, [example(text.encode()) for text in TEXTS])
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(config.ConfigError, match="damaged records|holds no record") as caught:
        read(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.array_record"])
def test_a_file_without_a_record_is_named(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(config.ConfigError, match=f"{name}: (holds no record|damaged records)"):
        read(tmp_path / name)
