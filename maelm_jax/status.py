"""Shows how far a run of pretraining is: step, time left, losses, checkpoint, who works on it.

    python -m maelm_jax.status runs/base
    python -m maelm_jax.status gs://BUCKET/runs/base
How many runs of a grid or table of fine-tuning are finished and in work:
    python -m maelm_jax.status runs/grid

It reads the records of the run, and neither waits for it nor writes into it. The time left is the
steps that are left at the speed of the last line of metrics.jsonl, without evaluations and
checkpoints. A run in a bucket sends its records at each checkpoint, and a bucket has no locks: a
process on another machine is not seen.
"""

import collections
import datetime
import typing

from maelm_jax import cli, config, storage, tables

if typing.TYPE_CHECKING:
    from maelm_jax.training.workdir import Workdir

SHOWN_LINES = 5  # of metrics.jsonl
GRID_RUNS = "*/*/*/seed*"  # ENCODER/TASK/CELL/SEED in the folder of a grid or table
COLUMNS = ("step", "loss", "held-out loss", "learning rate", "tokens/s")


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = cli.parser(__doc__, reads_settings=False, takes_path=True)
    workdir = cli.arguments(flags, argv).args.workdir
    if workdir is None:
        raise config.ConfigError("name the run: python -m maelm_jax.status WORKDIR")

    import jax

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    print(describe(workdir))
    return 0


def describe(workdir: "Workdir") -> str:
    """Returns what the records of a run, a grid or a table say of it.

    Raises ConfigError if it is none of them.
    """
    from maelm_jax.training import checkpoint, metrics
    from maelm_jax.training.workdir import Kind

    workdir.fetch()
    if not workdir.is_run and (grid := _describe_grid(workdir)):
        return grid
    workdir.require_run()
    if workdir.kind == Kind.FINETUNED:
        raise config.ConfigError(
            f"{workdir} is a fine-tuned run, which takes minutes. Give a run of pretraining"
        )
    run = workdir.read_settings().run
    lines = [line for line in metrics.read(workdir) if "loss" in line]
    saved = checkpoint.complete_steps(workdir)
    step = max(lines[-1]["step"] if lines else 0, saved[-1] if saved else 0)
    left = run.train_steps - step
    paragraph = [
        f"{workdir}: step {step:,} of {run.train_steps:,} ({step / run.train_steps:.1%})",
        f"holder: {_holder(workdir)}",
        _time_left(lines, left),
        f"newest checkpoint: {f'step {saved[-1]:,}' if saved else 'none'}",
    ]
    if written := _last_record(workdir):
        paragraph.append(f"last record: {written:%Y-%m-%d %H:%M:%S} UTC")
    if lines:
        # Held-out losses are rarer than lines.
        evaluated = [line for line in lines if "eval_loss" in line][-1:]
        shown = [line for line in evaluated if line not in lines[-SHOWN_LINES:]]
        cells = [_cells(line) for line in (*shown, *lines[-SHOWN_LINES:])]
        paragraph += ["", tables.plain(COLUMNS, cells)]
    return "\n".join(paragraph)


def _describe_grid(workdir: "Workdir") -> str:
    """Returns how many runs of each encoder and task have begun. Empty: there are none.

    Those that no process has begun are not known: the settings of the command say how many.
    """
    from maelm_jax.training.workdir import Workdir

    counts: dict[tuple[str, str], collections.Counter] = {}
    for folder in sorted(workdir.folder.glob(GRID_RUNS)):
        run = Workdir(folder)
        if run.results_file.is_file():
            state = "finished"
        else:
            # A grid of one process has one lock for all its runs.
            state = "in work" if run.is_running or workdir.is_running else "stopped"
        encoder, task = folder.parts[-4:-2]
        counts.setdefault((encoder, task), collections.Counter())[state] += 1
    columns = ("finished", "in work", "stopped")
    cells = [(*names, *(count[state] for state in columns)) for names, count in counts.items()]
    if not cells:
        return ""
    return f"{workdir}:\n\n" + tables.plain(("encoder", "task", *columns), cells, left=2)


def _holder(workdir: "Workdir") -> str:
    """Returns the process that trains in the workdir, as its lock records it."""
    if workdir.is_running:
        return workdir.lock_file.read_text(errors="replace").strip()
    return "no process of this machine" if workdir.in_bucket else "nobody"


def _time_left(lines: list[dict], left: int) -> str:
    """Returns how long the steps that are left take at the speed of the last line that has one."""
    if not left:
        return "left: nothing"
    seconds = next((line["step_seconds"] for line in lines[::-1] if "step_seconds" in line), None)
    if seconds is None:
        return f"left: {left:,} steps; no speed is recorded yet"
    duration = datetime.timedelta(seconds=round(seconds * left))
    return f"left: {left:,} steps, {duration} (hours:minutes:seconds) at {seconds:.3g} s a step"


def _last_record(workdir: "Workdir") -> datetime.datetime | None:
    """Returns when metrics.jsonl was written. None: never."""
    place = workdir.folder if workdir.is_running else workdir
    files, root = storage.file_system(str(place))
    name = f"{root}/{workdir.metrics_file.name}"
    return files.modified(name) if files.exists(name) else None


def _cells(line: dict) -> tuple:
    """Returns the cells of a line of metrics.jsonl."""
    speed, heldout = line.get("tokens_per_second"), line.get("eval_loss")
    return (
        f"{line['step']:,}",
        f"{line['loss']:.4f}",
        "" if heldout is None else f"{heldout:.4f}",
        f"{line['learning_rate']:.3g}",
        "" if speed is None else f"{speed:,.0f}",
    )


def command():
    """Runs `maelm-status`, or `python -m maelm_jax.status`."""
    cli.run(main)


if __name__ == "__main__":
    command()
