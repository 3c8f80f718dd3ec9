r"""Fine-tune a pretrained encoder on GLUE, SQuAD or your own files: a run, a grid or a table.

    # One run.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny \
        --workdir=runs/rte --gin.DATA_DIR=glue_data
    # One run that starts from an earlier checkpoint.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny --step=500 \
        --workdir=runs/rte-500
    # A grid: the hyperparameters of the paper, five seeds each.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --gin_file=finetune/grid.gin \
        --init_from=runs/tiny
    # A table: every task of glue.gin with two encoders.
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin \
        --init_from=runs/tiny,runs/tiny-mlm --workdir=runs/table
    # The same on eight machines, which see one folder; then the table.
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin --init_from=runs/tiny \
        --workdir=runs/table --part=0 --parts=8
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin --init_from=runs/tiny \
        --workdir=runs/table --join
    # Labels for an unlabelled file: its columns, a label and its probability.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv
    # The probability of each class too, in another file.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv --probabilities \
        --output=labels.csv
    # Score the model on a labelled file that was not the dev set.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=labelled.tsv --score
    # Predictions of GLUE's test sets, as GLUE's server takes them.
    python -m maelm_jax.finetune --workdir=runs/table --init_from=tiny --submission=glue.zip

DATA_DIR is the folder of GLUE's folders or of SQuAD's files. Without it, data comes from TFDS.
`--init_from=random:RUN` is the control: the model of RUN with fresh weights.

The workdir of a run holds results.json, predictions, metrics.jsonl, config.gin, vocabulary/,
inputs.json (fingerprint of the data and checkpoint step of RUN) and checkpoints/ with the best
parameters. A grid or table has one such folder for each run, and table.md, .csv, .tex and .json.
With two encoders or more it also has differences.png and .pdf. In a grid, only the chosen cell
keeps its checkpoints. Finished runs are skipped. The exit status is that of maelm_jax.train.
"""

import argparse

from maelm_jax import cli, config, storage

# What pretraining calls otherwise, and the names that fine-tuning reads.
REPLACED = {
    "TRAIN_STEPS": "EPOCHS",
    "SEQUENCE_LENGTH": "MAX_LENGTH",
    "SEED": "SEEDS",
    "Run.train_steps": "EPOCHS",
    "Run.batch_size": "BATCH_SIZE",
    "Run.seed": "SEEDS",
    "Run.eval_every": "Finetune.evaluations",
    "Run.init_from": "--init_from",
    "Optimizer.learning_rate": "LEARNING_RATE",
    "Optimizer.warmup_steps": "WARMUP",
    "Corpus.sequence_length": "MAX_LENGTH",
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    cli.log_plain_lines()
    args, bindings = cli.arguments(_flags(), argv)
    _check(args, bindings)
    if args.predict is None and args.submission is None:
        _train(args, bindings)
        return 0
    if args.predict is not None:
        print(_predict(args, bindings))
    else:
        from maelm_jax.finetuning import predict

        print(predict.submit(args.workdir, args.submission, args.init_from, bindings))
    return 0


def _predict(args: argparse.Namespace, bindings: list[str]) -> str:
    from maelm_jax.finetuning import predict

    return predict.predict(
        args.workdir, args.predict, args.output, bindings, args.score, args.probabilities
    )


def _check(args: argparse.Namespace, bindings: list[str]):
    """Raises ConfigError for a flag or setting that the command would not read."""
    if (args.output is not None or args.score or args.probabilities) and args.predict is None:
        raise config.ConfigError("--output, --score and --probabilities need --predict=FILE")
    unread = {
        "predict": ("submission", "init_from", "step", "gin_file", "parts", "join"),
        "submission": ("step", "gin_file", "parts", "join"),
    }
    given = {
        name for name, value in vars(args).items() if value is not False and value not in (None, [])
    }
    for flag, others in unread.items():
        for other in others:
            if flag in given and other in given:
                raise config.ConfigError(
                    f"--{flag} uses the encoder and the settings of the run in --workdir. "
                    f"Leave --{other} out"
                )
    cli.check_division(args)
    for name in (binding.partition("=")[0] for binding in bindings):
        if name in REPLACED:
            raise config.ConfigError(f"fine-tuning does not read {name}; set {REPLACED[name]}")
        if name.startswith(("Encoder.", "Decoder.", "Vocabulary.", "Corpus.")):
            raise config.ConfigError(
                f"fine-tuning does not read {name}: it takes model and vocabulary from --init_from"
            )


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
    cli.add_division_flags(flags)
    flags.add_argument(
        "--predict",
        metavar="FILE",
        help="label this file with the fine-tuned model in --workdir, and stop",
    )
    flags.add_argument(
        "--output",
        metavar="FILE",
        help="with --predict: the predictions, .csv, .tsv, .jsonl or .parquet; default in "
        "--workdir, predictions_STEM in the format of the input",
    )
    flags.add_argument(
        "--probabilities",
        action="store_true",
        help="with --predict: a column with the probability of each class",
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


def _train(args: argparse.Namespace, bindings: list[str]):
    """Does the runs that the command asks for."""
    if not args.gin_file or not args.init_from:
        raise config.ConfigError(
            "give --gin_file=finetune/TASK.gin (configs/finetune/ has one for each task) "
            "and --init_from=RUN"
        )
    names = cli.listed("--init_from", args.init_from)
    storage.require_local(args.workdir)
    cli.require_writable("--workdir", str(args.workdir.settings_file))

    from maelm_jax.finetuning import grid, table
    from maelm_jax.training.workdir import FINETUNING

    args.workdir.require_writable_by(FINETUNING)
    labels = table.labels(args.workdir)
    plan = grid.plan(names, args.gin_file, bindings, args.step, labels)
    if args.part is not None:
        grid.run_part(args.workdir, plan, grid.Part(args.part, args.parts))
    else:
        grid.run_all(args.workdir, plan, args.join)


def command():
    """Runs `maelm-finetune`, or `python -m maelm_jax.finetune`."""
    cli.run(main, trains=True, advice=cli.FINETUNE_MEMORY)


if __name__ == "__main__":
    command()
