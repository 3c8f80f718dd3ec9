"""Exit statuses: SIGTERM before and after the training loop, and a run that diverged."""

import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

from maelm_jax import cli, config, huge_pages, stopping
from maelm_jax.training import step_log

ROOT = pathlib.Path(__file__).resolve().parent.parent
READY = "print('ready', flush=True); "
IN_PYTHON = "import time; " + READY + "time.sleep(600)"
IN_C = "import hashlib; " + READY + "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)"  # minutes in which no Python handler runs
FORKED = """if True:
    import multiprocessing, time
    context = multiprocessing.get_context("fork")
    running = context.Event()
    child = context.Process(target=lambda: (running.set(), time.sleep(600)))
    child.start()
    running.wait()
    child.terminate()
    child.join()
    print(child.exitcode, "ready", flush=True)
    time.sleep(600)
"""
# A step of training releases the interpreter's lock, and so does the sleep. Without it CPython 3.11
# may never run the handler: the system may deliver the signal to another thread of the process.
AS_THE_LOOP = """if True:
    import time
    from maelm_jax.training import sigterm
    with sigterm.SigtermWatcher() as watcher:
        watcher.start()
        print("ready", flush=True)
        while not watcher.stops_after(1):
            time.sleep(0.001)
    print("saved", flush=True)
    raise SystemExit(143)
"""


def stopped(body: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command that runs `body` and gets SIGTERM once it says that it is ready. It must end before `body` does."""
    code = f"from maelm_jax import cli\ndef main(argv):\n    exec({body!r}, {{}})\ncli.run(main)"
    environment = os.environ | {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "")}  # no second start
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert select.select([process.stdout], [], [], 120)[0]
            said = process.stdout.readline().decode()
            process.terminate()
            rest, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "ready" in said, errors
    return process.returncode, said + rest.decode(), errors.decode()


@pytest.mark.parametrize("body", [IN_PYTHON, IN_C], ids=["in Python", "in a call of C"])
def test_sigterm_outside_the_loop_ends_at_once_with_143(body):
    status, _, errors = stopped(body)
    assert status == 143 and errors == "stopped by SIGTERM; the same command goes on\n"


def test_a_forked_child_is_terminated_alone():
    status, said, _ = stopped(FORKED)
    assert (status, said) == (143, f"{-signal.SIGTERM} ready\n")


def test_the_loop_looks_after_its_own_signal():
    status, said, errors = stopped(AS_THE_LOOP)
    assert (status, said, errors) == (143, "ready\nsaved\n", "")


@pytest.mark.parametrize(
    "error,status",
    [
        (config.ConfigError("a wrong input"), 2),
        (config.RunError("a disk that is full"), 1),
        (step_log.Diverged("step 5: loss nan"), 3),
    ],
)
def test_each_error_has_its_exit_status_and_one_line(monkeypatch, capsys, error, status):
    def main(argv):
        raise error

    monkeypatch.setattr(huge_pages, "use_huge_pages", lambda: None)
    monkeypatch.setattr(stopping, "exit_on_sigterm", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert end.value.code == status and capsys.readouterr().err == f"error: {error}\n"
