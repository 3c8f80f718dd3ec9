"""Questions from JSON and TFDS, and the split of a dev file that stands alone."""

import json

import pytest

from maelm_jax import config
from maelm_jax.finetuning import squad


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "not JSON"),
        ('{"version": "1.1"}', "data: expected list, got NoneType"),
        ('{"data": [{"title": "a", "paragraphs": [{"qas": []}]}]}', "data[0].paragraphs[0].context: expected str, got NoneType"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1"}]}]}]}', "data[0].paragraphs[0].qas[0].question: expected str"),
        ('{"data": []}', "holds no question"),
    ],
)
def test_wrong_json(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(config.ConfigError) as error:
        squad.read_file(tmp_path / "x.json")
    assert message in str(error.value) and "x.json" in str(error.value)


@pytest.mark.parametrize("text,start,span", [("Denmark", 8, (8, 15)), ("Denmark ", 8, (8, 15)), (" Denmark ", 7, (8, 15)), (" ", 7, None)])
def test_an_answer_has_no_space_at_its_ends(text, start, span):
    """With SentencePiece, the space belongs to the token of the next word."""
    question = squad.Question("1", "Q?", "Kings of Denmark and Norway"[1:], ((text, start),), "T")
    assert squad.answer_span(question) == span


def test_a_dev_file_alone_is_split_by_article(data_dir, tmp_path):
    (tmp_path / "dev-v2.0.json").write_text((data_dir / "squad" / "dev-v2.0.json").read_text())
    with pytest.raises(config.ConfigError, match="no train-v2.0.json in .*dev_share=0.25 trains on three quarters"):
        squad.load("squad2", config.Finetune(data_dir=str(tmp_path)), config.Corpus())
    train, dev = squad.load("squad2", config.Finetune(data_dir=str(tmp_path), squad=config.Squad(dev_share=0.25)), config.Corpus())
    assert {q.article for q in train.questions}.isdisjoint(q.article for q in dev.questions)
    assert (len(train.questions), len(dev.questions)) == (24, 8) and "not the official split" in dev.notes[0]


def test_no_unanswerable_question_in_2_0_is_said(data_dir, tmp_path):
    content = json.loads((data_dir / "squad" / "dev-v1.1.json").read_text())
    for part in ("train", "dev"):
        (tmp_path / f"{part}-v2.0.json").write_text(json.dumps(content))
    _, dev = squad.load("squad2", config.Finetune(data_dir=str(tmp_path)), config.Corpus())
    assert "no question is unanswerable" in dev.notes[0]


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path, monkeypatch):
    """A dataset of SQuAD's name in TFDS format, read by the real reader."""
    pytest.importorskip("tensorflow_datasets")
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = tmp_path / "squad" / "v2.0" / "3.0.0"
    folder.mkdir(parents=True)
    features = tfds.builder("squad/v2.0", data_dir=str(tmp_path / "none")).info.features
    for split in ("train", "validation"):
        with tf.io.TFRecordWriter(str(folder / f"squad-{split}.tfrecord-00000-of-00001")) as writer:
            for number in range(2):
                answers = {"text": ["été", "of"] * number, "answer_start": [3, 7] * number}
                record = {"id": f"{split}{number}", "title": "T", "context": "un été of", "question": "Q?", "answers": answers}
                record |= {"is_impossible": number == 0, "plausible_answers": {"text": [], "answer_start": []}}
                writer.write(features.serialize_example(record))
    splits = [tfds.core.SplitInfo(name=split, shard_lengths=[2], num_bytes=0) for split in ("train", "validation")]
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    tfds.folder_dataset.write_metadata(data_dir=str(folder), features=features, split_infos=splits, filename_template=template)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    train, dev = squad.load("squad2", config.Finetune(), config.Corpus())
    assert dev.questions[1] == squad.Question("validation1", "Q?", "un été of", (("été", 3), ("of", 7)), "T")
    assert [question.is_impossible for question in train.questions] == [True, False]
    assert train.questions[0].answers == () and squad.answer_span(train.questions[1]) == (3, 6)
