"""How the processes of one run end together: each test starts two processes that join and run a few lines."""

import os
import pathlib
import select
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = """if True:
    import sys, time
    from maelm_jax import cli
    def main(argv):
        from maelm_jax.training import coordination, distributed, step_log
        process = int(argv[1])
        with distributed.joined(argv[0], 2, process, 120):
            coordination.all_true(True)
            print("ready", file=sys.stderr, flush=True)
            {body}
    cli.run(main)
"""


class Pair:
    def __init__(self, body: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": ""}
        self.running = [
            subprocess.Popen([sys.executable, "-c", CODE.format(body=body), place, str(number)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
            for number in range(2)
        ]

    def wait_until_ready(self):
        for process in self.running:
            assert select.select([process.stderr], [], [], 120)[0]
            while b"ready" not in (line := process.stderr.readline()):
                assert line, "it ended before it was ready"

    def finish(self) -> tuple[list[int], list[str]]:
        """(exit statuses, what each wrote to stderr)."""
        try:
            said = [process.communicate(timeout=240)[1].decode() for process in self.running]
        finally:
            for process in self.running:
                process.kill()
        return [process.returncode for process in self.running], said


@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_to_one_process_before_the_loop_ends_all_with_143(number):
    pair = Pair("time.sleep(1000)")
    pair.wait_until_ready()
    pair.running[number].send_signal(signal.SIGTERM)
    status, said = pair.finish()
    assert status == [143, 143]
    assert "stopped by SIGTERM; the same command goes on\n" in said[number]
    assert f"process {number} on {socket.gethostname()} ended: stopped by SIGTERM; the same command" in said[1 - number]


def test_all_end_with_3_when_one_sees_that_the_run_diverged():
    """The other one waits in a collective. Before that, both follow what process 0 decides."""
    line = "\n            "
    status, said = Pair(
        f"mine = [process == 0, process == 1]{line}"
        f"assert [coordination.broadcast_flag(str(n), mine[n]) for n in (0, 1)] == [True, False]{line}"
        f"if process: raise step_log.Diverged('step 5: loss nan'){line}"
        "coordination.all_true(True)"
    ).finish()
    assert status == [3, 3] and all("step 5: loss nan" in text.strip().splitlines()[-1] for text in said), said
