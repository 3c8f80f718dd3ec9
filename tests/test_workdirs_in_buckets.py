"""Workdirs in a bucket, against an emulator of Google Cloud Storage: checkpoints, and a run that goes on on another machine."""

import os
import runpy
import signal
import subprocess
import sys

import checkpoint_folders
import pytest
from emulators import put, put_folder
from testing import ROOT, english, finish, repeated, send_when, start, steps_of, training

from maelm_jax import cli, config, gin_files, status, storage
from maelm_jax.pretraining.start import find_starting_point
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning"),  # of gcsfs and aiohttp, about loops that are not closed
    pytest.mark.parametrize("bucket", ["gs"], indirect=True),  # Orbax writes no checkpoints to S3
]


@pytest.mark.slow
def test_checkpoints_in_a_bucket(bucket, cache):
    if "TEST_ALONE" not in os.environ:  # once another test has had a checkpoint, paths of buckets may go through TensorFlow, past the emulator
        alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_checkpoints_in_a_bucket[gs]"]
        done = subprocess.run(alone, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"TEST_ALONE": "1"})
        assert done.returncode == 0, done.stdout
        return
    state, place = checkpoint_folders.state_of(3), f"{bucket}/runs/y"
    assert checkpoint.restore_newest(Workdir(place), state) is None
    checkpoint_folders.write(place, 3)
    restored = checkpoint.restore_newest(Workdir(place), state)
    assert restored.step == 3 and checkpoint_folders.equal(restored.state, state)
    assert checkpoint_folders.equal(checkpoint.read_params(Workdir(place), 3), state.params)
    with pytest.MonkeyPatch.context() as patch:  # the bucket keeps checksums itself: nothing is read for them
        patch.setattr(checkpoint.hashlib, "md5", None)
        checkpoint.verify(Workdir(place).checkpoints / "3")
    put(f"{place}/checkpoints/3/default/_METADATA", b"{}")
    with pytest.raises(checkpoint.Damaged, match="default/_METADATA"):
        checkpoint.read_params(Workdir(place), 3)
    with pytest.raises(config.ConfigError, match="bucket"):
        checkpoint.read_params(Workdir(f"{bucket}/runs/nothing"))


def test_a_run_in_a_bucket_that_has_a_checkpoint_needs_its_source_no_more(bucket, cache):
    """A new machine has neither the folder of the encoder nor files of the run."""
    place = f"{bucket}/runs/continued"
    experiment = gin_files.load(["continue.gin"], ["Run.init_from='/nowhere/encoder'", "TEXT_FILES='*.txt'"])
    with pytest.raises(config.ConfigError, match="/nowhere/encoder"):
        find_starting_point(experiment, Workdir(place))
    recorded = gin_files.load(["continue.gin"], ["Run.init_from='/nowhere/encoder'", "TEXT_FILES='*.txt'", "Encoder.layers=3"])
    put(f"{place}/config.gin", gin_files.render(recorded).encode())
    put(f"{place}/vocabulary/sentencepiece.model", b"of the source")
    put(f"{place}/checkpoints/20/_CHECKPOINT_METADATA", b"{}")
    newest_step = runpy.run_path(str(ROOT / "launch" / "newest_step.py"))["newest_step"]
    with pytest.raises(config.ConfigError, match="/nowhere/encoder"):
        find_starting_point(experiment, Workdir(place))  # the write of this checkpoint was cut off
    assert newest_step(place) == 0
    put(f"{place}/checkpoints/20/commit_success.txt", b"")
    assert newest_step(place) == 20
    Workdir(place).fetch()
    assert (Workdir(place).folder / "vocabulary" / "sentencepiece.model").read_bytes() == b"of the source"
    resolved = find_starting_point(experiment, Workdir(place))
    assert resolved.encoder is None and resolved.experiment.model.encoder.layers == 3


