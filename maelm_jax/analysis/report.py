"""Writes the output of `analyze`: ranks.json with every number, the figures, and report.md."""

import json
import pathlib
import typing

import numpy as np

from maelm_jax import config, json_files, paths, storage, tables
from maelm_jax.analysis import figures, ranks
from maelm_jax.analysis.figures import KIND_LABELS

RANKS_FILE = "ranks.json"
DIGITS = 7  # the precision of sums in float32


def write(results: dict, workdir: str) -> str:
    """Writes ranks.json, the figures and report.md into `workdir`.

    Args:
        results: What `analyze.py` measured.
        workdir: Folder to write into.

    Returns:
        The main tables and the path of the report, as text to print.
    """
    folder = pathlib.Path(workdir)
    with paths.writing("--workdir", workdir):
        folder.mkdir(parents=True, exist_ok=True)
        files = figures.draw(results, folder)
        storage.write(folder / RANKS_FILE, json.dumps(_rounded(results)) + "\n")
        storage.write(folder / "report.md", markdown(results, files))
    summary = [runs_table(results), last_layer_table(results), mask_table(results)]
    return "\n\n".join([*filter(None, summary), str(folder / "report.md")])


def _rounded(value):
    """Rounds all floats in a JSON value to `DIGITS` digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def runs_table(results: dict) -> str:
    """Table of the runs with their losses at the last step and after equally many tokens.

    These are the tokens of the shortest run. delta and the training rate are those
    of training, or "-" if it is not known. The rate here is the mask rate of the ranks.
    """
    trained = [run for run in results["runs"] if run["curve"]["tokens"]]
    equal_tokens = min((run["curve"]["tokens"][-1] for run in trained), default=0)
    header = (
        "run",
        "encoder",
        "decoder",
        "delta",
        "training rate",
        "rate here",
        "step",
        "tokens measured",
        "held-out loss",
        "tokens trained on",
        f"loss at {equal_tokens:,} tokens",
        "unigram",
    )
    rows = []
    for run in results["runs"]:
        masking, model = run["masking"], run["model"]
        rows.append(
            (
                run["name"],
                f"{model['layers']} x {model['width']}",
                model["decoder_layers"],
                _delta(masking) if masking else "-",
                f"{masking['rate']:g}" if masking else "-",
                f"{run['measured_masking']['rate']:g}",
                run["step"],
                f"{run['tokens']['plain']:,}",
                *_losses(run["curve"], equal_tokens),
            )
        )
    return tables.markdown(header, rows)


def check_folder(workdir: str, runs: list[str]):
    """Raises ConfigError if `workdir` has a report of others than `runs`, the measured workdirs."""
    path = pathlib.Path(workdir) / RANKS_FILE
    if not path.is_file():
        return
    report = json_files.read(path, _names_runs, f"remove {workdir}, or give another --workdir")
    earlier = [run["workdir"] for run in report["runs"]]
    if sorted(earlier) != sorted(runs):
        raise config.ConfigError(
            f"{workdir} holds the report of other runs ({', '.join(earlier)}): give another "
            "--workdir"
        )


def _names_runs(value: typing.Any) -> bool:
    """Returns whether a value is the content of ranks.json, as far as `check_folder` reads it."""
    runs = value.get("runs") if isinstance(value, dict) else None
    return isinstance(runs, list) and all(
        isinstance(run, dict) and isinstance(run.get("workdir"), str) for run in runs
    )


def _delta(masking: dict) -> str:
    """Share of [MASK] that the encoder reads, and of random and kept tokens in its place."""
    delta = f"{masking['encoder_mask_fraction']:g}"
    if not masking["random_fraction"] and not masking["keep_fraction"]:
        return delta
    return f"{delta} (random {masking['random_fraction']:g}, kept {masking['keep_fraction']:g})"


def _losses(curve: dict, equal_tokens: int) -> tuple[str, ...]:
    """Last held-out loss, tokens, held-out loss at `equal_tokens`, unigram cross-entropy."""
    if not curve["tokens"]:
        return ("-",) * 4
    # NaN: the run had no evaluation by then.
    then = np.interp(equal_tokens, curve["tokens"], curve["losses"], left=np.nan)
    return (
        f"{curve['losses'][-1]:.3f}",
        f"{curve['tokens'][-1]:,}",
        "-" if np.isnan(then) else f"{then:.3f}",
        f"{curve['unigram']:.3f}",
    )


def last_layer_table(results: dict) -> str:
    """Table of the ranks of the last layer, one column for each set of tokens."""
    rows = []
    for run in results["runs"]:
        last = run["layers"][-1]
        cells = (rank_cell(last.get(name)) for name in KIND_LABELS)
        rows.append((run["name"], run["model"]["width"], *cells, last["plain"]["centred_rank"]))
    header = ("last layer", "width", *KIND_LABELS.values(), "without [MASK], centred")
    return tables.markdown(header, rows)


def rank_cell(figures_of_set: dict | None) -> str:
    """Text of a rank with its interval, or the reason why there is none."""
    if figures_of_set is None or figures_of_set.get("tokens") == 0:
        return "-"
    if "rank" not in figures_of_set:
        return f"({figures_of_set['tokens']:,} tokens: too few)"
    interval = figures_of_set["rank_by_set"]
    if interval["half"] is None:
        return str(figures_of_set["rank"])
    if not interval["half"]:  # three equal whole numbers do not show a rank without error
        return f"{figures_of_set['rank']} ({interval['mean']:g} in each of {interval['sets']} sets)"
    return f"{figures_of_set['rank']} ({interval['mean']:.1f} ± {interval['half']:.1f})"


def step_table(results: dict) -> str | None:
    """Table of the ranks of the last layer at every checkpoint, or None if none was measured."""
    rows = [
        (run["name"], entry["step"], *(rank_cell(entry[name]) for name in KIND_LABELS))
        for run in results["runs"]
        for entry in run.get("by_step", ())
    ]
    header = ("last layer", "step", *KIND_LABELS.values())
    return f"## Every checkpoint\n\n{tables.markdown(header, rows)}" if rows else None


def mask_table(results: dict) -> str | None:
    """Table of what the encoders keep for [MASK], or None if no run has a rank of [MASK].

    The column of the real tokens is for comparison: a part of them lies outside their own span too.
    """
    rows = []
    for run in results["runs"]:
        measured = [layer for layer in run["layers"] if "mask_alone" in layer]
        if measured:
            first, last = measured[0], measured[-1]
            alone = last["mask_alone"]
            rows.append(
                (
                    run["name"],
                    f"{first['mask']['rank']} -> {last['mask']['rank']}",
                    alone["dimensions"],
                    f"{alone['share_outside']:.1%}",
                    f"{_real_tokens_outside(last):.1%}",
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


def _real_tokens_outside(layer: dict) -> float:
    """Share of the real tokens' squared length that lies outside their own span."""
    spectrum = np.asarray(layer["real"]["spectrum"])
    return 1 - spectrum[: layer["real"]["rank"]].sum() / spectrum.sum()


