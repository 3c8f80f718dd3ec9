"""Entry points of the installed commands, such as `maelm-train` for `python -m maelm_jax.train`."""

import importlib
import typing

from maelm_jax import cli


def _run(name: str, **options: bool) -> typing.NoReturn:
    """Runs maelm_jax/NAME.py and exits with its status. `options` go to `cli.run`."""
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
