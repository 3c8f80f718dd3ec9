"""Sources: the same documents from every packing, wrong files named with the place, documentation strings that are English."""

import gzip
import json
import lzma
import pathlib
import re

import pytest

from maelm_jax import config
from maelm_jax.data import installed_docs, sources

TEXTS = ["One paragraph.\nAnother, naïve one.", "A second document.", "Third: a < b."]
PACK = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def read(pattern, **settings):
    return list(sources.documents_of(f"files:{pattern}", config.Corpus(**settings)))


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_text_files_of_every_packing(tmp_path, packing, ending):
    content = "\ufeff" + "\n \n\n".join(TEXTS) + "\n\n"
    with PACK[packing](tmp_path / f"a.txt{packing}", "wb") as file:
        file.write(content.replace("\n", ending).encode())
    assert read(tmp_path / "*") == TEXTS


@pytest.mark.parametrize("packing", PACK)
def test_json_files_of_every_packing(tmp_path, packing):
    with PACK[packing](tmp_path / f"a.jsonl{packing}", "wb") as file:
        file.write("\n".join(json.dumps({"body": text, "id": 1}) for text in [*TEXTS, "", "  \n"]).encode())
    assert read(tmp_path / "*.jsonl*", json_field="body") == TEXTS


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"document {name}")
    assert read(tmp_path / "*.txt") == ["document a", "document b", "document c"]


BAD = {
    "latin.txt": (b"one\n\nna\xefve", r"latin\.txt: not UTF-8 at byte 7 "),
    "empty.txt": (b"", r"empty\.txt: the file is empty"),
    "empty.txt.gz": (gzip.compress(b""), r"the file is empty"),
    "cut.txt.gz": (gzip.compress(bytes(range(256)) * 50)[:60], r"cut\.txt\.gz: corrupt gzip data"),
    "no.txt.gz": (b"plain text", r"corrupt gzip data"),
    "cut.txt.xz": (lzma.compress(b"x y" * 5000)[:-20], r"cut\.txt\.xz: corrupt xz data"),
    "no.jsonl.xz": (b"plain text", r"corrupt xz data"),
    "field.jsonl": (b'{"text": "a"}\n{"txt": "b"}', r"field\.jsonl:2: no text field 'text' in the record \(txt\)"),
    "number.jsonl": (b'{"text": 3}', r"number\.jsonl:1: no text field"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text"', r"broken\.jsonl:3: not JSON"),
    "table.csv": (b"a,b", r"table\.csv: not a \.txt or \.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_with_its_place(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(config.ConfigError, match=message) as caught:
        read(tmp_path / "*")
    assert "\n" not in str(caught.value)


def test_no_match_says_the_pattern():
    with pytest.raises(config.ConfigError, match=r"no text file matches '/nowhere/\*\.txt'"):
        read("/nowhere/*.txt")


def test_identity_is_of_the_bytes(tmp_path):
    corpus = config.Corpus(rows_dir=str(tmp_path / "rows"))
    source = f"files:{tmp_path}/*.txt"
    (tmp_path / "a.txt").write_text("one")
    first = sources.identity(source, corpus)
    (tmp_path / "a.txt").touch()
    assert sources.identity(source, corpus) == first
    (tmp_path / "a.txt").write_text("two")
    assert sources.identity(source, corpus) != first


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
        ("Reads a file and gives back what is in it.\nThe second paragraph goes over two lines of the source.\n"
        "An item of the list that is long enough to keep.\n"
        "This docstring is the same in two functions of the module, word for word.")
    ]


def test_installed_docs_are_the_same_each_time_and_in_any_number_of_processes():
    paths = [path for path in installed_docs.modules() if "/json/" in path or "/email/" in path or "/optax/" in path]
    assert len(paths) > 30
    one = installed_docs.extract(paths)
    assert installed_docs.extract(paths, processes=2) == one
    lines = [line for text in one for line in text.split("\n")]
    assert sum(map(len, lines)) > 100_000
    assert not any(line.startswith(">>>") for line in lines)
    assert len(re.findall(r"\bthe\b", " ".join(lines))) > 0.02 * len(" ".join(lines).split())


def test_installed_docs_are_cached_and_read_from_there(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_docs, "modules", lambda: [json.__file__, pathlib.__file__])
    corpus = config.Corpus(rows_dir=str(tmp_path))
    first = list(sources.documents_of("installed_docs", corpus))
    assert len(first) == 2
    monkeypatch.setattr(installed_docs, "modules", lambda: pytest.fail("made again"))
    assert list(sources.documents_of("installed_docs", corpus)) == first
