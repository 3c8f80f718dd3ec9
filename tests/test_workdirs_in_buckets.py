"""Workdirs in a bucket, against an emulator of Google Cloud Storage: checkpoints, leases, and a run that goes on on another machine."""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from pydoc_data import topics

import jax.numpy as jnp
import pytest
from emulators import put

from maelm_jax import cli, config, gin_files, storage
from maelm_jax import workdirs as runs_in
from maelm_jax.pretraining import start
from maelm_jax.training import checkpoint, checkpoint_params, step, workdir_lock

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
    state = step.State(step=jnp.int32(3), params={"kernel": jnp.arange(1000.0)}, opt_state=())
    checkpoints = checkpoint.Checkpoints(f"{bucket}/runs/y")
    assert checkpoints.restore(state) is None
    checkpoints.save(3, state)
    checkpoints.wait()
    number, restored = checkpoints.restore(state)
    assert number == 3 and (restored.params["kernel"] == state.params["kernel"]).all()
    checkpoints.close()
    checkpoint_params.restore_params(f"{bucket}/runs/y", state.params, step=3)
    with pytest.MonkeyPatch.context() as patch:  # the bucket keeps checksums itself: nothing is read for them
        patch.setattr(checkpoint.checksums, "_digest", None)
        checkpoint.checksums.verify(f"{bucket}/runs/y/checkpoints/3")
    put(f"{bucket}/runs/y/checkpoints/3/default/_METADATA", b"{}")
    with pytest.raises(config.ConfigError, match="3 is damaged: default/_METADATA"):
        checkpoint_params.restore_params(f"{bucket}/runs/y", state.params)
    with pytest.raises(config.ConfigError, match="no checkpoints"):
        checkpoint_params.restore_params(f"{bucket}/runs/nothing", state.params)


def test_a_run_in_a_bucket_that_has_a_checkpoint_needs_its_source_no_more(bucket, cache):
    """A new machine has neither the folder of the encoder nor files of the run."""
    place = f"{bucket}/runs/continued"
    experiment = gin_files.load(["continue.gin"], ["Run.init_from='/nowhere/encoder'", "TEXT_FILES='*.txt'"])
    with pytest.raises(config.ConfigError, match="/nowhere/encoder"):
        start.resolve_source(experiment, place)
    recorded = gin_files.load(["continue.gin"], ["Run.init_from='/nowhere/encoder'", "TEXT_FILES='*.txt'", "Model.layers=3"])
    put(f"{place}/config.gin", gin_files.render(recorded).encode())
    put(f"{place}/vocabulary/sentencepiece.model", b"of the source")
    put(f"{place}/checkpoints/20/_CHECKPOINT_METADATA", b"{}")
    newest_step = runpy.run_path(str(ROOT / "launch" / "newest_step.py"))["newest_step"]
    with pytest.raises(config.ConfigError, match="/nowhere/encoder"):
        start.resolve_source(experiment, place)  # the write of this checkpoint was cut off
    assert newest_step(place) == 0
    put(f"{place}/checkpoints/20/commit_success.txt", b"")
    assert newest_step(place) == 20
    assert (runs_in.records(place) / "vocabulary" / "sentencepiece.model").read_bytes() == b"of the source"
    resolved = start.resolve_source(experiment, place)
    assert resolved.encoder_source is None and resolved.experiment.model.layers == 3


def test_a_run_in_a_bucket_that_exists_needs_its_workdir_only(bucket, cache):
    place = f"{bucket}/runs/without-gin-file"
    with pytest.raises(config.ConfigError, match="no run gs://bucket/runs/without-gin-file"):
        cli.parse(cli.parser(""), [f"--workdir={place}"])
    text = gin_files.render(gin_files.load(["tiny.gin"], ["Model.layers=3"]))
    older = "".join(line for line in text.splitlines(keepends=True) if "decoder_refills_mask" not in line)
    put(f"{place}/config.gin", older.encode())
    for argv in ([], ["--gin_file=tiny.gin"]):
        found = cli.parse(cli.parser(""), [f"--workdir={place}", *argv]).experiment.model
        assert not found.decoder_refills_mask, "what an older run does not record is what it had"
    assert found.layers == 2


