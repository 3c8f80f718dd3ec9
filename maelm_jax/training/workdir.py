"""What a file or folder is that a command gets. Every command decides it here."""

import enum
import os
import re

from maelm_jax import config, gin_files, storage
from maelm_jax.data import rows, vocabularies

STOCK_CONFIG = "config.json"  # of a folder that transformers reads
MODULES = "modules.json"  # of a folder that sentence-transformers reads
PUBLISHED_WEIGHTS = "model.pt"  # in a folder of the published layout
TABLE = "table.json"  # of fine-tuned runs


class Kind(enum.Enum):
    """What a path names. The value is a description for messages."""

    RUN = "a run of pretraining"
    FINETUNED = "a fine-tuned run"
    TABLE = "a table of fine-tuned runs"
    EXPORT = "an exported folder"
    STOCK = "a folder of stock transformers"
    PUBLISHED = "a checkpoint of the published code"
    ROWS = "a folder of prepared rows"
    OTHER = "no folder that a command here has written"
    ABSENT = "no file or folder"


RUNS = (Kind.RUN, Kind.FINETUNED)
# Into what train, finetune and analyze may write.
PRETRAINING = (Kind.RUN, Kind.OTHER, Kind.ABSENT)
FINETUNING = (Kind.FINETUNED, Kind.TABLE, Kind.OTHER, Kind.ABSENT)
REPORTING = (*RUNS, Kind.TABLE, Kind.OTHER, Kind.ABSENT)


def kind_of(path: str | os.PathLike) -> Kind:
    """Returns what `path` is. `run_record.fetch` must have fetched a workdir in a bucket.

    The first kind that fits counts: a folder with a config.gin is a run, whatever else it holds.
    """
    path = storage.local_path(os.fspath(path))
    if (path / gin_files.RECORD).is_file():
        record = (path / gin_files.RECORD).read_text(encoding="utf-8", errors="replace")
        return Kind.FINETUNED if re.search(r"^Finetune\.", record, re.MULTILINE) else Kind.RUN
    if path.is_file() or (path / PUBLISHED_WEIGHTS).is_file():
        return Kind.PUBLISHED
    if (path / STOCK_CONFIG).is_file() or (path / MODULES).is_file():
        is_ours = (path / vocabularies.CHECKSUMS).is_file()
        return Kind.EXPORT if is_ours else Kind.STOCK
    if (path / TABLE).is_file():
        return Kind.TABLE
    if (path / rows.MANIFEST).is_file() or any(path.glob(f"*/{rows.MANIFEST}")):
        return Kind.ROWS
    return Kind.OTHER if path.exists() else Kind.ABSENT


def require_writable_by(path: str, kinds: tuple[Kind, ...]):
    """Raises ConfigError if a command that writes into folders of `kinds` may not write there."""
    kind = kind_of(path)
    if kind not in kinds:
        raise config.ConfigError(f"--workdir={path} is {kind.value}. Give another --workdir")
