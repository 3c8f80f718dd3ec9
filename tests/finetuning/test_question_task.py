"""SQuAD as training sees it: no answer to train on, and ids that come twice."""

import json
import pathlib
import shutil

import pytest

from maelm_jax import config, finetune
from maelm_jax.finetuning import tasks
from maelm_jax.finetuning.input_format import InputFormat


def squad_files(folder: pathlib.Path, data_dir: pathlib.Path, change) -> pathlib.Path:
    """SQuAD 1.1's files, of which `change` is made to each question of the training file."""
    content = json.loads((data_dir / "squad" / "train-v1.1.json").read_text())
    for question in (
        question
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ):
        change(question)
    (folder / "train-v1.1.json").write_text(json.dumps(content))
    shutil.copy(data_dir / "squad" / "dev-v1.1.json", folder)
    return folder


@pytest.mark.parametrize("change", [
    lambda question: question.update(answers=[{"text": "not there at all", "answer_start": 0}]),
    lambda question: question.update(answers=[{"text": "", "answer_start": 0}]),
], ids=["elsewhere", "empty"])  # fmt: skip
def test_squad_without_a_trainable_answer_ends_with_its_count(
    tmp_path, data_dir, pretrained, change
):
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


def test_two_questions_of_one_id_are_refused_where_answers_are_written(
    tmp_path, data_dir, vocabulary
):
    path = (
        squad_files(tmp_path, data_dir, lambda question: question.update(id="q"))
        / "train-v1.1.json"
    )
    with pytest.raises(
        config.ConfigError, match="train-v1.1.json: more than one question has the id 'q'"
    ):
        tasks.read_file("squad1", str(path), config.Finetune(), InputFormat(vocabulary, 64), {})


def test_squad1_has_an_answer_to_every_question(tmp_path, data_dir, pretrained):
    """Without one, its target would be "no answer", which SQuAD 1.1 does not have."""
    def change(question):
        if question["id"].endswith("7"):
            question.update(answers=[])

    argv = ["--gin_file=finetune/squad1.gin", f"--init_from={pretrained}", f"--workdir={tmp_path / 'out'}"]
    with pytest.raises(config.ConfigError, match="train-v1.1.json: the question '.*7' has no right answer. Give a file in which"):
        finetune.main([*argv, f"--gin.DATA_DIR={squad_files(tmp_path, data_dir, change)}"])
