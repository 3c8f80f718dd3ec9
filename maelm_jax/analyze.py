"""Measure what [MASK] does to the hidden states of trained runs.

The report has the effective rank of every layer, the spectra, and the dimensions kept for [MASK].

    python -m maelm_jax.analyze --runs=runs/tiny,runs/tiny-mlm --workdir=runs/report
    python -m maelm_jax.analyze --runs=runs/tiny,runs/rte --tau=0.99 --tokens=5000000 --sets=10
    python -m maelm_jax.analyze --runs=runs/tiny --gin.Corpus.text_files='other/*.txt'
    python -m maelm_jax.analyze --runs=runs/tiny,runs/tiny-mlm --all_steps

RUN is the workdir of a pretrained or a fine-tuned run. Each run is measured on held-out rows of its
own corpus, with masks drawn as in its own pretraining. --step measures another checkpoint than the
newest. --all_steps also measures the last layer at every checkpoint. --gin.NAME=VALUE and
--gin_file change settings of every run's config.gin: Corpus.text_files selects other text, and
Corpus.rows_dir is needed where rows were moved. The command writes report.md, its figures, and
ranks.json with every number into the workdir. Exit status: 0 done, 2 wrong input, 1 anything else.
"""

import argparse
import logging

from maelm_jax import cli, config, paths
from maelm_jax.analysis import ranks


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args, bindings = cli.arguments(_flags(), argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("maelm_jax").setLevel(logging.INFO)
    ranks.check_tau(args.tau)
    paths.check_output_folder("--workdir", args.workdir)
    workdirs = [path for path in args.runs.split(",") if path]
    if not workdirs:
        raise config.ConfigError(f"--runs={args.runs} names no workdir. Give at least one")

    from maelm_jax.analysis import measurement, report, runs

    # Open every run before measuring any, so that a bad run is reported at once.
    opened = [runs.open_run(path, args.gin_file, bindings, args.step) for path in workdirs]
    trained = runs.with_unique_names([run._replace(name=name_of(run)) for run in opened])
    rows = [runs.heldout_rows(run, args.tokens) for run in trained]
    notes = runs.differences(trained)
    for note in notes:
        print(note)
    results = {"tau": args.tau, "seed": args.seed, "tokens_asked": args.tokens, "notes": notes}
    results["runs"] = [
        measurement.measure(run, heldout, args.tau, args.sets, args.seed)
        for run, heldout in zip(trained, rows, strict=True)
    ]
    if args.all_steps:
        for result, run, heldout in zip(results["runs"], trained, rows, strict=True):
            result["by_step"] = measurement.ranks_by_step(
                run, heldout, args.tau, result["sets"], args.seed
            )
    print(report.write(results, args.workdir))
    return 0


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    runs = "workdirs to analyse, separated by commas"
    flags.add_argument("--runs", required=True, metavar="RUN,RUN", help=runs)
    tau = "share of the squared length that the effective rank holds"
    flags.add_argument("--tau", type=float, default=0.9, help=tau)
    tokens = "held-out tokens of each run to measure, at most"
    flags.add_argument("--tokens", type=cli.whole_number(1), default=1_000_000, help=tokens)
    sets = "disjoint sets of tokens for the confidence intervals, at most"
    flags.add_argument("--sets", type=cli.whole_number(1, 1000), default=5, help=sets)
    step = "step of the checkpoints to measure; default: the newest of each run"
    flags.add_argument("--step", type=cli.whole_number(0), metavar="N", help=step)
    all_steps = "also measure the last layer at every checkpoint of each run"
    flags.add_argument("--all_steps", action="store_true", help=all_steps)
    seed = cli.whole_number(0, 2**32 - 1)
    flags.add_argument("--seed", type=seed, default=0, help="of the masks")
    flags.set_defaults(workdir="runs/report")
    return flags


def name_of(run) -> str:
    """Name of a run: the folder's name, or "tiny on rte" for a fine-tuned run.

    The folder of a fine-tuned run may be called seed1, so its source and task name it.
    """
    from maelm_jax.finetuning import encoder_source

    tuned = run.experiment.finetune
    return f"{encoder_source.label_of(tuned.init_from)} on {tuned.tasks}" if tuned else run.name


if __name__ == "__main__":
    cli.run(main)
