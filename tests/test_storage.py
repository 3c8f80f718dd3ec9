"""Folders in a bucket, against emulators of Google Cloud Storage and S3: rows are copied once, files sent, checkpoints written and read by Orbax."""

import gzip
import hashlib
import http.server
import json
import os
import pathlib
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pydoc_data import topics

import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import cli, config, finetune, gin_files, storage, train
from maelm_jax import workdirs as runs_in
from maelm_jax.analysis import runs
from maelm_jax.data import block_files, rows_dir, rows_in_place, sources, store
from maelm_jax.data.documents import Unavailable
from maelm_jax.encoders import source
from maelm_jax.pretraining import start
from maelm_jax.training import checkpoint, checkpoint_params, step, workdir_lock

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of gcsfs and aiohttp, about loops that are not closed


EMULATOR = """
from http import HTTPStatus

from gcp_storage_emulator import exceptions
from gcp_storage_emulator.handlers import objects

plain = objects.download

def with_generation(request, response, storage, *rest, **more):  # which TensorStore asks for, and this emulator leaves out
    plain(request, response, storage, *rest, **more)
    if response.status != 404:
        file = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = str(file["generation"])

insert = objects.insert

def on_condition(request, response, storage, *rest, **more):  # which this emulator leaves out as well
    if request.query.get("ifGenerationMatch") == ["0"]:
        try:
            name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
            storage.get_file_obj(request.params["bucket_name"], name)
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412, "message": "conditionNotMet"}})
            return
        except exceptions.NotFound:
            pass
    insert(request, response, storage, *rest, **more)

objects.download = with_generation
objects.insert = on_condition
from gcp_storage_emulator import server  # its table of handlers takes what stands in the module now

server.create_server("127.0.0.1", PORT, in_memory=True, default_bucket="bucket").run()
"""


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def gcs_emulator(port: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command of an emulator, and the environment that points every library at it."""
    place = f"http://127.0.0.1:{port}"
    environment = {"STORAGE_EMULATOR_HOST": place, "TENSORSTORE_GCS_HTTP_URL": place, "EPATH_USE_TF": "false"}
    return [sys.executable, "-c", EMULATOR.replace("PORT", str(port))], environment


def s3_emulator(port: int) -> tuple[list[str], dict[str, str]]:
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "EPATH_USE_TF": "false", **keys}
    return [sys.executable, "-m", "moto.server", "-p", str(port)], environment


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request):
    """gs://bucket or s3://bucket, of an emulator that every library is pointed at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, environment = {"gs": gcs_emulator, "s3": s3_emulator}[request.param](port)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        end = time.monotonic() + 120
        while not listens(port):
            assert server.poll() is None and time.monotonic() < end, "the emulator does not start"
            time.sleep(0.1)
        if request.param == "s3":
            import s3fs

            s3fs.S3FileSystem().mkdir("bucket")
        yield f"{request.param}://bucket"
    server.kill()


workdirs = pytest.mark.parametrize("bucket", ["gs"], indirect=True)  # Orbax writes no checkpoints to S3


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(place: str, content: bytes):
    import fsspec

    files, path = fsspec.url_to_fs(place, use_listings_cache=False)
    files.pipe_file(path, content)


def test_stores_are_copied_once_and_only_whole_ones(bucket, cache):
    for name in ("a-1/store.json", "a-1/train/c/0/0", "a-2/train/c/0/0", "b-1/store.json"):
        put(f"{bucket}/rows/{name}", name.encode())
    storage.fetch_folders(f"{bucket}/rows", "a-*", "store.json", storage.local_path(f"{bucket}/rows"))
    folder = storage.local_path(f"{bucket}/rows")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == ["a-1/store.json", "a-1/train/c/0/0"]
    put(f"{bucket}/rows/a-1/store.json", b"another")
    storage.fetch_folders(f"{bucket}/rows", "a-*", "store.json", storage.local_path(f"{bucket}/rows"))
    assert (folder / "a-1" / "store.json").read_bytes() == b"a-1/store.json"


def test_rows_stay_in_the_bucket_and_are_read_through_a_cache(bucket, cache, tmp_path):
    table = np.arange(400, dtype=np.uint16).reshape(50, 8)
    counts = {split: dict.fromkeys(block_files.COUNTS, 50) for split in block_files.SPLITS}
    with open(tmp_path / "block.npz", "wb") as file:
        np.savez(file, counts=json.dumps(counts), train=table, heldout=table)
    (tmp_path / "s-1").mkdir()
    store.write(tmp_path / "s-1", [tmp_path / "block.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
    for path in (tmp_path / "s-1").rglob("*"):
        if path.is_file():
            put(f"{bucket}/rows4/{path.relative_to(tmp_path)}", path.read_bytes())
    corpus = config.Corpus(rows_dir=f"{bucket}/rows4/", cache_gb=600e-9)  # two of four files
    rows_dir.fetch(corpus, "s-*", "store.json")
    folder = rows_dir.prepared_folder(corpus) / "s-1"
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["store.json", "zarr.json", "zarr.json"]
    rows = rows_in_place.open_stores({"here": folder}, corpus)["here"]["train"]
    for numbers in (np.arange(50), np.array([49, 3, 17, 3])):
        assert (rows[numbers] == table[numbers]).all()
    files, root = storage.file_system(corpus.rows_dir)
    files.rm_file(f"{root}/s-1/train/c/2/0")
    with pytest.raises(config.ConfigError, match=f"{bucket}/rows4/s-1/train/c/2/0: missing"):
        rows[np.array([40])]
    copied = config.Corpus(rows_dir=f"{bucket}/rows4/")  # a copy is another folder
    rows_dir.fetch(copied, "s-*", "store.json")
    assert (rows_dir.prepared_folder(copied) / "s-1" / "train" / "c" / "1" / "0").is_file()


@workdirs
def test_files_are_sent_and_fetched(bucket, cache):
    place = f"{bucket}/runs/x"
    (storage.local_path(place) / "tensorboard").mkdir()
    (storage.local_path(place) / "tensorboard" / "events").write_bytes(b"12")
    (storage.local_path(place) / "metrics.jsonl").write_text("{}\n")
    storage.send(place)
    shutil.rmtree(cache)
    (storage.local_path(place) / "config.gin").write_text("of another run")
    storage.fetch_files(place, ("metrics.jsonl", "config.gin"))
    assert [path.name for path in storage.local_path(place).iterdir()] == ["metrics.jsonl"]


def test_what_knows_no_bucket_says_so(tmp_path):
    with pytest.raises(config.ConfigError, match="gs://bucket/run: only train and prepare"):
        source.find("gs://bucket/run")
    with pytest.raises(config.ConfigError, match="gs://bucket/run: only train and prepare"):
        runs.open_run("gs://bucket/run", [], [])
    with pytest.raises(config.ConfigError, match="gs://bucket/out: only train and prepare"):
        finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={tmp_path}", "--workdir=gs://bucket/out"])
    with pytest.raises(config.ConfigError, match="s3://bucket/run: Orbax writes no checkpoints to s3://"):
        train.main(["--gin_file=tiny.gin", "--workdir=s3://bucket/run"])


def test_text_in_a_bucket_is_read_where_it_lies(bucket, tmp_path, monkeypatch):
    """A nested glob of several formats; unchanged files are not read again, changed ones are another text."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["three", "four"]}), tmp_path / "c.parquet")
    put(f"{bucket}/text/a/a.txt", b"one\n\ntwo")
    put(f"{bucket}/text/b/c.parquet", (tmp_path / "c.parquet").read_bytes())
    put(f"{bucket}/text/b/d.jsonl.gz", gzip.compress(b'{"text": "five"}'))
    source = f"files:{bucket}/text/**/*.*"
    corpus = config.Corpus(sources={source: 1.0}, rows_dir=str(tmp_path / "rows"))
    assert list(sources.documents_of(source, corpus)) == ["one", "two", "three", "four", "five"]
    first = sources.identity(source, corpus)
    assert first == sources.identity(source, corpus)
    put(f"{bucket}/text/a/a.txt", b"one\n\nTWO")
    assert sources.identity(source, corpus) != first
    with pytest.raises(Unavailable, match=rf"no text file matches '{bucket}/nothing/\*\.txt'"):
        sources.shards(f"files:{bucket}/nothing/*.txt", corpus)


@pytest.mark.slow
def test_processes_read_text_in_a_bucket_together(bucket, tmp_path):
    """Two processes make the rows that one makes of the same files on disk."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, topic in enumerate(sorted(topics.topics)):
        (folder / f"{number:03}.txt.gz").write_bytes(gzip.compress(" ".join(topics.topics[topic].split()).encode()))
    for path in folder.iterdir():
        put(f"{bucket}/topics/{path.name}", path.read_bytes())
    common = [sys.executable, "-m", "maelm_jax.prepare", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Corpus.heldout_fraction=0.1"]
    for text, processes in ((folder, 1), (f"{bucket}/topics", 2)):
        flags = [f"--gin.TEXT_FILES={text}/*.gz", f"--gin.Corpus.processes={processes}", f"--gin.Corpus.rows_dir={tmp_path / str(processes)}"]
        subprocess.run([*common, *flags], check=True, cwd=ROOT, timeout=300)
    one, two = (sorted((path.parts[-4:], path.read_bytes()) for path in (tmp_path / name).rglob("c/*/*")) for name in "12")
    assert one == two and {parts[0] for parts, _ in one} == {"train", "heldout"}


def test_what_a_mixture_holds_is_read_from_the_bucket(bucket, cache, monkeypatch):
    """Where seqio is not installed; what the bucket does not have stays an error."""

    def unavailable(*_):
        raise Unavailable("no seqio here")

    monkeypatch.setattr(sources.seqio_tasks, "members", unavailable)
    corpus = config.Corpus(sources={"seqio:both": 1.0}, rows_dir=f"{bucket}/rows3")
    with pytest.raises(Unavailable):
        sources.rates(corpus)
    put(f"{bucket}/rows3/mixture-{hashlib.sha256(b'seqio:both').hexdigest()[:12]}.json", b'{"seqio:a": 0.25, "seqio:b": 0.75}')
    assert sources.rates(corpus) == {"seqio:a": 0.25, "seqio:b": 0.75}


@workdirs
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
    assert checkpoint_params.restore_params(f"{bucket}/runs/y", state.params)[0] == 3
    with pytest.MonkeyPatch.context() as patch:  # the bucket keeps checksums itself: nothing is read for them
        patch.setattr(checkpoint.checksums, "_digest", None)
        checkpoint.checksums.verify(f"{bucket}/runs/y/checkpoints/3")
    put(f"{bucket}/runs/y/checkpoints/3/default/_METADATA", b"{}")
    with pytest.raises(config.ConfigError, match="3 is damaged: default/_METADATA"):
        checkpoint_params.restore_params(f"{bucket}/runs/y", state.params)
    with pytest.raises(config.ConfigError, match="no checkpoints"):
        checkpoint_params.restore_params(f"{bucket}/runs/nothing", state.params)


@workdirs
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


@workdirs
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


@pytest.mark.parametrize("code", [401, 403])  # 503 is tried again for two minutes first
def test_a_bucket_that_refuses_is_one_line(tmp_path, monkeypatch, code):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps({"error": {"code": code, "message": "Backend Error"}}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gcsfs.GCSFileSystem.retries", 1, raising=False)
    corpus = config.Corpus(text_files="gs://refusing/*.txt", rows_dir=str(tmp_path / "rows"))
    in_bucket = config.Corpus(text_files="*.txt", rows_dir="gs://refusing/rows")
    calls = (
        lambda: list(sources.documents_of(f"files:{corpus.text_files}", corpus)), lambda: rows_dir.fetch(in_bucket, "*", "store.json"),
        lambda: storage.fetch_files("gs://refusing/run", ["config.gin"]), lambda: start._has_checkpoint("gs://refusing/run"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(config.RunError, match="gs://refusing/.*: the bucket cannot be reached now .*the same command again"):
            call()
    server.shutdown()
    server.server_close()


@workdirs
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


@workdirs
def test_a_workdir_in_a_bucket_is_held_and_given_back(bucket, cache):
    for _ in range(2):  # without a wait
        with workdir_lock.held(f"{bucket}/runs/held"):
            pass
    storage.send(f"{bucket}/runs/held")
    storage.fetch_files(f"{bucket}/runs/held", ("run.lock",))
    assert not (storage.local_path(f"{bucket}/runs/held") / "run.lock").exists(), "the lock is this machine's own"


@workdirs
@pytest.mark.slow
def test_a_run_whose_rows_and_workdir_are_in_a_bucket_goes_on_on_another_machine(bucket, tmp_path):
    (tmp_path / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    settings = {
        "TRAIN_STEPS": 40, "BATCH_SIZE": 8, "SEQUENCE_LENGTH": 32, "TEXT_FILES": tmp_path / "*.txt", "Vocabulary.size": 400, "Corpus.processes": 1,
        "Corpus.heldout_fraction": 0.1, "Model.layers": 1, "Model.width": 32, "Model.heads": 2, "Model.feed_forward": 64, "Run.log_every": 1,
        "Run.eval_every": 20, "Run.eval_rows": 24, "Run.checkpoint_every": 5,
    }  # fmt: skip
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
    in_place = "--gin.Corpus.cache_gb=1e-4"  # the rows are not copied to the second machine
    line = [*python, "maelm_jax.train", *bindings, *in_bucket, in_place]
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
