"""Reading gin files: macros and the settings they stand for, and texts that are no gin files."""

import pathlib
import re

import pytest

from maelm_jax import cli, config, config_files, gin_files

DATA = pathlib.Path(__file__).parent / "data"


@pytest.mark.parametrize(
    "binding,of",
    [
        ("Run.batch_size=8", lambda e: e.run.batch_size == 8),
        ("Run.train_steps=8", lambda e: e.run.train_steps == 8),
        ("Run.seed=8", lambda e: e.run.seed == 8),
        ("Corpus.sequence_length=8", lambda e: e.corpus.sequence_length == 8),
        ("Corpus.text_files=a.txt", lambda e: e.corpus.text_files == "a.txt"),
    ],
)
def test_a_field_can_be_bound_although_a_macro_stands_for_it(binding, of):
    assert of(gin_files.load(["tiny.gin"], [binding]))


def test_a_field_of_fine_tuning_can_be_bound_although_a_macro_stands_for_it():
    files = ["base.gin", "finetune/base.gin", "finetune/rte.gin"]
    assert gin_files.load(files, ["Finetune.max_length=128"]).finetune.max_length == 128
    fields = {"batch_size": 8, "seeds": 4, "epochs": 2, "learning_rate": 0.5}
    for name, value in fields.items():
        grid = gin_files.load(files, [f"Grid.{name}={value}"]).finetune.grid
        assert getattr(grid, name) == value


def test_the_older_names_of_settings_of_fine_tuning_mean_the_same():
    """The file is the config.gin of a workdir from before the sections Grid, Squad, CustomTask."""
    finetune = gin_files.load([str(DATA / "finetuned_workdir_of_2026_11_22.gin")]).finetune
    assert finetune.grid == config.Grid(3, 16, 1e-3, 4, 10, 0.1)
    assert finetune.squad == config.Squad(32, 64, 20, 0.25)
    assert finetune.custom == config.CustomTask("train.tsv", "dev.tsv", ("a", "b"), "good", ("no", "yes"))
    assert (finetune.tasks, finetune.init_from) == ("own", "runs/tiny")
    files = ["base.gin", "finetune/base.gin", "finetune/rte.gin"]
    later = gin_files.load(files, ["Grid.epochs=2", "Finetune.epochs=5"])
    assert later.finetune.grid.epochs == 5
    with pytest.raises(config.ConfigError, match="^Squad.stride must be"):
        gin_files.load(["tiny.gin"], ["Finetune.stride=0"])


def test_the_settings_to_start_from_are_those_of_every_field_that_nothing_binds():
    base = gin_files.load(["base.gin"])
    experiment = gin_files.load(["finetune/base.gin", "finetune/rte.gin"], ["BATCH_SIZE=[8,16]"], base)
    assert experiment.finetune.grid.batch_size == (8, 16), "and macros do not reach into them"
    assert experiment.run.batch_size == 2048 and experiment.corpus == base.corpus


def test_a_file_can_bind_a_field_although_a_macro_stands_for_it(tmp_path):
    (tmp_path / "mine.gin").write_text("include 'tiny.gin'\nRun.batch_size = 8\n")
    assert gin_files.load([str(tmp_path / "mine.gin")]).run.batch_size == 8


@pytest.mark.parametrize(
    "bindings",
    [
        ["BATCH_SIZE=16", "Run.batch_size=8"],
        ["Run.batch_size=8", "BATCH_SIZE=16"],
    ],
)
def test_a_macro_and_its_field_together_are_refused(bindings):
    message = "--gin.BATCH_SIZE has no effect, because Run.batch_size is bound directly"
    with pytest.raises(config.ConfigError, match=message):
        gin_files.load(["tiny.gin"], bindings)


def test_a_macro_of_a_macro():
    assert gin_files.load(["tiny.gin"], ["TRAIN_STEPS=%SEED", "SEED=7"]).run.train_steps == 7


