"""Measure what [MASK] does to the hidden states of trained runs.

The report has the effective rank of every layer, the spectra, and the dimensions kept for [MASK].

    python -m maelm_jax.analyze --runs=runs/tiny,runs/tiny-mlm --workdir=runs/report
    python -m maelm_jax.analyze --runs=runs/tiny,runs/rte --tau=0.99 --tokens=5000000 --sets=10
    python -m maelm_jax.analyze --runs=runs/tiny --gin.Corpus.text_files='other/*.txt'

RUN is the workdir of a pretrained or a fine-tuned run. Each run is measured on held-out rows of its
own corpus, with masks drawn as in its own pretraining. --gin.NAME=VALUE and --gin_file change
settings of every run's config.gin: Corpus.text_files selects other text, and Corpus.rows_dir is
needed where rows were moved. The command writes report.md, its figures, and ranks.json with every
number into the workdir. Exit status: 0 done, 2 wrong input, 1 anything else.
"""

import dataclasses
import logging
import pathlib
import typing

import numpy as np

from maelm_jax import cli, config, gin_files, outputs, storage, workdirs
from maelm_jax.analysis import ranks

MOST_SETS = 100  # more sets take more batches and narrow the intervals little


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--runs", required=True, metavar="RUN,RUN", help="workdirs to analyse, separated by commas"
    )
    flags.add_argument(
        "--tau",
        type=float,
        default=0.9,
        help="share of the squared length that the effective rank holds",
    )
    flags.add_argument(
        "--tokens",
        type=cli.whole_number(1),
        default=1_000_000,
        help="held-out tokens of each run to measure, at most",
    )
    flags.add_argument(
        "--sets",
        type=cli.whole_number(1, 1000),
        default=5,
        help="disjoint sets of tokens for the confidence intervals, at most",
    )
    flags.add_argument(
        "--seed", type=cli.whole_number(0, 2**32 - 1), default=0, help="of the masks"
    )
    flags.set_defaults(workdir="runs/report")
    args, bindings = cli.arguments(flags, argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("maelm_jax").setLevel(logging.INFO)
    ranks.check_tau(args.tau)
    outputs.check_folder("--workdir", args.workdir)
    workdirs = [path for path in args.runs.split(",") if path]
    if not workdirs:
        raise config.ConfigError(f"--runs={args.runs} names no workdir")
    # Open every run before measuring any, so that a bad run is reported at once.
    runs = with_names([open_run(path, args.gin_file, bindings) for path in workdirs])
    texts = [heldout_of(run, args.tokens) for run in runs]

    from maelm_jax.analysis import report

    notes = differences(runs)
    for note in notes:
        print(note)
    results = {"tau": args.tau, "seed": args.seed, "tokens_asked": args.tokens, "notes": notes}
    results["runs"] = [measure(run, rows, args) for run, rows in zip(runs, texts, strict=True)]
    print(report.write(results, args.workdir))
    return 0


class Run(typing.NamedTuple):
    """A trained run: its settings, its vocabulary and the parameters of its encoder."""

    name: str
    workdir: str
    experiment: config.Experiment
    vocabulary: typing.Any  # data.vocabulary.Vocabulary
    step: int
    params: dict


def open_run(workdir: str, files: list[str], bindings: list[str]) -> Run:
    """Reads the run in a workdir.

    Args:
        workdir: Local path of the workdir.
        files: Gin files to read after the run's config.gin.
        bindings: Gin bindings to apply last.

    Returns:
        The run with the parameters of its newest checkpoint.

    Raises:
        ConfigError: The folder is no workdir, or no checkpoint fits its config.gin.
    """
    import jax

    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.model import maelm
    from maelm_jax.training import checkpoint_params

    storage.require_local(workdir)
    saved = pathlib.Path(workdir) / "config.gin"
    if not saved.is_file():
        raise config.ConfigError(
            f"{workdir} holds no config.gin: it is no run{workdirs.near(workdir)}"
        )
    experiment = gin_files.load([str(saved), *files], bindings)
    vocabulary = vocabularies.load(pathlib.Path(workdir) / "vocabulary")
    shapes = maelm.encoder_shapes(experiment.model, vocabulary.size, vocabulary.pad)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    step, params = checkpoint_params.restore_params(workdir, {"encoder": like})
    return Run(
        name_of(workdir, experiment), workdir, experiment, vocabulary, step, params["encoder"]
    )


def name_of(workdir: str, experiment: config.Experiment) -> str:
    """Name of a run: the folder's name, or "tiny on rte" for a fine-tuned run.

    The folder of a fine-tuned run may be called seed1, so its source and task name it.
    """
    from maelm_jax.finetuning import encoder_source

    tuned = experiment.finetune
    return (
        f"{encoder_source.label_of(tuned.init_from)} on {tuned.tasks}"
        if tuned
        else pathlib.Path(workdir).name
    )


def with_names(runs: list[Run]) -> list[Run]:
    """Renames runs with equal names after their paths."""
    names = [run.name for run in runs]
    return [
        run._replace(name=run.workdir.strip("./").replace("/", "-"))
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def heldout_of(run: Run, tokens: int) -> np.ndarray:
    """Reads held-out rows of the run's corpus.

    Args:
        run: The run.
        tokens: Number of tokens that the rows together hold, if there are so many.

    Returns:
        Token ids, int32 [R, L].

    Raises:
        ConfigError: The rows hold too few visible tokens for the width of the model.
    """
    from maelm_jax.data import batches, rows, sources
    from maelm_jax.training import row_record

    corpus = run.experiment.corpus
    data = row_record.open_recorded(run.workdir, corpus, run.vocabulary)
    stores = data.stores if data else rows.prepare(corpus, run.vocabulary)
    heldout, rates = (
        {name: store["heldout"] for name, store in stores.items()},
        data.rates if data else sources.rates(corpus),
    )
    found = batches.heldout(heldout, rates, sum(map(len, heldout.values())))
    found = first_rows(found, run.vocabulary.pad, tokens)
    count, least = (
        int((found != run.vocabulary.pad).sum()),
        ranks.LEAST_PER_DIMENSION * run.experiment.model.width,
    )
    visible = int(count * (1 - run.experiment.masking.rate))
    if visible < least:
        raise config.ConfigError(
            f"{run.workdir}: {visible:,} visible held-out tokens are too few for a rank: "
            f"{ranks.LEAST_PER_DIMENSION} for each of "
            f"{run.experiment.model.width} dimensions, {least:,}, are needed; raise --tokens, or "
            "give more text with --gin.Corpus.text_files"
        )
    return found


def first_rows(rows: np.ndarray, pad: int, tokens: int) -> np.ndarray:
    """First rows of `rows` [R, L] that together hold `tokens` tokens, or all rows."""
    held = (rows != pad).sum(1).cumsum()
    return rows[: int(np.searchsorted(held, min(tokens, int(held[-1])))) + 1]


def number_of_sets(asked: int, rows: int, visible: int, width: int) -> int:
    """Number of disjoint sets: `asked`, or fewer so that each can have a rank.

    A set consists of whole rows. A margin of a tenth allows for rows of different lengths.
    """
    with_enough_tokens = visible * 9 // 10 // (ranks.LEAST_PER_DIMENSION * width)
    return max(1, min(asked, MOST_SETS, rows, with_enough_tokens))


def differences(runs: list[Run]) -> list[str]:
    """Describes the differences that prevent a comparison of the runs token by token."""
    notes = []
    kinds = {
        "vocabularies": lambda run: run.vocabulary.fingerprint[:12],
        "lengths": lambda run: run.experiment.corpus.sequence_length,
    }
    kinds["corpora"] = lambda run: run.experiment.corpus.rates
    for what, of in kinds.items():
        if len({str(of(run)) for run in runs}) > 1:
            each = ", ".join(f"{run.name}: {of(run)}" for run in runs)
            notes.append(
                f"the runs have different {what} ({each}); each is analysed on its own text"
            )
    return notes


def measure(run: Run, rows: np.ndarray, args) -> dict:
    """Measures one run; returns everything that the report needs, ready for JSON."""
    import jax
    import tqdm

    from maelm_jax.analysis import moments, report
    from maelm_jax.model import keys, maelm

    experiment, special = run.experiment, run.vocabulary.special
    graph = maelm.encoder_graph(experiment.model, run.vocabulary.size, special.pad)
    compiled = jax.jit(moments.measure(graph, experiment.masking, rows.shape[1], special))
    key = keys.of_seed(args.seed)
    # A set is a range of neighbouring rows, so sets share few documents.
    visible = int((rows != special.pad).sum() * (1 - experiment.masking.rate))
    sets = number_of_sets(args.sets, len(rows), visible, experiment.model.width)
    if sets < args.sets:
        print(f"{run.name}: {sets} disjoint sets of tokens instead of {args.sets}")
    bounds = np.linspace(0, len(rows), sets + 1).astype(int)
    with tqdm.tqdm(total=len(rows), unit="row", desc=run.name) as bar:
        found = [
            moments.accumulate(
                compiled,
                run.params,
                rows[start:end],
                int(start),
                key,
                special.pad,
                progress=bar.update,
            )
            for start, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]
    numbers = tqdm.trange(
        experiment.model.layers + 1, unit="layer", desc="eigenvalues", leave=False
    )
    layers = [ranks.describe(found, layer, args.tau) for layer in numbers]
    return {
        "name": run.name,
        "workdir": run.workdir,
        "step": run.step,
        "started_from": report.started_from(experiment),
        "model": dataclasses.asdict(experiment.model),
        "masking": dataclasses.asdict(experiment.masking),
        "vocabulary": run.vocabulary.fingerprint[:12],
        "rows": len(rows),
        "length": int(rows.shape[1]),
        "sets": sets,
        "tokens": {name: int(sum(one[name].count for one in found)) for name in moments.SETS},
        "layers": layers,
        "curve": report.curve(run.workdir, experiment),
    }


if __name__ == "__main__":
    cli.run(main)
