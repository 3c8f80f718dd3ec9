"""TFDS datasets on disk, seqio Tasks and Mixtures, and the corpus as Tasks, all through the real TensorFlow Datasets and seqio."""

import importlib.util
import socket
import sys
import types

import pytest

from maelm_jax import config
from maelm_jax.data import prepare, readers, seqio_tasks, sources

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("seqio") is None, reason="seqio is not installed"),  # its import takes seconds
    pytest.mark.filterwarnings("ignore"),  # theirs: Protobuf, NumPy and SWIG deprecations of TensorFlow, TFDS and seqio
]


TEXTS = [f"Document {number} of the dataset.\nIt has a second line, with the number {number * 7}." for number in range(60)]


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A dataset in TFDS format, three files of 20 records, its metadata written by TFDS itself."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    data = folder / "little_corpus" / "1.2.0"
    data.mkdir(parents=True)
    features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "title": tfds.features.Text()})
    for number in range(3):
        with tf.io.TFRecordWriter(str(data / f"little_corpus-train.tfrecord-{number:05d}-of-00003")) as writer:
            for text in TEXTS[number * 20 : number * 20 + 20]:
                writer.write(features.serialize_example({"text": text, "title": "unused"}))
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    split = tfds.core.SplitInfo(name="train", shard_lengths=[20, 20, 20], num_bytes=0)
    tfds.folder_dataset.write_metadata(data_dir=str(data), features=features, split_infos=[split], filename_template=template)
    return str(folder)


def corpus_of(source, tmp_path, **settings):
    given = {"sequence_length": 32, "heldout_fraction": 0.1, "rows_dir": str(tmp_path / "rows")}
    return config.Corpus(sources={source: 1.0}, **given | {"processes": 1} | settings)


@pytest.fixture
def tfds(monkeypatch):
    """A function that sets the folder of TFDS datasets, which TFDS reads from TFDS_DATA_DIR at its start."""
    from tensorflow_datasets.core import constants

    return lambda folder: monkeypatch.setattr(constants, "DATA_DIR", str(folder))


def test_a_tfds_dataset_becomes_documents_and_rows(tfds, tfds_dir, vocabulary, tmp_path):
    tfds(tfds_dir)
    source = "tfds:little_corpus:1.2.0"
    corpus = corpus_of(source, tmp_path)
    assert list(sources.documents_of(source, corpus)) == TEXTS
    titles = corpus_of(source, tmp_path, text_field=("none", "title"))
    assert set(sources.documents_of(source, titles)) == {"unused"}
    parts = sources.parts(source, corpus)
    assert [len(list(sources.documents_of_part(part, corpus))) for part in parts] == [20, 20, 20]
    stores = prepare.prepare(corpus, vocabulary).stores[source]
    assert sum(store.statistics["documents"] for store in stores.values()) == len(TEXTS)


def test_a_dataset_without_a_training_split_is_named(tmp_path, monkeypatch):
    info = types.SimpleNamespace(full_name="few/1.0.0", splits={"validation": None})
    monkeypatch.setattr(seqio_tasks, "_builder", lambda *_: types.SimpleNamespace(info=info, is_prepared=lambda: True))
    for function in (seqio_tasks.identity, seqio_tasks.shard_count):
        with pytest.raises(config.ConfigError, match="few/1.0.0.*'train'.*validation"):
            function("tfds:few", corpus_of("tfds:few", tmp_path))


