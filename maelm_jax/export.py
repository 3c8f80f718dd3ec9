"""Exports an encoder for transformers, for plain PyTorch or for the published MAE-LM code.

    python -m maelm_jax.export --workdir=runs/tiny --output=exported
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=pytorch
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --format=reference
    python -m maelm_jax.export --workdir=runs/tiny --output=exported --all_steps

--workdir is a workdir, or any other encoder: an exported folder, a folder of stock transformers, or
a checkpoint of the published code.

The first command writes a folder for AutoModel.from_pretrained("exported"). --format=pytorch also
holds the decoder and the prediction head, and any bucket function. --format=reference writes
model.pt in the checkpoint layout of the published code.

Writing needs neither PyTorch nor an accelerator. If PyTorch is installed, the command reads the
folder back and compares it with JAX on real text. If the two differ, it writes no folder and fails.
--no-verify skips the comparison.
"""

import argparse

from maelm_jax import cli, config
from maelm_jax.encoders import export_folder

FORMATS = ("huggingface", "pytorch", "reference")


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args, experiment = cli.parse_encoder(_flags(), argv)
    if args.all_steps and args.step is not None:
        raise config.ConfigError("--step and --all_steps contradict each other. Give one of them")
    if experiment is not None:
        from maelm_jax.training import run_record

        run_record.check_settings(args.workdir, experiment)
    elif args.all_steps or args.step is not None:
        raise config.ConfigError(
            f"--step and --all_steps need a workdir. --workdir={args.workdir} has one checkpoint"
        )
    if not args.all_steps:
        export_folder.check(args.output, args.workdir, args.overwrite)

    import jax

    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator to other processes
    for step, output in _outputs(args).items():
        _export(args, experiment, step, output)
    return 0


def _outputs(args: argparse.Namespace) -> dict[int | None, str]:
    """Returns {step: folder to write}. With --all_steps, checks all folders before any is written.

    A step of None is the newest.
    """
    if not args.all_steps:
        return {args.step: args.output}
    from maelm_jax.training import checkpoint

    steps = checkpoint.all_steps(args.workdir)
    outputs: dict[int | None, str] = {step: f"{args.output}/step-{step}" for step in steps}
    for output in outputs.values():
        export_folder.check(output, args.workdir, args.overwrite)
    return outputs


def _export(
    args: argparse.Namespace,
    experiment: config.Experiment | None,
    step: int | None,
    output: str,
):
    """Writes one checkpoint to one folder."""
    from maelm_jax.encoders import card, encoder, export_formats, run_results
    from maelm_jax.training import metrics

    loaded = encoder.Encoder.load(args.workdir, step)
    export_formats.check(args.format, loaded.model, loaded.vocabulary.special)
    unverified = _why_unverified(args.verify, args.format)
    export_formats.check_heads(args.format, loaded, args.workdir)
    with export_folder.written(output, args.workdir, args.overwrite) as folder:
        written = export_formats.write(args.format, folder, loaded)
        reports = None
        if not unverified:
            reports = export_formats.verify_folder(args.format, folder, loaded)
        about = card.About(
            name=export_folder.resolved(output).name,
            format=args.format,
            architecture=written.architecture,
            parameters=written.parameters,
            model=loaded.model,
            origin=args.workdir,
            experiment=experiment,
            step=loaded.step,
            lines=metrics.read(args.workdir) if experiment else [],
            results=run_results.read(args.workdir) if experiment else {},
            reports=reports,
            unverified=unverified,
            length=loaded.length,
            mask=loaded.vocabulary.pieces()[loaded.vocabulary.mask],
            special=loaded.vocabulary.special,
            has_tokenizer_json=(folder / "tokenizer.json").is_file(),
            has_pooler="pooler/kernel" in loaded.params and loaded.head is None,
        )
        (folder / "README.md").write_text(card.render(about), encoding="utf-8")
    origin = args.workdir if loaded.step is None else f"step {loaded.step}"
    size = f"{written.parameters:,} parameters"
    print(f"{output}: {written.architecture} of {origin}, {size}")
    _print_reports(reports, unverified)


def _flags() -> argparse.ArgumentParser:
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
        "--all_steps", action="store_true", help="write every checkpoint, to DIR/step-N"
    )
    flags.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="compare with JAX on real text; default: where PyTorch is installed",
    )
    flags.add_argument(
        "--overwrite", action="store_true", help="replace the output folder, if export wrote it"
    )
    return flags


def _why_unverified(verify_flag: bool | None, format: str) -> str:
    """Returns why the export is not compared with JAX, or "" if it is.

    Raises:
        ConfigError: --verify is given, and a library is not installed.
    """
    from maelm_jax.encoders import torch_checkpoint, verify

    if format == "reference":
        torch_checkpoint.require_torch("--format=reference")
    if verify_flag is False:
        return "--no-verify was given"
    missing = verify.missing_library(format)
    if missing and verify_flag:
        raise config.ConfigError(
            f"--verify needs {missing}, which is not installed here: {torch_checkpoint.INSTALL}"
        )
    return f"{missing} is not installed ({torch_checkpoint.INSTALL})" if missing else ""


def _print_reports(reports: list[dict] | None, unverified: str):
    """Prints what was compared, or why nothing was."""
    if reports is None:
        print(f"unverified: {unverified}")
    for report in reports or []:
        print(
            f"verified: {report['of']}: largest difference {report['largest_difference']:.2g}, "
            f"largest value {report['largest_value']:.4g}"
        )
        if "sentence" in report:
            print(
                f"  {report['sentence']!r} -> ids {report['input_ids']}, hidden state of <s> "
                f"{report['hidden_state_of_<s>']} ..."
            )


def command():
    """Runs `maelm-export`, or `python -m maelm_jax.export`."""
    cli.run(main)


if __name__ == "__main__":
    command()
