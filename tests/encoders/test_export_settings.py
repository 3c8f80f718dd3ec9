"""A workdir whose settings contradict its weights is refused, verified or not."""

import dataclasses
import json

import pytest

from maelm_jax import config, embed, export, gin_files
from maelm_jax.data import vocabulary_training
from maelm_jax.encoders import origin, run_results, source


@pytest.fixture
def edited(workdirs, tmp_path):
    """(name, changes to Model) -> a workdir with these in its config.gin, and another's weights."""

    def make(name, **changes):
        folder = tmp_path / "run"
        folder.mkdir()
        for path in workdirs[name].iterdir():
            if path.name != "config.gin":
                (folder / path.name).symlink_to(path)
        experiment = gin_files.load([str(workdirs[name] / "config.gin")])
        experiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))
        (folder / "config.gin").write_text(gin_files.render(experiment))
        return folder

    return make


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"layers": 1}, "encoder/blocks/attention/key/kernel is (2, 32, 32) in the checkpoint, (1, 32, 32) by the"),
        ({"layers": 3}, "(3, 32, 32) by the settings"),
        ({"width": 64}, "decoder/blocks/attention/key/kernel is (2, 32, 32) in the checkpoint, (2, 64, 64) by the"),
        ({"feed_forward": 64}, "encoder/blocks/feed_forward/up/kernel is (2, 32, 48) in the checkpoint, (2, 32, 64)"),
        ({"heads": 2}, "encoder/relative_bias/table is (64, 4) in the checkpoint, (64, 2) by the settings"),
        ({"max_positions": 100}, "encoder/position_embedding is (160, 32) in the checkpoint, (100, 32)"),
        ({"decoder_layers": 1}, "decoder/blocks"),
        ({"relative_buckets": "none"}, "encoder/relative_bias/table is (64, 4) in the checkpoint, no"),
        ({"decoder_relative_bias": True}, "decoder/relative_bias/table is missing in the checkpoint"),
    ],
)
def test_settings_that_contradict_the_weights_are_named(edited, changes, message):
    encoder_source = source.find(str(edited("reference", **changes)))
    with pytest.raises(config.ConfigError) as error:
        encoder_source.read(config.Model())
    assert message in str(error.value) and "contradicts the checkpoint" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["huggingface", "pytorch"])
def test_nothing_is_exported_from_settings_that_contradict(edited, tmp_path, form):
    argv = [f"--workdir={edited('mpnet', feed_forward=64)}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(config.ConfigError, match="contradicts the checkpoint"):
        export.main([*argv, f"--format={form}", "--no-verify"])
    assert not (tmp_path / "out").exists()


def test_embed_and_training_refuse_them_too(edited, tmp_path):
    run = edited("mpnet", feed_forward=64)
    (tmp_path / "lines.txt").write_text("a line\n")
    with pytest.raises(config.ConfigError, match="contradicts the checkpoint"):
        embed.main(
            [
                f"--workdir={run}",
                f"--input={tmp_path / 'lines.txt'}",
                f"--output={tmp_path / 'v.npy'}",
            ]
        )
    with pytest.raises(config.ConfigError, match="contradicts the checkpoint"):
        source.find(str(run)).read(config.Model())


def test_a_vocabulary_of_another_size_is_refused(edited, tmp_path):
    from pydoc_data import topics

    run = edited("mpnet")
    (run / "vocabulary").unlink()
    vocabulary_training.train([topics.topics["if"], topics.topics["for"]], config.Vocabulary(size=300)).save(run / "vocabulary")
    with pytest.raises(
        config.ConfigError,
        match="contradicts the checkpoint: encoder/token_embedding is .640, 32. in the checkpoint, .384, 32.",
    ):
        export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--no-verify"])


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"labels": 3}',
        '{"labels": [1]}',
        '{"max_length": "48"}',
        '{"max_length": 0}',
        '{"max_length": 10000000000}',
        '{"score": "x"}',
        '{"best": 3}',
        '{"best": {"best_f1_threshold": "x"}}',
        '{"score": 1.0}',
        '{"task": []}',
        '{"score": 0.5, "main_metric": 3}',
    ],
)
def test_results_of_another_form_are_one_line(edited, tmp_path, content):
    run = edited("mpnet")
    (run / "results.json").write_text(content)
    with pytest.raises(config.ConfigError, match="results.json") as error:
        export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--no-verify"])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_results_that_are_whole_are_taken(edited, tmp_path):
    run = edited("mpnet")
    (run / "results.json").write_text(json.dumps({"task": "rte", "labels": [], "max_length": 32, "score": None, "main_metric": "f1"}))
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0


@pytest.mark.parametrize(
    "start,vocabulary,stated,length",
    [
        (None, None, None, 48),
        ("stock", "stock", None, 160),
        ("stock", "stock", 128, 128),
        ("stock", "stock", 10**30, 160),
        ("stock", "stock", 20, 48),
        ("stock", "stock", "long", 160),
        ("gone", "gone", None, 160),
        ("runs/tiny", "runs/tiny/vocabulary", None, 48),
        ("model.pt", None, None, 160),
    ],
)
def test_the_longest_input_is_that_of_the_encoder_it_started_from(tmp_path, monkeypatch, start, vocabulary, stated, length):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stock").mkdir()
    if stated is not None:
        (tmp_path / "stock" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    bindings = [
        f"Run.init_from={start!r}",
        f"Vocabulary.file={vocabulary!r}",
        "SEQUENCE_LENGTH=48",
        "Model.max_positions=160",
    ]
    experiment = gin_files.load(["tiny.gin"], bindings)
    assert run_results.longest_input(experiment, {}, None) == length
    assert run_results.longest_input(experiment, {"max_length": 96}, None) == 96, "a fine-tuned run's own"
    for longest, expected in ((100, 100), (20, 48)):  # what the run recorded counts, not what lies there now
        started_from = origin.Origin("stock", "bert folder", None, longest, has_decoder=False)
        assert run_results.longest_input(experiment, {}, started_from) == expected
