r"""Prepares the rows of a corpus: trains its vocabulary, then tokenises and packs its text.

    python -m maelm_jax.prepare --gin_file=tiny.gin
    python -m maelm_jax.prepare --gin_file=base.gin --gin.TEXT_FILES='/data/*.jsonl.gz' \
        --part=3 --parts=64

The rows are written once, under Corpus.rows_dir. Training prepares missing rows by itself. An
interrupted preparation continues where it stopped. With --workdir=RUN and no --gin_file, the
settings and the vocabulary are those of RUN. With Run.init_from or Run.continue_from, the
vocabulary is that of the encoder or the other run, as in training.

To divide the work among machines that share Corpus.rows_dir, for example as an array job, give
each task --part=I --parts=N, with I from 0. The tasks need not run at the same time. Start the
command with --join when all are done. --runner=beam does both as one pipeline of Apache Beam.
--beam_NAME=VALUE gives it Beam's options.
"""

import argparse
import functools

from maelm_jax import cli, config, tables
from maelm_jax.data import beam_runner, prepare, rows, vocabulary_training


def main(argv: list[str]) -> int:
    """Prepares the rows and prints their statistics."""
    cli.log_plain_lines()
    parser = _flags()
    beam_flags = [flag for flag in argv if flag.startswith("--beam_")]
    own_flags = [flag for flag in argv if flag not in beam_flags]
    args, experiment = cli.parse(parser, own_flags, runs_modules=("Corpus.task_modules",))
    check_division(args)
    if beam_flags and args.runner != "beam":
        raise config.ConfigError(f"{beam_flags[0]}: give --runner=beam as well")
    if args.run or experiment.run.init_from or experiment.run.continue_from:
        from maelm_jax.pretraining import start  # imports JAX

        args.workdir.fetch()
        starting_point = start.find_starting_point(experiment, args.workdir)
        experiment = starting_point.experiment
        if not args.run:
            start.check_settings(args.workdir, experiment)
        vocabulary = start.choose_vocabulary(args.workdir, starting_point)
    else:
        vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, experiment.corpus)
    corpus = experiment.corpus
    if args.part is not None:
        prepare.make_parts(corpus, vocabulary, args.part, args.parts)
        print(f"part {args.part} of {args.parts} is done; --join joins them")
        return 0
    if args.join:
        prepared = prepare.join(corpus, vocabulary)
    elif args.runner == "beam":
        options = [flag.replace("--beam_", "--", 1) for flag in beam_flags]
        make_all = functools.partial(beam_runner.make_with_beam, options=options)
        prepared = prepare.prepare(corpus, vocabulary, make_all)
    else:
        prepared = prepare.prepare(corpus, vocabulary)
    print(
        f"vocabulary of {vocabulary.size} ids, sha256 {vocabulary.fingerprint[:12]}; "
        f"rows of {corpus.sequence_length} ids"
    )
    print(table(prepared.stores))
    for line in prepared.describe_passes(experiment.run):
        print(line)
    return 0


def _flags() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    cli.add_division_flags(parser)
    parser.add_argument(
        "--runner",
        choices=("local", "beam"),
        default="local",
        help="beam: one pipeline of Apache Beam; --beam_NAME=VALUE gives its options",
    )
    return parser


def check_division(args: argparse.Namespace):
    """Raises ConfigError if the flags that divide the work do not fit together."""
    cli.check_division(args)
    if sum((args.part is not None, args.join, args.runner == "beam")) > 1:
        raise config.ConfigError("--part, --join and --runner=beam: give one of them")


def table(stores: dict[str, dict[str, rows.Rows]]) -> str:
    """Returns the statistics of each source and split, as an aligned table."""
    lines = []
    for source, splits in stores.items():
        for split, store in splits.items():
            counts = store.statistics
            means = (
                counts["tokens"] / max(counts["documents"], 1),
                counts["segments"] / max(counts["rows"], 1),
            )
            cells = [f"{counts[name]:,}" if name in counts else "-" for name in rows.COUNTS]
            lines.append((source, split, *cells, *(f"{mean:,.1f}" for mean in means)))
    header = ("source", "split", *rows.COUNTS, "tokens/document", "segments/row")
    return tables.plain(header, lines, left=2)


def command():
    """Runs `maelm-prepare`, or `python -m maelm_jax.prepare`."""
    cli.run(main)


if __name__ == "__main__":
    command()
