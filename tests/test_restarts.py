"""When launchers start a run again: after 143 or a lost process, a bounded number of times in a row without a newer checkpoint."""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time

import pytest
from testing import ROOT

LAUNCH = ROOT / "launch"
FLAGS = ["--gin_file=tiny.gin", "--gin.TEXT_FILES=my books/*.txt", "--workdir=gs://bucket/runs/a"]

# A gcloud whose answers come from the file `answers` (one JSON list [words, status, stdout, stderr] a line, each used once, in order) and
# that writes the words of each call to the file `calls`. An ssh call is known by what it asks for.
GCLOUD = """#!/usr/bin/env -S python3 -IS
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
word = ("queued " if sys.argv[3] == "queued-resources" else "") + sys.argv[4]
if word == "ssh":
    command = sys.argv[-1].removeprefix("--command=")
    known = ("worker.sh state", "worker.sh install", "worker.sh start", "worker.sh watch", "newest_step.py")
    word = next(part for part in known if part in command)
with open(folder / "calls", "a") as calls:
    calls.write(word + "\\n")
answers = [json.loads(line) for line in (folder / "answers").read_text().splitlines()]
for number, (asked, status, out, error) in enumerate(answers):
    if asked == word:
        del answers[number]
        (folder / "answers").write_text("".join(json.dumps(answer) + "\\n" for answer in answers))
        print(out)
        print(error, file=sys.stderr)
        sys.exit(status)
sys.exit(0 if word in ("worker.sh install", "worker.sh start", "worker.sh watch", "scp", "queued create", "delete", "queued delete") else 77)
"""


def executable(path: pathlib.Path, text: str):
    path.write_text(text)
    path.chmod(0o755)


