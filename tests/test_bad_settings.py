"""Wrong settings, flags and paths of every command: status 2, one line, nothing started.

Each command is called in-process, as `cli.run` calls it. Where its work would begin, it raises
`Started`, so that a wrong input that is accepted fails its test and costs nothing.
"""

import functools
import importlib
import os
import pathlib

import pytest

from maelm_jax import cli, gin_files
from maelm_jax.encoders import opened
from maelm_jax.finetuning import initial_encoder
from maelm_jax.measuring import runs, scoring  # noqa: F401  first imported in `commands`, they would keep its stand-ins

COMMANDS = ("train", "prepare", "plan", "finetune", "export", "embed", "analyze", "evaluate", "merge", "status")
BASE = {
    "train": ["--gin_file=tiny.gin"],
    "prepare": ["--gin_file=tiny.gin"],
    "plan": ["--gin_file=tiny.gin", "--topology=cpu:8"],
    "finetune": ["--gin_file=finetune/rte.gin", "--init_from=run"],
    "export": ["--workdir=run", "--output=out"],
    "embed": ["--workdir=run", "--input=lines.txt", "--output=out.npy"],
    "analyze": ["--runs=run"],
    "evaluate": ["--models=run"],
    "merge": ["--checkpoints=run@3,run@4", "--workdir=out"],
    "status": ["run"],
}
# The first thing that each command does once its settings, flags and paths are known to be right.
WORK = {
    "train": "maelm_jax.pretraining.start.find_starting_point",
    "prepare": "maelm_jax.data.vocabulary_training.vocabulary_for",
    "plan": "maelm_jax.planning.targets.start_compiler",
    "finetune": "maelm_jax.finetuning.sentence.SentenceTask.check_files",
    "export": "maelm_jax.encoders.opened.find_model",
    "embed": "maelm_jax.embed.read_lines",
    "analyze": "maelm_jax.data.vocabularies.load",
    "evaluate": "maelm_jax.encoders.opened.find_model",
    "merge": "maelm_jax.encoders.opened.find_model",
    "status": "maelm_jax.training.checkpoint.complete_steps",
}


class Started(Exception):
    """A command took its input for right."""


@functools.cache
def tiny_config() -> str:
    return gin_files.render(gin_files.load(["tiny.gin"]))


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """{name: main} in a folder with a run in it. What follows the checks raises Started."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("run", "checkpoints").mkdir(parents=True)
    pathlib.Path("run", "config.gin").write_text(tiny_config())
    pathlib.Path("file").write_text("text")
    pathlib.Path("lines.txt").write_text("a line\n")

    experiment = gin_files.load(["run/config.gin"])
    run = opened.OpenedModel(experiment.model, 64, path="run", kind="maelm_jax workdir", experiment=experiment, step=3)
    encoder = initial_encoder.InitialEncoder("run", run, is_random=False)
    monkeypatch.setattr(initial_encoder, "load", lambda name, step=None: encoder)
    for command in COMMANDS:

        def begin(*_, **__):
            raise Started

        monkeypatch.setattr(WORK[command], begin)
    return {name: importlib.import_module(f"maelm_jax.{name}").main for name in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_right_input_is_started(command, commands):
    with pytest.raises(Started):
        commands[command](BASE[command])


# A setting for each kind of rule: name, macro, type, range, choice.
RULES = """
    TRAIN_STEPS=0 TRAIN_STEPS=1e3 TRAIN_STEPS=None TEXT_FILES TEXT_FILES= TEXT_FILES='' TEXT_FILES=['a.txt']
    TRAIN_STEP=5 train_steps=5 Modle.layers=3 Model.layers=3 Encoder.layer=3 Encoder.layers=@Encoder() Encoder.layers=%NOPE
    BATCH_SIZE=[8,16] SEED=-1 SEED=4294967296 SEED=True Corpus.sources={1:1} Corpus.sources={'installed_docs':0} Corpus.task_modules=[1]
    Corpus.heldout_fraction=nan Corpus.heldout_fraction=0.5 Masking.unit=None Masking.renumber=no Objective.mask_fraction=1.1 Objective.name=bert
    Encoder.num_buckets=30 Dropout.hidden=1 Compute.dtype=float16 Optimizer.weight_decay=-0.01 Mesh.data=-2 Mesh.data=1.0
""".split()
TUNING_RULES = """
    SEEDS=4294967296 SEEDS=(1,'2') Finetune.tasks=rta Finetune.tasks=['rte','rta'] Finetune.max_lenght=3 Finetune=3
    CustomTask.columns=[''] WARMUP=1
