"""The embedded corpus: docstrings of Python and of the packages that requirements.txt pins.

A document holds the docstrings of one module, in order, with one paragraph a line. Code, doctests,
tables and field lists are left out. Docstrings under MINIMUM_WORDS words are left out. A docstring
that occurs several times is kept once, because many are copied from class to class. The text is
kept as a file under Corpus.rows_dir, because extracting it takes a while.
"""

import ast
import contextlib
import gc
import hashlib
import importlib.metadata
import inspect
import logging
import os
import pathlib
import platform
import re
import sysconfig
import typing
import warnings

from maelm_jax import config, storage
from maelm_jax.data import workers

VERSION = 1  # version of the rules below; the name of the kept file depends on it
# The text comes from the standard library (`python`) and from these. requirements.txt pins all of
# them, so that other installed packages do not change the text. TensorFlow is left out: it would be
# a third of the source to parse, and tiny.gin reads a third of the text without it.
DISTRIBUTIONS = (
    "array_record beartype flax fsspec gin-config jax jaxtyping matplotlib numpy optax "
    "orbax-checkpoint pytest scikit-learn scipy sentencepiece seqio tensorboardX tensorstore "
    "tokenizers tqdm"
).split()
MINIMUM_WORDS = 10
STDLIB_LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idlelib lib2to3 __pycache__".split()
)
CODE = re.compile(r"^\s*(>>>|\.\.\.( |$)|\$ |\.\. |:\w|@|#|\||\+[-=]|[-=~^*`]{3,})")
ITEM = re.compile(r"^([-*+•]|\d+[.)])\s+")
WORD = re.compile(r"[A-Za-z][a-z']*\b")
OTHER = re.compile(r"[^A-Za-z ]")
COMMON = frozenset(
    "the a an of to in is are and or for if with that this be by as on from it not "
    "which when can".split()
)
log = logging.getLogger(__name__)


def versions() -> dict[str, str]:
    """{distribution: version} of those that are installed, with `python` first."""
    result = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def identity() -> str:
    """Returns what identifies the text: the versions of the installed distributions."""
    return f"{VERSION} {sorted(versions().items())}"


def text_file(corpus: config.Corpus) -> pathlib.Path:
    """Returns the file of the text, with a blank line between documents.

    The text is extracted if the file is missing. It is made of those DISTRIBUTIONS that are
    installed. Its SHA-256 is logged.
    """
    digest = hashlib.sha256(identity().encode()).hexdigest()[:12]
    path = pathlib.Path(corpus.rows_dir).expanduser() / f"installed_docs-{digest}.txt"
    if not path.is_file():
        documents = extract(modules(), corpus.processes)
        content = ("\n\n".join(documents) + "\n").encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, content)
        log.info(
            "installed_docs: %d documents, %.1f MB, sha256 %s, kept in %s",
            len(documents),
            len(content) / 1e6,
            hashlib.sha256(content).hexdigest(),
            path,
        )
    return path


def modules() -> list[str]:
    """Returns the .py files in a fixed order: the standard library, then the distributions."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(set(folders) - STDLIB_LEFT_OUT)
        paths += [os.path.join(folder, name) for name in sorted(files) if name.endswith(".py")]
    for name in versions():
        if name != "python":
            listed = importlib.metadata.files(name) or []
            paths += sorted(
                str(file.locate())
                for file in listed
                if file.suffix == ".py" and not {"test", "tests", "testdata"} & set(file.parts)
            )
    return paths


def extract(paths: list[str], processes: int = 1) -> list[str]:
    """Returns the documents of Python files, one for each file that has new docstrings.

    A docstring that an earlier file has is left out.
    """
    seen, documents = set(), []
    for strings in workers.results(docstrings, paths, processes):
        new = [text for text in dict.fromkeys(strings) if text not in seen]
        seen.update(new)
        if new:
            documents.append("\n".join(new))
    return documents


def docstrings(path: str) -> list[str]:
    """Returns the cleaned docstrings of a file that are long enough; none if it does not parse."""
    enabled = gc.isenabled()
    # A syntax tree has many small objects. Searching them for cycles takes longer than parsing.
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parsed code may hold invalid escapes
            tree = ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))
        raw = (ast.get_docstring(node, clean=False) for node in _definitions(tree))
        texts = (prose(text) for text in raw if text)
        return [text for text in texts if len(text.split()) >= MINIMUM_WORDS]
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    finally:
        if enabled:
            gc.enable()


def _definitions(node: ast.AST) -> typing.Iterator[ast.AST]:
    """Yields the module, its classes and functions, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    # Expressions hold no definitions with docstrings and are most of the tree, so they are skipped.
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            yield from _definitions(child)


def prose(docstring: str) -> str:
    """Returns the English paragraphs of a docstring, one on a line. Other blocks are dropped."""
    paragraphs: list[str] = []
    fenced = doctest = False
    block: list[str] = []
    for line in [*inspect.cleandoc(docstring).replace("\x0c", "\n").split("\n"), ""]:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        elif fenced:
            continue
        bare = line.strip()
        # The output of a doctest ends at the next blank line.
        doctest = bool(bare) and (doctest or bare.startswith(">>>"))
        if not bare or doctest or CODE.match(line) or ITEM.match(bare):
            text = " ".join(" ".join(block).split())
            if _english(text):
                paragraphs.append(text)
            block = [ITEM.sub("", bare)] if ITEM.match(bare) else []
        else:
            block.append(bare)
    return "\n".join(paragraphs)


def _english(text: str) -> bool:
    """Returns whether the text reads as English: mostly letters, at least one word of COMMON."""
    words = WORD.findall(text)
    return (
        len(words) >= 4
        and len(OTHER.findall(text)) <= 0.25 * len(text)
        and any(word.lower() in COMMON for word in words)
    )
