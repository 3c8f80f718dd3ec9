r"""Prepare a corpus of mixed files by every driver, killed on the way, and compare the stores.

    python benchmarks/prepare_killed.py --text='books/*.txt.xz' --workdir=/tmp/killed \
        --gigabytes=5 --beam=beam/bin/python

The corpus is made of repeats of the text: files of .parquet, .jsonl.zst and .txt.gz in turn, and a
vocabulary. It is prepared four times: by the local driver undisturbed, then by the local driver, as
an array job (--part, --parts, --join) and by Beam, each killed --kills times. Kills come at
random moments and hit by turns the whole process group and one worker alone. What was killed, or
ended because a worker was killed, is started again by the same command. Every file of every store
must equal the undisturbed one, byte for byte.

--beam is the Python of an environment with requirements-beam.txt. Without it, Beam is left out. A
rate counts all seconds, those of starts and of lost work too. Memory is the largest resident set
that a worker process had.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import mixed_corpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.1
PATIENCE = 4 * 3600.0  # seconds after which a phase counts as hung
HEADER = (
    f"{'':<20}{'kills of':>8}{'of one':>9}\n"
    f"{'driver':<20}{'all':>8}{'worker':>9}{'seconds':>9}{'MB/s':>8}{'MB, worker':>11}"
    f"{'MB, command':>12}"
)
WORKER_MARKS = (b"spawn_main", b"sdk_worker_main")  # in the command lines of worker processes


class Processes:
    """The processes of one command: a session whose leader is the command."""

    def __init__(self, argv: list[str], log: pathlib.Path):
        self.argv, self.log = argv, log
        with open(log, "ab") as file:
            self.leader = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.killed = False

    def workers(self) -> list[int]:
        """Returns the ids of the worker processes; of the command itself, if it has none."""
        ids = map(int, filter(str.isdigit, os.listdir("/proc")))
        members = [pid for pid in ids if session_of(pid) == self.leader.pid and is_worker(pid)]
        return members or [self.leader.pid]

    def kill_all(self):
        """Kills the whole process group."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.leader.pid, signal.SIGKILL)

    def kill_worker(self, chance: random.Random):
        """Kills one worker alone."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(self.workers()), signal.SIGKILL)

    def started_again(self) -> "Processes | None":
        """Returns this, or a new start of a command that was killed; None if it is done.

        Raises:
            RuntimeError: The command failed by itself.
        """
        status = self.leader.poll()
        if status is None:
            return self
        if status == 0:
            return None
        if not self.killed:
            raise RuntimeError(f"status {status}: see {self.log}; {' '.join(self.argv)}")
        return Processes(self.argv, self.log)


def session_of(pid: int) -> int:
    """Returns the session of a process, 0 if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def is_worker(pid: int) -> bool:
    """Returns whether a process is a worker, by its command line. Beam's shells are none."""
    try:
        line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"python" in line.split(b"\0")[0] and any(mark in line for mark in WORKER_MARKS)


