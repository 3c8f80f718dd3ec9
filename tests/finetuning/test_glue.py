"""GLUE's files as they are distributed, what is wrong in them, TFDS, and the submission format."""

import dataclasses
import lzma

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.finetuning import files, glue, sentence_data, sentence_files, sentence_task, tasks

FOUND_HERE = {"cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "rte": (2490, 277), "qqp": (20105, 3391), "mnli": (9888, 9815)}


def settings(folder, **more):
    return config.Finetune(data_dir=str(folder), **more)


def write(path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())


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


def test_cola_has_no_header_and_its_test_file_has_one(tmp_path):
    write(tmp_path / "CoLA" / "train.tsv", 'gj04\t1\t\tThe "sailors\ngj04\t0\t*\tThem sleeps.\n')
    write(tmp_path / "CoLA" / "dev.tsv.xz", "gj04\t1\t\tNight.\n")
    train, dev = sentence_data.load(glue.TASKS["cola"], settings(tmp_path), config.Corpus())
    assert train.sentences == [('The "sailors',), ("Them sleeps.",)] and train.labels.tolist() == [1, 0]
    assert dev[""].sentences == [("Night.",)]
    write(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past.\n")
    assert sentence_files.read(glue.TASKS["cola"], tmp_path / "test.tsv", labelled=False).sentences == [("Bill whistled past.",)]


def test_stsb_and_qnli_as_distributed(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    rows = '0\tnews\tf\t2012\t0001\tn/a\tn/a\tA plane.\tAn air "plane.\t5.000\n1\tnews\tf\t2012\t0004\tn/a\tn/a\tA man.\tA dog.\t0.600\n'
    write(tmp_path / "glue" / "STS-B" / "train.tsv", "\ufeff" + header + rows)
    write(tmp_path / "glue" / "STS-B" / "dev.tsv", (header + rows).replace("\n", "\r\n"))
    train, dev = sentence_data.load(glue.TASKS["stsb"], settings(tmp_path), config.Corpus())
    assert train.sentences[0] == ("A plane.", 'An air "plane.') and train.labels.dtype == np.float32
    np.testing.assert_allclose(dev[""].labels, [5.0, 0.6], rtol=1e-6)
    for part in ("train", "dev"):
        write(tmp_path / "QNLI" / f"{part}.tsv", "index\tquestion\tsentence\tlabel\n0\tWhen?\tThen.\tentailment\n1\tWho?\tThen.\tnot_entailment\n")
    train, _ = sentence_data.load(glue.TASKS["qnli"], settings(tmp_path), config.Corpus())
    assert train.sentences == [("When?", "Then."), ("Who?", "Then.")] and train.labels.tolist() == [0, 1]


def test_mnli_has_two_dev_sets_and_a_diagnostic(tmp_path):
    pair = "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tneutral\n"
    for part in ("train", "dev_matched", "dev_mismatched"):
        write(tmp_path / "MNLI" / f"{part}.tsv", pair)
    write(tmp_path / "AX" / "AX.tsv", "index\tsentence1\tsentence2\n0\tThe cat.\tA cat.\n")
    train, dev = sentence_data.load(glue.TASKS["mnli"], settings(tmp_path), config.Corpus())
    assert list(dev) == ["matched", "mismatched"] and train.notes == []
    assert sentence_data.diagnostic(settings(tmp_path), config.Corpus()).sentences == [("The cat.", "A cat.")]


RTE = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize("text,message", [
    ("index\tsentence1\tlabel\n0\tA.\tentailment\n", "train.tsv:1: no column 'sentence2'; rte needs sentence1, sentence2, label"),
    (RTE + "0\tA.\tB.\tentailment\n1\tA.\tB.\tperhaps\n", "train.tsv:3: unknown label 'perhaps' in column label; rte has entailment, not_entailment"),
    (RTE + "0\tA.\tB.\tentailment\n1\tA. B.\tentailment\n", "train.tsv:3: 3 columns, expected 4 (index, sentence1, sentence2, label)"),
    (RTE, "train.tsv: holds no example"),
    ("", "train.tsv: the file is empty"),
])  # fmt: skip
def test_wrong_files(tmp_path, text, message):
    write(tmp_path / "RTE" / "train.tsv", text)
    with pytest.raises(config.ConfigError) as error:
        sentence_files.read(glue.TASKS["rte"], tmp_path / "RTE" / "train.tsv", labelled=True)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(config.ConfigError, match="rte: no train in .*RTE/, also in its glue/"):
        sentence_data.load(glue.TASKS["rte"], settings(tmp_path), config.Corpus())
    with pytest.raises(config.ConfigError, match="DATA_DIR: no folder"):
        sentence_data.load(glue.TASKS["rte"], settings(tmp_path / "nowhere"), config.Corpus())


def test_a_score_out_of_range(tmp_path):
    write(tmp_path / "dev.tsv", "sentence1\tsentence2\tscore\nA.\tB.\t5.5\n")
    with pytest.raises(config.ConfigError, match="dev.tsv:2: unknown label '5.5'.*numbers from 0 to 5"):
        sentence_files.read(glue.TASKS["stsb"], tmp_path / "dev.tsv", labelled=True)


def test_empty_sentences_and_broken_rows_are_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path / "train.tsv", header + "1\t1\t2\tWhy?\t\t0\n2\t3\n4\t5\t6\tHow?\tHow so?\t1\n")
    found = sentence_files.read(glue.TASKS["qqp"], tmp_path / "train.tsv", labelled=True)
    assert found.sentences == [("Why?", ""), ("How?", "How so?")] and found.labels.tolist() == [0, 1]
    assert any("1 rows with missing columns left out" in note for note in found.notes)
    assert any("1 examples with an empty sentence, kept" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path):
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
    corpus = config.Corpus(tfds_data_dir=str(tmp_path))
    train, dev = sentence_data.load(glue.TASKS["rte"], config.Finetune(), corpus)
    assert train.sentences[1] == ("train 1 é", "B.") and train.labels.tolist() == [0, 1, 0]
    assert dev[""].sentences[2] == ("validation 2 é", "B.")
    assert files.records("glue/rte", "test", corpus) is None


def test_mnli_goes_without_a_diagnostic_set_that_cannot_be_had(monkeypatch):
    def unavailable(name, split, corpus):
        raise config.ConfigError(f"{name} is not here")

    monkeypatch.setattr(files, "records", unavailable)
    assert sentence_data.diagnostic(config.Finetune(), config.Corpus()) is None


def test_the_submission_format(tmp_path):
    sentence_task.write_predictions(glue.TASKS["rte"], np.asarray([[0.0, 1.0], [2.0, 1.0]]), tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"
    sentence_task.write_predictions(glue.TASKS["stsb"], np.asarray([[0.5], [1.2]]), tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text() == "index\tprediction\n0\t2.500\n1\t5.000\n"


OWN = {"columns": ("question", "answer"), "label": "good", "labels": ("no", "yes", "unclear")}


def test_a_task_of_ones_own(tmp_path):
    write(tmp_path / "train.tsv.xz", "good\tquestion\tanswer\nyes\tWhy?\tBecause.\nunclear\tWho?\t\nno\tWhen?\tThere.\n")
    write(tmp_path / "dev.tsv", "answer\tquestion\tgood\nHere.\tWhere?\tyes\n")
    custom = config.CustomTask(train_file=str(tmp_path / "train.tsv.xz"), dev_file=str(tmp_path / "dev.tsv"), **OWN)
    chosen = config.Finetune(tasks="own", custom=custom)
    task = glue.task_of("own", custom)
    train, dev = sentence_data.load(task, chosen, config.Corpus())
    assert train.sentences == [("Why?", "Because."), ("Who?", ""), ("When?", "There.")] and list(train.labels) == [1, 2, 0]
    assert dev[""].sentences == [("Where?", "Here.")] and list(dev[""].labels) == [1]
    assert "1 examples with an empty sentence" in train.notes[0]
    assert tasks.head_of("own", chosen, ()) == ("sentence", 3)
    sentence_task.write_predictions(task, np.eye(3)[[2, 0]], tmp_path / "predictions.tsv")
    assert (tmp_path / "predictions.tsv").read_text() == "index\tprediction\n0\tunclear\n1\tno\n"
    sentence_task.write_probabilities(task, np.log([[0.25, 0.5, 0.25], [1, 3, 4]]).astype(np.float32), tmp_path / "p.tsv")
    shown = "index\tno\tyes\tunclear\n0\t0.250000\t0.500000\t0.250000\n1\t0.125000\t0.375000\t0.500000\n"
    assert (tmp_path / "p.tsv").read_text() == shown
    tasks.check("own", chosen)
    with pytest.raises(config.ConfigError, match="gone.tsv"):
        tasks.check("own", config.Finetune(tasks="own", custom=dataclasses.replace(custom, dev_file="gone.tsv")))
    for change, message in [
        ({"labels": ("yes",)}, "two classes"),
        ({"columns": ()}, "one or two"),
        ({"train_file": None}, "CustomTask.train_file is missing. Give --gin_file=finetune/own.gin"),
    ]:
        with pytest.raises(config.ConfigError, match=message):
            dataclasses.replace(chosen, custom=dataclasses.replace(custom, **change))


def test_missing_data_is_found_before_anything_runs(shared_data):
    tasks.check("mnli", settings(shared_data))
    tasks.check("squad1", settings(shared_data))
    tasks.check("squad2", settings(shared_data, squad=config.Squad(dev_share=0.25)))
    for name in ("qnli", "squad2"):
        with pytest.raises(config.ConfigError, match=f"{name}: no train"):
            tasks.check(name, settings(shared_data))


def test_a_broken_row_of_a_file_to_label_is_not_left_out(tmp_path):
    """The lines of the predictions would no longer be those of the file."""
    write(tmp_path / "test.tsv", "id\tquestion1\tquestion2\n0\tA?\tB?\n1\tC?\n")
    with pytest.raises(config.ConfigError, match="test.tsv:3: 2 columns"):
        sentence_files.read(glue.TASKS["qqp"], tmp_path / "test.tsv", labelled=False)
