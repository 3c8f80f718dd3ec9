r"""Pretrain a text encoder: MAE-LM, the MLM baseline, or a mixture of both.

A small encoder on text that is already on this machine, and the MLM baseline for it:
    python -m maelm_jax.train --gin_file=tiny.gin
    python -m maelm_jax.train --gin_file=tiny.gin --gin_file=mlm.gin --workdir=runs/tiny-mlm
Your own text:
    python -m maelm_jax.train --gin_file=small.gin --gin.TEXT_FILES='books/*.txt'
Print sizes, memory, how long it takes here, and FLOPs, without reading data:
    python -m maelm_jax.train --gin_file=base.gin --dry_run
A new run that goes on from another one, with its optimiser:
    python -m maelm_jax.train --gin_file=tiny.gin --gin.Run.continue_from=runs/tiny@500 \
        --gin.Optimizer.schedule=decay --gin.TRAIN_STEPS=100 --workdir=runs/tiny-decay

The workdir contains the whole run: config.gin, environment.txt, vocabulary/, rows.json,
metrics.jsonl, tensorboard/, checkpoints/, loss_curve.png. The rows themselves are in
Corpus.rows_dir. The same command resumes the run from its newest checkpoint. Exit status: 0 done,
143 stopped by SIGTERM, 130 by Ctrl-C, 2 wrong input, 3 diverged, 1 anything else. SIGTERM saves a
checkpoint, and so does Ctrl-C in a run of one process.
"""

import time

from maelm_jax import cli, config


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    began = time.perf_counter()
    cli.log_plain_lines()
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--dry_run",
        action="store_true",
        help="print sizes, memory, time and FLOPs, with --verbose each parameter, then stop; "
        "reads no data",
    )
    flags.add_argument(
        "--accept_new_data",
        action="store_true",
        help="go on with other rows than the run began with",
    )
    flags.add_argument(
        "--profile",
        type=cli.whole_number(0),
        default=0,
        metavar="N",
        help="trace N steps with JAX's profiler, from the third of this start on",
    )
    cli.add_process_flags(flags)
    args, experiment = cli.parse(flags, argv)
    if experiment.finetune:
        raise config.ConfigError(
            "train pretrains: give the finetune files to python -m maelm_jax.finetune"
        )
    if args.workdir.path.startswith("s3://"):
        raise config.ConfigError(
            f"--workdir={args.workdir}: Orbax writes no checkpoints to s3://; "
            "give gs://..., or a folder on a disk that all processes share"
        )
    if not args.workdir.in_bucket:
        cli.require_writable("--workdir", str(args.workdir.settings_file))

    from maelm_jax import plan
    from maelm_jax.pretraining import run, start
    from maelm_jax.training import distributed
    from maelm_jax.training.workdir import PRETRAINING

    args.workdir.require_writable_by(PRETRAINING)
    with distributed.joined(args.coordinator, args.processes, args.process, args.peer_timeout):
        distributed.check_same_start(experiment, str(args.workdir))
        parts = run.load_own_parts(experiment)  # before anything of a run is read
        if args.dry_run:
            args.workdir.fetch()
            found = start.find_starting_point(experiment, args.workdir)
            with_vocabulary = found.parent.workdir if found.parent else args.workdir
            return plan.dry_run(found.experiment, with_vocabulary, args.verbose)
        with args.workdir.locked():
            run.pretrain(args.workdir, experiment, parts, args.accept_new_data, began, args.profile)
    return 0


def command():
    """Runs `maelm-train`, or `python -m maelm_jax.train`."""
    cli.run(main, trains=True, advice=cli.TRAIN_MEMORY)


if __name__ == "__main__":
    command()
