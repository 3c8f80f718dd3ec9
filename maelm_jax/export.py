"""Exports an encoder for transformers, or a model for the published MAE-LM code.

    python -m maelm_jax.export --workdir=runs/tiny --output=exported
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=reference

--workdir is a workdir, or any other encoder: an exported folder, a folder of stock transformers, or
a checkpoint of the published code.

The first command writes a folder for AutoModel.from_pretrained("exported"). Beside the encoder it
holds the decoder and the prediction head of MAE-LM, and modeling_mae_lm.py, with which
AutoModelForMaskedLM.from_pretrained("exported", trust_remote_code=True) reads them.
--format=reference writes model.pt in the checkpoint layout of the published code.

Writing needs neither PyTorch nor an accelerator. The command reads the folder back and compares
each setting and each parameter. If PyTorch is installed, it also computes with the folder and
compares that with JAX on real text. If anything differs, it writes no folder and fails. --no-verify
skips PyTorch.

--all_kept exports every checkpoint that the run keeps (Run.keep_at_words, Run.keep_at,
Run.keep_every), each to a folder in --output: chck_1M after a million words, as the BabyLM
challenge calls it, or step_1000.

--dtype=bfloat16 rounds the weights to bfloat16, and halves .safetensors files. Both libraries still
compute in float32 by default.
"""

import argparse
import importlib.util
import pathlib

from maelm_jax import cli, config

FORMATS = ("huggingface", "reference")


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args = cli.arguments(_flags(), argv).args
    cli.require_writable("--output", args.output)

    import jax

    from maelm_jax.encoders import export, hub

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    export.check_output(args.output)
    if args.push_to_hub:
        if args.all_kept:
            raise config.ConfigError("--push_to_hub uploads one export: leave --all_kept out")
        hub.create_repository(args.push_to_hub)  # before the work
    if args.all_kept:
        kept = _kept_checkpoints(args.workdir, args.step)
        pathlib.Path(args.output).mkdir(parents=True, exist_ok=True)
        for name, step in kept.items():
            _export(args, step, f"{args.output}/{name}")
    else:
        _export(args, args.step, args.output)
    if args.push_to_hub:
        print(f"uploaded: {hub.upload(args.push_to_hub, args.output)}")
    return 0


def _kept_checkpoints(name: str, step: int | None) -> dict[str, int]:
    """Returns {name of its folder: step} of the checkpoints that a run keeps and has.

    Raises ConfigError if `step` is given, `name` is no run, or it has none.
    """
    from maelm_jax.training import checkpoint, kept_steps
    from maelm_jax.training.workdir import Kind

    workdir, named = checkpoint.split_name(str(name))
    if step is not None or named is not None:
        raise config.ConfigError("--all_kept exports many steps: leave --step and @STEP out")
    workdir.fetch()
    if workdir.kind is not Kind.RUN:
        raise config.ConfigError(f"--all_kept: {workdir} is no run of pretraining")
    saved = checkpoint.all_steps(workdir)
    kept = kept_steps.read(workdir)
    present = {name: step for name, step in kept.items() if step in saved}
    if not present:
        raise config.ConfigError(
            f"--all_kept: {workdir} has none of the checkpoints that it keeps. It has steps "
            f"{', '.join(map(str, saved))}. Set Run.keep_at_words=(WORDS, WORDS) before training"
        )
    return present


def _export(args: argparse.Namespace, step: int | None, output: str):
    """Exports one step of the encoder to the folder `output`."""
    from maelm_jax.encoders import card, export, opened, results, verify

    metadata = dict(_metadata(entry) for entry in args.metadata)
    loaded = opened.find_model(args.workdir, step).read()
    export.check_format(args.format, loaded)
    if args.dtype == "bfloat16":
        loaded = loaded.round_weights()  # what is compared with the folder
    verification = _why_unverified(args.verify, args.format)
    with export.write_atomically(output) as folder:
        written = loaded.write(args.format, folder, args.dtype)
        verification = verification or verify.verify(args.format, folder, loaded)
        has_tokenizer_json = (folder / "tokenizer.json").is_file()
        name = pathlib.Path(output).absolute().name
        text = card.render(
            args.format,
            name,
            loaded,
            written,
            has_tokenizer_json,
            verification,
            metadata,
        )
        (folder / export.CARD).write_text(text, encoding="utf-8")
        report = loaded.results and loaded.results.classes
        if report and report.shows_confusion:
            report.draw(folder / results.CONFUSION, f"{name}: what is taken for what")
    origin = args.workdir if loaded.step is None else f"step {loaded.step}"
    print(f"{output}: {written.architecture} of {origin}, {written.parameters:,} parameters")
    if isinstance(verification, str):
        print(f"read back, but not computed with PyTorch: {verification}")
        return
    for subject, difference, largest in verification:
        print(
            f"verified: {subject}: largest difference {difference:.2g}, largest value {largest:.4g}"
        )


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__, reads_settings=False)
    flags.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    flags.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default huggingface")
    dtypes = ("float32", "bfloat16")
    flags.add_argument(
        "--dtype", choices=dtypes, default=dtypes[0], help="of the weights in .safetensors files"
    )
    cli.add_step_flag(flags)
    every = "export every checkpoint that the run keeps, each to a folder in --output"
    flags.add_argument("--all_kept", action="store_true", help=every)
    flags.add_argument(
        "--metadata",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an entry for the Hub in the card, such as license=apache-2.0, language=en, "
        "base_model=NAME or datasets=NAME,NAME; repeatable",
    )
    push = (
        "also upload the folder to this repository of the Hub, which is made, and public, if it "
        "does not exist (needs a login)"
    )
    flags.add_argument("--push_to_hub", metavar="ORG/NAME", help=push)
    flags.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare with JAX on real text; default: where PyTorch is installed",
    )
    return flags


def _metadata(entry: str) -> tuple[str, str | list[str]]:
    """Returns the name and the value of --metadata. Raises ConfigError if there is no "="."""
    name, separator, value = entry.partition("=")
    if not (name and separator and value):
        raise config.ConfigError(f"--metadata={entry}: write NAME=VALUE, as in license=apache-2.0")
    return name, value.split(",") if "," in value or name == "datasets" else value


def _why_unverified(verify_flag: bool | None, format: str) -> str:
    """Returns why the export is not compared with JAX, or "" if it is.

    Raises ConfigError if --verify is given and a library is not installed.
    """
    from maelm_jax.encoders import weight_files

    if verify_flag is False:
        return "--no-verify was given"
    libraries = {"torch": "PyTorch"}
    if format == "huggingface":
        libraries["transformers"] = "transformers"
    for module, name in libraries.items():
        if importlib.util.find_spec(module) is None:
            reason = f"{name} is not installed ({weight_files.INSTALL})"
            if verify_flag:
                raise config.ConfigError(f"--verify: {reason}")
            return reason
    return ""


def command():
    """Runs `maelm-export`, or `python -m maelm_jax.export`."""
    cli.run(main)


if __name__ == "__main__":
    command()