def peak_memory(pid: int) -> int:
    """Returns the largest resident set that a process had, in bytes; 0 if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@dataclasses.dataclass
class Run:
    """One preparation, and what it took."""

    name: str
    phases: list[list[list[str]]]  # commands of a phase run at the same time
    log: pathlib.Path
    gaps: list[float]  # seconds to each kill from the one before
    chance: random.Random
    groups_killed: int = 0
    workers_killed: int = 0
    seconds: float = 0.0
    worker_peak: int = 0  # bytes
    command_peak: int = 0  # bytes, of the process that was started

    def finish(self):
        """Runs all phases to their ends, with the kills."""
        began = time.monotonic()
        kill_at = began + (self.gaps.pop(0) if self.gaps else float("inf"))
        for commands in self.phases:
            running = [Processes(argv, self.log) for argv in commands]
            phase_began = time.monotonic()
            while running:
                time.sleep(POLL_SECONDS)
                self._measure(running)
                now = time.monotonic()
                if now > phase_began + PATIENCE:
                    raise RuntimeError(f"{self.name}: no end in {PATIENCE:.0f} s: see {self.log}")
                if now > kill_at:
                    self._kill(running)
                    kill_at = now + (self.gaps.pop(0) if self.gaps else float("inf"))
                running = [
                    again for process in running if (again := process.started_again()) is not None
                ]
        self.seconds = time.monotonic() - began

    def _measure(self, running: list[Processes]):
        for process in running:
            workers = map(peak_memory, process.workers())
            self.worker_peak = max(self.worker_peak, *workers)
            self.command_peak = max(self.command_peak, peak_memory(process.leader.pid))

    def _kill(self, running: list[Processes]):
        """Kills everything and one worker by turns."""
        if self.groups_killed > self.workers_killed:
            self.workers_killed += 1
            self.chance.choice(running).kill_worker(self.chance)
            return
        self.groups_killed += 1
        for process in running:
            process.kill_all()
            process.leader.wait()

    def line(self, megabytes: float) -> str:
        """Returns the row of the table."""
        return (
            f"{self.name:<20}{self.groups_killed:>8}{self.workers_killed:>9}{self.seconds:>9.0f}"
            f"{megabytes / self.seconds:>8.2f}{self.worker_peak / 1e6:>11.0f}"
            f"{self.command_peak / 1e6:>12.0f}"
        )


def phases_of(driver: str, flags: list[str], processes: int, beam: str) -> list[list[list[str]]]:
    """Returns the commands of a driver."""
    prepare = [sys.executable, "-m", "maelm_jax.prepare", *flags]
    if driver in ("undisturbed", "local"):
        return [[[*prepare, f"--gin.Corpus.processes={processes}"]]]
    if driver == "beam":
        options = (
            "runner=DirectRunner",
            "direct_running_mode=multi_processing",
            f"direct_num_workers={processes}",
        )
        beam_flags = [f"--beam_{option}" for option in options]
        return [[[beam, *prepare[1:], "--runner=beam", *beam_flags]]]
    count = 2 * processes  # as many as there are processes run at a time
    tasks = [
        [*prepare, "--gin.Corpus.processes=1", f"--part={part}", f"--parts={count}"]
        for part in range(count)
    ]
    return [tasks[:processes], tasks[processes:], [[*prepare, "--join"]]]


def contents(rows: pathlib.Path) -> dict[str, str]:
    """Returns {file: SHA-256} of a folder of rows."""
    result = {}
    for path in sorted(rows.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            result[str(path.relative_to(rows))] = digest
    return result


def text_megabytes(rows: pathlib.Path) -> float:
    """Returns the text that a store was made of."""
    (store,) = rows.glob("*/store.json")
    splits = json.loads(store.read_text())["splits"]
    return sum(split["bytes"] for split in splits.values()) / 1e6


def compare(rows: pathlib.Path, expected: dict[str, str]):
    """Ends the program if a store differs from `contents` of another."""
    hashes = contents(rows)
    names = sorted({*expected, *hashes})
    different = [name for name in names if expected.get(name) != hashes.get(name)]
    if different or not expected:
        raise SystemExit(f"{rows}: {len(different)} files differ: {', '.join(different[:5])}")


def main():
    """Prepares the corpus by all drivers and prints a table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--text", required=True, help="glob of the text that is repeated")
    flags.add_argument("--workdir", type=pathlib.Path, required=True)
    flags.add_argument("--gigabytes", type=float, default=0.1, help="text of the corpus, 10**9 B")
    flags.add_argument("--files", type=int, default=200)
    flags.add_argument("--ids", type=int, default=32768, help="size of the vocabulary")
    flags.add_argument("--kills", type=int, default=6, help="of each driver")
    flags.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    flags.add_argument("--beam", help="Python of the environment with Beam")
    flags.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = flags.parse_args()
    folder = args.workdir.resolve()
    corpus = mixed_corpus.Corpus(folder, args.text, args.gigabytes, args.files, args.ids)
    corpus.write()
    print(f"{args.files} files of {corpus.packed_megabytes():.0f} MB, {args.processes} processes")
    print(HEADER, flush=True)
    seconds, expected = 0.0, {}
    for name in ("undisturbed", "local", "array", *(["beam"] if args.beam else [])):
        rows = folder / f"rows-{name}"
        shutil.rmtree(rows, ignore_errors=True)
        chance = random.Random(f"{args.seed} {name}")
        kills = args.kills if expected else 0
        # The mean is below an equal share of the time, so that all kills come before the end.
        gaps = [chance.uniform(0.1, 1.1) * seconds / (kills + 1) for _ in range(kills)]
        prepare_flags = [*corpus.flags(), f"--gin.Corpus.rows_dir={rows}"]
        phases = phases_of(name, prepare_flags, args.processes, args.beam)
        run = Run(name, phases, folder / f"{name}.log", gaps, chance)
        run.finish()
        print(run.line(text_megabytes(rows)), flush=True)
        if not expected:
            seconds, expected = run.seconds, contents(rows)
        compare(rows, expected)
        shutil.rmtree(rows)
    print(f"every store has the same {len(expected)} files, byte for byte")


if __name__ == "__main__":
    main()
