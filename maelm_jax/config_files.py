"""Finds gin files: beside the one that includes them, in the working directory, in configs/."""

import pathlib

from maelm_jax.settings import ConfigError, closest, shown

PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package has configs/ inside. In a checkout it is beside the package.
INSTALLED_CONFIGS = PACKAGE / "configs"
CONFIGS = INSTALLED_CONFIGS if INSTALLED_CONFIGS.is_dir() else PACKAGE.parent / "configs"


def find(name: str, including: tuple[pathlib.Path, ...] = ()) -> pathlib.Path:
    """Returns the path of a gin file: `name` itself, or else `name` in configs/.

    A file that another one includes is looked for beside that one first. The files of configs/
    include each other only, whatever lies in the working directory.

    Args:
        name: The file.
        including: The files that include it, resolved, the innermost last. Another file of the
            same name is preferred to one of them.

    Raises:
        ConfigError: There is no such file.
    """
    candidates = [pathlib.Path(name), CONFIGS / name]
    if including and including[-1].is_relative_to(CONFIGS.resolve()):
        candidates = [CONFIGS / name]
    elif including:
        candidates.insert(0, including[-1].parent / name)
    try:
        existing = [path for path in candidates if path.is_file()]
        others = [path for path in existing if path.resolve() not in including]
        if existing:
            return (others or existing)[0]
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"gin file {shown(name)}: {reason}; is the path right?") from error
    if name and pathlib.Path(name).is_dir():
        raise ConfigError(f"gin file {name!r} is a folder; name a file in it")
    raise ConfigError(f"no gin file {shown(name)}{_near(name)}")


def _near(name: str) -> str:
    """Returns a hint to the file of configs/ that `name` may mean, or the list of its files."""
    known = {str(path.relative_to(CONFIGS)): path.name for path in CONFIGS.rglob("*.gin")}
    same_name = [path for path, base in known.items() if base == pathlib.Path(name).name]
    if same_name:
        return f"; did you mean {' or '.join(sorted(same_name))}?"
    top_level = ", ".join(sorted(path for path, base in known.items() if path == base))
    near = closest(name.removesuffix(".gin"), [path.removesuffix(".gin") for path in known])
    return near.replace("?", ".gin?") or f"; configs/ holds {top_level}, and files in its folders"