""".split()
# A line for each thing that a section, or the whole experiment, checks itself.
CHECKS = """
    BATCH_SIZE=16 Run.batch_size=8
    SEQUENCE_LENGTH=129
    Corpus.sources={}
    Corpus.sources={'wikipedia':1.0}
    Masking.rate=0.001
    Masking.heldout_rate=0.001
    Masking.random_fraction=0.5
    Masking.renumber=True Encoder.positions=rotary Encoder.relative_buckets=none Decoder.relative_bias=False Encoder.local_attention=8
    Objective.name=mlm Masking.random_fraction=0.6 Masking.keep_fraction=0.6
    Encoder.width=130
    Encoder.max_distance=16
    Encoder.positions=rotary Decoder.relative_bias=False
    Encoder.positions=rotary Encoder.relative_buckets=none Decoder.relative_bias=True
    Encoder.positions=rotary Encoder.relative_buckets=none Decoder.relative_bias=False Encoder.width=12
    Encoder.local_attention=8
    Objective.name=between
    Objective.name=mlm Decoder.causal=True
    Objective.mask_fraction=0.5
    TEXT_FILES=a.txt Corpus.sources={'files:b.txt':1.0}
    Objective.name=causal Encoder.positions=rotary Encoder.relative_buckets=none Encoder.local_attention=8
    Objective.causal_share=0.5 Encoder.positions=rotary Encoder.relative_buckets=none Decoder.relative_bias=False Encoder.local_attention=8
    Objective.name=causal Objective.causal_share=0.5
    Decoder.slots=masked
    Decoder.attention=cross Decoder.causal=True
    Decoder.width=100
    Mesh.fsdp=-1
    Run.accumulate=3
    Run.init_from=a Run.continue_from=b
    Optimizer.schedule=decay
"""
TUNING_CHECKS = """
    Encoder.layers=3
    Run.train_steps=10
    Optimizer.kind=muon
    Run.accumulate=3
    EPOCHS=[]
    LEARNING_RATE=[1e-5,-1]
    EPOCHS=[1,1]
    Grid.small_task_epochs=[1,1]
    Finetune.tasks=['rte','rte']
    Finetune.tasks=own
    Finetune.tasks=conll Finetune.train_file=file
    CustomTask.columns=['a','b','c']
    CustomTask.labels=['yes']
    CustomTask.score_range=(0.0,1.0) CustomTask.label_separator=,
    CustomTask.score_range=(1.0,0.0)
    CustomTask.score_range=(5.0,)
    CustomTask.columns=['question','label']
    CustomTask.labels=['a','b'] CustomTask.score_range=(1.0,5.0)
    CustomTask.label_separator='\\t'
    CustomTask.labels=['a,b','c'] CustomTask.label_separator=,
"""
EVERY_COMMAND = [["--no_such_flag"], ["--workdir="]]
# Two flags of each command, and what is no command line at all. test_prepare, test_merge and others have the rest.
FLAGS = {
    "train": [["--gin_file=nowhere.gin"], ["--gin_file=run"], ["--gin_file=file"], ["--gin_file"], ["stray"], ["--gin.3"], ["--process=-1"]],
    "prepare": [["--part=x", "--parts=2"], ["--part=0", "--parts=0"]],
    "plan": [["--topology=cpu:-8"], ["--topology=v5e:3x3"], ["--price=cheap"]],
    "finetune": [["--init_from=run,run"], ["--predict=lines.txt"], ["--workdir=file/x"]],
    "export": [["--step=-1"], ["--format=onnx"]],
    "embed": [["--pooling=max"], ["--output="]],
    "analyze": [["--tau=nan"], ["--tokens=-1"]],
    "evaluate": [["--models=run,run"], ["--text=a.txt", "--rate=nan"], ["--rate=0.15"]],
    "merge": [["--checkpoints=run@3,run@3"], ["--gin.Encoder.layers=2"]],
    "status": [["file"], ["nowhere"]],
}


def with_settings(command: str, lines: list[str]) -> list[tuple[str, list[str]]]:
    """A case of `command` for each line of settings NAME=VALUE."""
    return [(command, [f"--gin.{one}" for one in line.split()]) for line in lines if line.strip()]


CASES = with_settings("train", RULES + CHECKS.splitlines()) + with_settings("finetune", TUNING_RULES + TUNING_CHECKS.splitlines())
CASES += [(command, more) for command in COMMANDS for more in EVERY_COMMAND + FLAGS[command]]
NUMBERED = [f"{command} {' '.join(more)!a:.60}" for command, more in CASES]


@pytest.mark.parametrize("command,more", CASES, ids=NUMBERED)
def test_a_wrong_input_ends_with_status_2_and_one_line(command, more, commands, capsys):
    before = sorted(os.listdir())
    assert cli.status_of(commands[command], [*BASE[command], *more]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    assert len(printed.err) < 2500
    assert printed.out == "" and sorted(os.listdir()) == before
