r"""Prepares the rows of a corpus: trains its vocabulary, then tokenises and packs its text.

    python -m maelm_jax.prepare --gin_file=tiny.gin
    python -m maelm_jax.prepare --gin_file=base.gin --gin.TEXT_FILES='/data/*.jsonl.gz' \
        --host=0 --hosts=4

The rows are written once, under Corpus.rows_dir. Training prepares missing rows by itself. An
interrupted preparation continues where it stopped. With --workdir=RUN and no --gin_file, the
settings and the vocabulary are those of RUN. With Run.init_from, the vocabulary is that of
the encoder, as in training.

To divide the work, start the command with --hosts=N on N machines that share Corpus.rows_dir.
Give each machine its own --host=I. Host 0 joins the parts. In an array job, whose tasks need not
run at the same time, give each task --shard=I --shards=N. Start the command with --join at the end.
--runner=beam does both as one pipeline of Apache Beam. --beam_NAME=VALUE gives it Beam's options.
"""

import argparse
import dataclasses
import logging

from maelm_jax import cli, config, storage, tables
from maelm_jax.data import (
    beam_runner,
    block_files,
    cleaning,
    rows,
    store_manifest,
    vocabularies,
    vocabulary_training,
)
from maelm_jax.data.store import Rows

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
        experiment = _adopting(experiment, args.run)
    corpus = experiment.corpus
    if args.skip_bad_files:
        corpus = dataclasses.replace(corpus, skip_bad_files=True)
    vocabulary = _vocabulary_of(args.run)  # also if the text has changed since
    if vocabulary is None:
        vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, corpus)
    if args.runner == "beam":
        beam_runner.prepare(corpus, vocabulary, beam_options)
    elif args.shard is not None:
        rows.write_part(corpus, vocabulary, args.shard, args.shards)
        print(f"shard {args.shard} of {args.shards} is done; --join joins them")
        return 0
    if args.join:
        rows.join(corpus, vocabulary)
    stores = rows.prepare(corpus, vocabulary, args.host, args.hosts)
    print(
        f"vocabulary of {vocabulary.size} ids, sha256 {vocabulary.fingerprint[:12]}; "
        f"rows of {corpus.sequence_length} ids"
    )
    print(table(stores))
    for source, splits in stores.items():
        left_out = store_manifest.left_out(splits["train"].folder)
        if left_out is not None:
            print(left_out_line(source, left_out))
    return 0


def _flags() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--host",
        type=cli.whole_number(0),
        default=0,
        metavar="I",
        help="number of this machine, from 0",
    )
    parser.add_argument(
        "--hosts",
        type=cli.whole_number(1),
        default=1,
        metavar="N",
        help="machines that share the work",
    )
    parser.add_argument(
        "--shard",
        type=cli.whole_number(0),
        metavar="I",
        help="tokenise one part only, from 0; needs --shards",
    )
    parser.add_argument("--shards", type=cli.whole_number(1), metavar="N", help="number of parts")
    parser.add_argument("--join", action="store_true", help="join the parts of every --shard")
    parser.add_argument(
        "--skip_bad_files",
        action="store_true",
        help="leave out files that cannot be read: Corpus.skip_bad_files=True",
    )
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


def _adopting(experiment: config.Experiment, workdir: str | None) -> config.Experiment:
    """Returns the settings with those of the encoder of `Run.init_from`, or of a begun run."""
    from maelm_jax.encoders import adoption, source  # these import JAX
    from maelm_jax.pretraining import start

    if workdir is not None:
        return start.resolve_source(experiment, workdir).experiment
    return adoption.adopt_settings(
        experiment, source.find_encoder(experiment.run.init_from)
    ).experiment


def check_division(args: argparse.Namespace):
    """Raises ConfigError if the flags that divide the work do not fit together."""
    if not 0 <= args.host < args.hosts:
        raise config.ConfigError(
            f"--host={args.host} --hosts={args.hosts}: host must lie between 0 and hosts - 1"
        )
    if (args.shard is None) != (args.shards is None):
        raise config.ConfigError("--shard and --shards: give both, or neither")
    if args.shard is not None and args.shard >= args.shards:
        raise config.ConfigError(
            f"--shard={args.shard} --shards={args.shards}: shard must lie between 0 and shards - 1"
        )
    divisions = (args.hosts > 1, args.shard is not None, args.join, args.runner == "beam")
    if sum(divisions) > 1:
        raise config.ConfigError("--hosts, --shard, --join and --runner=beam: give one of them")


def table(stores: dict[str, dict[str, Rows]]) -> str:
    """Returns the statistics of each source and split, as an aligned table."""
    lines = [
        (source, split, *(number(store.statistics[column]) for column in COLUMNS))
        for source, splits in stores.items()
        for split, store in splits.items()
    ]
    return tables.plain(("source", "split", *COLUMNS), lines, left=2)


def left_out_line(source: str, left_out: block_files.LeftOut) -> str:
    """Returns what was left out of a source, as one line."""
    counts = ", ".join(f"{left_out.documents[reason]:,} {reason}" for reason in cleaning.REASONS)
    line = f"left out of {source}: documents: {counts}; files: {len(left_out.files)}"
    return line + (f" ({', '.join(left_out.files)})" if left_out.files else "")


def number(value: float) -> str:
    """Returns a statistic as text: integers in full, others with four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def command():
    """Runs `maelm-prepare`, or `python -m maelm_jax.prepare`."""
    cli.run(main)


if __name__ == "__main__":
    command()
