r"""Fine-tune a pretrained encoder on GLUE, SQuAD or your own files: a run, a grid or a table.

    # One run.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny \
        --workdir=runs/rte --gin.DATA_DIR=glue_data
    # One run that starts from an earlier checkpoint.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny --step=300 \
        --workdir=runs/rte-300
    # A grid: the hyperparameters of the paper, five seeds each.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --gin_file=finetune/grid.gin \
        --init_from=runs/tiny
    # A table: every task of glue.gin with two encoders.
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin \
        --init_from=runs/tiny,runs/tiny-mlm --workdir=runs/table
    # Labels for an unlabelled file. --output writes them to another file.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv --output=labels.tsv
    # Score the model on a labelled file that was not the dev set.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=labelled.tsv --score
    # Predictions of GLUE's test sets, as GLUE's server takes them.
    python -m maelm_jax.finetune --workdir=runs/table --init_from=tiny --submission=glue.zip

DATA_DIR is the folder of GLUE's folders or of SQuAD's files. Without it, data comes from TFDS.
`--init_from=random:RUN` is the control: the model of RUN with fresh weights.

The workdir of a run holds results.json, predictions, metrics.jsonl, config.gin, vocabulary/,
inputs.json (fingerprint of the data and checkpoint step of RUN) and checkpoints/ with the best
parameters. A grid or table has one such folder for each run, and table.md and table.json. With
two encoders or more it also has differences.png. In a grid, only the chosen cell keeps its
checkpoints. Finished runs are skipped. The exit status is that of maelm_jax.train.
"""

import argparse
import logging
import pathlib

from maelm_jax import cli, config, paths, storage

# Settings of pretraining that have no effect here, and the settings that do the same.
REPLACED = {
    "Run.seed": "Grid.seeds",
    "Run.batch_size": "Grid.batch_size",
    "Run.train_steps": "Grid.epochs",
    "Optimizer.learning_rate": "Grid.learning_rate",
    "Optimizer.warmup_steps": "Grid.warmup",
    "Run.eval_every": "Finetune.evaluations",
    "Run.init_from": "--init_from",
    "Corpus.sequence_length": "Finetune.max_length",
}
# Settings of pretraining that nothing replaces.
UNREAD = (
    "Vocabulary.",
    "Corpus.",
    "Model.decoder_",
    "Model.unigram_bias",
    "Model.logit_tile",
    "Optimizer.schedule",
    "Optimizer.decay_share",
    "Optimizer.decay_shape",
    "Optimizer.muon_learning_rate",
    "Run.continue_from",
    "Run.eval_rows",
    "Run.keep_",
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    args, bindings = cli.arguments(_flags(), argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    _check(args, bindings)
    if args.predict is not None:
        from maelm_jax.finetuning import prediction

        print(prediction.predict(args.workdir, args.predict, args.output, bindings, args.score))
        return 0
    if args.submission is not None:
        from maelm_jax.finetuning import submission

        print(submission.write(args.workdir, args.submission, args.init_from, bindings))
        return 0
    return _train(args, bindings)


def _check(args: argparse.Namespace, bindings: list[str]):
    """Raises ConfigError for a flag or setting that the command would not read."""
    if args.output is not None and args.predict is None:
        raise config.ConfigError(
            "--output names the predictions of --predict. Give --predict=FILE too."
        )
    if args.score and args.predict is None:
        raise config.ConfigError(
            "--score scores the predictions of --predict. Give --predict=FILE too."
        )
    unread = {
        "predict": ("submission", "init_from", "step", "gin_file"),
        "submission": ("step", "gin_file"),
    }
    for flag, others in unread.items():
        for other in others:
            if getattr(args, flag) is not None and getattr(args, other) not in (None, []):
                raise config.ConfigError(
                    f"--{flag} uses the encoder and the settings of the run in --workdir. "
                    f"Leave --{other} out"
                )
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if name in REPLACED:
            raise config.ConfigError(
                f"--gin.{binding}: fine-tuning does not read {name}; set {REPLACED[name]}"
            )
        if name.startswith(UNREAD):
            raise config.ConfigError(f"--gin.{binding}: fine-tuning does not read {name}")


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--init_from",
        metavar="RUN[,RUN...]",
        help="pretrained workdirs, exported or stock folders; "
        "random:RUN: RUN's model with fresh weights",
    )
    flags.add_argument(
        "--step",
        type=cli.whole_number(0),
        metavar="N",
        help="step of the pretrained workdirs' checkpoint; default the newest",
    )
    flags.add_argument(
        "--predict",
        metavar="FILE",
        help="label this file with the fine-tuned model in --workdir, and stop",
    )
    flags.add_argument(
        "--output",
        metavar="FILE",
        help="with --predict: the predictions; default in --workdir, named as GLUE asks for, "
        "or predictions_STEM.tsv (.json, .txt)",
    )
    flags.add_argument(
        "--score",
        action="store_true",
        help="with --predict: compare with the labels in the file, and write _scores.json",
    )
    flags.add_argument(
        "--submission",
        metavar="FILE.zip",
        help="label GLUE's test sets with the finished models in --workdir, and stop; "
        "--init_from names the encoder in a table of several",
    )
    return flags


def _train(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does the runs that the command asks for."""
    if not args.gin_file or not args.init_from:
        raise config.ConfigError(
            "give --gin_file=finetune/TASK.gin (configs/finetune/ has one for each task) "
            "and --init_from=RUN"
        )
    storage.require_local(args.workdir)

    from maelm_jax.finetuning import experiments, table

    paths.check_folder("--workdir", args.workdir)
    known = table.labels(pathlib.Path(args.workdir))
    plan = experiments.plan(args.init_from, args.gin_file, bindings, args.step, known)

    import jax

    from maelm_jax.finetuning import runs
    from maelm_jax.training import run_record

    if jax.process_count() > 1:
        raise config.ConfigError(
            "fine-tuning runs in one process; give each of your hosts other tasks or seeds"
        )
    with run_record.locked(args.workdir):
        runs.run_all(pathlib.Path(args.workdir), plan)
    return 0


def command():
    """Runs `maelm-finetune`, or `python -m maelm_jax.finetune`."""
    cli.run(main, trains=True, advice=cli.FINETUNE_MEMORY)


if __name__ == "__main__":
    command()