@pytest.mark.parametrize(
    "text,message",
    [
        ("Run.seed == 3", "line 1"),
        ("\n\nRun.seed 3", "line 3"),
        ("Run.seed = ", "line 1"),
        ("Run.seed = (1,\n", "line"),
        ("Run.seed = '", "line 1"),
        ("Run.seed = " + "(" * 5000, "line"),
        ("Run.seed = " + "9" * 5000, "line 1"),
        ("Run.seed = [1, 2", "line"),
        ("Run.seed = {[]: 1}", "line 1"),
        ("  Run.seed = 1\n Run.seed = 2", "line"),
        ("Run.sed = 3", "line 1: Run.sed: there is no such setting; did you mean seed?"),
        ("SEED = 1\nRnu.seed = 3", "line 2: Rnu.seed: there is no section 'Rnu'; did you mean Run?"),
        ("\n\nRun.seed = @Model()", "line 3: @Model: a value is a Python literal or a %MACRO"),
        ("Run.seed = %SEDE", "%SEDE: no macro of this name is defined"),
        ("A = %B\nB = %A\nRun.seed = %A", "in a circle"),
        ("train/Run.seed = 3", "scope 'train' is not used here"),
        ("import no_such_module", "line 1: No module named 'no_such_module'"),
        ("import failing_module", "line 1: import failing_module: NameError: name 'nothing' is not defined; correct the module"),
        ("include 'nowhere.gin'", "no gin file 'nowhere.gin'"),
        ("include 3", "line 1"),
        ("include 'mine.gin'", "mine.gin includes itself"),
        ("include 'other.gin'", "mine.gin includes itself"),
        ("Run:\n  sed = 3", "there is no such setting"),
        ("\x00", "line 1"),
        ("{", "line"),
    ],
)
def test_a_text_that_is_no_gin_file(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(text)
    (tmp_path / "other.gin").write_text("include 'mine.gin'")
    (tmp_path / "failing_module.py").write_text("nothing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(config.ConfigError) as error:
        gin_files.load(["tiny.gin", "mine.gin"])
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1500


def test_a_block_of_bindings(tmp_path):
    (tmp_path / "mine.gin").write_text("Run:\n  seed = 3\n  batch_size = %BATCH_SIZE\n")
    experiment = gin_files.load(["tiny.gin", str(tmp_path / "mine.gin")])
    assert experiment.run.seed == 3 and experiment.run.batch_size == 32


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.gin").write_bytes(b"Run.seed = \xff\xfe")
    for name, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "binary.gin", "byte 11: not UTF-8 text"),
        ("", "no gin file ''"),
        ("x" * 300, "File name too long"),
        ("a\0b", "no gin file"),
        ("/dev/null", "no gin file '/dev/null'"),
    ):
        with pytest.raises(config.ConfigError) as error:
            gin_files.load([str(name)])
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_record_that_lacks_a_setting_has_the_value_of_its_run(tmp_path):
    new = gin_files.load(["tiny.gin"])
    record = tmp_path / "config.gin"
    record.write_text(gin_files.render(new))
    assert new.model.decoder_refills_mask and gin_files.load([str(record)]) == new
    record.write_text(record.read_text().replace("Model.decoder_refills_mask = True\n", ""))
    assert not gin_files.load([str(record)]).model.decoder_refills_mask
    flags = cli.parser("")
    resumed = cli.parse(flags, ["--gin_file=tiny.gin", f"--workdir={tmp_path}"])[1]
    assert not resumed.model.decoder_refills_mask, "the same command goes on with an older run"


@pytest.mark.parametrize("first", ["mlm.gin", "ablations/rate_30.gin"])
def test_a_preset_that_would_undo_an_earlier_file_is_refused(first):
    with pytest.raises(config.ConfigError, match=f"tiny.gin replaces what {first} sets, because it includes base.gin; give tiny.gin first"):
        gin_files.load([first, "tiny.gin"])


@pytest.mark.parametrize("names", [("tiny.gin", "continue.gin"), ("continue.gin", "tiny.gin"), ("mine.gin",)])
def test_two_whole_configs_are_refused(names, tmp_path, monkeypatch):
    """Whichever came first, values of one would be left in the other: base.gin does not set all that they set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("include 'tiny.gin'\ninclude 'small.gin'")
    with pytest.raises(config.ConfigError, match=f"{names[0]} and {names[-1]} both include base.gin, so each is a whole config; give one"):
        gin_files.load(names)


def test_presets_include_presets_whatever_lies_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gin").write_text("Run.seed = 7")
    assert gin_files.load(["tiny.gin"]).run.seed == 0
    (tmp_path / "tiny.gin").write_text("include 'tiny.gin'\nRun.seed = 9")
    assert gin_files.load(["tiny.gin"]).run.seed == 9, "the preset of the same name"
    monkeypatch.chdir(config_files.CONFIGS / "published")
    assert gin_files.load(["base.gin"]).model.relative_buckets == "reference"


def test_a_file_is_included_from_beside_the_one_that_includes_it(tmp_path):
    (tmp_path / "common.gin").write_text("Run.seed = 5")
    (tmp_path / "run.gin").write_text("include 'tiny.gin'\ninclude 'common.gin'")
    assert gin_files.load([str(tmp_path / "run.gin")]).run.seed == 5


def test_a_file_of_the_user_s_with_the_name_of_a_record_is_none(tmp_path):
    for name in ("my.gin", "config.gin"):
        (tmp_path / name).write_text("include 'tiny.gin'\nMasking.encoder_mask_fraction = 0.5\nRun.train_steps = 5")
    assert gin_files.load([str(tmp_path / "config.gin")]) == gin_files.load([str(tmp_path / "my.gin")])


@pytest.mark.parametrize("bindings", [[], ["TEXT_FILES=a"]])
def test_an_ablation_without_a_size_is_refused(bindings):
    with pytest.raises(config.ConfigError, match="no model size; name a size first: --gin_file=tiny.gin --gin_file=ablations/spans.gin"):
        gin_files.load(["ablations/spans.gin"], bindings)


@pytest.mark.parametrize(
    "name,hint",
    [
        ("spans.gin", "no gin file 'spans.gin'; did you mean ablations/spans.gin?"),
        ("ablations/span.gin", "did you mean ablations/spans.gin?"),
        ("nothing-like-it", "configs/ holds base.gin, base_plus.gin"),
    ],
)
def test_a_gin_file_that_does_not_exist_brings_a_hint(name, hint):
    with pytest.raises(config.ConfigError, match=re.escape(hint)):
        config_files.find(name)
