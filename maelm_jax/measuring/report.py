"""Writes the output of `analyze`: ranks.json with every number, the figures, and report.md."""

import json

import numpy as np

from maelm_jax import config, storage, tables
from maelm_jax.analysis import ranks
from maelm_jax.measuring import figures
from maelm_jax.measuring.figures import KIND_LABELS
from maelm_jax.training.workdir import Workdir

RANKS_FILE = "ranks.json"
DIGITS = 7  # the precision of sums in float32
DECODER_NOTE = (
    "The held-out loss of a run with a decoder is that of encoder and decoder together. The "
    "decoder is discarded after pretraining, so the loss does not rank encoders."
)
BRACKETS = (
    "In brackets: lowest and highest rank of disjoint sets of tokens. The rank of a small set is a "
    "little lower than that of all tokens."
)


def write(results: dict, workdir: Workdir) -> str:
    """Writes ranks.json, the figures and report.md into `workdir`.

    Returns:
        The main tables and the path of the report, as text to print.
    """
    folder = workdir.folder
    folder.mkdir(parents=True, exist_ok=True)
    files = figures.draw(results, folder)
    storage.write(folder / RANKS_FILE, json.dumps(_rounded(results)) + "\n")
    storage.write(folder / "report.md", render(results, files))
    brackets = BRACKETS if any(run["sets"] > 1 for run in results["runs"]) else ""
    summary = [runs_table(results), last_layer_table(results), brackets, mask_table(results)]
    return "\n\n".join([*filter(None, summary), str(folder / "report.md")])


def _rounded(value):
    """Rounds all floats in a JSON value to `DIGITS` digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def check_folder(workdir: Workdir, runs: list[str]):
    """Raises ConfigError if `workdir` has a report of others than `runs`, the measured paths."""
    path = workdir.folder / RANKS_FILE
    if not path.is_file():
        return
    with storage.reading(path):
        earlier = [run["workdir"] for run in json.loads(path.read_bytes())["runs"]]
    if sorted(earlier) != sorted(runs):
        raise config.ConfigError(
            f"{workdir} holds the report of other runs ({', '.join(earlier)}): give another "
            "--workdir"
        )


def runs_table(results: dict) -> str:
    """Returns the table of the runs, with their losses at the end and after equal tokens.

    The equal tokens are those of the shortest run. delta and the training rate are those of
    training, or "-" if it is not known. The rate here is the mask rate of the ranks.
    """
    curves = [run["curve"] for run in results["runs"] if run["curve"]["tokens"]]
    equal = min((curve["tokens"][-1] for curve in curves), default=0)
    header = (
        "run",
        "encoder",
        "decoder",
        "objective",
        "delta",
        "training rate",
        "rate here",
        "step",
        "tokens measured",
        "million tokens",
        "held-out loss",
        f"at {equal / 1e6:.1f} million",
        "unigram",
    )
    rows = []
    for run in results["runs"]:
        masking, own, decoder = run["masking"], run["encoder"], run["decoder"]
        rows.append(
            (
                run["name"],
                f"{own['layers']} x {own['width']}",
                decoder["layers"] if decoder else "-",
                run["objective"] or "-",
                _delta(run["delta"], masking) if masking else "-",
                f"{masking['rate']:g}" if masking else "-",
                f"{run['measured_masking']['rate']:g}",
                run["step"],
                f"{run['tokens']['plain']:,}",
                *_losses(run["curve"], equal),
            )
        )
    return tables.markdown(header, rows)


def _delta(fraction: float, masking: dict) -> str:
    """Returns the share of [MASK] that the encoder reads, and of other tokens in its place."""
    delta = f"{fraction:g}"
    if not masking["random_fraction"] and not masking["keep_fraction"]:
        return delta
    return f"{delta} (random {masking['random_fraction']:g}, kept {masking['keep_fraction']:g})"


def _losses(curve: dict, equal: int) -> tuple[str, ...]:
    """Returns million tokens, last held-out loss, loss at `equal` tokens, unigram entropy."""
    if not curve["tokens"]:
        return ("-",) * 4
    then = np.interp(equal, curve["tokens"], curve["losses"])
    return (
        f"{curve['tokens'][-1] / 1e6:.1f}",
        f"{curve['losses'][-1]:.3f}",
        f"{then:.3f}" if equal >= curve["tokens"][0] else "-",
        f"{curve['unigrams'][-1]:.3f}",
    )


def last_layer_table(results: dict) -> str:
    """Returns the table of the ranks of the last layer, one column for each kind of tokens."""
    rows = []
    for run in results["runs"]:
        last = run["layers"][-1]
        cells = (rank_cell(last[kind]) for kind in KIND_LABELS)
        rows.append((run["name"], run["encoder"]["width"], *cells, last["plain"]["centred_rank"]))
    header = ("last layer", "width", *KIND_LABELS.values(), "without [MASK], centred")
    return tables.markdown(header, rows)


def rank_cell(tokens: dict) -> str:
    """Returns a rank with the range over its sets, or the reason why there is none."""
    if not tokens["tokens"]:
        return "-"
    if "rank" not in tokens:
        return f"({tokens['tokens']:,} tokens: too few)"
    by_set = tokens["rank_by_set"]
    if len(by_set) < 2:
        return str(tokens["rank"])
    return f"{tokens['rank']} ({min(by_set)} to {max(by_set)})"


def step_table(results: dict) -> str | None:
    """Returns the table of the last layer's ranks at every checkpoint, or None without any."""
    rows = [
        (run["name"], entry["step"], *(rank_cell(entry[kind]) for kind in KIND_LABELS))
        for run in results["runs"]
        for entry in run.get("by_step", ())
    ]
    header = ("last layer", "step", *KIND_LABELS.values())
    return f"## Every checkpoint\n\n{tables.markdown(header, rows)}" if rows else None


