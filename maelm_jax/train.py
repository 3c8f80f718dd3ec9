"""Pretrain a text encoder: MAE-LM, the MLM baseline, or a mixture of both.

A small encoder on text that is already on this machine, and the MLM baseline for it:
    python -m maelm_jax.train --gin_file=tiny.gin
    python -m maelm_jax.train --gin_file=tiny.gin --gin_file=mlm.gin --workdir=runs/tiny-mlm
Your own text:
    python -m maelm_jax.train --gin_file=small.gin --gin.TEXT_FILES='books/*.txt'
Print sizes, FLOPs, memory and mesh without reading data:
    python -m maelm_jax.train --gin_file=base.gin --dry_run

The workdir contains the whole run: config.gin, environment.txt, vocabulary/, metrics.jsonl,
tensorboard/, checkpoints/, loss_curve.png. The same command resumes the run from its newest
checkpoint. Exit status: 0 done, 143 stopped by SIGTERM after saving a checkpoint, 2 wrong input,
3 diverged, 1 anything else.
"""

import logging
import time

from maelm_jax import cli, setting_changes, settings, storage, workdirs


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    began = time.perf_counter()
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--dry_run",
        action="store_true",
        help="print parameters, FLOPs, memory and mesh, then stop; reads no data",
    )
    flags.add_argument(
        "--accept_new_data",
        action="store_true",
        help="go on with other rows than the run began with, and record that (rows.json)",
    )
    cli.add_process_flags(flags)
    args, experiment = cli.parse(flags, argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("maelm_jax").setLevel(logging.INFO)

    from maelm_jax.pretraining import run, start
    from maelm_jax.training import coordination, distributed, run_record, workdir_lock

    if args.workdir.startswith("s3://"):
        raise settings.ConfigError(
            f"--workdir={args.workdir}: Orbax writes no checkpoints to s3://; "
            "give gs://..., or a folder on a disk that all processes share"
        )
    if not storage.in_bucket(args.workdir):
        cli.require_writable("--workdir", f"{args.workdir}/config.gin")
    if experiment.finetune:
        raise settings.ConfigError(
            "train pretrains: give the finetune files to python -m maelm_jax.finetune"
        )
    experiment, encoder_source = start.resolve_source(experiment, args.workdir)
    if not args.dry_run:
        setting_changes.check_workdir(args.workdir, experiment)
    options = run.Options(args.workdir, args.dry_run, args.accept_new_data, began)
    with distributed.joined(args.coordinator, args.processes, args.process, args.peer_timeout):
        distributed.check_same_start(experiment, args.workdir)
        if args.dry_run:
            return run.pretrain(options, experiment, encoder_source)
        with workdir_lock.held(args.workdir):
            # The job that held the lock may have begun a run with other settings.
            workdirs.records(args.workdir)  # fetched again if they are in a bucket
            coordination.run_on_process_zero(
                f"settings of {args.workdir}",
                lambda: setting_changes.check_workdir(args.workdir, experiment),
            )
            run_record.check(args.workdir)
            return run.pretrain(options, experiment, encoder_source)


def command():
    """Runs `maelm-train`, or `python -m maelm_jax.train`."""
    cli.run(main, trains=True, advice=cli.TRAIN_MEMORY)


if __name__ == "__main__":
    command()
