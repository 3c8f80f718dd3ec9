"""Progress bars on stderr. A terminal shows them moving, and a file gets few lines."""

import sys
import typing

import tqdm

TERMINAL_INTERVAL = 0.5  # seconds between two drawings
FILE_INTERVAL = 300.0


class Bar(tqdm.tqdm):
    """A tqdm bar. In a file, one that takes less than FILE_INTERVAL leaves nothing."""

    def __init__(self, iterable: typing.Iterable | None = None, **settings: typing.Any):
        if sys.stderr.isatty():
            pace = {"mininterval": TERMINAL_INTERVAL}
        else:
            pace = dict.fromkeys(("mininterval", "maxinterval", "delay"), FILE_INTERVAL)
        super().__init__(iterable, **pace | settings)
