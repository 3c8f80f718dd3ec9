"""Makes the folders that later versions must load: `python tests/compatibility/make.py`.

They are one of each kind, made by the version that runs this script, and lie in VERSION.tar.xz.
VERSION.json has the numbers that this version computes from them (`measure`), which the test
compares with those of the present code. Folders of a released version are not made again.
"""

import json
import os
import pathlib
import re
import shutil
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import numpy as np  # noqa: E402

import maelm_jax  # noqa: E402
from maelm_jax import config, embed, evaluate, export, finetune, gin_files, train  # noqa: E402

GIN_FILE = """\
include 'tiny.gin'
TRAIN_STEPS = 5
BATCH_SIZE = 4
SEQUENCE_LENGTH = 32
TEXT_FILES = 'text.txt'
Corpus.heldout_fraction = 0.1
Vocabulary.size = 300
Encoder.layers = 1
Encoder.width = 16
Encoder.heads = 2
Encoder.feed_forward = 32
Encoder.max_positions = 32
Optimizer.warmup_steps = 2
Run.log_every = 1
Run.eval_rows = 8
Run.rank_every = 0
Mesh.data = 1
"""
KINDS = ("own.gin", "rows", "mae_lm", "mlm", "export", "finetuned")
TEXTS = ["The value of the argument.", "A class is a callable object."]
LABELLED = [(f"{word} value is {number}", label) for number in range(6) for word, label in (("The", "first"), ("An old", "second"))]
FINETUNE = {"TRAIN_FILE": "labelled.csv", "EPOCHS": 4, "BATCH_SIZE": 4, "LEARNING_RATE": 1e-2, "Mesh.data": 1}


def make():
    """Makes a folder of each kind in the working directory, without the text of the runs."""
    from testing import english

    pathlib.Path("own.gin").write_text(GIN_FILE)
    pathlib.Path("text.txt").write_text("\n\n".join(english()[:30]))
    pathlib.Path("labelled.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in LABELLED))
    pathlib.Path("lines.txt").write_text("\n".join(TEXTS) + "\n")
    train.main(["--gin_file=own.gin", "--workdir=mae_lm"])
    export.main(["--workdir=mae_lm", "--output=export"])
    # A vocabulary of the other kind: a tokenizer.json.
    train.main(["--gin_file=own.gin", "--gin_file=mlm.gin", "--gin.Vocabulary.file=export/tokenizer.json", "--workdir=mlm"])
    settings = [f"--gin.{name}={value}" for name, value in FINETUNE.items()]
    finetune.main(["--gin_file=finetune/own.gin", *settings, "--init_from=mae_lm", "--workdir=finetuned"])
    pathlib.Path("text.txt").unlink()
    for folder in pathlib.Path().glob("*/"):
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        for figure in folder.glob("*.png"):
            figure.unlink()
        for record in folder.glob("environment.txt"):
            record.write_text(re.sub(r"(?<= on Linux)-\S*", "", record.read_text()))


def measure(kind: str) -> dict:
    """Loads a folder of one of KINDS in the working directory, as a user does. Returns {what: numbers}."""
    if kind == "own.gin":
        return _settings("own.gin")
    if kind == "rows":
        train.main(["--gin_file=mae_lm/config.gin", "--gin.Run.train_steps=1", "--workdir=new"])
        return {"step 1 of a new run": _step("new", 1)}
    if kind == "finetuned":
        finetune.main(["--workdir=finetuned", "--predict=labelled.csv", "--output=predictions.csv"])
        lines = pathlib.Path("predictions.csv").read_text().splitlines()
        in_python = maelm_jax.load_classifier("finetuned").predict(TEXTS)
        return {
            "predictions": [float(line.rpartition(",")[2]) for line in lines[1:]],
            "probabilities": [one.probability for one in in_python],
        }
    embed.main([f"--workdir={kind}", "--input=lines.txt", "--output=vectors.npy"])
    [[candidates]] = maelm_jax.load_encoder(kind).fill_mask(["The value of the [MASK]."], top=3)
    numbers = {
        "vectors": np.load("vectors.npy").tolist(),
        "mask": [one.probability for one in candidates],
        "loss": _evaluate(f"--models={kind}", "--text=lines.txt", "--rate=0.3"),
    }
    if kind == "export":
        return numbers
    numbers["held-out loss"] = _evaluate(f"--models={kind}")
    train.main([f"--workdir={kind}", "--gin.Run.train_steps=6"])
    return numbers | {"step 6": _step(kind, 6)}


def _settings(name: str) -> dict:
    """Returns the values of all settings, as JSON has them."""
    return json.loads(json.dumps(config.values(gin_files.load([name]))))


def _evaluate(*argv: str) -> float:
    """Returns the loss that the command writes."""
    evaluate.main([*argv, "--output=scores.json"])
    return json.loads(pathlib.Path("scores.json").read_text())["scores"][0]["loss"]


def _step(run: str, step: int) -> list[float]:
    """Returns the loss and the gradient norm of a step."""
    lines = map(json.loads, pathlib.Path(run, "metrics.jsonl").read_text().splitlines())
    return next([line["loss"], line["grad_norm"]] for line in lines if line["step"] == step and "loss" in line)


def main():
    """Makes VERSION.tar.xz and VERSION.json."""
    base = HERE / maelm_jax.__version__
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
        with tarfile.open(f"{base}.tar.xz", "w:xz") as archive:
            for path in sorted(pathlib.Path().rglob("*")):
                archive.add(path, recursive=False, filter=_anonymous)
        numbers = {kind: measure(kind) for kind in KINDS}
        # A later tiny.gin, and a later default, may have other values.
        values = _settings("tiny.gin")
        numbers["own.gin"] = {name: value for name, value in numbers["own.gin"].items() if value != values[name]}
        os.chdir(HERE)
    pathlib.Path(f"{base}.json").write_text(json.dumps(numbers, indent=1) + "\n")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
