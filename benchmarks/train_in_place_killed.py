r"""Train from rows that lie in a bucket, killed on the way, and compare with rows on disk.

    python benchmarks/train_in_place_killed.py --rows=rows --workdir=/tmp/in_place \
        --kills=3 --gin_file=base.gin --gin.TRAIN_STEPS=2400

The rows, made by `prepare`, go into a bucket of an S3 emulator on this machine (moto, which keeps
them in memory). The run trains twice: with the rows on disk, undisturbed, and with those in the
bucket, killed --kills times at random moments and started again by the same command. Every loss,
gradient norm and held-out loss must be the same to the last bit.

Other flags are those of maelm_jax.train, and choose the model and the windows in which rows are
shuffled (Corpus.shuffle_shards). The table has the memory of the process, and how many requests
for rows the bucket answered.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import prepare_killed

sys.path.insert(0, str(prepare_killed.ROOT / "tests"))

import emulators

POLL_SECONDS = 0.1
MOST_DELAY = 2.0  # seconds from a line of metrics to a kill
COMPARED = ("step", "loss", "accuracy", "grad_norm", "eval_loss")
HEADER = f"{'rows':<10}{'kills':>6}{'seconds':>9}{'memory, MB':>12}{'requests':>15}"


def requests_for_rows(log: pathlib.Path) -> int:
    """Returns how many requests for rows the emulator answered, by its log."""
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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--rows", type=pathlib.Path, required=True, help="folder made by prepare")
    flags.add_argument("--workdir", type=pathlib.Path, required=True)
    flags.add_argument("--kills", type=int, default=3)
    flags.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args, train_flags = flags.parse_known_args()
    folder = args.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files = list(args.rows.glob("*/*/c/*/0"))
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"{len(files)} files of rows, {megabytes:.0f} MB\n{HEADER}", flush=True)
    chance, kills, results = random.Random(args.seed), [], []
    with emulators.emulated("s3", folder / "emulator.log") as bucket:
        import s3fs

        s3fs.S3FileSystem().put(f"{args.rows}/", f"{bucket}/rows/", recursive=True)
        row_folders = {"disk": args.rows.resolve(), "bucket": f"{bucket}/rows"}
        for name, rows in row_folders.items():
            command = [
                sys.executable,
                "-m",
                "maelm_jax.train",
                *train_flags,
                f"--workdir={folder / name}",
                f"--gin.Corpus.rows_dir={rows}",
            ]
            measured = train(command, folder / name, kills)
            print(
                f"{name:<10}{measured.kills:>6}{measured.seconds:>9.0f}"
                f"{measured.memory / 1e6:>12.0f}{requests_for_rows(folder / 'emulator.log'):>15}",
                flush=True,
            )
            results.append(numbers(folder / name))
            steps = sorted(chance.choices([line[0] for line in results[0][:-1]], k=args.kills))
            kills = [(step, chance.uniform(0, MOST_DELAY)) for step in steps]
    if results[0] != results[1]:
        raise SystemExit("the runs differ")
    print(f"{len(results[0])} lines of metrics are the same to the last bit")


if __name__ == "__main__":
    main()
