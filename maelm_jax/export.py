"""Exports an encoder for transformers, or a model for the published MAE-LM code.

    python -m maelm_jax.export --workdir=runs/tiny --output=exported
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=reference

--workdir is a workdir, or any other encoder: an exported folder, a folder of stock transformers, or
a checkpoint of the published code.

The first command writes a folder for AutoModel.from_pretrained("exported"). Beside the encoder it
holds the decoder and the prediction head of MAE-LM, which the commands here read and transformers
does not. --format=reference writes model.pt in the checkpoint layout of the published code.

Writing needs neither PyTorch nor an accelerator. The command reads the folder back and compares
each setting and each parameter. If PyTorch is installed, it also computes with the folder and
compares that with JAX on real text. If anything differs, it writes no folder and fails. --no-verify
skips PyTorch.

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

    from maelm_jax.encoders import card, encoder, export, source, verify

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    export.check_output(args.output)
    found = source.find_encoder(args.workdir, args.step)
    loaded = encoder.Encoder.read(found)
    export.check_format(args.format, loaded, args.workdir)
    if args.dtype == "bfloat16":
        loaded = loaded.round_weights()  # what is compared with the folder
    verification = _why_unverified(args.verify, args.format)
    with export.write_atomically(args.output) as folder:
        written = export.write(args.format, folder, loaded, args.dtype)
        verification = verification or verify.verify(args.format, folder, loaded, found.path)
        has_tokenizer_json = (folder / "tokenizer.json").is_file()
        name = pathlib.Path(args.output).absolute().name
        text = card.render(
            args.format, name, found, loaded, written, has_tokenizer_json, verification
        )
        (folder / export.CARD).write_text(text, encoding="utf-8")
    origin = args.workdir if loaded.step is None else f"step {loaded.step}"
    print(f"{args.output}: {written.architecture} of {origin}, {written.parameters:,} parameters")
    if isinstance(verification, str):
        print(f"read back, but not computed with PyTorch: {verification}")
        return 0
    for subject, difference, largest in verification:
        print(
            f"verified: {subject}: largest difference {difference:.2g}, largest value {largest:.4g}"
        )
    return 0


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__, reads_settings=False)
    flags.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    flags.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default huggingface")
    dtypes = ("float32", "bfloat16")
    flags.add_argument(
        "--dtype", choices=dtypes, default=dtypes[0], help="of the weights in .safetensors files"
    )
    cli.add_step_flag(flags)
    flags.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare with JAX on real text; default: where PyTorch is installed",
    )
    return flags


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
