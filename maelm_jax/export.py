"""Exports a run to a folder for transformers, for plain PyTorch or for the published MAE-LM code.

    python -m maelm_jax.export --workdir=runs/tiny --output=exported
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=pytorch
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=reference

The first command writes a folder for AutoModel.from_pretrained("exported"). --format=pytorch also
holds the decoder and the prediction head, and any bucket function. --format=reference writes
model.pt in the checkpoint layout of the published code.

Writing needs neither PyTorch nor an accelerator. If PyTorch is installed, the command reads the
folder back and compares it with JAX on real text. If the two differ, it writes no folder and fails.
--no-verify skips the comparison.
"""

import argparse
import dataclasses
import json
import pathlib

from maelm_jax import cli, config, json_files
from maelm_jax.encoders import export_folder as folders

FORMATS = ("huggingface", "pytorch", "reference")


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    flags.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default huggingface")
    flags.add_argument(
        "--step",
        type=cli.whole_number(0),
        metavar="N",
        help="the checkpoint's step; default the newest",
    )
    flags.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare with JAX on real text; default: where PyTorch is installed",
    )
    flags.add_argument(
        "--overwrite", action="store_true", help="replace the output folder, if export wrote it"
    )
    args, experiment = cli.parse(flags, argv)
    cli.check_workdir(args.workdir, experiment)
    folders.check(args.output, args.workdir, args.overwrite)

    import jax

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.encoders import card, huggingface, source, verify
    from maelm_jax.training import metrics

    if args.verify and not verify.installed(args.format):
        raise config.ConfigError(
            f"--verify needs PyTorch, which is not installed here: {verify.INSTALL}"
        )
    verifying = verify.installed(args.format) if args.verify is None else args.verify
    encoder_source = source.find(args.workdir, args.step)
    vocabulary = vocabularies.load(encoder_source.vocabulary)
    check_fits(args.format, experiment.model, vocabulary)
    params = encoder_source.read(experiment.model)
    results = read_results(pathlib.Path(args.workdir) / "results.json")
    tuned = huggingface.Tuned.of(params, results.get("labels", ()))
    if tuned and args.format != "huggingface":
        raise config.ConfigError(
            f"{args.workdir} is a fine-tuned run, which --format=huggingface holds; "
            f"--format={args.format} does not"
        )

    with folders.written(args.output, args.workdir, args.overwrite) as folder:
        length = longest_input(experiment, results)
        architecture, count = write(
            folder, args.format, params, experiment.model, vocabulary, length, tuned
        )
        reports = None
        if verifying:
            reports = compare(
                folder, args.format, source.nested(params), experiment.model, vocabulary
            )
            (folder / "verification.json").write_text(
                json.dumps(reports, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        name, lines = folders.resolved(args.output).name, metrics.read(args.workdir)
        about = card.About(
            name,
            args.format,
            architecture,
            count,
            experiment,
            encoder_source.step,
            lines,
            results,
            reports,
            length,
        )
        (folder / "README.md").write_text(card.render(about), encoding="utf-8")
    print(f"{args.output}: {architecture} of step {encoder_source.step}, {count:,} parameters")
    if reports is None:
        print(
            "unverified: "
            + (
                "--no-verify was given"
                if args.verify is False
                else f"PyTorch is not installed ({verify.INSTALL})"
            )
        )
    for item in reports or []:
        print(
            f"verified: {item['of']}: largest difference {item['largest_difference']:.2g}, largest "
            f"value {item['largest_value']:.4g}"
        )
        if "sentence" in item:
            print(
                f"  {item['sentence']!r} -> ids {item['input_ids']}, hidden state of <s> "
                f"{item['hidden_state_of_<s>']} ..."
            )
    return 0


def read_results(path: pathlib.Path) -> dict:
    """Reads the results.json of a fine-tuned run.

    Returns:
        The content of the file; {} if there is no such file.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """
    if not path.is_file():
        return {}
    results = json_files.read_object(path)
    valid = {
        "task": isinstance(results.get("task", ""), str),
        "labels": json_files.is_texts(results.get("labels", [])),
        "max_length": json_files.is_integer(
            results.get("max_length", 1), 1, json_files.LARGEST
        ),
        "score": results.get("score") is None
        or json_files.is_number(results["score"], -1000.0, 1000.0),
        "main_metric": results.get("score") is None or isinstance(results.get("main_metric"), str),
    }
    if wrong := [
        f"{name} is {json_files.shown(results.get(name))}"
        for name, good in valid.items()
        if not good
    ]:
        raise config.ConfigError(f"{path} is damaged: {', '.join(wrong)}. Fine-tune the run again")
    return results


def longest_input(experiment: config.Experiment, results: dict) -> int:
    """Returns the longest input in tokens whose positions are trained, with `<s>` and `</s>`.

    A fine-tuned run states this length in `results`. If a run started from a folder or checkpoint
    that is not a workdir, the length is the `model_max_length` of its tokenizer_config.json, or
    else the number of positions, but at least the sequence length of the run. For any other run,
    it is the sequence length of the run.
    """
    length, positions = experiment.corpus.sequence_length, experiment.model.max_positions
    if "max_length" in results:
        return results["max_length"]
    start, vocabulary = experiment.run.init_from, experiment.vocabulary.file
    if start is None or (pathlib.Path(start) / "config.gin").is_file():
        return length
    # The vocabulary lies in a workdir that has been removed since the run started from it.
    if vocabulary and pathlib.Path(vocabulary) == pathlib.Path(start) / "vocabulary":
        return length
    file = pathlib.Path(start) / "tokenizer_config.json"
    stated = json_files.read_object(file).get("model_max_length") if file.is_file() else None
    return max(length, stated if json_files.is_integer(stated, 1, positions) else positions)


def check_fits(format: str, model: config.Model, vocabulary):
    """Raises ConfigError if the format cannot hold the model. Call it before reading weights."""
    from maelm_jax.encoders import huggingface, published, pytorch

    if format == "huggingface":
        huggingface.hf_model_type(model, vocabulary.special)
    else:
        {"pytorch": pytorch, "reference": published}[format].check(model)


def write(
    folder: pathlib.Path,
    format: str,
    params: dict,
    model: config.Model,
    vocabulary,
    length: int,
    tuned=None,
) -> tuple[str, int]:
    """Writes every file of the export except the model card.

    Args:
        folder: The folder to write into.
        format: One of FORMATS.
        params: {parameter path: array}.
        model: The settings of the model.
        vocabulary: The vocabulary of the run.
        length: The longest input in tokens, with `<s>` and `</s>`.
        tuned: The head of a fine-tuned run (`huggingface.Tuned`), or None.

    Returns:
        The name of the class or layout that loads the folder, and the number of parameters.
    """
    from maelm_jax.encoders import huggingface, published, pytorch, tokenizer

    special = vocabulary.special
    if format == "reference":
        vocabulary.save(folder)
        return "the reference's layout", published.write(
            folder / "model.pt", params, model, vocabulary.size
        )
    if format == "pytorch":
        try:
            tokenizer.write(folder, vocabulary, length)
        except tokenizer.NoEqual as error:  # the format holds the weights without a tokenizer.json
            print(f"no tokenizer.json: {error}")
            vocabulary.save(folder)
        return "maelm.MaeLm", pytorch.write(folder, params, model, vocabulary.size, special)
    tokenizer.write(folder, vocabulary, length)
    return huggingface.architecture(model, special, tuned), huggingface.write(
        folder, params, model, vocabulary.size, special, tuned
    )


def compare(
    folder: pathlib.Path, format: str, params: dict, model: config.Model, vocabulary
) -> list[dict]:
    """Reads the folder back and compares it with JAX.

    Returns:
        One report for each comparison (`verify.Report`).

    Raises:
        RunError: The folder does not compute what JAX computes.
    """
    from maelm_jax.encoders import verify

    model = dataclasses.replace(model, dtype="float32")
    if format == "reference":
        return verify.reference(folder)
    return (verify.huggingface if format == "huggingface" else verify.pytorch)(
        folder, params, model, vocabulary
    )


if __name__ == "__main__":
    cli.run(main)
