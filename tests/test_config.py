"""Settings: what a gin file and the command line may say, and the one line that answers what they may not. Invariant 7, first half."""

import pathlib
import subprocess
import sys

import pytest

from maelm_jax import config, config_files, gin_files, setting_changes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRESETS = [path.name for path in sorted(config_files.CONFIGS.glob("*.gin")) if path.name != "mlm.gin"]
PUBLISHED = ["published/base.gin", "published/base_plus.gin", "published/large_plus.gin"]
COMPLETE = [*PRESETS, *PUBLISHED]
MODERN = ["modern_base.gin", "modern_tiny.gin"]
MACROS = ("TRAIN_STEPS=7", "BATCH_SIZE=8", "SEQUENCE_LENGTH=64", "SEED=3", "TEXT_FILES=some/*.txt")


@pytest.mark.parametrize("name", COMPLETE)
def test_every_config_loads_with_every_macro(name):
    for files in ([name], [name, "mlm.gin"]):
        experiment = gin_files.load(files, MACROS)
        assert (experiment.run.train_steps, experiment.run.batch_size, experiment.run.seed) == (7, 8, 3)
        assert experiment.corpus.sequence_length == 64
        assert experiment.corpus.rates == {"files:some/*.txt": 1.0}
        assert experiment.masking.encoder_mask_fraction == len(files) - 1


@pytest.mark.parametrize("name", COMPLETE)
def test_the_efficient_recipe_goes_with_every_size_and_objective(name):
    for objective in ("mlm.gin", "ablations/decoder_masked_only.gin"):
        assert gin_files.load([name, "recipes/efficient.gin", objective], MACROS).optimizer.kind == "muon"


def test_mlm_has_no_decoder_whatever_decoder_was_set_before():
    for ablation in sorted((config_files.CONFIGS / "ablations").glob("decoder_*.gin")):
        model = gin_files.load(["tiny.gin", f"ablations/{ablation.name}", "mlm.gin"]).model
        assert model.decoder_layers == 0, ablation


def test_every_ablation_loads_over_every_size():
    for ablation in sorted((config_files.CONFIGS / "ablations").glob("*.gin")):
        for name in COMPLETE:
            if name in MODERN and ablation.name == "reference_positions.gin":
                continue  # rotary positions have no buckets
            experiment = gin_files.load([name, f"ablations/{ablation.name}"], MACROS)
            assert experiment.model.decoder_layers > 0 or experiment.masking.encoder_mask_fraction == 1, ablation


@pytest.mark.parametrize("name", COMPLETE)
def test_what_is_written_down_reads_back(name, tmp_path):
    experiment = gin_files.load([name], ["TEXT_FILES=it's a [glob]*.txt"])
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    assert gin_files.load([str(tmp_path / "config.gin")]) == experiment


def test_the_paper_s_presets():
    base, plus, large = (gin_files.load([name]) for name in ("base.gin", "base_plus.gin", "large_plus.gin"))
    assert (base.model.layers, base.model.width, base.model.heads, base.model.feed_forward, base.model.decoder_layers) == (12, 768, 12, 3072, 4)
    assert (base.run.train_steps, base.run.batch_size, base.corpus.sequence_length) == (125_000, 2048, 512)
    assert (base.optimizer.b2, base.optimizer.eps, base.optimizer.clip_norm, base.optimizer.weight_decay) == (0.98, 1e-6, 2.0, 0.01)
    assert (plus.run.train_steps, plus.optimizer.learning_rate, plus.vocabulary.cased) == (2_000_000, 2e-4, True)
    assert (large.model.layers, large.model.width, large.model.heads) == (24, 1024, 16)


def test_the_modern_preset_is_modernbert_base_with_a_decoder():
    model = gin_files.load(["modern_base.gin"]).model
    assert (model.layers, model.width, model.heads, model.feed_forward, model.decoder_layers) == (22, 768, 12, 1152, 4)
    assert (model.normalization, model.positions, model.feed_forward_gate, model.biases) == ("pre", "rotary", True, False)
    tiny = gin_files.load(["modern_tiny.gin"]).model
    assert not tiny.has_bert_blocks and tiny.relative_buckets == "none"


@pytest.mark.parametrize("name,buckets", [("base", (32, 128)), ("base_plus", (64, 128)), ("large_plus", (128, 256))])
def test_the_published_settings_differ_from_the_presets_in_buckets_and_masks_only(name, buckets):
    preset, published = gin_files.load([f"{name}.gin"]), gin_files.load([f"published/{name}.gin"])
    assert (published.model.num_buckets, published.model.max_distance) == buckets
    assert published.model.relative_buckets == "reference" and published.masking.mask_special_tokens
    assert {line.partition(":")[0] for line in setting_changes.differences(preset, published)} == {
        "Model.relative_buckets",
        "Masking.mask_special_tokens",
        *(["Model.num_buckets"] if buckets[0] != 32 else []),
        *(["Model.max_distance"] if buckets[1] != 128 else []),
    }


