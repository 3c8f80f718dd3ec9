"""A corpus of any size in mixed files, made of repeats of a text, and its vocabulary."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import config
from maelm_jax.data import readers, sources, vocabulary_training

SAMPLE_MEGABYTES = 16.0  # of text for the vocabulary
DONE = "corpus.json"  # says what the corpus was made of; written last


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files of .parquet, .jsonl.zst and .txt.gz in turn."""

    folder: pathlib.Path
    text: str  # glob of the files that are repeated
    gigabytes: float  # of text in all files together
    files: int
    ids: int  # size of the vocabulary

    def flags(self) -> list[str]:
        """Returns the flags of `prepare` for this corpus."""
        return [
            "--gin_file=base.gin",
            f"--gin.TEXT_FILES={self.folder}/text/*",
            f"--gin.Vocabulary.file={self.folder}/vocabulary",
        ]

    def packed_megabytes(self) -> float:
        """Returns the size of the files."""
        return sum(path.stat().st_size for path in (self.folder / "text").iterdir()) / 1e6

    def write(self):
        """Writes the files and the vocabulary, unless they are there."""
        request = json.dumps([self.text, self.gigabytes, self.files, self.ids])
        done = self.folder / DONE
        if done.is_file() and done.read_text() == request:
            return
        shutil.rmtree(self.folder / "text", ignore_errors=True)  # of a start that was interrupted
        (self.folder / "text").mkdir(parents=True)
        settings = config.Corpus(rows_dir=str(self.folder))
        documents = itertools.cycle(list(sources.documents_of(f"files:{self.text}", settings)))
        writers = (write_parquet, write_jsonl_zst, write_txt_gz)
        for number in range(self.files):
            part: list[str] = []
            size = 0
            while size < self.gigabytes * 1e9 / self.files:
                part.append(next(documents))
                size += len(part[-1].encode())
            writers[number % len(writers)](self.folder / "text" / f"{number:04d}", part)
        sample = vocabulary_training.sample(
            f"files:{self.folder}/text/*", settings, SAMPLE_MEGABYTES
        )
        trained = vocabulary_training.train(sample, config.Vocabulary(size=self.ids))
        trained.save(self.folder / "vocabulary")
        done.write_text(request)


def write_parquet(path: pathlib.Path, documents: list[str]):
    """Writes a .parquet file with the column `text`."""
    pyarrow = readers.import_pyarrow()
    pyarrow.parquet.write_table(
        pyarrow.table({"text": documents}), path.with_suffix(".parquet"), row_group_size=1000
    )


def write_jsonl_zst(path: pathlib.Path, documents: list[str]):
    """Writes a .jsonl.zst file with the field `text`."""
    pyarrow = readers.import_pyarrow()
    with pyarrow.CompressedOutputStream(f"{path}.jsonl.zst", "zstd") as file:
        for document in documents:
            file.write(json.dumps({"text": document}).encode() + b"\n")


def write_txt_gz(path: pathlib.Path, documents: list[str]):
    """Writes a .txt.gz file, with a blank line between documents."""
    content = "\n\n".join(documents).encode()
    path.with_name(f"{path.name}.txt.gz").write_bytes(gzip.compress(content, 1, mtime=0))
