"""Writes an export folder atomically, and never replaces files that export did not write.

An export writes OUTPUT.PID.tmp beside OUTPUT and renames it to OUTPUT at the end. An export that is
replaced is renamed to OUTPUT.PID.old first and removed afterwards. Each of these folders holds the
marker file. A running export locks the marker, so a folder without a lock is left by a process
that was killed.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import time
import typing

from maelm_jax import paths
from maelm_jax.config import ConfigError

FLAG = "--output"  # of the command export
MARKER = "maelm_jax_export.json"  # lists the files that export wrote
BYTECODE = "__pycache__"  # Python makes it where maelm.py is imported
EMPTY_SECONDS = 60  # an empty temporary folder older than this is a leftover, not a new one


def resolved(output: str | os.PathLike) -> pathlib.Path:
    """Returns the folder behind `output`, with links followed, so that a link stays a link."""
    return pathlib.Path(os.path.realpath(os.path.expanduser(output)))


def check(
    output: str | os.PathLike, workdir: str | os.PathLike | None, overwrite: bool, name: str = FLAG
):
    """Checks that an export may write `output`.

    `output` must be absent or empty, or `overwrite` must be set and `output` must be written by
    export. The run `workdir` and the folders above it are never replaced.

    Args:
        output: The folder to write.
        workdir: The run that is exported, if it is one.
        overwrite: Whether to replace what export wrote.
        name: What messages call the output.

    Raises:
        ConfigError: The export may not write `output`.
    """
    paths.check_output_folder(name, str(output))
    target = resolved(output)
    if workdir is not None and resolved(workdir).is_relative_to(target):
        raise ConfigError(
            f"{name}={output} is or holds the run that is exported, {workdir}. Give another {name}"
        )
    with paths.writing(name, str(output)):
        if not target.exists():
            return
        present = {path.name for path in target.iterdir()} - {BYTECODE}
    if not present:
        return
    if not overwrite:
        hint = ", or --overwrite to replace what export wrote there" if name == FLAG else ""
        raise ConfigError(f"{name}={output} exists. Give another {name}{hint}")
    files = _listed(target)
    if files is None:
        raise ConfigError(
            f"{name}={output} was not written by export, or by an earlier version, "
            f"which left no {MARKER}. "
            f"Give another {name}, or remove the folder yourself if nothing in it is needed"
        )
    if added := sorted(present - files - {MARKER}):
        raise ConfigError(
            f"{name}={output} holds {added[0]}, which export did not write. "
            f"Move it away, or give another {name}"
        )


def _listed(target: pathlib.Path) -> set[str] | None:
    """Returns the file names in the marker of an exported folder; None without a valid marker."""
    try:
        content = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    files = content.get("files") if isinstance(content, dict) else None
    return (
        set(files)
        if isinstance(files, list) and all(isinstance(name, str) for name in files)
        else None
    )


@contextlib.contextmanager
def written(
    output: str | os.PathLike,
    workdir: str | os.PathLike | None = None,
    overwrite: bool = False,
    name: str = FLAG,
) -> typing.Iterator[pathlib.Path]:
    """Context manager that yields a temporary folder and renames it to `output` at the end.

    If the block raises, the temporary folder is removed. The arguments are those of `check`.

    Raises:
        ConfigError: `check` fails, at the start or at the end. The second check is needed because
            another process can write `output` in between.
    """
    check(output, workdir, True, name)
    target = resolved(output)
    folder, retired = (
        target.with_name(f"{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old")
    )
    with paths.writing(name, str(output)), contextlib.ExitStack() as locks:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        check(output, workdir, overwrite, name)
        folder.mkdir()
        try:
            marker = locks.enter_context((folder / MARKER).open("w", encoding="utf-8"))
            _lock(marker)
            yield folder
            shutil.rmtree(folder / BYTECODE, ignore_errors=True)
            marker.write(
                json.dumps(
                    {
                        "written_by": "maelm_jax.export",
                        "files": sorted(path.name for path in folder.iterdir()),
                    },
                    indent=1,
                )
                + "\n"
            )
            marker.flush()
            check(output, workdir, overwrite, name)
            if (target / MARKER).exists():
                _lock(locks.enter_context((target / MARKER).open()))
                target.rename(retired)
            elif target.exists():
                # The folder is empty otherwise, and a rename replaces an empty folder.
                shutil.rmtree(target / BYTECODE, ignore_errors=True)
            folder.rename(target)
            shutil.rmtree(retired, ignore_errors=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _lock(file: typing.IO) -> bool:
    """Locks a marker. Returns False if another process holds the lock or locks do not work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _remove_leftovers(target: pathlib.Path):
    """Removes folders of killed exports; renames a replaced export back if `target` is free."""
    pattern = re.compile(re.escape(target.name) + r"\.\d+\.(tmp|old)")
    for path in sorted(target.parent.iterdir()):
        if not pattern.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if not (path / MARKER).is_file():
            if not any(path.iterdir()) and time.time() - path.stat().st_mtime > EMPTY_SECONDS:
                path.rmdir()
            continue
        with (path / MARKER).open() as file:
            if not _lock(file):
                continue
            if path.name.endswith(".old") and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)