@pytest.mark.parametrize(
    "bindings,message",
    [
        (["TRAIN_STEP=5"], "--gin.TRAIN_STEP: no macro of this name in tiny.gin; did you mean TRAIN_STEPS?"),
        (["TRAIN_STEPS=many"], "Run.train_steps must be an integer from 1 to 100000000, got 'many'"),
        (["TRAIN_STEPS=1.5"], "Run.train_steps must be an integer from 1 to 100000000, got 1.5"),
        (["Model.layer=3"], "layer"),
        (["Modle.layers=3"], "Modle"),
        (["SEED"], "expected --gin.NAME=VALUE"),
        (["Model.positions=rotary"], "Model.positions = 'rotary' needs relative_buckets = 'none', got 't5'"),
        (["Model.positions=rotary", "Model.relative_buckets=none"], "positions = 'rotary' needs decoder_relative_bias = False"),
        (["Model.positions=rotary", "Model.relative_buckets=none", "Model.decoder_relative_bias=False", "Model.heads=128"], "heads of an even size"),
        (["Model.relative_buckets=t6"], "Model.relative_buckets must be one of 't5', 'reference', 'none', got 't6'"),
        (["Model.local_attention=8"], "local_attention needs positions = 'rotary'"),
        (["SEQUENCE_LENGTH=256"], "longer than the position table: lower it to 128, or set Model.max_positions to 256"),
        (["Model.decoder_layers=0"], "encoder_mask_fraction = 1"),
        (["Model.heads=3"], "not divisible by heads"),
        (["Masking.random_fraction=0.5"], "set encoder_mask_fraction above 0"),
        (["Masking.encoder_mask_fraction=1", "Masking.random_fraction=0.7", "Masking.keep_fraction=0.6"], "must not exceed 1 together"),
        (["Masking.unit=nothing"], "Masking.unit must be one of 'token', 'word', 'span', got 'nothing'"),
        (["Model.decoder_slots=masked"], "needs decoder_attention with 'cross'"),
        (["Model.decoder_attention=cross", "Model.decoder_causal=True"], "decoder_causal needs decoder_attention with 'self'"),
        (["Model.decoder_width=100"], "decoder_width 100 is not a multiple of the encoder's head size 32"),
        (["Model.decoder_layers=0", "Masking.encoder_mask_fraction=1", "Model.decoder_causal=True"], "needs the defaults of decoder_width"),
        (["Run.rank_every=-1"], "Run.rank_every must be an integer from 0 to 2147483647, got -1"),
        (["Corpus.sources={'wikipedia': 1.0}"], "is none of installed_docs, files:GLOB"),
    ],
)
def test_wrong_settings(bindings, message):
    with pytest.raises(config.ConfigError) as error:
        gin_files.load(["tiny.gin"], bindings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_macro_that_nothing_uses(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text("include 'tiny.gin'\nTRIAN_STEPS = 10\n")
    with pytest.raises(config.ConfigError, match="TRIAN_STEPS: defined in a gin file but used by nothing"):
        gin_files.load([str(path)])


def test_a_gin_file_that_is_not_there():
    with pytest.raises(config.ConfigError, match="no gin file 'tinny.gin'; did you mean tiny.gin"):
        gin_files.load(["tinny.gin"])


def test_differences():
    old = gin_files.load(["tiny.gin"])
    assert setting_changes.differences(old, gin_files.load(["tiny.gin"], ["SEED=1"])) == ["Run.seed: 0 -> 1"]
    assert setting_changes.differences(old, gin_files.load(["tiny.gin"], ["Run.log_every=1", "Mesh.fsdp=2"])) == []


def test_a_free_setting_frees_no_longer_name():
    old, new = gin_files.load(["tiny.gin"]), gin_files.load(["tiny.gin"], ["Optimizer.decay_norms_and_biases=False", "Run.keep_checkpoints=5"])
    norms, keep = "Optimizer.decay_norms_and_biases: True -> False", "Run.keep_checkpoints: 3 -> 5"
    assert setting_changes.differences(old, new, free=("Optimizer.decay", "Run.keep")) == [norms, keep]
    assert setting_changes.differences(old, new, free=("Optimizer.decay_", "Run.")) == []


def test_a_wrong_setting_is_one_line_and_status_2(tmp_path):
    command = [sys.executable, "-m", "maelm_jax.train", "--gin_file=tiny.gin", "--gin.TRAIN_STEP=5", f"--workdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --gin.TRAIN_STEP") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_settings_need_neither_jax_nor_tensorflow():
    code = "import sys; from maelm_jax import gin_files; gin_files.load(['base.gin']); print([m for m in ('jax', 'tensorflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip() == "[]"


def test_a_gin_file_leaves_no_trace():
    gin_files.load(["tiny.gin"], ["TEXT_FILES=x.txt"])
    assert config.Model().dtype == "float32" and config.Model().width == 768 and config.Corpus().text_files is None


@pytest.mark.parametrize("setting", ["Masking.rate=1e-5", "Masking.heldout_rate=1e-5", "Masking.rate_plateaus=((0, 1e-5),)"])
def test_a_mask_rate_that_masks_nothing_is_refused(setting):
    with pytest.raises(config.ConfigError, match=r"rate.*masks less than one of the 64 tokens of a row. Use 0.016 or more"):
        gin_files.load(["tiny.gin"], [setting])
