"""Average the parameters of checkpoints of one run, or of several branches of a run.

    python -m maelm_jax.merge --checkpoints=runs/a@400,runs/a@500,runs/a@600 --workdir=runs/merged
    python -m maelm_jax.merge --checkpoints=runs/x,runs/y --workdir=runs/merged

A checkpoint is WORKDIR@STEP, or WORKDIR for the newest of a run. All have one architecture, one
objective and one vocabulary. Each has the same weight in the mean.

The output is a workdir with one checkpoint, which evaluate, analyze, export, embed, finetune and
Run.init_from read. Its settings, its rows and its step are those of the checkpoint that was trained
on the most tokens (the first of several). Its environment.txt records this command. The output has
no state of an optimiser, so no training resumes it or goes on from it with Run.continue_from.
"""

import os
import shutil
import typing

from maelm_jax import cli, config, storage

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.opened import OpenedModel
    from maelm_jax.training.workdir import Workdir


# Settings that decide what the encoder computes, or what it was trained to compute.
COMPUTED = ("Encoder.", "Decoder.", "Masking.renumber", "Objective.name")


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = cli.parser(__doc__, reads_settings=False)
    flags.add_argument(
        "--checkpoints", required=True, metavar="RUN@STEP,...", help="checkpoints to average"
    )
    args = cli.arguments(flags, argv).args
    names = cli.listed("--checkpoints", args.checkpoints)
    check_output(args.workdir)

    import jax
    import numpy as np

    from maelm_jax.encoders import export, opened
    from maelm_jax.training import checkpoint
    from maelm_jax.training.workdir import Workdir

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    found = [opened.find_model(name) for name in names]
    check_alike(found)

    total: dict = {}
    for name, one in zip(names, found, strict=True):
        wanted = checkpoint.split_name(name).step
        one.step, part = checkpoint.read_kept(one.workdir, one.step, wanted)
        part = jax.tree.map(lambda leaf: leaf.astype(np.float64), part)
        total = jax.tree.map(np.add, total, part) if total else part
    mean = jax.tree.map(lambda leaf: (leaf / len(found)).astype(np.float32), total)
    tokens = [one.workdir.trained_tokens(one.step) for one in found]
    most = found[tokens.index(max(tokens))]

    with export.write_atomically(args.workdir) as folder:
        merged = Workdir(folder)
        checkpoints = checkpoint.Checkpoints(merged)
        checkpoints.save(most.step, {"params": mean, "step": np.asarray(most.step)})
        checkpoints.wait()
        checkpoints.close()
        begun = most.workdir
        for file in (begun.rows_file, begun.parent_file, begun.origin_file):
            if file.is_file():
                shutil.copy(file, folder)
        merged.write_start(most.experiment, most.vocabulary, most.step)
    print(f"{args.workdir}: the mean of {', '.join(names)}, as step {most.step}")
    return 0


def check_output(workdir: "Workdir"):
    """Raises ConfigError if no new workdir can be written at `workdir`."""
    storage.require_local(workdir)
    cli.require_writable("--workdir", str(workdir.settings_file))
    if os.path.isdir(workdir) and os.listdir(workdir):
        raise config.ConfigError(f"--workdir={workdir} is not empty. Give a new folder")


def check_alike(found: list["OpenedModel"]):
    """Raises ConfigError unless all are runs with one model, one objective and one vocabulary."""
    first = found[0]
    for one in found:
        if one.workdir is None or one.experiment.finetune:
            raise config.ConfigError(f"--checkpoints: {one.path} is no workdir of pretraining")
        changes = config.changes(first.experiment, one.experiment)
        wrong = [line for name, line in changes.items() if name.startswith(COMPUTED)]
        if one.vocabulary.fingerprint != first.vocabulary.fingerprint:
            wrong.append(f"{one.path} has another vocabulary")
        if wrong:
            raise config.ConfigError(
                f"--checkpoints: {first.path} cannot be averaged with {one.path}: "
                f"{'; '.join(wrong)}"
            )


def command():
    """Runs `maelm-merge`, or `python -m maelm_jax.merge`."""
    cli.run(main)


if __name__ == "__main__":
    command()
