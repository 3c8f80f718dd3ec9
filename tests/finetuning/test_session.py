"""Heads, losses and runs in this process: 32 examples learned by heart, the schedule, what an answer can never be."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import only_devices

from maelm_jax import config, gin_files
from maelm_jax.finetuning import batches, encoder_source, features, heads, predictor, session, task_data, tasks
from maelm_jax.model import maelm

SETTINGS = ["BATCH_SIZE=32", "Finetune.evaluations=1", "Model.dropout=0.0", "Model.attention_dropout=0.0"]
FEW = ["Run.log_every=60", "Run.checkpoint_every=1000", "Run.rank_every=0", "MAX_LENGTH=64"]


def experiment_of(pretrained, task, data_dir, *more) -> config.Experiment:
    bindings = [f"DATA_DIR={data_dir}", *SETTINGS, *FEW, *more]
    return gin_files.load([str(pretrained / "config.gin"), "finetune/base.gin", f"finetune/{task}.gin"], bindings)


@pytest.mark.parametrize("task,best,epochs,devices", [
    ("rte", 1.0, 120, 8),
    pytest.param("stsb", 1.0, 400, 1, marks=pytest.mark.slow),
    pytest.param("squad2", 100.0, 120, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_32_examples_are_learned_by_heart(task, best, epochs, devices, pretrained, data_dir, tmp_path, monkeypatch):
    only_devices(monkeypatch, devices)
    monkeypatch.setattr(batches, "MOST_LENGTHS", 1)  # one shape to compile
    experiment = experiment_of(pretrained, task, data_dir, f"EPOCHS={epochs}", "LEARNING_RATE=5e-3")
    begin = encoder_source.load(str(pretrained))
    data = tasks.load(task, experiment.finetune, experiment.corpus, begin.vocabulary, 64)
    tuner = session.FinetuneSession(experiment, data, begin.vocabulary)
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, batch_size=32, seed=1))
    results = tuner.run(experiment, begin, str(tmp_path))
    assert results["score"] == pytest.approx(best, abs=1e-3 * best), results["best"]
    # What is kept is the best evaluation's model: loaded again, it gives the same score.
    model, params = predictor.restore(str(tmp_path), experiment, data.head, begin.vocabulary)
    again = data.dev[""].score(model.outputs(params, data.dev[""], tuner.sizes))
    assert again[data.main] == pytest.approx(results["score"], abs=1e-6)
    assert json.loads((tmp_path / "results.json").read_text())["best"]["step"] == int(next((tmp_path / "checkpoints").iterdir()).name)
    assert not (tmp_path / session.UNFINISHED).exists()


def test_what_is_kept_is_the_best_evaluation_not_the_last(one_device, pretrained, data_dir, tmp_path, monkeypatch):
    """Scores come from a script, so that the second of four evaluations is the best; the weights and predictions kept are its own."""
    monkeypatch.setattr(batches, "MOST_LENGTHS", 1)
    experiment = experiment_of(pretrained, "rte", data_dir, "EPOCHS=4", "LEARNING_RATE=5e-3")
    begin = encoder_source.load(str(pretrained))
    data = tasks.load("rte", experiment.finetune, experiment.corpus, begin.vocabulary, 64)
    tuner, seen, script = session.FinetuneSession(experiment, data, begin.vocabulary), [], [0.5, 0.9, 0.1, 0.9]
    outputs = tuner.predictor.outputs

    def recorded(params, *more):
        seen.append((jax.device_get(params), outputs(params, *more)))
        return seen[-1][1]

    monkeypatch.setattr(tuner.predictor, "outputs", recorded)
    monkeypatch.setattr(tuner, "score", lambda outputs: {"accuracy": script[len(seen) - 1]})
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, batch_size=32, seed=1))
    results = tuner.run(experiment, begin, str(tmp_path))
    assert (results["best"]["epoch"], results["last"]["epoch"], results["score"]) == (2, 4, 0.9)
    kept = predictor.restore(str(tmp_path), experiment, data.head, begin.vocabulary)[1]
    same = lambda other: all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(other)))  # noqa: E731
    assert [same(params) for params, _ in seen] == [False, True, False, False]  # and no fifth prediction for the file
    for number, (_, outputs_then) in enumerate(seen):
        data.dev[""].write(outputs_then, tmp_path, str(number))
    written = [(tmp_path / f"{name}_probabilities.tsv").read_text() for name in ("predictions", *range(4))]
    assert [written[0] == other for other in written[1:]] == [False, True, False, False]


PAIR = task_data.Head("sentence", 2)


def model(pretrained, head=PAIR):
    begin = encoder_source.load(str(pretrained))
    settings = gin_files.load([begin.gin_file]).model
    graph, init = heads.create(settings, begin.vocabulary.size, begin.vocabulary.pad, head)
    return graph, init(jax.random.key(0))


def test_the_encoder_is_the_pretrained_one(pretrained):
    begin = encoder_source.load(str(pretrained))
    vocabulary = begin.vocabulary
    special = config.SpecialIds(vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.mask)
    saved = maelm.create(gin_files.load([begin.gin_file]).model, vocabulary.size, special)[1](jax.random.key(5))["encoder"]  # as the fixture made it
    saved["token_embedding"] = saved["token_embedding"].at[vocabulary.size :].set(0.0)  # rows that only fill up the table are not kept
    fresh = model(pretrained)[1]["encoder"]
    for _ in range(2):  # what is handed out is a copy each time
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), begin.encoder(fresh), saved)
    jax.tree.map(np.testing.assert_array_equal, encoder_source.load(f"random:{pretrained}").encoder(fresh), fresh)


def test_an_exported_folder_is_the_same_start(pretrained, tmp_path):
    from maelm_jax import export
    from maelm_jax.finetuning import experiments

    export.main([f"--workdir={pretrained}", f"--output={tmp_path / 'stock'}", "--no-verify"])
    fresh = model(pretrained)[1]["encoder"]
    here, there = encoder_source.load(str(pretrained)), encoder_source.load(str(tmp_path / "stock"))
    jax.tree.map(np.testing.assert_array_equal, here.encoder(fresh), there.encoder(fresh))
    files = ["finetune/rte.gin"]
    settings = [experiments.of_encoder(one, files, [])["rte"].model for one in (here, there)]
    assert [one.width for one in settings] == [32, 32] and settings[1].max_positions == 64
    with pytest.raises(config.ConfigError, match="has no vocabulary"):
        encoder_source.load(str(next(pathlib.Path("tests/data/reference").glob("*.npz"))))


def a_batch(size: int, targets) -> batches.Batch:
    ids = [np.arange(4, 4 + length, dtype=np.int32) for length in (9, 12, 7)]
    rows = features.Features(ids, np.asarray(targets), np.asarray([4, 5, 4], np.int32))
    return jax.tree.map(jnp.asarray, batches.pack(rows, size, 4, 1, seed=0))


def test_neither_padding_nor_rows_without_weight_count(pretrained):
    graph, params = model(pretrained)
    params = jax.tree.map(lambda x: 4 * x, params)  # so that what is attended to is seen in the scores
    loss_fn = heads.loss_of(graph, PAIR)
    sums = lambda batch: loss_fn(params, batch, jnp.arange(4, dtype=jnp.uint32), jax.random.key(0), False)  # noqa: E731
    short, long = a_batch(12, np.asarray([0, 1, 1], np.int32)), a_batch(24, np.asarray([0, 1, 1], np.int32))
    np.testing.assert_allclose(sums(short), sums(long), rtol=1e-5)
    assert float(sums(short).count) == 3
    other = short._replace(ids=short.ids.at[3].set(7), targets=short.targets.at[3].set(1))
    np.testing.assert_array_equal(sums(short), sums(other))


def test_the_seed_in_the_batch_draws_the_dropout(pretrained):
    graph, params = model(pretrained)
    graph = heads.create(dataclasses.replace(gin_files.load([str(pretrained / "config.gin")]).model, dropout=0.5), 500, 1, PAIR)[0]
    loss_fn, numbers = heads.loss_of(graph, PAIR), jnp.arange(4, dtype=jnp.uint32)
    batch = a_batch(12, np.asarray([0, 1, 1], np.int32))
    of = lambda batch: float(loss_fn(params, batch, numbers, jax.random.key(0), True).loss)  # noqa: E731
    assert of(batch) == of(batch) != of(batch._replace(seed=batch.seed + 1))


def test_an_answer_is_in_the_context_or_nowhere(pretrained):
    graph, params = model(pretrained, task_data.SPAN)
    spans = heads.predict_of(graph, task_data.SPAN)(params, a_batch(24, np.zeros((3, 2), np.int32)))
    for row, (first, length) in enumerate([(4, 9), (5, 12), (4, 7)]):
        allowed = {0, *range(first, length - 1)}
        for scores, slots in ((spans.start, spans.start_slot), (spans.end, spans.end_slot)):
            assert set(np.asarray(slots[row])[np.asarray(scores[row]) > -1e8].tolist()) == allowed


def test_a_workdir_without_an_encoder(pretrained, tmp_path):
    import shutil

    from maelm_jax.training import checkpoint

    shutil.copytree(pretrained, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    fresh = model(pretrained)[1]["encoder"]
    with pytest.raises(config.ConfigError, match="no checkpoint"):
        encoder_source.load(str(tmp_path / "other"))
    saved = checkpoint.Checkpoints(str(tmp_path / "other"))
    saved.save(1, {"params": {"decoder": {"x": jnp.zeros(3)}}})
    saved.close()
    with pytest.raises(config.ConfigError, match="contradicts the checkpoint: .* is missing in the checkpoint"):
        encoder_source.load(str(tmp_path / "other")).encoder(fresh)
    with pytest.raises(config.ConfigError, match="neither a workdir"):
        encoder_source.load(str(tmp_path))
