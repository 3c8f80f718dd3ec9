"""Settings: what gin files and the command line may say, and the line that answers what they may not. Invariant 7, first half."""

import contextlib
import dataclasses
import fractions
import math
import pickle
import runpy
import subprocess
import sys
import types
import typing

import hypothesis
import pytest
from hypothesis import strategies
from testing import ROOT

from maelm_jax import config, gin_files
from maelm_jax.finetuning import grid

PRESETS = [path.name for path in sorted(gin_files.CONFIGS.glob("*.gin")) if path.name != "mlm.gin"]
COMPLETE = [*PRESETS, "published/base.gin", "published/base_plus.gin", "published/large_plus.gin"]
ABLATIONS = [f"ablations/{path.name}" for path in sorted((gin_files.CONFIGS / "ablations").glob("*.gin"))]
MODERN = ["modern_base.gin", "modern_tiny.gin"]
MACROS = ("TRAIN_STEPS=7", "BATCH_SIZE=8", "SEQUENCE_LENGTH=64", "SEED=3", "TEXT_FILES=some/*.txt")
FINETUNE = ["base.gin", "finetune/base.gin", "finetune/rte.gin"]


@pytest.mark.parametrize("name", COMPLETE)
def test_every_config_loads_with_every_macro_and_objective(name):
    for files in ([name], [name, "mlm.gin"]):
        experiment = gin_files.load(files, MACROS)
        assert (experiment.run.train_steps, experiment.run.batch_size, experiment.run.seed) == (7, 8, 3)
        assert experiment.corpus.sequence_length == 64
        assert experiment.corpus.rates == {"files:some/*.txt": 1.0}
        assert experiment.objective.encoder_mask_fraction == len(files) - 1
        assert gin_files.load([*files, "recipes/efficient.gin"], MACROS).optimizer.kind == "muon"
        assert gin_files.load([*files, "recipes/modern_layers.gin"], MACROS).model.encoder.positions == "rotary"
        assert gin_files.load([*files, "recipes/causal_phase.gin"], MACROS).model.causal
        assert gin_files.load([*files, "recipes/hybrid.gin"], MACROS).objective.causal_rows == fractions.Fraction(1, 16)


@pytest.mark.parametrize("name", ["babylm.gin", "babylm_small.gin"])
def test_the_configs_of_the_challenge_take_its_dev_files(name):
    assert gin_files.load([name], [*MACROS, "Corpus.heldout_files='some/*.dev'"]).corpus.heldout_share == 0.0


def test_every_ablation_loads_over_a_size_and_leaves_mlm_without_a_decoder():
    for ablation in ABLATIONS:
        for name in ("base.gin", *MODERN):
            if name in MODERN and ablation.endswith("reference_positions.gin"):
                continue  # rotary positions have no buckets
            experiment = gin_files.load([name, ablation], MACROS)
            assert (experiment.decoder is None) == ("80_10_10" in ablation), ablation
        assert gin_files.load(["tiny.gin", ablation, "mlm.gin"]).decoder is None, ablation


@pytest.mark.parametrize("names", [[name] for name in COMPLETE] + [FINETUNE], ids=str)
def test_what_is_written_down_reads_back(names, tmp_path):
    experiment = gin_files.load(names, ["TEXT_FILES=it's a [glob]*.txt"])
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    assert gin_files.load([str(tmp_path / "config.gin")]) == experiment


# What gin, Python or this package could read as something else: macros, references, quotes, escapes, comments, line ends.
SIGNS = strategies.sampled_from("%@#'\"\\\n\t ()[]{}=,:/.*ab1_\u00c9\u4e2d\U0001f600")
TEXTS = strategies.text(SIGNS, min_size=1, max_size=12) | strategies.sampled_from(
    (" %SEED", "%TRAIN_STEPS", "books %20.txt", "\nimport os", "include 'base.gin'", "@Run", "None", "1.0", "Run.seed = 3", "a 'b' " * 60)
)