def markdown(results: dict, files: dict[str, str]) -> str:
    """Text of report.md. `files` is {title of a figure: file name}."""
    pictures = [f"## {title}\n\n![{title}]({name})" for title, name in files.items()]
    parts = [
        "# Effective rank",
        *(f"Note: {note}." for note in results["notes"]),
        runs_table(results),
        _note_on_kept_tokens(results),
        _definition(results),
        last_layer_table(results),
        mask_table(results),
        _definition_of_mask_table(results) if mask_table(results) else None,
        *pictures,
        step_table(results),
        "## Every layer",
        *(_layers_of(run) for run in results["runs"]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _note_on_kept_tokens(results: dict) -> str | None:
    """Names the runs whose encoders read some of the tokens that they predict."""
    trained, measured = (
        [run["name"] for run in results["runs"] if run[key] and _keeps_tokens(run[key])]
        for key in ("masking", "measured_masking")
    )
    sentences = []
    if trained:
        sentences.append(
            f"{', '.join(trained)}: in training the encoder reads some of the predicted tokens as "
            "they are, or random tokens in their place. So the held-out loss is not comparable "
            "with that of the other runs."
        )
    if measured:
        sentences.append(
            f'{", ".join(measured)}: the "real tokens of masked input" are all but [MASK], also '
            "these kept and random tokens."
        )
    return " ".join(sentences) or None


def _keeps_tokens(masking: dict) -> bool:
    """Whether the encoder reads some of the predicted tokens, or random ones in their place."""
    return bool(masking["keep_fraction"] or masking["random_fraction"])


def _definition(results: dict) -> str:
    """What the figures of the report mean, and what they are measured on."""
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
        f"their sum. The states are not centred. {tokens} {masks} In "
        f"brackets: mean and {ranks.CONFIDENCE:.0%} interval over disjoint sets of tokens. The "
        "figures show these. The rank of a small set is a little lower than that of all tokens. "
        f"Nothing is reported from fewer than {ranks.LEAST_PER_DIMENSION} tokens a dimension. "
        "Layer 0 is the input of the first layer. The held-out loss of a run with a decoder is "
        "that of the decoder, which is discarded: it does not compare encoders."
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
    """The section of one run: every layer's ranks."""
    sets = "one set: too few tokens for intervals"
    if run["sets"] > 1:
        sets = f"{run['sets']} disjoint sets"
    origin = f", started from {run['started_from']}" if run["started_from"] else ""
    rows = [
        (layer["layer"], *(rank_cell(layer.get(kind)) for kind in KIND_LABELS))
        for layer in run["layers"]
    ]
    return (
        f"### {run['name']}\n\n"
        f"`{run['workdir']}`, step {run['step']}{origin}; {run['rows']:,} rows of {run['length']}; "
        f"{sets}.\n\n"
        f"{tables.markdown(('layer', *KIND_LABELS.values()), rows)}"
    )