@pytest.mark.parametrize(
    ("is_known", "proxies", "tries"),
    [(False, {}, False), (True, {}, True), (False, {"https": "proxy:1"}, True)],
)
def test_without_a_network_nothing_is_downloaded(tfds, tmp_path, monkeypatch, is_known, proxies, tries):
    def look_up(host, port):
        if not is_known:
            raise socket.gaierror("unknown name")
        return ["an address"]

    def download(builder):
        tried.append(True)
        raise ConnectionError("refused")

    tfds(tmp_path)
    tried = []
    monkeypatch.setattr(seqio_tasks.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(seqio_tasks.urllib.request, "getproxies", lambda: proxies)
    monkeypatch.setattr("tensorflow_datasets.core.DatasetBuilder.download_and_prepare", download)
    with pytest.raises(readers.Unavailable, match="'glue/rte'.*DATA_DIR.*TFDS_DATA_DIR"):
        seqio_tasks.records("tfds:glue/rte", "train")
    assert bool(tried) is tries


MODULE = """
import seqio, tensorflow as tf

def source(field, texts):
    dataset = lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({field: texts})
    return seqio.FunctionDataSource(dataset, splits=["train"])

plain = {"text": seqio.Feature(seqio.PassThroughVocabulary(9), dtype=tf.string, rank=0)}
seqio.TaskRegistry.add("ours_a", source=source("text", ["alpha one.", "alpha two."]), preprocessors=[], output_features=plain)
seqio.TaskRegistry.add("ours_b", source=source("text", ["beta one."]), preprocessors=[], output_features=plain)
seqio.MixtureRegistry.add("ours_mixture", [("ours_a", 3.0), ("ours_b", 1.0)])
bytes_feature = {"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=False)}
without_text = lambda data: data.map(lambda example: {"targets": example["targets"]})
steps = [seqio.preprocessors.tokenize, without_text]
seqio.TaskRegistry.add("ours_ids", source=source("targets", ["gamma one."]), preprocessors=steps, output_features=bytes_feature)
"""


@pytest.fixture
def task_module(tmp_path, monkeypatch):
    (tmp_path / "our_tasks_for_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "our_tasks_for_test"
    import seqio

    for name in ("ours_a", "ours_b", "ours_ids"):
        seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove("ours_mixture")
    sys.modules.pop("our_tasks_for_test", None)


def test_a_named_task_and_a_mixture(task_module, tmp_path):
    corpus = corpus_of("seqio:ours_mixture", tmp_path, task_modules=(task_module,))
    assert sources.rates(corpus) == {"seqio:ours_a": 0.75, "seqio:ours_b": 0.25}
    assert list(sources.documents_of("seqio:ours_a", corpus)) == ["alpha one.", "alpha two."]
    assert list(sources.documents_of("seqio:ours_ids", corpus)) == ["gamma one."]
    with pytest.raises(config.ConfigError, match="'ours_x'.*our_tasks_for_test.*task_modules"):
        sources.parts("seqio:ours_x", corpus)


def test_a_task_whose_file_has_changed_is_another_text(tmp_path):
    import seqio
    import tensorflow as tf

    file = tmp_path / "lines.txt"
    file.write_text("one line\n")
    source = seqio.TextLineDataSource({"train": str(file)})
    plain = {"text": seqio.Feature(seqio.PassThroughVocabulary(9), dtype=tf.string, rank=0)}
    seqio.TaskRegistry.add("ours_lines", source=source, preprocessors=[], output_features=plain)
    corpus = corpus_of("seqio:ours_lines", tmp_path)
    first = sources.identity("seqio:ours_lines", corpus)
    assert sources.identity("seqio:ours_lines", corpus) == first
    file.write_text("other line\n")
    assert sources.identity("seqio:ours_lines", corpus) != first
    seqio.TaskRegistry.remove("ours_lines")


def test_rows_of_a_mixture_are_read_where_seqio_is_not(task_module, vocabulary, tmp_path, monkeypatch):
    corpus = corpus_of("seqio:ours_mixture", tmp_path, task_modules=(task_module,))
    monkeypatch.setattr(sources, "is_heldout", lambda text, fraction: text == "alpha two.")
    prepared = prepare.prepare(corpus, vocabulary)

    def absent(name):
        raise readers.Unavailable("no seqio")

    monkeypatch.setattr(readers, "load_module", absent)
    again = prepare.prepare(corpus, vocabulary)
    assert again.rates == prepared.rates == {"seqio:ours_a": 0.75, "seqio:ours_b": 0.25}
    assert list(again.stores) == list(prepared.stores)


@pytest.mark.parametrize("module", ["failing_tasks_for_test", "nowhere_at_all"])
def test_a_task_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, module):
    (tmp_path / "failing_tasks_for_test.py").write_text("raise RuntimeError('set MODEL_DIR')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(config.ConfigError, match=f"Corpus.task_modules: '{module}'"):
        sources.rates(corpus_of("seqio:x", tmp_path, task_modules=(module,)))
