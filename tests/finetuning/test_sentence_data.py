"""GLUE's files as they are distributed, and TFDS."""

import numpy as np
import pytest
from testing import PACK, write_text

from maelm_jax import config
from maelm_jax.finetuning import files, glue, sentence_data, sentence_files

FOUND_HERE = {"cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "rte": (2490, 277), "qqp": (20105, 3391), "mnli": (9888, 9815)}


def settings(folder, **more):
    return config.Finetune(data_dir=str(folder), **more)


@pytest.mark.parametrize("name", FOUND_HERE)
def test_the_real_files(name, shared_data):
    train, dev = sentence_data.load(glue.TASKS[name], settings(shared_data), config.Corpus())
    found = next(iter(dev.values()))
    assert (len(train.sentences), len(found.sentences)) == FOUND_HERE[name]
    assert set(train.labels) == set(found.labels) == set(range(len(glue.TASKS[name].labels)))
    if name == "mnli":
        assert list(dev) == ["matched"] and "dev_mismatched" in train.notes[0]
    if name == "mrpc":  # quotes are characters
        assert found.sentences[0][1].startswith('"The foodservice') and found.labels[0] == 1


@pytest.mark.parametrize("packing", PACK)
def test_cola_has_no_header_and_its_test_file_has_one(tmp_path, packing):
    write_text(tmp_path / "CoLA" / "train.tsv", 'gj04\t1\t\tThe "sailors\ngj04\t0\t*\tThem sleeps.\n')
    write_text(tmp_path / "CoLA" / f"dev.tsv{packing}", "gj04\t1\t\tNight.\n")
    train, dev = sentence_data.load(glue.TASKS["cola"], settings(tmp_path), config.Corpus())
    assert train.sentences == [('The "sailors',), ("Them sleeps.",)] and train.labels.tolist() == [1, 0]
    assert dev[""].sentences == [("Night.",)]
    write_text(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past.\n")
    assert sentence_files.read(glue.TASKS["cola"], tmp_path / "test.tsv", labelled=False).sentences == [("Bill whistled past.",)]


def test_stsb_and_qnli_as_distributed(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    rows = '0\tnews\tf\t2012\t0001\tn/a\tn/a\tA plane.\tAn air "plane.\t5.000\n1\tnews\tf\t2012\t0004\tn/a\tn/a\tA man.\tA dog.\t0.600\n'
    write_text(tmp_path / "glue" / "STS-B" / "train.tsv", "\ufeff" + header + rows)
    write_text(tmp_path / "glue" / "STS-B" / "dev.tsv", (header + rows).replace("\n", "\r\n"))
    train, dev = sentence_data.load(glue.TASKS["stsb"], settings(tmp_path), config.Corpus())
    assert train.sentences[0] == ("A plane.", 'An air "plane.') and train.labels.dtype == np.float64
    np.testing.assert_allclose(dev[""].labels, [5.0, 0.6], rtol=1e-6)
    for part in ("train", "dev"):
        path = tmp_path / "QNLI" / f"{part}.tsv"
        write_text(path, "index\tquestion\tsentence\tlabel\n0\tWhen?\tThen.\tentailment\n1\tWho?\tThen.\tnot_entailment\n")
    train, _ = sentence_data.load(glue.TASKS["qnli"], settings(tmp_path), config.Corpus())
    assert train.sentences == [("When?", "Then."), ("Who?", "Then.")] and train.labels.tolist() == [0, 1]


def test_mnli_has_two_dev_sets_and_a_diagnostic(tmp_path):
    pair = "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tneutral\n"
    for part in ("train", "dev_matched", "dev_mismatched"):
        write_text(tmp_path / "MNLI" / f"{part}.tsv", pair)
    write_text(tmp_path / "AX" / "AX.tsv", "index\tsentence1\tsentence2\n0\tThe cat.\tA cat.\n")
    train, dev = sentence_data.load(glue.TASKS["mnli"], settings(tmp_path), config.Corpus())
    assert list(dev) == ["matched", "mismatched"] and train.notes == []
    assert sentence_data.diagnostic(settings(tmp_path), config.Corpus()).sentences == [("The cat.", "A cat.")]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(config.ConfigError, match="rte: no train in .*RTE/, also in its glue/"):
        sentence_data.load(glue.TASKS["rte"], settings(tmp_path), config.Corpus())
    with pytest.raises(config.ConfigError, match="DATA_DIR: no folder"):
        sentence_data.load(glue.TASKS["rte"], settings(tmp_path / "nowhere"), config.Corpus())


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path, monkeypatch):
    """A dataset of GLUE's name in TFDS format, read by the real reader."""
    pytest.importorskip("tensorflow_datasets")
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = tmp_path / "glue" / "rte" / "2.0.0"
    folder.mkdir(parents=True)
    text = tfds.features.Text()
    label = tfds.features.ClassLabel(names=["entailment", "not_entailment"])
    features = tfds.features.FeaturesDict({"sentence1": text, "sentence2": text, "label": label, "idx": np.int32})
    for split in ("train", "validation"):
        with tf.io.TFRecordWriter(str(folder / f"rte-{split}.tfrecord-00000-of-00001")) as writer:
            for number in (2, 0, 1):  # TFDS stores examples shuffled
                record = {"sentence1": f"{split} {number} é", "sentence2": "B.", "label": number % 2, "idx": number}
                writer.write(features.serialize_example(record))
    splits = [tfds.core.SplitInfo(name=split, shard_lengths=[3], num_bytes=0) for split in ("train", "validation")]
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    tfds.folder_dataset.write_metadata(data_dir=str(folder), features=features, split_infos=splits, filename_template=template)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    corpus = config.Corpus()
    train, dev = sentence_data.load(glue.TASKS["rte"], config.Finetune(), corpus)
    assert train.sentences[1] == ("train 1 é", "B.") and train.labels.tolist() == [0, 1, 0]
    assert dev[""].sentences[2] == ("validation 2 é", "B.")
    assert files.records("glue/rte", "test", corpus) is None


def test_mnli_goes_without_a_diagnostic_set_that_cannot_be_had(monkeypatch):
    def unavailable(name, split, corpus):
        raise config.ConfigError(f"{name} is not here")

    monkeypatch.setattr(files, "records", unavailable)
    assert sentence_data.diagnostic(config.Finetune(), config.Corpus()) is None
