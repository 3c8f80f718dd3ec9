"""SQuAD as training sees it: questions without a right answer, no answer to train on, and ids that come twice."""

import json
import pathlib
import shutil

import pytest
from testing import input_format

from maelm_jax import config, finetune
from maelm_jax.finetuning import tasks


def squad_files(folder: pathlib.Path, data_dir: pathlib.Path, change, changed="train-v1.1.json") -> pathlib.Path:
    """SQuAD's files, of which `change` is made to each question of the file `changed`."""
    shutil.copytree(data_dir / "squad", folder, dirs_exist_ok=True)
    content = json.loads((folder / changed).read_text())
    for question in (question for article in content["data"] for paragraph in article["paragraphs"] for question in paragraph["qas"]):
        change(question)
    (folder / changed).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda question: question.update(answers=[{"text": "not there at all", "answer_start": 0}]),
        lambda question: question.update(answers=[{"text": "", "answer_start": 0}]),
    ],
    ids=["elsewhere", "empty"],
)
def test_squad_without_a_trainable_answer_ends_with_its_count(tmp_path, data_dir, pretrained, change):
    argv = [
        "--gin_file=finetune/squad1.gin",
        f"--init_from={pretrained}",
        f"--workdir={tmp_path / 'out'}",
        "--gin.MAX_LENGTH=64",
    ]
    where = r"none of the 32 training questions of .*train-v1.1.json has an answer that stands in its context at answer_start"
    with pytest.raises(config.ConfigError, match=where) as error:
        finetune.main([*argv, f"--gin.DATA_DIR={squad_files(tmp_path, data_dir, change)}"])
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert len(str(error.value).splitlines()) == 1 and left == ["run.lock"]


def test_two_questions_of_one_id_are_refused_where_answers_are_written(tmp_path, data_dir, vocabulary):
    path = squad_files(tmp_path, data_dir, lambda question: question.update(id="q")) / "train-v1.1.json"
    with pytest.raises(config.ConfigError, match="train-v1.1.json: more than one question has the id 'q'"):
        tasks.read_file("squad1", str(path), config.Finetune(), input_format(vocabulary, 64), {})


def test_squad1_has_an_answer_to_every_question(tmp_path, data_dir, pretrained):
    """Without one, its target would be "no answer", which SQuAD 1.1 does not have."""

    def change(question):
        if question["id"].endswith("7"):
            question.update(answers=[])

    argv = ["--gin_file=finetune/squad1.gin", f"--init_from={pretrained}", f"--workdir={tmp_path / 'out'}"]
    with pytest.raises(config.ConfigError, match="train-v1.1.json: the question '.*7' has no right answer. Give a file in which"):
        finetune.main([*argv, f"--gin.DATA_DIR={squad_files(tmp_path, data_dir, change)}"])


@pytest.mark.parametrize("changed", ["train-v2.0.json", "dev-v2.0.json"])
def test_squad2_has_an_answer_to_every_question_or_says_that_there_is_none(tmp_path, data_dir, vocabulary, changed):
    """Without both, a file of questions would count as unanswerable, and empty answers would have F1 100."""

    def change(question):
        del question["answers"], question["is_impossible"]

    settings = config.Finetune(data_dir=str(squad_files(tmp_path, data_dir, change, changed)))
    with pytest.raises(config.ConfigError, match=f"{changed}: the question 'q0' has no right answer.*every question has one, or is_impossible"):
        tasks.load("squad2", settings, config.Corpus(), input_format(vocabulary, 64))
