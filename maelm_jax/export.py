"""Turns a run into a folder that others load: stock transformers, plain PyTorch, or the reference implementation's checkpoint layout.

    python -m maelm_jax.export --workdir=runs/tiny --output=exported                      AutoModel.from_pretrained("exported")
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=pytorch     decoder and head as well, any bucket function
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=reference   model.pt for the published code

Where PyTorch is installed, what was written is read back and compared with JAX on real text (--no-verify: not), and not kept if it differs.
Writing needs neither PyTorch nor an accelerator.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import typing

from maelm_jax import cli, config

FORMATS = ("huggingface", "pytorch", "reference")


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    flags.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default huggingface")
    flags.add_argument("--step", type=cli.whole_number(0), metavar="N", help="the checkpoint's step; default the newest")
    flags.add_argument("--verify", action=argparse.BooleanOptionalAction, help="compare with JAX on real text; default: where PyTorch is installed")
    flags.add_argument("--overwrite", action="store_true", help="replace the output folder if it is there")
    args, experiment = cli.parse(flags, argv)
    cli.check_workdir(args.workdir, experiment)
    output = pathlib.Path(args.output)
    if output.exists() and not args.overwrite:
        raise config.ConfigError(f"{output} exists; give another --output, or --overwrite to replace it")

    import jax

    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, and none is held
    from maelm_jax import pretrained
    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.interop import card, huggingface, verify
    from maelm_jax.training import metrics

    if args.verify and not verify.installed(args.format):
        raise config.ConfigError(f"--verify needs PyTorch, which is not installed here: {verify.INSTALL}")
    verifying = verify.installed(args.format) if args.verify is None else args.verify
    source = pretrained.find(args.workdir, args.step)
    vocabulary = vocabularies.load(source.vocabulary)
    check_fits(args.format, experiment.model, vocabulary)
    params = source.read(experiment.model)
    results = pathlib.Path(args.workdir) / "results.json"  # what a fine-tuned run leaves
    results = json.loads(results.read_text()) if results.is_file() else {}
    tuned = huggingface.Tuned.of(params, results.get("labels", ()))
    if tuned and args.format != "huggingface":
        raise config.ConfigError(f"{args.workdir} is a fine-tuned run, which --format=huggingface holds; --format={args.format} does not")

    with whole_folder(output) as folder:
        length = results.get("max_length", experiment.corpus.sequence_length)  # tokens of the longest input it was trained on
        architecture, count = write(folder, args.format, params, experiment.model, vocabulary, length, tuned)
        reports = None
        if verifying:
            reports = compare(folder, args.format, pretrained.nested(params), experiment.model, vocabulary)
            (folder / "verification.json").write_text(json.dumps(reports, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        about = card.About(output.name, args.format, architecture, count, experiment, source.step, metrics.read(args.workdir), results, reports)
        (folder / "README.md").write_text(card.render(about), encoding="utf-8")
    print(f"{output}: {architecture} of step {source.step}, {count:,} parameters")
    if reports is None:
        print("unverified: " + ("--no-verify was given" if args.verify is False else f"PyTorch is not installed ({verify.INSTALL})"))
    for item in reports or []:
        print(f"verified: {item['of']}: largest difference {item['largest_difference']:.2g}, largest value {item['largest_value']:.4g}")
        if "sentence" in item:
            print(f"  {item['sentence']!r} -> ids {item['input_ids']}, hidden state of <s> {item['hidden_state_of_<s>']} ...")
    return 0


def check_fits(format: str, model: config.Model, vocabulary):
    """Raises ConfigError, before anything is read, when the format cannot hold the model."""
    from maelm_jax.interop import huggingface, pytorch, reference

    if format == "huggingface":
        huggingface.home(model, vocabulary.special)
    else:
        {"pytorch": pytorch, "reference": reference}[format].check(model)


@contextlib.contextmanager
def whole_folder(output: pathlib.Path) -> typing.Iterator[pathlib.Path]:
    """A temporary folder beside `output` that takes its name (and its place) at the end; gone if something fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder, retired = (output.with_name(f"{output.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    folder.mkdir()
    try:
        yield folder
        if output.exists():
            output.rename(retired)
        folder.rename(output)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(folder: pathlib.Path, format: str, params: dict, model: config.Model, vocabulary, length: int, tuned=None) -> tuple[str, int]:
    """Writes all but the card; returns (what loads it, how many numbers it holds)."""
    from maelm_jax.interop import huggingface, pytorch, reference, tokenizer

    special = vocabulary.special
    if format == "reference":
        vocabulary.save(folder)
        return "the reference's layout", reference.write(folder / "model.pt", params, model, vocabulary.size)
    if format == "pytorch":
        try:
            tokenizer.write(folder, vocabulary, length)
        except tokenizer.NoEqual as error:  # the weights have a home here all the same
            print(f"no tokenizer.json: {error}")
            vocabulary.save(folder)
        return "maelm.MaeLm", pytorch.write(folder, params, model, vocabulary.size, special)
    tokenizer.write(folder, vocabulary, length)
    return huggingface.architecture(model, special, tuned), huggingface.write(folder, params, model, vocabulary.size, special, tuned)


def compare(folder: pathlib.Path, format: str, params: dict, model: config.Model, vocabulary) -> list[dict]:
    """Reads the folder back and compares; raises RunError when it is not what JAX computes."""
    from maelm_jax.interop import verify

    model = dataclasses.replace(model, dtype="float32")
    if format == "reference":
        return verify.reference(folder)
    return (verify.huggingface if format == "huggingface" else verify.pytorch)(folder, params, model, vocabulary)


if __name__ == "__main__":
    cli.run(main)
