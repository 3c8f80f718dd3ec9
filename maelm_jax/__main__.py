"""Lists the commands: `python -m maelm_jax`."""

import importlib
import sys

COMMANDS = (
    "train",
    "status",
    "prepare",
    "evaluate",
    "finetune",
    "analyze",
    "export",
    "embed",
    "merge",
    "plan",
)


def main():
    """Prints each command with the first line of its description."""
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        hint = "--help lists the commands"
        if sys.argv[1] in COMMANDS:
            hint = f"the command is python -m maelm_jax.{sys.argv[1]}"
        print(f"error: maelm_jax has no argument {sys.argv[1]!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    for name in COMMANDS:
        about = importlib.import_module(f"maelm_jax.{name}").__doc__.splitlines()[0]
        print(f"python -m maelm_jax.{name:<9} {about}")
    print("\n--help after a command describes it.")


if __name__ == "__main__":
    main()
