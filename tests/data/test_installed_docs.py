"""The embedded corpus depends on nothing but Python and on what requirements.txt pins."""

import importlib.metadata
import json
import pathlib
import re

import pytest
from testing import ROOT

from maelm_jax import config
from maelm_jax.data import installed_docs, sources


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
    before, original, asked = installed_docs.identity(), importlib.metadata.version, []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or original(name))
    assert installed_docs.identity() == before
    assert set(asked) == set(installed_docs.DISTRIBUTIONS)


def test_docstrings_lose_code_and_keep_sentences(tmp_path):
    (tmp_path / "module.py").write_text('''"""Reads a file and gives back what is in it.

    The second paragraph goes over
    two lines of the source.

    >>> read("a")
    'content of the file that is there'

    ```
    this is fenced code and is not for the corpus
    ```

    ====  ====
    a     b
    ====  ====

    - An item of the list that is long enough to keep.
    """
def short():
    """Too short."""
def copied():
    """This docstring is the same in two functions of the module, word for word."""
class A:
    def copied(self):
        """This docstring is the same in two functions of the module, word for word."""
''')
    documents = installed_docs.extract([str(tmp_path / "module.py"), str(tmp_path / "module.py")])
    assert documents == [
        (
            "Reads a file and gives back what is in it.\nThe second paragraph goes over two lines of the source.\n"
            "An item of the list that is long enough to keep.\n"
            "This docstring is the same in two functions of the module, word for word."
        )
    ]


def test_installed_docs_are_the_same_each_time_and_in_any_number_of_processes():
    paths = [path for path in installed_docs.modules() if "/json/" in path or "/email/" in path]
    assert len(paths) > 20
    one = installed_docs.extract(paths)
    assert installed_docs.extract(paths, processes=2) == one
    lines = [line for text in one for line in text.split("\n")]
    assert sum(map(len, lines)) > 20_000
    assert not any(line.startswith(">>>") for line in lines)
    assert len(re.findall(r"\bthe\b", " ".join(lines))) > 0.02 * len(" ".join(lines).split())


def test_installed_docs_are_cached_and_read_from_there(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_docs, "modules", lambda: [json.__file__, pathlib.__file__])
    corpus = config.Corpus(rows_dir=str(tmp_path), processes=1)
    first = list(sources.documents_of("installed_docs", corpus))
    assert len(first) == 2
    monkeypatch.setattr(installed_docs, "modules", lambda: pytest.fail("made again"))
    assert list(sources.documents_of("installed_docs", corpus)) == first