class Slice:
    """launch/tpu_pod.sh with a fake gcloud on PATH, and sleeps that take no time."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        executable(folder / "gcloud", GCLOUD)
        executable(folder / "sleep", "#!/bin/sh\n")
        executable(folder / "git", '#!/bin/sh\n[ "$1" != archive ] || set -- "$@" launch\nexec /usr/bin/git "$@"\n')  # the whole tree takes seconds

    def run(self, *answers: tuple, **environment: str) -> tuple[int, list[str], str]:
        """The exit status, the calls of gcloud in order, and stderr. An answer is (word, status, stdout, stderr)."""
        filled = [(*answer, *[0, "", ""][len(answer) - 1 :]) for answer in answers]
        (self.folder / "answers").write_text("".join(json.dumps(answer) + "\n" for answer in filled))
        (self.folder / "calls").write_text("")
        path = os.pathsep.join([str(self.folder), os.path.dirname(sys.executable), "/usr/bin", "/bin"])
        argv = ["bash", str(LAUNCH / "tpu_pod.sh"), "slice", "zone", "v5litepod-16", *FLAGS]
        done = subprocess.run(argv, env={"PATH": path, "HOME": "/nowhere"} | environment, capture_output=True, text=True, timeout=300)
        return done.returncode, (self.folder / "calls").read_text().split("\n")[:-1], done.stderr


@pytest.fixture
def slice(tmp_path) -> Slice:
    return Slice(tmp_path)


def states(*answers: str) -> list[tuple]:
    """The answers of a ready slice whose worker 0 gives these states, one a question; "255" is an ssh connection that drops."""
    return [one for answer in answers for one in (("describe", 0, "READY"), ("worker.sh state", *((255,) if answer == "255" else (0, answer))))]


def steps(*values: int) -> list[tuple]:
    return [("newest_step.py", 0, str(value)) for value in values]


def test_a_slice_is_started_again_until_it_makes_no_progress(slice):
    """The status 2 is that of an earlier run. The tests of Slurm have the statuses and the counting, which is the same script."""
    ended, calls, error = slice.run(*states("2", "running", "143", "lost"), *steps(100, 100), RETRIES="1")
    assert ended == 1 and calls.count("worker.sh start") == 2, error


def test_a_dropped_connection_does_not_start_over_a_live_run(slice):
    answers = [*states("none", "running", "255", "running", "255", "255", "running", "0"), *[("worker.sh watch", 255)] * 3]
    ended, calls, error = slice.run(*answers)
    assert ended == 0 and calls.count("worker.sh start") == calls.count("worker.sh install") == 1, error
    assert calls.count("worker.sh watch") == 3


def test_the_same_command_joins_a_live_run(slice):
    ended, calls, _ = slice.run(*states("running", "3"))
    assert ended == 3 and not {"worker.sh start", "worker.sh install"} & set(calls)


def test_a_slice_whose_state_is_unknown_is_not_deleted(slice):
    failing = [("describe", 1, "", "ERROR: could not reach the service")] * 2
    ended, calls, error = slice.run(*failing, *states("none", "0"))
    assert ended == 0 and not {"delete", "queued delete", "queued create"} & set(calls), error
    ended, calls, error = slice.run(*failing * 20)
    assert ended == 1 and calls == ["describe"] * 21 and "UNKNOWN" in error.splitlines()[-1]


MISSING = "ERROR: (gcloud.compute.tpus.describe) NOT_FOUND: Resource was not found"


def absent(*requests: str) -> list[tuple]:
    """The answers of a slice that is not there and whose request has these states, "" where there is no request."""
    known = [("queued describe", 0, request) if request else ("queued describe", 1, "", MISSING) for request in requests]
    return [one for answer in known for one in (("describe", 1, "", MISSING), answer)]


def test_a_preempted_slice_is_asked_for_again_and_the_run_goes_on(slice):
    taken = [("describe", 0, "PREEMPTED"), ("queued describe", 0, "SUSPENDED"), *absent("", "WAITING_FOR_RESOURCES", "PROVISIONING")]
    ended, calls, error = slice.run(*states("none", "running"), *taken, *states("none", "0"), *steps(100))
    assert ended == 0 and calls.count("worker.sh start") == 2, error
    assert [call for call in calls if call.endswith(("create", "delete"))] == ["queued delete", "queued create"]
    assert "status preempted at checkpoint 100" in error


def test_a_slice_that_was_made_without_the_queue_is_made_again_in_it(slice):
    taken = [("describe", 0, "PREEMPTED"), ("queued describe", 1, "", MISSING)]
    ended, calls, error = slice.run(*states("none", "running"), *taken, *states("none", "0"), *steps(100))
    assert ended == 0 and [call for call in calls if call.endswith(("create", "delete"))] == ["delete", "queued create"], error


def test_a_slice_that_cannot_be_requested_ends_the_script(slice):
    ended, calls, _ = slice.run(*absent(""), ("queued create", 1, "", "no quota"))
    assert ended == 1 and calls == ["describe", "queued describe", "queued create"]


def test_capacity_is_waited_for_as_many_hours_as_asked(slice):
    """It looks every two minutes, although the sleeps take no time here."""
    hour = absent("", *["WAITING_FOR_RESOURCES"] * 29)
    ended, calls, error = slice.run(*hour, *states("none", "0"), PATIENCE="1")
    assert ended == 0 and calls.count("queued create") == 1 and calls.count("queued describe") == 30, error
    ended, calls, error = slice.run(*hour, *absent("WAITING_FOR_RESOURCES"), PATIENCE="1")
    assert ended == 1 and "worker.sh start" not in calls and "PATIENCE" in error.splitlines()[-1]
    assert "queued delete" not in calls, "its place in the queue is kept"
    ended, calls, error = slice.run(PATIENCE="1.5")
    assert ended == 2 and calls == [] and "error: PATIENCE=1.5" in error


def test_a_request_that_fails_is_made_again_a_few_times(slice):
    """It can fail for want of capacity, or because it is wrong."""
    failing = [*absent("FAILED"), ("queued describe", 0, "why"), *absent("")]
    ended, calls, error = slice.run(*absent(""), *failing, *states("none", "0"), RETRIES="1")
    assert ended == 0 and calls.count("queued create") == 2 and calls.count("queued delete") == 1, error
    ended, calls, error = slice.run(*absent(""), *failing * 3, RETRIES="1")
    assert ended == 1 and calls.count("queued create") == 2 and "why" in error, error


class Worker:
    """launch/worker.sh in a folder of its own, with a fake Python that does what the file `behaviour` says."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        for name in ("launch", ".venv/bin"):
            (folder / name).mkdir(parents=True)
        executable(folder / "launch" / "worker.sh", (LAUNCH / "worker.sh").read_text())

    def __call__(self, *words: str) -> str:
        argv = [str(self.folder / "launch" / "worker.sh"), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout.strip()

    def python(self, text: str):
        executable(self.folder / ".venv" / "bin" / "python", f"#!/bin/bash\n{text}\n")

    def until(self, condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, self("state")
            time.sleep(0.02)

    def until_state(self, state: str):
        self.until(lambda: self("state") == state)


@pytest.fixture
def worker(tmp_path) -> Worker:
    return Worker(tmp_path)


def test_a_worker_says_what_its_run_does(worker):
    assert worker("state") == "none"
    worker.python('printf "%s\\n" "$@" >flags; read -r _ <wait; exit 3')
    os.mkfifo(worker.folder / "wait")
    worker("start", *FLAGS)
    assert worker("state") == "running"
    (worker.folder / "wait").write_text("go\n")
    worker.until_state("3")
    assert (worker.folder / "flags").read_text().splitlines() == ["-m", "maelm_jax.train", "--coordinator=auto", *FLAGS]
    assert worker("watch") == ""


def test_a_worker_does_not_start_a_second_run_beside_the_first(worker):
    os.mkfifo(worker.folder / "wait")
    worker.python("echo begun >>begun; read -r _ <wait; exit 1")
    worker("start", *FLAGS)
    worker.until((worker.folder / "begun").is_file)
    second = subprocess.Popen([str(worker.folder / "launch" / "worker.sh"), "start", *FLAGS])
    time.sleep(0.5)
    assert second.poll() is None and (worker.folder / "begun").read_text() == "begun\n"
    (worker.folder / "wait").write_text("go\n")
    assert second.wait(timeout=120) == 0
    worker.until_state("running")
    (worker.folder / "wait").write_text("go\n")
    worker.until_state("1")
    assert (worker.folder / "begun").read_text() == "begun\n" * 2


def test_a_worker_knows_a_run_that_was_killed_with_its_shell(worker):
    os.mkfifo(worker.folder / "wait")
    worker.python("echo $$ $PPID >processes; read -r _ <wait")
    worker("start", *FLAGS)
    processes = worker.folder / "processes"
    worker.until(lambda: processes.is_file() and processes.read_text())
    run, shell = map(int, processes.read_text().split())
    os.kill(shell, signal.SIGKILL)
    assert worker("state") == "running", "the run itself lives, and holds the lock"
    os.kill(run, signal.SIGKILL)
    worker.until_state("lost")


def starts_again(folder: pathlib.Path, status: str, step: int) -> bool:
    argv = ["bash", str(LAUNCH / "restarts.sh"), str(folder / "count"), status, str(step)]
    return subprocess.run(argv, env=os.environ | {"RETRIES": "2"}, capture_output=True).returncode == 0


def test_a_run_starts_again_after_143_or_a_lost_process_only(tmp_path):
    again = {status: starts_again(tmp_path, status, step) for step, status in enumerate(("0", "2", "3", "143", "1", "137", "lost"))}
    assert [status for status in again if again[status]] == ["143", "1", "137", "lost"]


def test_a_run_is_given_up_without_progress(tmp_path):
    """Two starts at one step, and not a third."""
    assert [starts_again(tmp_path, "1", step) for step in (0, 100, 100, 100)] == [True, True, True, False]
    assert all(starts_again(tmp_path, "1", step) for step in (100, 200, 300, 400))


@pytest.mark.parametrize("status,is_queued", [(3, False), (143, True)])
def test_slurm_queues_a_run_again_that_starts_again(tmp_path, status, is_queued):
    executable(tmp_path / "srun", f"#!/bin/sh\nexit {status}\n")
    executable(tmp_path / "scontrol", f"#!/bin/sh\necho $@ >>{tmp_path}/queued\n")
    (tmp_path / "launch").mkdir()
    for name in ("slurm.sbatch", "restarts.sh", "newest_step.py"):
        executable(tmp_path / "launch" / name, (LAUNCH / name).read_text())
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "PYTHON": sys.executable}
    (tmp_path / "runs" / "checkpoints" / "100").mkdir(parents=True)
    argv = ["bash", str(tmp_path / "launch" / "slurm.sbatch"), "--gin_file=tiny.gin", f"--workdir={tmp_path / 'runs'}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == status and (tmp_path / "queued").exists() == is_queued, done.stderr
    assert not is_queued or (tmp_path / "maelm_jax-17.restarts").read_text() == "100 1\n"


def test_the_newest_step_is_that_of_a_complete_checkpoint(tmp_path, capsys, monkeypatch):
    script = runpy.run_path(str(LAUNCH / "newest_step.py"))
    monkeypatch.chdir(tmp_path)
    script["main"](["--gin_file=configs/tiny.gin", "--gin.TRAIN_STEPS=5"])
    for name in ("5", "40", "damaged-90", "100.orbax-checkpoint-tmp-1"):
        (tmp_path / "runs" / "tiny" / "checkpoints" / name).mkdir(parents=True)
    script["main"](["--coordinator=auto", "--gin_file=configs/tiny.gin"])
    script["main"](["--gin_file=mlm.gin", "--workdir", str(tmp_path / "runs" / "tiny")])
    assert capsys.readouterr().out.split() == ["0", "40", "40"]
