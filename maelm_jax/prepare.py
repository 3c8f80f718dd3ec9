"""Makes the rows of a config's corpus: its vocabulary, then each source as rows of ids of one length, once, under Corpus.rows_dir.

    python -m maelm_jax.prepare --gin_file=tiny.gin
    python -m maelm_jax.prepare --gin_file=base.gin --gin.TEXT_FILES='/data/*.jsonl.gz' --host=0 --hosts=4

Training does this by itself when the rows are not there. An interrupted preparation goes on where it stopped. With --hosts=N, start it on N machines
that share Corpus.rows_dir, each with its own --host=I: they share the work, and host 0 joins it.
"""

import logging

from maelm_jax import cli, config
from maelm_jax.data import rows

COLUMNS = ("documents", "bytes", "rows", "segments", "tokens", "mean_segment", "fill")


def main(argv: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--host", type=cli.whole_number(0), default=0, metavar="I", help="number of this machine, from 0")
    parser.add_argument("--hosts", type=cli.whole_number(1, 10_000), default=1, metavar="N", help="machines that share the work")
    args, experiment = cli.parse(parser, argv)
    if not 0 <= args.host < args.hosts:
        raise config.ConfigError(f"--host={args.host} --hosts={args.hosts}: host must lie between 0 and hosts - 1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    vocabulary = rows.vocabulary_for(experiment.vocabulary, experiment.corpus)
    stores = rows.prepare(experiment.corpus, vocabulary, args.host, args.hosts)
    print(f"vocabulary of {vocabulary.size} ids, sha256 {vocabulary.fingerprint[:12]}; rows of {experiment.corpus.sequence_length} ids")
    print(table(stores))
    return 0


def table(stores: dict[str, dict[str, rows.Rows]]) -> str:
    """The statistics of each source and split, lined up."""
    lines = [("source", "split", *COLUMNS)]
    for source, splits in stores.items():
        for split, store in splits.items():
            values = (store.statistics[column] for column in COLUMNS)
            lines.append((source, split, *(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in values)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if number < 2 else cell.rjust(width) for number, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


if __name__ == "__main__":
    cli.run(main)
