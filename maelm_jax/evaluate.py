"""Measure the loss and accuracy of pretrained models at masked tokens, on any text.

    python -m maelm_jax.evaluate --models=runs/tiny,runs/tiny-mlm --text='other/*.txt'
    python -m maelm_jax.evaluate --models=runs/tiny --text='other/*.txt' --all_steps
    python -m maelm_jax.evaluate --models=runs/tiny --step=500
    python -m maelm_jax.evaluate --models=runs/tiny,bert --pairs='blimp/*.jsonl'

A model is a workdir of pretraining, an export, a folder of stock transformers with a language-model
head, or a checkpoint of the published code. With --text, all models read the same start of the
text: 4 characters for each of --tokens. Each model uses its own vocabulary, so compare losses only
between models of one vocabulary. --rate of the tokens are masked one by one. An MLM model reads
[MASK] at these positions. The encoder of MAE-LM skips them. --gin.Corpus.text_field names the field
or the column that holds the text.

Without --text, a workdir is measured as in its own evaluations: on its held-out rows, with its
masks. This gives the `eval_loss` of its metrics.jsonl.

With --pairs, the models are scored on minimal pairs such as BLiMP: the share of pairs whose
grammatical sentence is the likelier one. Each token is masked in turn, and the log-probabilities of
a sentence are summed. Equal sums count one half. The files of EWoK and COMPS are read too: there
only the continuation is scored. The interval of the mean over paradigms is over pairs. It does not
say how much another seed of training would change the score. The line "by word" also masks the
later tokens of the same word. --floor adds what the first model's token frequencies and its fresh
weights get.

With --probe, a logistic regression reads the mean states of every layer, on five folds of GLUE's
training examples (the first 10,000). The score of the most frequent class is beside it.

--left_to_right predicts each token from those before it, and masks none. The run must have learned
next tokens in some rows (Objective.causal_share). A causal run is always measured so.

Without --pairs, the table has the mean loss in nats and its 95% interval over batches of rows, the
accuracy, and how far the loss is below that of a model that knows only how often each token is in
the training text (where the rows of the run are still there). Of models that are measured on the
same masked tokens, the differences of the losses follow, each with its own interval. --output
writes every number as JSON. Exit status: 0 done, 2 wrong input, 1 anything else.
"""

import argparse
import collections.abc
import functools
import itertools
import json
import os
import pathlib

from maelm_jax import cli, config, gin_files, storage, tables

HEADER = (
    "model",
    "step",
    "tokens trained on",
    "mask rate",
    "masked tokens",
    "loss (nats)",
    "95% interval",
    "accuracy",
    "below unigram",
)
TEXT_SETTING = "Corpus.text_field"  # that --text may need


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args, bindings = cli.arguments(_flags(), argv)
    _check_flags(args, bindings)
    if args.pairs:
        return _score_pairs(args)
    if args.probe:
        return _probe(args)

    from maelm_jax.data import packing
    from maelm_jax.measuring import scoring
    from maelm_jax.training import run_rows

    models = [
        scoring.open_model(path, _steps(path, args), not args.text, args.left_to_right)
        for path in cli.listed("--models", args.models)
    ]
    if args.text:
        length = min(packing.LONGEST_ROW, *(model.length for model in models))
        rows = packing.pack_same_text(
            [model.vocabulary for model in models],
            gin_files.load([], [f"Corpus.text_files={args.text!r}", *bindings]).corpus,
            args.tokens,
            length,
        )
        models = [
            scoring.with_comparable_masks(model, args.rate, length, args.seed) for model in models
        ]
    else:
        rows = [scoring.heldout_rows(model) for model in models]
    by_model = [scoring.measure(*pair) for pair in zip(models, rows, strict=True)]
    scores = [measured.score for of_model in by_model for measured in of_model]
    print(tables.plain(HEADER, [_cells(score) for score in scores]))

    def describe_differences(numbers: collections.abc.Iterable[int]) -> list[str]:
        compared = [(models[n], rows[n], models[n].experiment.run.seed) for n in numbers]
        return run_rows.describe_differences(*map(list, zip(*compared, strict=True)))

    notes = describe_differences(range(len(models)))
    differences = [
        scoring.paired_difference(*(by_model[n][-1] for n in pair))
        for pair in itertools.combinations(range(len(models)), 2)
        if not describe_differences(pair)
    ]
    for line in (*notes, *differences):
        print(line)
    for model in models:
        print(f"{model.path}: {model.objective.description}")
    if args.output:
        content = {
            "text": args.text,
            "tokens": args.tokens if args.text else None,
            "seed": args.seed if args.text else None,
            "left_to_right": args.left_to_right,
            "scores": [score._asdict() for score in scores],
            "differences": [difference._asdict() for difference in differences],
            "notes": notes,
        }
        _write(args.output, content)
    return 0