def test_of_two_processes_one_creates_a_lease(bucket, cache):
    first, second = (workdir_lock.Lease(f"{bucket}/runs/lease", {"id": name, "host": "host", "process": name, "since": ""}) for name in "ab")
    first.acquire({})
    with pytest.raises(FileExistsError):
        second._files.pipe_file(second._path(1), second._content(), mode="create")
    assert not second._create(1)
    first.renew()
    first.release()
    second.acquire({})
    with pytest.raises(workdir_lock.Lost):
        first.renew()


def test_a_workdir_in_a_bucket_is_held_and_given_back(bucket, cache):
    for _ in range(2):  # without a wait
        with workdir_lock.held(f"{bucket}/runs/held"):
            pass
    storage.send(f"{bucket}/runs/held")
    storage.fetch_files(f"{bucket}/runs/held", ("run.lock",))
    assert not (storage.local_path(f"{bucket}/runs/held") / "run.lock").exists(), "the lock is this machine's own"


@pytest.mark.slow
def test_a_run_whose_rows_and_workdir_are_in_a_bucket_goes_on_on_another_machine(bucket, tmp_path):
    (tmp_path / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    settings = {
        "TRAIN_STEPS": 40,
        "BATCH_SIZE": 8,
        "SEQUENCE_LENGTH": 32,
        "TEXT_FILES": tmp_path / "*.txt",
        "Vocabulary.size": 400,
        "Corpus.processes": 1,
        "Corpus.heldout_fraction": 0.1,
        "Model.layers": 1,
        "Model.width": 32,
        "Model.heads": 2,
        "Model.feed_forward": 64,
        "Run.log_every": 1,
        "Run.eval_every": 20,
        "Run.eval_rows": 24,
        "Run.checkpoint_every": 5,
    }
    bindings = ["--gin_file=tiny.gin", *(f"--gin.{name}={value}" for name, value in settings.items())]
    python = [sys.executable, "-m"]

    def environment(machine: str) -> dict:
        quick = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return os.environ | quick | {"XDG_CACHE_HOME": str(tmp_path / machine)}

    rows = tmp_path / "rows"
    subprocess.run([*python, "maelm_jax.prepare", *bindings, f"--gin.Corpus.rows_dir={rows}"], check=True, cwd=ROOT)
    in_bucket = [f"--gin.Corpus.rows_dir={bucket}/rows2", f"--workdir={bucket}/runs/z"]
    done = subprocess.run([*python, "maelm_jax.train", *bindings, *in_bucket], cwd=ROOT, env=environment("one"), capture_output=True, text=True)
    assert done.returncode == 2 and "launch/prepare_data.sh" in done.stderr
    for path in rows.rglob("*"):
        if path.is_file():
            put(f"{bucket}/rows2/{path.relative_to(rows)}", path.read_bytes())
    running = subprocess.Popen([*python, "maelm_jax.train", *bindings, *in_bucket], cwd=ROOT, env=environment("one"))
    metrics = lambda: list((tmp_path / "one").rglob("metrics.jsonl"))  # noqa: E731
    while not metrics() or len(metrics()[0].read_text().splitlines()) < 12:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    line = [*python, "maelm_jax.train", *bindings, *in_bucket]
    done = subprocess.run(line, cwd=ROOT, env=environment("two"), capture_output=True, text=True)
    assert not list((tmp_path / "two").glob("maelm_jax/*/**/c"))
    assert done.returncode == 0 and "resuming gs://" in done.stdout, done.stderr
    storage.fetch_files(f"{bucket}/runs/z", ("metrics.jsonl", "loss_curve.png", "environment.txt"))
    (sent,) = (path.read_text().splitlines() for path in [storage.local_path(f"{bucket}/runs/z") / "metrics.jsonl"])
    local = [f"--gin.Corpus.rows_dir={rows}", f"--workdir={tmp_path / 'run'}"]
    subprocess.run([*python, "maelm_jax.train", *bindings, *local], check=True, cwd=ROOT, env=environment("two"))
    theirs = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    numbers = lambda lines: [[json.loads(line).get(key) for key in ("step", "loss", "grad_norm", "eval_loss")] for line in lines]  # noqa: E731
    assert numbers(sent) == numbers(theirs)
    finished = [*python, "maelm_jax.train", f"--workdir={bucket}/runs/z"]
    done = subprocess.run(finished, cwd=ROOT, env=environment("three"), capture_output=True, text=True)
    assert done.returncode == 0 and "at step 40" in done.stdout, done.stderr
