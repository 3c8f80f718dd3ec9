"""The embedded corpus depends on nothing but Python and on what requirements.txt pins."""

import importlib.metadata
import pathlib
import re

from maelm_jax.data import installed_docs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    """Distribution -> version of a requirements file."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found = dict(line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", key).lower(): value for key, value in found.items()}


def test_every_distribution_of_the_text_is_pinned():
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in installed_docs.DISTRIBUTIONS}
    assert len(names) == len(installed_docs.DISTRIBUTIONS) > 10
    assert names <= set(pins("requirements.txt"))


def test_installing_the_rest_changes_no_version_of_the_text():
    text, torch = pins("requirements.txt"), pins("requirements-torch.txt")
    assert all(torch[name] == text[name] for name in set(text) & set(torch))


def test_what_else_is_installed_changes_nothing(monkeypatch):
    before = installed_docs.identity(partial=True), installed_docs.modules()
    original = importlib.metadata.version
    asked = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or original(name))
    assert (installed_docs.identity(partial=True), installed_docs.modules()) == before
    assert set(asked) == set(installed_docs.DISTRIBUTIONS)