def values_of(annotation, limits=()):
    """A strategy of the values that a setting of this type and these limits allows, and of some that the setting refuses."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values_of(arguments[0], arguments[1].metadata)
    if origin in (typing.Union, types.UnionType):
        return strategies.one_of(*(values_of(argument, limits) for argument in arguments))
    if origin is typing.Literal:
        return strategies.sampled_from(arguments)
    if origin is tuple:
        return strategies.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is dict:
        return strategies.dictionaries(*map(values_of, arguments), max_size=3)
    if annotation is str:
        return TEXTS
    if annotation in (int, float):
        small = strategies.integers(-1, 64) if annotation is int else strategies.floats(0, 2)
        limits = [limit for limit in limits if not hasattr(limit, "multiple_of")]  # unknown to hypothesis
        return small | strategies.from_type(typing.Annotated[annotation, *limits] if limits else annotation)
    return strategies.from_type(annotation)


def draw_section(data, section):
    """A section with other values: those of the settings that are drawn, as far as they fit together."""
    changes = {name: draw_section(data, value) for name, value in vars(section).items() if isinstance(value, config.Settings)}
    section = dataclasses.replace(section, **changes)
    for name in data.draw(strategies.lists(strategies.sampled_from(config.field_names(type(section))), unique=True)):
        field = type(section).__pydantic_fields__[name]
        with contextlib.suppress(config.ConfigError):
            section = dataclasses.replace(section, **{name: data.draw(values_of(field.annotation, field.metadata))})
    return section


@hypothesis.given(strategies.data(), strategies.booleans())
def test_any_experiment_that_is_written_down_reads_back(tmp_path_factory, data, is_finetuning):
    finetune = config.Finetune(train_file="train.tsv", dev_file="dev.tsv") if is_finetuning else None
    experiment = config.Experiment(finetune=finetune)
    for name, section in vars(experiment).items():
        if section is not None:
            with contextlib.suppress(config.ConfigError):
                experiment = dataclasses.replace(experiment, **{name: draw_section(data, section)})
    file = tmp_path_factory.mktemp("run") / "config.gin"
    file.write_text(gin_files.render(experiment))
    assert gin_files.load([str(file)]) == experiment


def test_the_presets_have_the_published_sizes():
    base, plus, large, modern = (gin_files.load([f"{name}.gin"]) for name in ("base", "base_plus", "large_plus", "modern_base"))
    assert (
        base.model.encoder.layers,
        base.model.encoder.width,
        base.model.encoder.heads,
        base.model.encoder.feed_forward,
        base.model.decoder.layers,
    ) == (12, 768, 12, 3072, 4)
    assert (base.run.train_steps, base.run.batch_size, base.corpus.sequence_length) == (125_000, 2048, 512)
    assert (base.optimizer.b2, base.optimizer.eps, base.optimizer.clip_norm, base.optimizer.weight_decay) == (0.98, 1e-6, 2.0, 0.01)
    assert (plus.run.train_steps, plus.optimizer.learning_rate, plus.vocabulary.cased) == (2_000_000, 2e-4, True)
    assert (large.model.encoder.layers, large.model.encoder.width, large.model.encoder.heads) == (24, 1024, 16)
    assert (modern.model.encoder.layers, modern.model.encoder.width, modern.model.encoder.heads, modern.model.encoder.feed_forward) == (
        22,
        768,
        12,
        1152,
    )
    assert (
        modern.model.encoder.normalization,
        modern.model.encoder.positions,
        modern.model.encoder.feed_forward_gate,
        modern.model.encoder.biases,
    ) == ("pre", "rotary", True, False)


@pytest.mark.parametrize("name,buckets", [("base", (32, 128)), ("base_plus", (64, 128)), ("large_plus", (128, 256))])
def test_the_published_settings_differ_from_the_presets_in_buckets_and_masks_only(name, buckets):
    preset, published = gin_files.load([f"{name}.gin"]), gin_files.load([f"published/{name}.gin"])
    assert (published.model.encoder.num_buckets, published.model.encoder.max_distance) == buckets
    assert published.model.encoder.relative_buckets == "reference" and published.objective.masking.mask_special_tokens
    named = {line.partition(":")[0] for line in config.differences(preset, published)}
    assert named <= {"Encoder.relative_buckets", "Masking.mask_special_tokens", "Encoder.num_buckets", "Encoder.max_distance"}


@pytest.mark.parametrize(
    "binding,value",
    [
        ("Run.batch_size=8", 8),
        ("Corpus.text_files=a.txt", "a.txt"),
        ("Grid.learning_rate=0.5", 0.5),
        ("Finetune.max_length=128", 128),
        ("Grid.epochs=[1,2]", (1, 2)),
    ],
)
def test_a_setting_can_be_bound_although_a_macro_stands_for_it(binding, value):
    assert config.values(gin_files.load(FINETUNE, [binding]))[binding.partition("=")[0]] == value


def test_macros_and_blocks_of_a_user_s_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.gin").write_text("include 'tiny.gin'\nWIDTH = 64\nRun:\n  seed = 3\n  batch_size = 8\nEncoder.width = %WIDTH\n")
    experiment = gin_files.load(["~/mine.gin"], ["TRAIN_STEPS=%SEED", "SEED=7", "TEXT_FILES='my %20books/*.txt'"])
    assert (experiment.run.seed, experiment.run.batch_size, experiment.model.encoder.width, experiment.run.train_steps) == (3, 8, 64, 7)
    assert experiment.corpus.text_files == "my %20books/*.txt"


def test_the_settings_to_start_from_are_those_of_every_field_that_nothing_binds():
    base = gin_files.load(["base.gin"])
    experiment = gin_files.load(["finetune/base.gin", "finetune/rte.gin"], ["BATCH_SIZE=[8,16]"], base)
    assert experiment.finetune.grid.batch_size == (8, 16), "and macros do not reach into them"
    assert experiment.run.batch_size == 2048 and experiment.corpus == base.corpus


@pytest.mark.parametrize(
    "names,bindings,named",
    [
        (["tiny.gin"], ["TRAIN_STEP=5"], "did you mean TRAIN_STEPS?"),
        (["tiny.gin"], ["BATCH_SIZE=16", "Run.batch_size=8"], "--gin.BATCH_SIZE"),
        (["tiny.gin"], ["Encoder.layer=3"], "did you mean layers?"),
        (["tiny.gin"], ["Model.decoder_layers=3"], "Decoder.layers"),
        (["tiny.gin", "mlm.gin"], ["Decoder.layers=3"], "no decoder"),
        (["tiny.gin"], ["Modle.layers=3"], "Modle"),
        (["tiny.gin"], ["Encoder.layers=%NOPE"], "NOPE"),
        (["tiny.gin"], ["SEED"], "--gin.SEED"),
        (["tinny.gin"], [], "did you mean tiny.gin?"),
        (["mlm.gin", "tiny.gin"], [], "tiny.gin"),
        (["tiny.gin", "small.gin"], [], "small.gin"),
        (["mine.gin"], [], "TRIAN_STEPS"),
        (["wrong.gin"], [], "wrong.gin"),
        (["binary.gin"], [], "binary.gin"),
        (["run/config.gin"], [], "config.gin"),
    ],
)
def test_a_wrong_name_or_file(names, bindings, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("include 'tiny.gin'\nTRIAN_STEPS = 10\n")
    (tmp_path / "wrong.gin").write_text("include 'tiny.gin'\nEncoder.layers = = 3\n")
    (tmp_path / "binary.gin").write_bytes(b"Run.seed = \xff\xfe")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text("import code_of_a_stranger\n")
    (tmp_path / "code_of_a_stranger.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(config.ConfigError) as error:
        gin_files.load(names, bindings)
    assert named in str(error.value)


def test_differences_are_those_of_settings_that_change_past_steps():
    old = gin_files.load(["tiny.gin"])
    assert config.differences(old, gin_files.load(["tiny.gin"], ["SEED=1"])) == ["Run.seed: 0 -> 1"]
    assert config.differences(old, gin_files.load(["tiny.gin"], ["Run.log_every=1", "Mesh.fsdp=2"])) == []


def test_the_settings_need_neither_jax_nor_tensorflow():
    code = "import sys; from maelm_jax import gin_files; gin_files.load(['base.gin']); print([m for m in ('jax', 'tensorflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip() == "[]"


def test_a_section_is_a_frozen_dataclass_of_strict_types():
    gin_files.load(["tiny.gin"], ["TEXT_FILES=x.txt"])
    model = config.Encoder(layers=3)
    assert dataclasses.replace(model, width=96).layers == 3 and model.width == 768, "gin files leave no trace"
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.layers = 4
    assert pickle.loads(pickle.dumps(model)) == model and hash(model) == hash(config.Encoder(layers=3))
    assert config.Optimizer(weight_decay=0).weight_decay == 0.0 and config.Grid(seeds=[1, 2]).seeds == (1, 2)
    for value in (0, 2.0, "2", True, None, math.nan):
        with pytest.raises(config.ConfigError, match=r"^Encoder\.layers[^\n]*$"):
            dataclasses.replace(model, layers=value)


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    render_page = runpy.run_path(str(ROOT / "docs" / "configuration.py"))["render_page"]
    assert page == render_page(), "run: python docs/configuration.py > docs/configuration.md"


def test_the_tasks_are_those_that_can_be_fine_tuned():
    assert set(config.Task.__args__) == {name for kind in grid.KINDS for name in kind.names}