def _score_pairs(args: argparse.Namespace) -> int:
    """Scores the models on minimal pairs. Returns the exit status."""
    from maelm_jax.measuring import pairs
    from maelm_jax.training import checkpoint

    read, scores = pairs.read(args.pairs, args.pairs_per_paradigm), {}
    paths = cli.listed("--models", args.models)
    for path in paths:
        open_scorer = functools.partial(_open_scorer, path, args=args)
        for encoder in checkpoint.read_each(_steps(path, args), open_scorer):
            name = _name_checkpoint(path, encoder.step)
            scores[name] = pairs.score(encoder, read, name, args.temperature)
    if args.floor:
        scores |= _score_floor(paths[0], read, args)
    print(pairs.table(read, scores))
    if args.output:
        content = {
            "pairs": args.pairs,
            "temperature": args.temperature,
            "left_to_right": args.left_to_right,
            "texts": [pair._asdict() for pair in read],
            "scores": pairs.as_json(read, scores),
        }
        _write(args.output, content)
    return 0


def _probe(args: argparse.Namespace) -> int:
    """Scores linear probes of the models. Returns the exit status."""
    from maelm_jax.encoders.opened import load_model
    from maelm_jax.measuring import pairs, probe
    from maelm_jax.training import checkpoint

    tasks = [probe.read(folder) for folder in cli.listed("--probe", args.probe)]
    encoders = {}
    for path in cli.listed("--models", args.models):
        open_encoder = functools.partial(load_model, path)
        for encoder in checkpoint.read_each(_steps(path, args), open_encoder):
            name = _name_checkpoint(path, encoder.step)
            encoders[name] = encoder
    scores, notes = [], []
    for data in tasks:
        probes, of_task = {}, [f"{data.task.spec.folder}: {note}" for note in data.task.notes]
        for name, encoder in encoders.items():
            data.task.notes.clear()
            probes[name] = probe.score(encoder, data)
            of_task += [f"{name}, {data.task.spec.folder}: {note}" for note in data.task.notes]
        print(probe.table(dict(zip(pairs.shorten(list(probes)), probes.values(), strict=True))))
        for note in of_task:
            print(note)
        for name, one in probes.items():
            scores.append({"model": name, **one._asdict(), "layers": one.layers.tolist()})
        notes += of_task
    if args.output:
        _write(args.output, {"probe": args.probe, "scores": scores, "notes": notes})
    return 0


def _name_checkpoint(path: str, step: int | None) -> str:
    """Returns how a model is called in a table: by its words if the run keeps the step for them."""
    from maelm_jax.measuring import scoring
    from maelm_jax.training import checkpoint, kept_steps, run_rows
    from maelm_jax.training.workdir import Kind

    workdir = checkpoint.split_name(path).workdir
    counted = workdir.kind is Kind.RUN and run_rows.words_per_row(workdir)
    kept = kept_steps.read(workdir) if counted else {}
    for name, kept_step in kept.items():
        if kept_step == step and name.startswith(kept_steps.AFTER_WORDS):
            return f"{workdir}, {name}"
    return scoring.name_model(str(workdir), step)


def _open_scorer(path: str, step: int | None, args: argparse.Namespace):
    """Opens a model that predicts tokens, left to right if that is asked for."""
    from maelm_jax.encoders.opened import find_model

    encoder = find_model(path, step).read()
    encoder.check_predicts()
    return encoder.left_to_right() if args.left_to_right else encoder


def _score_floor(path: str, read: list, args: argparse.Namespace) -> dict:
    """Returns what the token frequencies and the fresh weights of a model score on pairs."""
    from maelm_jax.measuring import pairs, scoring

    encoder, scores = _open_scorer(path, None, args), {}
    token_nll = scoring.token_frequencies(path)
    if token_nll is None:
        print(f"no score of token frequencies: {path} has no rows here")
    else:
        scores["unigram"] = pairs.score_unigram(encoder, read, token_nll)
    fresh = scoring.with_fresh_weights(encoder)
    scores["fresh weights"] = pairs.score(fresh, read, "fresh weights", args.temperature)
    return scores


def _steps(path: str, args: argparse.Namespace) -> list[int | None]:
    """Returns the steps of a model's checkpoints that are measured. None is the newest."""
    from maelm_jax.training import checkpoint

    workdir, step = checkpoint.choose_step(path, args.step)
    if args.all_steps and step is not None:
        raise config.ConfigError(f"--models={path} names a step: leave it or --all_steps out")
    if args.all_steps and workdir.is_run:
        return checkpoint.all_steps(workdir)
    return [step]


def _write(path: str, content: dict):
    pathlib.Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    storage.write(path, json.dumps(content, indent=1) + "\n")


