"""Entry points of the installed commands: `maelm-train` does what `python -m maelm_jax.train` does, and so on for each command."""

import importlib
import typing

from maelm_jax import cli


def _run(name: str, **options: bool) -> typing.NoReturn:
    """Runs the command in maelm_jax/NAME.py on this process's arguments and ends the process with its exit status."""
    command = importlib.import_module(f"maelm_jax.{name}")
    cli.run(command.main, **options)


def train():
    _run("train", trains=True)


def prepare():
    _run("prepare")


def finetune():
    _run("finetune", trains=True)


def export():
    _run("export")


def embed():
    _run("embed")


def analyze():
    _run("analyze")


def plan():
    _run("plan")
