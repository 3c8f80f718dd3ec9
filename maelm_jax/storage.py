"""Files that are there whole or not at all, whoever is killed while writing; and folders in buckets (gs://, s3://), through fsspec.

A bucket is slow at small reads and cannot append. So what is read at random (rows) is copied from it once, and what is appended to (metrics,
TensorBoard) is written to a folder here that is copied to it. Checkpoints go there directly: Orbax writes few large objects.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import threading
import typing

from maelm_jax import config


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> typing.Iterator[typing.BinaryIO]:
    """A file open for writing bytes that takes the place of `path` when the block ends, and disappears if the block raises.

    Raises FileNotFoundError when the folder is not there: it is not made again behind the back of whoever removed it.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: str | os.PathLike, content: bytes | str):
    """Writes a file whole (text as UTF-8)."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def unused(path):
    """`path` (a pathlib or epath Path), or where something is there the first of STEM-2, STEM-3, ... that is free."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def in_bucket(place: str | os.PathLike) -> bool:
    return str(place).startswith(("gs://", "s3://"))


def require_local(place: str):
    """Raises ConfigError when `place` is in a bucket: for what knows folders of this machine only."""
    if in_bucket(place):
        raise config.ConfigError(f"{place}: only train and prepare know buckets; give a folder of this machine (gcloud storage cp -r copies one)")


def local_path(place: str) -> pathlib.Path:
    """The folder itself, or the one on this machine that stands for a folder in a bucket (under $XDG_CACHE_HOME/maelm_jax)."""
    if not in_bucket(place):
        return pathlib.Path(place)
    os.environ.setdefault("EPATH_USE_TF", "false")  # Orbax's paths then go through fsspec too, whether TensorFlow is installed or not
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    folder = cache / "maelm_jax" / hashlib.sha256(place.rstrip("/").encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_folders(place: str, pattern: str, manifest: str):
    """Copies folders in the bucket whose names match `pattern` and that hold the file `manifest` into `local_path(place)`, unless they are there."""
    files, root = file_system(place)
    for found in files.glob(f"{root}/{pattern}/{manifest}"):
        source = found.rsplit("/", 1)[0]
        target = local_path(place) / source.rsplit("/", 1)[1]
        if target.is_dir():
            continue
        arriving = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            files.get(f"{source}/", f"{arriving}/", recursive=True)
            os.rename(arriving, target)
        except OSError:
            if not target.is_dir():  # else another process of this machine was faster
                raise
        finally:
            shutil.rmtree(arriving, ignore_errors=True)


def fetch_files(place: str, names: typing.Sequence[str]):
    """Copies files of a bucket's folder into `local_path(place)`; what the bucket does not have is not there afterwards either."""
    files, root = file_system(place)
    for name in names:
        target = local_path(place) / name
        if files.exists(f"{root}/{name}"):
            write(target, files.cat_file(f"{root}/{name}"))
        else:
            target.unlink(missing_ok=True)


def send(place: str):
    """Copies all of `local_path(place)` to the bucket. Does nothing for a folder that is here."""
    if not in_bucket(place):
        return
    files, root = file_system(place)
    for path in sorted(local_path(place).rglob("*")):
        if path.is_file() and path.suffix not in (".tmp", ".lock"):
            files.pipe_file(f"{root}/{path.relative_to(local_path(place))}", path.read_bytes())


def file_system(place: str):
    """(fsspec's file system, the folder's path in it), of a folder in a bucket or on this machine. Nothing listed before is remembered."""
    try:
        import fsspec

        files, root = fsspec.url_to_fs(place, use_listings_cache=False)
    except ImportError as error:
        raise config.ConfigError(f"{place}: {error}; pip install '.[bucket]' has what buckets need") from error
    return files, root.rstrip("/")
