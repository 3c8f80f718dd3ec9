"""The declarations of settings: ranges, meanings and the page that is written from them."""

import dataclasses
import math
import pathlib
import pickle
import re

import pytest

from maelm_jax import config, config_finetune, gin_files, settings
from maelm_jax.finetuning import tasks

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECTIONS = config.ALL_SECTIONS
FIELDS = [(cls, name) for cls in SECTIONS for name in settings.field_names(cls)]


@pytest.mark.parametrize("cls,name", FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_is_described_and_takes_its_default(cls, name):
    field = cls.__pydantic_fields__[name]
    assert re.fullmatch(r"[A-Z].*\.", field.description) and len(field.description) <= 120
    default = field.get_default(call_default_factory=True)
    assert getattr(cls(**{name: default}), name) == default
    assert settings.allowed(cls, name)


@pytest.mark.parametrize("cls,name", FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_no_number_is_without_bounds(cls, name):
    for value in (math.inf, -math.inf, math.nan, 10**40, -(10**40), 1e300, -1e300, -7):
        with pytest.raises(config.ConfigError, match=rf"^{cls.__name__}\.{name} must be [^\n]*$"):
            cls(**{name: value})


def test_text_that_cannot_be_a_path_is_refused():
    texts = [(cls, name) for cls, name in FIELDS if "text of" in settings.allowed(cls, name)]
    assert len(texts) >= 15
    for cls, name in texts:
        for value in ("", "a\0b", "\udc80", "x" * 5000):
            for wrapped in (value, [value], {value: 1.0}):
                with pytest.raises(config.ConfigError, match=f"^{cls.__name__}.{name} must be"):
                    cls(**{name: wrapped})


def test_a_wrong_value_in_a_list_is_refused():
    for cls, name, value in (
        (config.Grid, "seeds", [1, -1]),
        (config.Grid, "seeds", [1, 2**32]),
        (config.Grid, "batch_size", [8, 0]),
        (config.Grid, "epochs", [1, 2.5]),
        (config.Grid, "learning_rate", [1e-3, 0.0]),
        (config.Grid, "warmup", [0.1, 1.0]),
        (config.Grid, "small_task_epochs", [True]),
        (config.Finetune, "tasks", ["rte", "rta"]),
        (config.CustomTask, "columns", [1]),
        (config.CustomTask, "labels", "no"),
    ):
        with pytest.raises(config.ConfigError, match=f"^{cls.__name__}.{name} must be"):
            cls(**{name: value})


def test_a_settings_object_is_a_frozen_dataclass():
    model = config.Model(layers=3)
    assert dataclasses.replace(model, width=96).layers == 3 and model.width == 768
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.layers = 4
    with pytest.raises(config.ConfigError, match="Model.layers must be"):
        dataclasses.replace(model, layers=0)
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(model) == hash(config.Model(layers=3))
    assert config.Grid(seeds=[1, 2]).seeds == (1, 2)


def test_an_integer_is_taken_for_a_number_but_not_the_reverse():
    assert config.Optimizer(weight_decay=0).weight_decay == 0.0
    for value in (2.0, "2", True, None):
        with pytest.raises(config.ConfigError, match="^Model.layers must be an integer from 1 to "):
            config.Model(layers=value)


def test_a_long_value_is_cut_in_the_message():
    for value in ("9" * 5000, 10**4400, [[[]]] * 1000):
        with pytest.raises(config.ConfigError) as error:
            config.Run(seed=value)
        assert len(str(error.value)) < 250


def test_the_tasks_are_those_that_can_be_fine_tuned():
    assert set(config_finetune.Task.__args__) == set(tasks.NAMES)


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = "python -m maelm_jax.config > docs/configuration.md"
    assert page == settings.page(SECTIONS), f"run: {command}"
    assert page.count("\n| `") == len(FIELDS)


def test_a_value_beyond_a_bound_is_refused():
    bounded = 0
    for cls, name in FIELDS:
        for limit in cls.__pydantic_fields__[name].metadata:
            for bound, step in (("ge", -1), ("le", 1)):
                value = getattr(limit, bound, None)
                if value is None:
                    continue
                bounded += 1
                beyond = value + step if isinstance(value, int) else value * 2.0**step
                with pytest.raises(config.ConfigError, match=f"^{cls.__name__}.{name} must be"):
                    cls(**{name: beyond})
    assert bounded > 60


def test_a_workdir_written_before_reads_as_it_did(tmp_path):
    files = ["base.gin", "finetune/base.gin", "finetune/rte.gin"]
    experiment = gin_files.load(files, ["DATA_DIR=glue"])
    lines = gin_files.render(experiment).splitlines()
    kept = [line for line in lines if "deterministic" not in line and "unigram_bias" not in line]
    (tmp_path / "config.gin").write_text("\n".join(kept))
    again = gin_files.load([str(tmp_path / "config.gin")])
    assert again == experiment


@pytest.mark.parametrize("value", [10**5000, [[[[[]]]]] * 100, "\ud800", float("nan"), "x" * 1000, None], ids=lambda value: type(value).__name__)
def test_any_value_is_shown_in_one_short_line(value):
    shown = settings.shown(value)
    assert len(shown) <= 110 and shown.isprintable()
