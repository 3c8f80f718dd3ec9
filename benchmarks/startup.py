r"""Measure the seconds from the start of a command to the end of its first training step.

The compilation cache is cold for the first measurement and warm for the second.

    python benchmarks/startup.py --gin_file=base.gin --gin.BATCH_SIZE=2 \
        --gin.Compute.dtype=float32 --gin.TEXT_FILES='books/*.txt'

Starts `python -m maelm_jax.train` with the same flags and ends it after its first step. Workdir and
cache are temporary. The rows are prepared before, and their preparation does not count.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maelm_jax import cli, config  # noqa: E402


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    cli.parse(flags, argv)
    flag = [argument for argument in argv if not argument.startswith("--workdir")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "PYTHONPATH": path,
        }
        # maelm_jax/huge_pages.py sets this for this process. A user's command starts without it.
        environment.pop("GLIBC_TUNABLES", None)
        prepare = [sys.executable, "-m", "maelm_jax.prepare", *flag, f"--workdir={folder}/rows"]
        subprocess.run(prepare, env=environment, stdout=subprocess.DEVNULL, check=True)
        for name in ("cold", "warm"):
            workdir = pathlib.Path(folder) / name
            command = [
                sys.executable,
                "-m",
                "maelm_jax.train",
                *flag,
                f"--workdir={workdir}",
                "--gin.Run.log_every=1",
                "--gin.Run.eval_rows=2",
            ]
            seconds = _first_step(command, workdir / "metrics.jsonl", environment)
            print(f"{name} cache: {seconds:.1f} s to the first step's numbers")


def _first_step(command: list[str], metrics: pathlib.Path, environment: dict) -> float:
    """Runs a command until its first line of metrics; returns the seconds until then."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() is not None:
                raise config.RunError(
                    f"{' '.join(command[1:])} ended with {process.returncode}: "
                    f"{process.stderr.read()[-300:]}"
                )
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    cli.run(main)
