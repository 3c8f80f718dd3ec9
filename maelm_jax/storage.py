"""Files that are there whole or not at all, whoever is killed while writing and however many processes or hosts write the same one."""

import contextlib
import os
import pathlib
import threading
import typing


@contextlib.contextmanager
def whole(path: str | os.PathLike) -> typing.Iterator[typing.BinaryIO]:
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
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
