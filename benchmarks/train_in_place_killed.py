r"""Train from rows that lie in a bucket, killed on the way, and compare with rows on disk.

    python benchmarks/train_in_place_killed.py --rows=rows --workdir=/tmp/in_place \
        --cache_gb=0.5 --kills=3 --gin_file=base.gin --gin.TRAIN_STEPS=2400

The rows, made by `prepare`, go into a bucket of an S3 emulator on this machine (moto, which keeps
them in memory). The run trains twice: with the rows on disk, undisturbed, and with those in the
bucket, through a cache of --cache_gb, killed --kills times at random moments and started again by
the same command. Every loss, gradient norm and held-out loss must be the same to the last bit.

Other flags are those of maelm_jax.train, and choose the model and the windows in which rows are
shuffled (Corpus.shuffle_shards). The table has the memory of the process, and how many files it
fetched from the bucket.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import typing

import prepare_killed

BUCKET = "s3://rows"
START_SECONDS = 60.0  # in which the emulator must answer
POLL_SECONDS = 0.1
MOST_DELAY = 2.0  # seconds from a line of metrics to a kill
COMPARED = ("step", "loss", "accuracy", "grad_norm", "eval_loss")
HEADER = f"{'rows':<10}{'kills':>6}{'seconds':>9}{'memory, MB':>12}{'files fetched':>15}"


@contextlib.contextmanager
def emulator(log: pathlib.Path) -> typing.Iterator[None]:
    """Runs an S3 emulator, at which this process and those that it starts look for buckets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with open(log, "wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_SECONDS
        while not listens(port):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the emulator does not start: see {log}")
            time.sleep(0.1)
        yield
    finally:
        server.kill()


def listens(port: int) -> bool:
    """Returns whether a program accepts connections at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def upload(rows: pathlib.Path):
    """Copies a folder of rows into the bucket."""
    import s3fs

    files = s3fs.S3FileSystem()
    files.mkdir(BUCKET)
    files.put(f"{rows}/", f"{BUCKET}/", recursive=True)


def files_fetched(log: pathlib.Path) -> int:
    """Returns how many files of rows were read from the emulator, by its log."""
    return sum("GET /" in line and "/c/" in line for line in log.read_text().splitlines())


def numbers(workdir: pathlib.Path) -> list[tuple]:
    """Returns what a run wrote at each step."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [tuple(json.loads(line).get(key) for key in COMPARED) for line in lines]


@dataclasses.dataclass
class Measured:
    """What a run took."""

    seconds: float = 0.0
    memory: int = 0  # bytes, the largest resident set
    kills: int = 0


def train(command: list[str], workdir: pathlib.Path, kills: list[tuple[int, float]]) -> Measured:
    """Trains until the command ends by itself.

    Args:
        command: The command. It is started again after a kill.
        workdir: Where it trains.
        kills: (step, seconds): kill the command so long after it wrote the metrics of this step.

    Raises:
        SystemExit: The command failed.
    """
    shutil.rmtree(workdir, ignore_errors=True)
    result, began, kills = Measured(), time.monotonic(), list(kills)
    with open(workdir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, cwd=prepare_killed.ROOT, stdout=log, stderr=log)
        while (status := process.poll()) is None or process.returncode == -signal.SIGKILL:
            if status is not None:
                process = subprocess.Popen(command, cwd=prepare_killed.ROOT, stdout=log, stderr=log)
            result.memory = max(result.memory, prepare_killed.peak_memory(process.pid))
            time.sleep(POLL_SECONDS)
            written = numbers(workdir) if kills else []
            if written and written[-1][0] >= kills[0][0]:
                time.sleep(kills.pop(0)[1])
                process.kill()
                process.wait()
                result.kills += 1
    if status:
        raise SystemExit(f"status {status}: see {workdir.with_suffix('.log')}")
    result.seconds = time.monotonic() - began
    return result


def main():
    """Trains the run twice, prints a table, and ends with status 1 if a number differs."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", type=pathlib.Path, required=True, help="folder made by prepare")
    flags.add_argument("--workdir", type=pathlib.Path, required=True)
    flags.add_argument("--cache_gb", type=float, default=0.5)
    flags.add_argument("--kills", type=int, default=3)
    flags.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args, train_flags = flags.parse_known_args()
    folder = args.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files = list(args.rows.glob("*/*/c/*/0"))
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"{len(files)} files of rows, {megabytes:.0f} MB\n{HEADER}", flush=True)
    chance, kills, results = random.Random(args.seed), [], []
    with emulator(folder / "emulator.log"):
        upload(args.rows)
        for rows, cache_gb in ((str(args.rows.resolve()), 0), (BUCKET, args.cache_gb)):
            name = "bucket" if rows == BUCKET else "disk"
            command = [
                sys.executable, "-m", "maelm_jax.train", *train_flags,
                f"--workdir={folder / name}", f"--gin.Corpus.rows_dir={rows}",
                f"--gin.Corpus.cache_gb={cache_gb}"]
            measured = train(command, folder / name, kills)
            print(
                f"{name:<10}{measured.kills:>6}{measured.seconds:>9.0f}"
                f"{measured.memory / 1e6:>12.0f}{files_fetched(folder / 'emulator.log'):>15}",
                flush=True)
            results.append(numbers(folder / name))
            steps = sorted(chance.choices([line[0] for line in results[0][:-1]], k=args.kills))
            kills = [(step, chance.uniform(0, MOST_DELAY)) for step in steps]
    if results[0] != results[1]:
        raise SystemExit("the runs differ")
    print(f"{len(results[0])} lines of metrics are the same to the last bit")


if __name__ == "__main__":
    main()