def mask_table(results: dict) -> str | None:
    """Returns the table of what encoders keep for [MASK], or None if no run has a rank of it.

    The column of the real tokens is for comparison: a part of them lies outside their own span too.
    """
    rows = []
    for run in results["runs"]:
        measured = [layer for layer in run["layers"] if "mask_alone" in layer]
        if measured:
            first, last = measured[0], measured[-1]
            alone, spectrum = last["mask_alone"], np.asarray(last["real"]["spectrum"])
            real_outside = 1 - spectrum[: last["real"]["rank"]].sum() / spectrum.sum()
            rows.append(
                (
                    run["name"],
                    f"{first['mask']['rank']} -> {last['mask']['rank']}",
                    alone["dimensions"],
                    f"{alone['share_outside']:.1%}",
                    f"{real_outside:.1%}",
                    f"{alone['variance_outside']:.1%}",
                )
            )
    header = (
        "[MASK] in the last layer",
        "rank, first -> last",
        "dimensions of its own",
        "length outside",
        "real tokens' own",
        "variance outside",
    )
    return tables.markdown(header, rows) if rows else None


def render(results: dict, files: dict[str, str]) -> str:
    """Returns the text of report.md. `files` is {title of a figure: file name}."""
    has_decoder = any(run["decoder"] and not run["fine_tuned"] for run in results["runs"])
    of_mask = mask_table(results)
    parts = [
        "# Effective rank",
        *(f"Note: {note}." for note in results["notes"]),
        runs_table(results),
        DECODER_NOTE if has_decoder else None,
        _note_on_kept_tokens(results),
        _definition(results),
        last_layer_table(results),
        of_mask,
        _definition_of_mask_table(results) if of_mask else None,
        *(f"## {title}\n\n![{title}]({name})" for title, name in files.items()),
        step_table(results),
        "## Every layer",
        *(_layers_of(run) for run in results["runs"]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _note_on_kept_tokens(results: dict) -> str | None:
    """Returns a note on runs whose encoders read some of the tokens that they predict."""
    names = [
        run["name"]
        for run in results["runs"]
        if run["masking"] and (run["masking"]["keep_fraction"] or run["masking"]["random_fraction"])
    ]
    if not names:
        return None
    return (
        f"{', '.join(names)}: the encoder reads some of the predicted tokens as they are, or "
        "random tokens in their place. They count as real tokens of masked input. The held-out "
        "loss does not compare with that of the other runs."
    )


def _definition(results: dict) -> str:
    """Returns what the figures of the report mean, and what they are measured on."""
    tau, seed = f"{results['tau']:g}", results["seed"]
    tokens = "Tokens are held-out text with <s> and </s>, without padding."
    masks = f"Masks are drawn as in each run's evaluations, unless noted, with seed {seed}."
    if results["text"]:
        rate = results["runs"][0]["measured_masking"]["rate"]
        tokens = f"Tokens are the text of `{results['text']}` with <s> and </s>, without padding."
        masks = f"[MASK] replaces {rate:.0%} of the tokens of masked input, seed {seed}."
    return (
        f"The effective rank at tau = {tau} is the smallest k such that the k largest squared "
        f"singular values of the (tokens x width) matrix of hidden states hold at least {tau} of "
        f"their sum. The states are not centred. {tokens} {masks} {BRACKETS} Nothing is reported "
        f"from fewer than {ranks.LEAST_PER_DIMENSION} tokens a dimension. Layer 0 is the input of "
        "the first layer."
    )


def _definition_of_mask_table(results: dict) -> str:
    return (
        f"Dimensions of its own: the span that holds {results['tau']:g} of the squared length of "
        "[MASK]'s states has this many dimensions at more than "
        f"{ranks.ALONE_DEGREES:g} degrees from the same span of the real tokens beside it. "
        "Outside: the share of [MASK]'s squared length, and of its variance, that lies outside "
        "the real tokens' span. A share of the real tokens' own length lies outside too; only "
        "what exceeds it is [MASK]'s."
    )


def _layers_of(run: dict) -> str:
    """Returns the section of one run: every layer's ranks."""
    origin = f", started from {run['started_from']}" if run["started_from"] else ""
    rows = [
        (layer["layer"], *(rank_cell(layer[kind]) for kind in KIND_LABELS))
        for layer in run["layers"]
    ]
    return (
        f"### {run['name']}\n\n"
        f"`{run['workdir']}`, step {run['step']}{origin}; {run['rows']:,} rows of "
        f"{run['length']}; {run['sets']} disjoint sets.\n\n"
        f"{tables.markdown(('layer', *KIND_LABELS.values()), rows)}"
    )
