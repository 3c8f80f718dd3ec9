r"""Prepares the rows of a corpus: trains its vocabulary, then tokenises and packs its text.

    python -m maelm_jax.prepare --gin_file=tiny.gin
    python -m maelm_jax.prepare --gin_file=base.gin --gin.TEXT_FILES='/data/*.jsonl.gz' \
        --part=3 --parts=64

The rows are written once, under Corpus.rows_dir. Training prepares missing rows by itself. An
interrupted preparation continues where it stopped. With --workdir=RUN and no --gin_file, the
settings and the vocabulary are those of RUN. With Run.init_from, the vocabulary is that of
the encoder, as in training.

To divide the work among machines that share Corpus.rows_dir, for example as an array job, give
each task --part=I --parts=N, with I from 0. The tasks need not run at the same time. Start the
command with --join when all are done. --runner=beam does both as one pipeline of Apache Beam.
--beam_NAME=VALUE gives it Beam's options.
"""

import argparse
import functools
import logging

from maelm_jax import cli, config, storage, tables
from maelm_jax.data import beam_runner, prepare, rows, vocabularies, vocabulary_training

COLUMNS = ("documents", "bytes", "rows", "segments", "tokens", "mean_segment", "fill")


def main(argv: list[str]) -> int:
    """Prepares the rows and prints their statistics."""
    parser = _flags()
    beam_flags = [flag for flag in argv if flag.startswith("--beam_")]
    args, experiment = cli.parse(parser, [flag for flag in argv if flag not in beam_flags])
    check_division(args)
    beam_options = beam_runner.options(beam_flags)
    if beam_options and args.runner != "beam":
        raise config.ConfigError(f"{beam_flags[0]}: give --runner=beam as well")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if experiment.run.init_from:
        experiment = _adopt_encoder(experiment, args.run)
    corpus = experiment.corpus
    vocabulary = _vocabulary_of(args.run)  # also if the text has changed since
    if vocabulary is None and experiment.run.continue_from:
        from maelm_jax.pretraining import start  # imports JAX

        vocabulary = _vocabulary_of(start.find_parent(experiment).workdir)
    if vocabulary is None:
        vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, corpus)
    if args.part is not None:
        prepare.make_parts(corpus, vocabulary, args.part, args.parts)
        print(f"part {args.part} of {args.parts} is done; --join joins them")
        return 0
    if args.join:
        prepared = prepare.join(corpus, vocabulary)
    elif args.runner == "beam":
        make_all = functools.partial(beam_runner.make_with_beam, options=beam_options)
        prepared = prepare.prepare(corpus, vocabulary, make_all)
    else:
        prepared = prepare.prepare(corpus, vocabulary)
    print(
        f"vocabulary of {vocabulary.size} ids, sha256 {vocabulary.fingerprint[:12]}; "
        f"rows of {corpus.sequence_length} ids"
    )
    print(table(prepared.stores))
    for source, entry in prepared.record["sources"].items():
        left_out = rows.read_manifest(rows.path_of(corpus, entry["store"]))["left_out"]
        if left_out:
            print(f"left out of {source}: {len(left_out)} files ({'; '.join(left_out.values())})")
    return 0


def _flags() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--part",
        type=cli.whole_number(0),
        metavar="I",
        help="do one share of the work only, from 0; needs --parts",
    )
    parser.add_argument("--parts", type=cli.whole_number(1), metavar="N", help="number of shares")
    parser.add_argument("--join", action="store_true", help="join the shares of every --part")
    parser.add_argument(
        "--runner",
        choices=("local", "beam"),
        default="local",
        help="beam: one pipeline of Apache Beam; --beam_NAME=VALUE gives its options",
    )
    return parser


def _vocabulary_of(run: str | None) -> vocabularies.Vocabulary | None:
    """Returns the vocabulary of a run, or None if it has none yet or `run` is None."""
    folder = run and storage.local_path(run) / "vocabulary"
    return vocabularies.load(folder) if folder and vocabularies.files_in(folder) else None


def _adopt_encoder(experiment: config.Experiment, workdir: str | None) -> config.Experiment:
    """Returns the settings with those of the encoder of `Run.init_from`, or of a begun run."""
    from maelm_jax.encoders import adoption, source  # these import JAX
    from maelm_jax.pretraining import start

    if workdir is not None:
        return start.find_starting_point(experiment, workdir).experiment
    return adoption.adopt_settings(
        experiment, source.find_encoder(experiment.run.init_from)
    ).experiment


def check_division(args: argparse.Namespace):
    """Raises ConfigError if the flags that divide the work do not fit together."""
    if (args.part is None) != (args.parts is None):
        raise config.ConfigError("--part and --parts: give both, or neither")
    if args.part is not None and args.part >= args.parts:
        raise config.ConfigError(
            f"--part={args.part} --parts={args.parts}: part must lie between 0 and parts - 1"
        )
    if sum((args.part is not None, args.join, args.runner == "beam")) > 1:
        raise config.ConfigError("--part, --join and --runner=beam: give one of them")


def table(stores: dict[str, dict[str, rows.Rows]]) -> str:
    """Returns the statistics of each source and split, as an aligned table."""
    lines = [
        (source, split, *(number(store.statistics[column]) for column in COLUMNS))
        for source, splits in stores.items()
        for split, store in splits.items()
    ]
    return tables.plain(("source", "split", *COLUMNS), lines, left=2)


def number(value: float) -> str:
    """Returns a statistic as text: integers in full, others with four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def command():
    """Runs `maelm-prepare`, or `python -m maelm_jax.prepare`."""
    cli.run(main)


if __name__ == "__main__":
    command()
