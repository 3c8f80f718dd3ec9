"""Lists the commands: `python -m maelm_jax`."""

import importlib

COMMANDS = (
    "train",
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
    for name in COMMANDS:
        about = importlib.import_module(f"maelm_jax.{name}").__doc__.splitlines()[0]
        print(f"python -m maelm_jax.{name:<9} {about}")
    print("\n--help after a command describes it.")


if __name__ == "__main__":
    main()