def test_a_run_in_a_bucket_that_exists_needs_its_workdir_only(bucket, cache):
    place = f"{bucket}/runs/without-gin-file"
    with pytest.raises(config.ConfigError, match="gs://bucket/runs/without-gin-file"):
        cli.parse(cli.parser(""), [f"--workdir={place}"])
    text = gin_files.render(gin_files.load(["tiny.gin"], ["Encoder.layers=3"]))
    put(f"{place}/config.gin", text.encode())
    assert cli.parse(cli.parser(""), [f"--workdir={place}"]).experiment.model.encoder.layers == 3


def test_the_status_of_a_run_in_a_bucket(bucket, cache):
    place = f"{bucket}/runs/watched"
    put(f"{place}/config.gin", gin_files.render(gin_files.load(["tiny.gin"], ["TRAIN_STEPS=80"])).encode())
    put(f"{place}/metrics.jsonl", b'{"step": 30, "loss": 2.5, "learning_rate": 0.001, "tokens_per_second": 1.0, "step_seconds": 3.0}\n')
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        put(f"{place}/checkpoints/20/{name}", b"{}")
    text = status.describe(Workdir(place))
    assert "step 30 of 80" in text and "50 steps, 0:02:30" in text and "checkpoint: step 20" in text
    assert "last record: 20" in text and "no process of this machine" in text


def test_the_lock_of_a_workdir_in_a_bucket_is_this_machine_s_own(bucket, cache):
    with Workdir(f"{bucket}/runs/held").locked():
        metrics = storage.local_path(f"{bucket}/runs/held") / "metrics.jsonl"
        metrics.write_text("{}\n")
        Workdir(f"{bucket}/runs/held").fetch()  # by another command on this machine
        assert metrics.exists()
        storage.send(f"{bucket}/runs/held")
    storage.fetch_files(f"{bucket}/runs/held", ("run.lock",))
    assert not (storage.local_path(f"{bucket}/runs/held") / "run.lock").exists()


@pytest.mark.slow
def test_a_run_whose_rows_and_workdir_are_in_a_bucket_goes_on_on_another_machine(bucket, tmp_path, monkeypatch):
    (tmp_path / "topics.txt").write_text("\n\n".join(english()))
    here = training(tmp_path, tmp_path / "run", "--gin.TRAIN_STEPS=40", "--gin.Run.rank_every=0")
    in_bucket = [*here, f"--gin.Corpus.rows_dir={bucket}/rows2", f"--workdir={bucket}/runs/z"]

    def start_on(machine: str, *argv: str):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        return start("train", *argv)

    assert finish(start("prepare", *here)).status == 0
    refused = finish(start_on("one", *in_bucket))
    assert refused.status == 2 and "launch/prepare_data.sh" in refused.stderr
    put_folder(tmp_path / "rows", f"{bucket}/rows2")
    killed = start_on("one", *in_bucket)
    workdir = storage.local_path(f"{bucket}/runs/z")
    send_when(killed, signal.SIGKILL, lambda: len(steps_of(workdir)) > 10)
    finish(killed)
    done = finish(start_on("two", *in_bucket))
    assert done.status == 0 and "resuming gs://" in done.stdout, done.stderr
    assert not list((tmp_path / "two").glob("maelm_jax/*/**/c")), "rows are not copied"
    assert finish(start("train", *here)).status == 0
    done = finish(start_on("three", f"--workdir={bucket}/runs/z"))
    assert done.status == 0 and "at step 40" in done.stdout, done.stderr
    more = [*here, "--gin.TRAIN_STEPS=2", f"--gin.Run.continue_from={bucket}/runs/z", f"--workdir={tmp_path / 'more'}"]
    done = finish(start_on("four", *more))
    assert done.status == 0 and "going on from step 40 of gs://" in done.stdout, done.stderr
    storage.fetch_files(f"{bucket}/runs/z", ("metrics.jsonl",))
    assert repeated(storage.local_path(f"{bucket}/runs/z")) == repeated(tmp_path / "run")
