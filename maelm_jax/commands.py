"""Entry points of the installed commands, such as `maelm-train` for `python -m maelm_jax.train`."""

import importlib
import typing

from maelm_jax import cli


def _run(name: str, **options: typing.Any) -> typing.NoReturn:
    """Runs maelm_jax/NAME.py and exits with its status. `options` go to `cli.run`."""
    command = importlib.import_module(f"maelm_jax.{name}")
    cli.run(command.main, **options)


def train():
    """Runs `maelm-train`."""
    _run("train", trains=True, advice=cli.TRAIN_MEMORY)


def prepare():
    """Runs `maelm-prepare`."""
    _run("prepare")


def finetune():
    """Runs `maelm-finetune`."""
    _run("finetune", trains=True, advice=cli.FINETUNE_MEMORY)


def export():
    """Runs `maelm-export`."""
    _run("export")


def embed():
    """Runs `maelm-embed`."""
    _run("embed")


def analyze():
    """Runs `maelm-analyze`."""
    _run("analyze")


def evaluate():
    """Runs `maelm-evaluate`."""
    _run("evaluate")


def plan():
    """Runs `maelm-plan`."""
    _run("plan")
