"""Prints the step of a run's newest checkpoint, 0 if there is none.

Launchers start a run again only while this number grows.

    python launch/newest_step.py FLAGS

FLAGS are those of maelm_jax.train. Only --workdir and --gin_file are read.

The workdir may be a folder or gs://.
"""

import argparse
import pathlib
import sys

import fsspec


def newest_step(workdir: str) -> int:
    """The largest step of a complete checkpoint under WORKDIR/checkpoints.

    An incomplete checkpoint has another name, or in a bucket no commit_success.txt.
    """
    files, root = fsspec.url_to_fs(workdir, use_listings_cache=False)
    folder = f"{root.rstrip('/')}/checkpoints"
    paths = files.ls(folder, detail=False) if files.exists(folder) else []
    if "://" in workdir:
        paths = [path for path in paths if files.exists(f"{path.rstrip('/')}/commit_success.txt")]
    names = [pathlib.PurePath(path).name for path in paths]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def main(argv: list[str]):
    """Runs the command with these arguments."""
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    flags.add_argument("--workdir")
    flags.add_argument("--gin_file", action="append")
    args, _ = flags.parse_known_args(argv)
    if not args.workdir and not args.gin_file:
        flags.error("give --workdir or --gin_file, as to maelm_jax.train")
    print(newest_step(args.workdir or f"runs/{pathlib.Path(args.gin_file[0]).stem}"))


if __name__ == "__main__":
    main(sys.argv[1:])
