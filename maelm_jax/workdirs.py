"""What a run recorded of its start, and messages for a path that holds no run."""

import difflib
import pathlib

from maelm_jax import storage

# Files that a resumed run reads at its start.
RECORDS = (
    "config.gin",
    "environment.txt",
    "changes.txt",
    "rows.json",
    "origin.json",
    "vocabulary/sentencepiece.model",
    "vocabulary/tokenizer.json",
)
# A folder with one of these files counts as a run: a workdir, an exported or Hugging Face folder,
# or a checkpoint of the published code.
RUN_FILES = ("config.gin", "config.json", "model.pt")
MOST_LISTED = 6  # largest number of runs that a message lists


def records(workdir: str) -> pathlib.Path:
    """Returns the folder on this machine with the `RECORDS` of a run.

    Those of a workdir in a bucket are fetched. No run is on s3://, where Orbax writes no
    checkpoints.
    """
    folder = storage.local_path(workdir)
    if workdir.startswith("gs://"):
        (folder / "vocabulary").mkdir(exist_ok=True)
        storage.fetch_files(workdir, RECORDS)
    return folder


def no_run(path: str) -> str:
    """Returns a line that says that `path` holds no run, and names runs near it."""
    is_folder = pathlib.Path(path).is_dir()
    problem = f"{path} holds no run (no config.gin)" if is_folder else f"there is no run {path}"
    return f"{problem}{near(path)}"


def near(path: str) -> str:
    """Returns "; did you mean runs/tiny?", or the runs in or beside `path`, or ""."""
    folder = pathlib.Path(path)
    try:
        inside = _runs_in(folder)
        beside = _runs_in(folder.parent)
    except OSError:
        return ""
    if inside:
        return f"; it holds the runs {', '.join(inside[:MOST_LISTED])}"
    if close := difflib.get_close_matches(folder.name, beside, n=1):
        return f"; did you mean {folder.parent / close[0]}?"
    return f"; {folder.parent} holds the runs {', '.join(beside[:MOST_LISTED])}" if beside else ""


def _runs_in(folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of the runs in a folder."""
    if not folder.is_dir():
        return []
    return sorted(
        item.name for item in folder.iterdir() if any((item / name).is_file() for name in RUN_FILES)
    )