def _cells(score) -> list:
    interval = "-"
    if score.half is not None:
        interval = f"{score.loss - score.half:.3f} to {score.loss + score.half:.3f}"
    return [
        score.path,
        "-" if score.step is None else score.step,
        "-" if score.trained_tokens is None else f"{score.trained_tokens:,}",
        "-" if score.mask_rate is None else f"{score.mask_rate:g}",
        f"{score.masked:,}",
        f"{score.loss:.3f}",
        interval,
        f"{score.accuracy:.1%}",
        "-" if score.unigram is None else f"{score.unigram - score.loss:.2f}",
    ]


def _check_flags(args: argparse.Namespace, bindings: list[str]):
    """Raises ConfigError if flags contradict each other or do not belong to this command."""
    of_text = all(binding.startswith(TEXT_SETTING) for binding in bindings) and args.text
    if args.gin_file or args.workdir or (bindings and not of_text):
        raise config.ConfigError(
            "--gin_file, --gin.NAME and --workdir are not flags of evaluate: name the models with "
            f"--models=RUN,RUN. With --text, it reads {TEXT_SETTING}"
        )
    of_pairs = ("pairs_per_paradigm", "temperature", "floor")
    given = [name for name in of_pairs if getattr(args, name) not in (None, False)]
    if given and not args.pairs:
        raise config.ConfigError(f"--{', --'.join(given)} goes with --pairs=FILES")
    args.temperature = 1.0 if args.temperature is None else args.temperature
    if not args.temperature > 0:
        raise config.ConfigError(f"--temperature={args.temperature} must be above 0")
    named = [f"--{name}" for name in ("rate", "tokens", "seed") if getattr(args, name) is not None]
    if args.probe and (args.pairs or args.text or named or args.left_to_right):
        raise config.ConfigError(
            "--probe goes without --pairs, --text, --rate, --tokens, --seed and --left_to_right"
        )
    if args.left_to_right and args.rate is not None:
        raise config.ConfigError("--left_to_right masks no token: leave --rate out")
    if args.pairs and (args.text or named):
        raise config.ConfigError("--pairs goes without --text, --rate, --tokens and --seed")
    if not args.text and named:
        raise config.ConfigError(
            f"{', '.join(named)} goes with --text: the held-out rows of a run have their own masks"
        )
    args.rate = 0.15 if args.rate is None else args.rate
    args.tokens = args.tokens or 1_000_000
    args.seed = args.seed or 0
    if not 0 < args.rate < 1:
        raise config.ConfigError(f"--rate={args.rate} must be above 0 and below 1")
    if args.output:
        cli.require_writable("--output", args.output)
        if os.path.isdir(args.output):
            raise config.ConfigError(f"--output={args.output} is a folder: name a file")


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    models = "models to measure, separated by commas"
    flags.add_argument("--models", metavar="PATH,PATH", required=True, help=models)
    text = "glob of text files, as Corpus.text_files; default: each run's own held-out rows"
    flags.add_argument("--text", metavar="FILES", help=text)
    pairs = "glob of files of minimal pairs: JSON lines as in BLiMP, EWoK or COMPS"
    flags.add_argument("--pairs", metavar="FILES", help=pairs)
    most = "with --pairs: pairs of each paradigm, spread evenly over them; default: all"
    flags.add_argument("--pairs_per_paradigm", type=cli.whole_number(1), metavar="N", help=most)
    temperature = "with --pairs: divides the logits; default 1"
    flags.add_argument("--temperature", type=float, metavar="T", help=temperature)
    floor = "with --pairs: also score token frequencies and fresh weights of the first model"
    flags.add_argument("--floor", action="store_true", help=floor)
    left_to_right = "predict next tokens, of models that have learned them (docs/phases.md)"
    flags.add_argument("--left_to_right", action="store_true", help=left_to_right)
    probe = "folders of GLUE tasks, as glue/RTE,glue/CoLA, for linear probes of every layer"
    flags.add_argument("--probe", metavar="FOLDER,FOLDER", help=probe)
    flags.add_argument("--rate", type=float, help="with --text: share that is masked; default 0.15")
    tokens = "with --text: amount of text, 4 characters a token; default 1 million"
    flags.add_argument("--tokens", type=cli.whole_number(1), metavar="N", help=tokens)
    step = "step of the checkpoints to measure; default: the newest of each run"
    steps = flags.add_mutually_exclusive_group()
    steps.add_argument("--step", type=cli.whole_number(0), metavar="N", help=step)
    steps.add_argument("--all_steps", action="store_true", help="measure every checkpoint")
    seed = cli.whole_number(0)
    flags.add_argument("--seed", type=seed, help="with --text: of the masks; default 0")
    flags.add_argument("--output", metavar="FILE", help="the JSON file to write")
    return flags


def command():
    """Runs `maelm-evaluate`, or `python -m maelm_jax.evaluate`."""
    cli.run(main)


if __name__ == "__main__":
    command()
