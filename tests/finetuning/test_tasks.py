"""The tasks by name: missing data is found before anything runs."""

import dataclasses
import pathlib

import pytest
from testing import input_format

from maelm_jax import config
from maelm_jax.finetuning import table_rows, tasks


def test_a_folder_in_the_place_of_a_file_is_no_file(tmp_path):
    for name in ("RTE/train.tsv", "RTE/dev.tsv", "train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).mkdir(parents=True)
    settings = config.Finetune(data_dir=str(tmp_path))
    for task in ("rte", "squad1"):
        with pytest.raises(config.ConfigError, match=f"{task}: no "):
            tasks.check(task, settings)
    for path in (tmp_path, tmp_path / "gone", pathlib.Path(__file__) / "under"):
        with pytest.raises(config.ConfigError, match="cannot be read"):
            next(table_rows.rows(path))


@pytest.mark.parametrize("data_dir", [__file__, __file__ + "/under", "~nobody-of-this-name/glue", "x" * 4000])
def test_a_data_dir_that_is_no_folder(data_dir):
    with pytest.raises(config.ConfigError, match="DATA_DIR: no folder|rte: no train"):
        tasks.check("rte", config.Finetune(data_dir=data_dir))


def test_the_files_of_ones_own_task_are_looked_for_first(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "gone", "x" * 4000, __file__ + "/under"):
        custom = config.CustomTask(train_file=str(path), dev_file=__file__, labels=("no", "yes"))
        settings = config.Finetune(tasks="own", custom=custom)
        with pytest.raises(config.ConfigError, match="own: no file"):
            tasks.check("own", settings)


def test_missing_data_is_found_before_anything_runs(shared_data):
    tasks.check("mnli", config.Finetune(data_dir=str(shared_data)))
    tasks.check("squad1", config.Finetune(data_dir=str(shared_data)))
    tasks.check("squad2", config.Finetune(data_dir=str(shared_data), squad=config.Squad(dev_share=0.25)))
    for name in ("qnli", "squad2"):
        with pytest.raises(config.ConfigError, match=f"{name}: no train"):
            tasks.check(name, config.Finetune(data_dir=str(shared_data)))


@pytest.mark.parametrize("separator,rest", [(None, "a\tno\n"), (",", "a\tno,maybe\nb\tmaybe\n")])
def test_labels_that_no_training_example_has_are_named(tmp_path, vocabulary, separator, rest):
    text = "sentence\tlabel\nfirst\tyes\n" + rest * 20
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text(text)
    custom = config.CustomTask(train_file=str(tmp_path / "train.tsv"), dev_file=str(tmp_path / "dev.tsv"), labels=("no", "yes", "maybe"))
    custom = dataclasses.replace(custom, label_separator=separator)

    def notes(examples: int | None) -> list[str]:
        settings = config.Finetune(custom=custom, train_examples=examples)
        found = tasks.load("own", settings, config.Corpus(), input_format(vocabulary, 64)).notes
        return [note for note in found if note.startswith("training: no example has the label")]

    unused = [] if separator else ["training: no example has the label 'maybe'"]
    of_sample = ["training: no example has the label 'yes'" + (", 'maybe'" if not separator else "")]
    assert notes(None) == unused and notes(4) == of_sample, "the sample leaves the first example out"


def test_a_squad_model_is_given_json(tmp_path):
    (tmp_path / "x.tsv").write_text("index\tsentence1\tsentence2\n0\tThe cat.\tA dog.\n")
    with pytest.raises(config.ConfigError, match="x.tsv: not JSON"):
        tasks.read_file("squad1", str(tmp_path / "x.tsv"), config.Finetune(), input_format(None, 64), {})
