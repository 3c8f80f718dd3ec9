"""Measure what [MASK] does to the hidden states of trained runs.

The report has the effective rank of every layer, the spectra, and the dimensions kept for [MASK].

    python -m maelm_jax.analyze --runs=runs/tiny,runs/tiny-mlm --workdir=runs/report
    python -m maelm_jax.analyze --runs=runs/tiny,runs/rte --tau=0.99 --tokens=5000000 --sets=10
    python -m maelm_jax.analyze --runs=runs/tiny --gin.Corpus.text_files='other/*.txt'
    python -m maelm_jax.analyze --runs=runs/tiny,runs/tiny-mlm --all_steps

--encoders takes workdirs, exported folders, folders of stock transformers and checkpoints of the
published code. All are measured on the same start of --text, 4 characters for each of --tokens,
each with its own tokenizer, with and without [MASK] at 15% of the tokens.

    python -m maelm_jax.analyze --encoders=bert-base,runs/tiny --text='books/*.txt'

RUN is the workdir of a pretrained or a fine-tuned run. Each run is measured on held-out rows of its
own corpus, masked as in its own evaluations, with --seed. A fine-tuned run is measured on the rows
of the run that it began from. --step measures another checkpoint than the newest. --all_steps also
measures the last layer at every checkpoint. --gin.NAME=VALUE and --gin_file change settings of
every run's config.gin: Corpus.text_files selects other text, and Corpus.rows_dir is needed where
rows were moved. The command writes report.md, its figures (.png and .pdf), and ranks.json with
every number into the workdir (default runs/report), where it replaces an earlier report of the same
runs only. held-out_loss.pdf has the losses of all runs by tokens, words and hours of training.
--names gives the runs other names than those of their folders. Exit status: 0 done, 2 wrong input,
1 anything else.
"""

import argparse

from maelm_jax import cli, config, storage
from maelm_jax.analysis import ranks


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    cli.log_plain_lines()
    args, bindings = cli.arguments(_flags(), argv)
    storage.require_local(args.workdir)
    cli.require_writable("--workdir", f"{args.workdir}/report.md")
    _check_flags(args, bindings)

    from maelm_jax.data import packing
    from maelm_jax.measuring import report, runs
    from maelm_jax.training import run_rows
    from maelm_jax.training.workdir import REPORTING

    args.workdir.require_writable_by(REPORTING)
    # Open every run before measuring any, so that a bad run is reported at once.
    if args.encoders:
        opened = runs.open_encoders(cli.listed("--encoders", args.encoders), args.text)
        corpus = opened[0].experiment.corpus
        rows = packing.pack_same_text(
            [run.vocabulary for run in opened], corpus, args.tokens, corpus.sequence_length
        )
    else:
        workdirs = cli.listed("--runs", args.runs)
        opened = runs.open_runs(workdirs, args.gin_file, bindings, args.step)
        rows = [runs.read_heldout_rows(run, args.tokens) for run in opened]
    if args.names:
        opened = runs.rename(opened, cli.listed("--names", args.names))
    for run, rows_of_run in zip(opened, rows, strict=True):
        runs.require_tokens(run, rows_of_run)
    report.check_folder(args.workdir, [run.path for run in opened])
    notes = [
        *runs.describe_other_masks(opened),
        *run_rows.describe_differences(opened, rows, [args.seed] * len(opened)),
    ]
    print("\n".join(notes))
    measured = [
        runs.measure(run, rows_of_run, args.tau, args.sets, args.seed)
        for run, rows_of_run in zip(opened, rows, strict=True)
    ]
    results = {
        "tau": args.tau,
        "seed": args.seed,
        "tokens_requested": args.tokens,
        "text": args.text,
        "notes": notes,
        "runs": measured,
    }
    summary = report.write(results, args.workdir)
    if args.all_steps:
        for result, run, rows_of_run in zip(measured, opened, rows, strict=True):
            result["by_step"] = runs.measure_steps(
                run, rows_of_run, args.tau, result["sets"], args.seed
            )
            summary = report.write(results, args.workdir)
    print(summary)
    return 0


def _check_flags(args: argparse.Namespace, bindings: list[str]):
    """Raises ConfigError if flags contradict each other or name nothing."""
    if not 0 < args.tau <= 1:
        raise config.ConfigError(f"--tau={args.tau} is not above 0 and at most 1")
    if args.runs:
        if args.text:
            raise config.ConfigError(
                "--text goes with --encoders. With --runs, give --gin.Corpus.text_files"
            )
        return
    if not args.text:
        raise config.ConfigError("--encoders needs --text=FILES, a glob of the text to measure on")
    if bindings or args.gin_file or args.all_steps or args.step is not None:
        raise config.ConfigError(
            "settings, --step and --all_steps go with --runs. Leave them out beside --encoders"
        )


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    analysed = flags.add_mutually_exclusive_group(required=True)
    runs = "workdirs to analyse, separated by commas"
    analysed.add_argument("--runs", metavar="RUN,RUN", help=runs)
    encoders = "any encoders instead of runs, measured on the documents of --text"
    analysed.add_argument("--encoders", metavar="PATH,PATH", help=encoders)
    names = "names of the runs or encoders in tables and figures, in their order"
    flags.add_argument("--names", metavar="NAME,NAME", help=names)
    text = "with --encoders: glob of text files, as Corpus.text_files"
    flags.add_argument("--text", metavar="FILES", help=text)
    tau = f"share of the squared length that the effective rank holds; default {ranks.TAU}"
    flags.add_argument("--tau", type=float, default=ranks.TAU, help=tau)
    tokens = (
        "tokens of each run to measure, in whole rows; with --encoders, the same text for all, of "
        "4 characters a token; default 1 million"
    )
    flags.add_argument("--tokens", type=cli.whole_number(1), default=1_000_000, help=tokens)
    sets = "disjoint sets of tokens, whose lowest and highest ranks are shown, at most; default 5"
    flags.add_argument("--sets", type=cli.whole_number(1), default=5, help=sets)
    step = "step of the checkpoints to measure; default: the newest of each run"
    flags.add_argument("--step", type=cli.whole_number(0), metavar="N", help=step)
    all_steps = "also measure the last layer at every checkpoint of each run"
    flags.add_argument("--all_steps", action="store_true", help=all_steps)
    seed = cli.whole_number(0)
    flags.add_argument("--seed", type=seed, default=0, help="of the masks; default 0")
    flags.set_defaults(workdir="runs/report")
    return flags


def command():
    """Runs `maelm-analyze`, or `python -m maelm_jax.analyze`."""
    cli.run(main)


if __name__ == "__main__":
    command()
