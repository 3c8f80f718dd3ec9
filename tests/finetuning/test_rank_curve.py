"""Ranks while fine-tuning: what is measured when, and on which text."""

import dataclasses
import json

import numpy as np
from testing import input_format

from maelm_jax import config, finetune
from maelm_jax.finetuning import experiments, initial_encoder, rank_curve, tasks
from maelm_jax.training import checkpoint_params, sharding


def test_examples_are_padded_to_the_longest():
    rows = rank_curve.padded_rows([np.array([0, 5, 2], np.int32), np.array([0, 2], np.int32)], 1)
    assert rows.tolist() == [[0, 5, 2], [0, 2, 1]] and rows.dtype == np.int32


def test_a_run_logs_ranks_before_its_first_step_at_intervals_and_after_its_last(one_device, data_dir, pretrained, tmp_path):
    header, *examples = (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "RTE").mkdir()
    for name, count in (("train", 32), ("dev", 64)):  # 32 examples have too few tokens for a rank at width 32
        (tmp_path / "RTE" / f"{name}.tsv").write_text("".join([header, *(examples * 2)[:count]]))
    data_dir, workdir = tmp_path, tmp_path / "run"
    argv = ["--gin_file=finetune/rte.gin", f"--init_from={pretrained}", f"--workdir={workdir}", f"--gin.DATA_DIR={data_dir}"]
    settings = ["EPOCHS=3", "BATCH_SIZE=16", "MAX_LENGTH=64", "LEARNING_RATE=5e-3", "Run.rank_every=4", "Run.log_every=100"]
    assert finetune.main([*argv, *(f"--gin.{setting}" for setting in settings)]) == 0
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "rank_plain_last" in line}
    assert list(logged) == [0, 4, 6]
    names = {f"rank_{tokens}_{layer}" for tokens in ("plain", "real", "all") for layer in ("middle", "last")}
    assert all(names <= set(line) for line in logged.values()) and set(logged[0]) == names | {"step"}
    # Step 0 is the encoder that the run starts from, on the text of the dev set.
    encoder = initial_encoder.load(str(pretrained))
    experiment = experiments.of_encoder(encoder, ["finetune/rte.gin"], [f"DATA_DIR={data_dir}", "MAX_LENGTH=64"])["rte"]
    task = tasks.load("rte", experiment.finetune, experiment.corpus, input_format(encoder.vocabulary, 64))
    monitors = rank_curve.RankMonitors(task, encoder.vocabulary, sharding.make_mesh(experiment.mesh))
    assert monitors.of(experiment)(checkpoint_params.read_params(str(pretrained), 3)) == {name: logged[0][name] for name in names}
    assert any(logged[0][name] != logged[6][name] for name in names)
    masked = dataclasses.replace(experiment, masking=config.Masking(rate=0.3))
    assert monitors.of(experiment) is monitors.of(experiment) and monitors.of(masked) is not monitors.of(experiment)
