"""Wrong settings, flags and paths of every command: status 2, one line, nothing started.

Each command is called in-process, as `cli.run` calls it. Where its work would begin, it raises
`Started`, so that a wrong input that is accepted fails its test and costs nothing.
"""

import functools
import importlib
import os
import pathlib
import types

import pytest

from maelm_jax import cli, gin_files
from maelm_jax.finetuning import initial_encoder

COMMANDS = ("train", "prepare", "plan", "finetune", "export", "embed", "analyze", "evaluate", "merge")
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
}
# The first thing that each command does once its settings, flags and paths are known to be right.
WORK = {
    "train": "maelm_jax.pretraining.start.find_starting_point",
    "prepare": "maelm_jax.data.vocabulary_training.vocabulary_for",
    "plan": "maelm_jax.planning.targets.start_compiler",
    "finetune": "maelm_jax.finetuning.sentence.SentenceTask.check_files",
    "export": "maelm_jax.encoders.source.find_encoder",
    "embed": "maelm_jax.embed.read_lines",
    "analyze": "maelm_jax.data.vocabularies.load",
    "evaluate": "maelm_jax.encoders.source.find_encoder",
    "merge": "maelm_jax.encoders.source.find_encoder",
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
    pathlib.Path("loop").symlink_to("loop")

    experiment = gin_files.load(["run/config.gin"])
    source = types.SimpleNamespace(path="run", settings={}, step=3, experiment=experiment)
    encoder = initial_encoder.InitialEncoder("run", source, None, is_random=False)
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


# Settings that every command checks, as NAME=VALUE.
SETTINGS = [
    "TRAIN_STEPS=0",
    "TRAIN_STEPS=-1",
    "TRAIN_STEPS=1e3",
    "TRAIN_STEPS=many",
    "TRAIN_STEPS=None",
    "BATCH_SIZE=0",
    "BATCH_SIZE=[8,16]",
    "BATCH_SIZE=8.0",
    "SEQUENCE_LENGTH=0",
    "SEQUENCE_LENGTH=7",
    "SEQUENCE_LENGTH=129",
    "SEED=-1",
    "SEED=True",
    "SEED=None",
    "SEED=''",
    "TEXT_FILES=''",
    "TEXT_FILES=3",
    "TEXT_FILES=['a.txt']",
    "TEXT_FILES",
    "TEXT_FILES=",
    "TRAIN_STEP=5",
    "train_steps=5",
    "Model.layer=3",
    "Modle.layers=3",
    "Model.layers=@Model()",
    "Model.layers=%NOPE",
    "Vocabulary.size=299",
    "Vocabulary.cased=yes",
    "Vocabulary.cased=1",
    "Vocabulary.file=''",
    "Vocabulary.file=3",
    "Vocabulary.sample_megabytes=0",
    "Vocabulary.sample_megabytes=-1.0",
    "Corpus.sources={}",
    "Corpus.sources=[]",
    "Corpus.sources={'wikipedia':1.0}",
    "Corpus.sources={'installed_docs':0}",
    "Corpus.sources={'installed_docs':-1}",
    "Corpus.sources={'files:':1}",
    "Corpus.sources={'tfds:':1}",
    "Corpus.sources={'':1}",
    "Corpus.sources={1:1}",
    "Corpus.sources={'installed_docs':'all'}",
    "Corpus.text_field=''",
    "Corpus.text_field=1",
    "Corpus.task_modules=my.tasks",
    "Corpus.task_modules=[1]",
    "Corpus.task_modules=['']",
    "Corpus.heldout_fraction=0",
    "Corpus.heldout_fraction=0.5",
    "Corpus.heldout_fraction=nan",
    "Corpus.heldout_fraction=-0.1",
    "Corpus.rows_dir=''",
    "Corpus.rows_dir=None",
    "Corpus.rows_dir=5",
    "Corpus.processes=-1",
    "Corpus.processes=2.5",
    "Corpus.skip_bad_files=yes",
    "Masking.rate=0",
    "Masking.rate=1",
    "Masking.rate=-0.15",
    "Masking.rate=15%",
    "Masking.unit=nothing",
    "Masking.unit=None",
    "Masking.encoder_mask_fraction=-0.1",
    "Masking.encoder_mask_fraction=1.1",
    "Masking.random_fraction=2",
    "Masking.keep_fraction=-1",
    "Masking.random_fraction=0.5",
    "Masking.renumber=no",
    "Model.layers=0",
    "Model.layers=-2",
    "Model.width=0",
    "Model.width=130",
    "Model.heads=0",
    "Model.heads=3",
    "Model.heads=-4",
    "Model.feed_forward=0",
    "Model.decoder_layers=-1",
    "Model.decoder_layers=0",
    "Model.decoder_width=100",
    "Model.decoder_width=0",
    "Model.decoder_width=-32",
    "Model.decoder_attention=other",
    "Model.decoder_slots=masked",
    "Model.decoder_slots=some",
    "Model.max_positions=0",
    "Model.relative_buckets=t6",
    "Model.decoder_relative_bias=2",
    "Model.num_buckets=0",
    "Model.num_buckets=30",
    "Model.num_buckets=-32",
    "Model.max_distance=16",
    "Model.max_distance=0",
    "Model.relative_bias_init=zero",
    "Model.init_std=0",
    "Model.init_std=-1.0",
    "Model.unigram_bias=3",
    "Model.dropout=1",
    "Model.dropout=-0.1",
    "Model.attention_dropout=1.0",
    "Model.attention_dropout=x",
    "Model.layer_norm_eps=0",
    "Model.layer_norm_eps=-1e-5",
    "Model.dtype=float16",
    "Model.dtype=None",
    "Model.rematerialise=maybe",
    "Optimizer.learning_rate=0",
    "Optimizer.learning_rate=-1e-3",
    "Optimizer.learning_rate=fast",
    "Optimizer.warmup_steps=-1",
    "Optimizer.warmup_steps=1e4",
    "Optimizer.b1=1",
    "Optimizer.b1=-0.1",
    "Optimizer.b1=1.5",
    "Optimizer.b2=1",
    "Optimizer.b2=-1",
    "Optimizer.b2=98",
    "Optimizer.eps=0",
    "Optimizer.eps=-1e-6",
    "Optimizer.weight_decay=-0.01",
    "Optimizer.clip_norm=-1",
    "Optimizer.schedule=decay",
    "Mesh.data=0",
    "Mesh.data=-2",
    "Mesh.data=1.0",
    "Mesh.fsdp=0",
    "Mesh.fsdp=-1",
    "Mesh.tensor=0",
    "Run.batch_size=0",
    "Run.accumulate=0",
    "Run.accumulate=3",
    "Run.accumulate=-1",
    "Run.seed=-5",
    "Run.init_from=''",
    "Run.continue_from=''",
    "Run.init_from=7",
    "Run.log_every=0",
    "Run.log_every=-1",
    "Run.eval_every=0",
    "Run.eval_every=None",
    "Run.eval_rows=0",
    "Run.eval_rows=-5",
    "Run.rank_every=-1",
    "Run.rank_every=0.5",
    "Run.checkpoint_every=0",
    "Run.checkpoint_every=-100",
    "Run.keep_every=0",
    "Run.keep_every=-3",
    "Run.keep_every=often",
    "Run.sed=3",
]
TUNING = [
    "MAX_LENGTH=0",
    "MAX_LENGTH=-1",
    "MAX_LENGTH=7",
    "MAX_LENGTH=10000000",
    "MAX_LENGTH=[128]",
    "EPOCHS=0",
    "EPOCHS=[]",
    "EPOCHS=[1,1]",
    "EPOCHS=1.5",
    "SEEDS=-1",
    "SEEDS=[1,-2]",
    "SEEDS=4294967296",
    "SEEDS=[]",
    "SEEDS=[1,1]",
    "SEEDS=(1,'2')",
    "BATCH_SIZE=[]",
    "BATCH_SIZE=[0]",
    "BATCH_SIZE=-8",
    "LEARNING_RATE=0",
    "LEARNING_RATE=[1e-5,-1]",
    "LEARNING_RATE=[]",
    "WARMUP=1",
    "WARMUP=-0.1",
    "WARMUP=[0.1,1.5]",
    "TRAIN_EXAMPLES=0",
    "TRAIN_EXAMPLES=-5",
    "TRAIN_EXAMPLES=all",
    "DATA_DIR=''",
    "DATA_DIR=3",
    "Finetune.tasks=rta",
    "Finetune.tasks=['rte','rta']",
    "Finetune.tasks=['rte','rte']",
    "Finetune.tasks=3",
    "Finetune.tasks=own",
    "Finetune.evaluations=0",
    "Finetune.evaluations=-1",
    "Grid.small_task_epochs=0",
    "CustomTask.columns=sentence",
    "CustomTask.columns=['']",
    "CustomTask.label=''",
    "CustomTask.labels=yes",
    "Finetune.train_file=''",
    "Finetune.max_lenght=3",
    "EPOCH=3",
    "Finetune=3",
    "Finetune.epochs=0",
    "Finetune.stride=0",
]
EVERY_COMMAND = [
    ["--no_such_flag"],
    ["--workdir="],
    ["--gin_file=nowhere.gin"],
    ["--gin_file=run"],
    ["--gin_file=file"],
    ["--gin_file"],
    ["stray"],
    ["--gin.3"],
]
FLAGS = {
    "train": [
        ["--processes=-1"],
        ["--processes=0"],
        ["--processes=two"],
        ["--process=-1"],
        ["--peer_timeout=0"],
        ["--peer_timeout=-5"],
        ["--peer_timeout=1e3"],
        ["--coordinator="],
        ["--dry_run=yes"],
        ["--gin.BATCH_SIZE=16", "--gin.Run.batch_size=8"],
    ],
    "prepare": [
        ["--part=-1", "--parts=2"],
        ["--part=1"],
        ["--part=x", "--parts=2"],
        ["--part=0", "--parts=0"],
        ["--part=0", "--parts=1.5"],
        ["--part=3", "--parts=3"],
    ],
    "plan": [
        ["--topology=cpu:0"],
        ["--topology=cpu:-8"],
        ["--topology=cpu:"],
        ["--topology=v5e:3x3"],
        ["--topology=v9:2x2"],
        ["--topology="],
        ["--topology"],
        ["--sweep=2"],
    ],
    "finetune": [
        ["--init_from="],
        ["--init_from=run,run"],
        ["--predict="],
        ["--predict=nowhere.tsv"],
        ["--predict"],
    ],
    "export": [
        ["--step=-1"],
        ["--step=x"],
        ["--format=onnx"],
        ["--gin.Model.layers=3"],
        ["--format="],
        ["--output="],
        ["--output"],
    ],
    "embed": [
        ["--step=-1"],
        ["--step=1.5"],
        ["--pooling=max"],
        ["--dtype=float16"],
        ["--gin.Model.dtype=bfloat16"],
        ["--input="],
        ["--output="],
        ["--output"],
    ],
    "analyze": [
        ["--tau=0"],
        ["--tau=nan"],
        ["--tau=x"],
        ["--tokens=0"],
        ["--tokens=-1"],
        ["--sets=0"],
        ["--runs="],
        ["--runs=,"],
        ["--runs=nowhere"],
        ["--runs=file"],
    ],
    "evaluate": [
        ["--models="],
        ["--models=,"],
        ["--models=run,run"],
        ["--step=-1"],
        ["--step=1.5"],
        ["--step=3", "--all_steps"],
        ["--rate=0.15"],
        ["--text=a.txt", "--rate=0"],
        ["--text=a.txt", "--rate=1"],
        ["--text=a.txt", "--rate=nan"],
        ["--text=a.txt", "--rate=x"],
        ["--tokens=0"],
        ["--text=a.txt", "--tokens=-1"],
        ["--seed=3"],
        ["--output="],
        ["--output"],
    ],
    "merge": [
        ["--checkpoints="],
        ["--checkpoints=run@3,run@3"],
        ["--weights=1"],
        ["--weights=1,0"],
        ["--weights=1,nan"],
        ["--weights=1,x"],
        ["--workdir=run"],
        ["--workdir=file"],
        ["--gin_file=tiny.gin"],
        ["--gin.Model.layers=2"],
    ],
}
CASES = [("train", [f"--gin.{text}"]) for text in SETTINGS]
CASES += [("finetune", [f"--gin.{text}"]) for text in TUNING]
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
