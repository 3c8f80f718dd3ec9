"""Helpers that several test files share: commands in this process, a small training run, folders made once for all workers."""

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import hashlib
import importlib
import io
import json
import logging
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import typing
import unittest.mock
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from maelm_jax import config, huge_pages

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"  # beside a checkout, or not there
# Parameter trees to {path: leaf} and back.
flatten = functools.partial(traverse_util.flatten_dict, sep="/")
unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")
COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of the cache that `fill_cache` writes
STEPS = 60  # of the run that `training` describes


def model_of(base: config.Model | None = None, /, **changes) -> config.Model:
    """A model with changes to its parts, by the name of a field: of the encoder, of what else it has, or of the decoder as `decoder_layers`.

    `dropout` is Dropout.hidden. 0 layers are no decoder.
    """
    base = base or config.Model(decoder=config.Decoder())
    if changes.get("decoder_layers") == 0:
        del changes["decoder_layers"]
        base = dataclasses.replace(base, decoder=None)
    renamed = {
        "dropout": ("dropout", "hidden"),
        "attention_dropout": ("dropout", "attention"),
        "init_std": ("init", "std"),
        "relative_bias_init": ("init", "relative_bias"),
    }
    parts: dict[str, dict] = {}
    for name, value in changes.items():
        if name == "causal":
            base = dataclasses.replace(base, causal=value)
            continue
        part, field = renamed.get(name, ("compute" if name in config.field_names(config.Compute) else "encoder", name))
        if name.startswith("decoder_"):
            part, field = "decoder", name.removeprefix("decoder_")
        parts.setdefault(part, {})[field] = value
    if "decoder" in parts and base.decoder is None:
        base = dataclasses.replace(base, decoder=config.Decoder())
    return dataclasses.replace(base, **{part: dataclasses.replace(getattr(base, part), **values) for part, values in parts.items()})


def objective_of(encoder_mask_fraction: float = 0.0, **masking) -> config.Objective:
    """The objective of a decoder with these settings of masking."""
    return config.Objective.between(encoder_mask_fraction, config.Masking(**masking))


def experiment_of(model: config.Model, **sections) -> config.Experiment:
    """An experiment with a model. Without a decoder it is MLM."""
    if not model.decoder:
        sections.setdefault("objective", config.Objective(name="mlm"))
    parts = {name: getattr(model, name) for name in ("encoder", "decoder", "init", "dropout", "compute")}
    return config.Experiment(**parts, **sections)


# An encoder that is measured in no time.
LITTLE = model_of(layers=2, width=8, heads=2, feed_forward=16, max_positions=16, num_buckets=8, max_distance=16)


class Done(typing.NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def call(command: str, *argv, devices: int = 1) -> Done:
    """Runs `python -m maelm_jax.COMMAND ARGV` in this process, as on a machine that has the first `devices` of its devices.

    The arguments, the environment, logging and the exit status are those of the real command. Any exception that would print a traceback is raised.
    """
    command_line = importlib.import_module(f"maelm_jax.{command}").command
    stdout, stderr, root, ours = io.StringIO(), io.StringIO(), logging.getLogger(), logging.getLogger("maelm_jax")
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [f"maelm_jax.{command}", *map(str, argv)])
        patch.setattr(sys, "unraisablehook", sys.unraisablehook)  # pytest's comes back
        patch.setattr(huge_pages, "use_huge_pages", lambda argv: None)
        for logger in (root, ours):
            stack.callback(logger.setLevel, logger.level)
        patch.setattr(root, "handlers", [])
        only_devices(patch, devices)
        stack.enter_context(contextlib.chdir(ROOT))
        stack.enter_context(contextlib.redirect_stdout(stdout))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        try:
            command_line()
        except SystemExit as end:
            status = end.code
    return Done(status, stdout.getvalue(), stderr.getvalue())


def only_devices(patch: pytest.MonkeyPatch, count: int):
    """Makes the package see the first `count` devices only."""
    some, make_mesh = jax.devices()[:count], jax.make_mesh

    def mesh_of_some(*arguments, devices=some, **settings):
        return make_mesh(*arguments, devices=devices, **settings)

    patch.setattr(jax, "devices", lambda *_: some)
    patch.setattr(jax, "device_count", lambda *_: count)
    patch.setattr(jax, "make_mesh", mesh_of_some)


def environment(devices: int = 1) -> dict[str, str]:
    """The environment of a process with so many CPU devices."""
    others = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    return os.environ | {"XLA_FLAGS": f"{others} --xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def start(command: str, *argv, devices: int = 1) -> subprocess.Popen:
    """Starts `python -m maelm_jax.COMMAND ARGV` as a process of its own. For promises about processes; `call` is quicker."""
    line = [sys.executable, "-m", f"maelm_jax.{command}", *map(str, argv)]
    settings = environment(devices) | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as tests/conftest.py sets it for this process
    return subprocess.Popen(line, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 600) -> Done:
    """Waits for a process of `start`, which is ended when it takes longer than `timeout` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Done(process.returncode, stdout, stderr)


def send_when(process: subprocess.Popen, signal_number: int, condition: typing.Callable[[], bool]):
    """Sends the process a signal as soon as `condition()` holds."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "the process did not get so far"
        assert process.poll() is None, f"the process ended before it got its signal: {process.communicate()}"
        time.sleep(0.002)
    process.send_signal(signal_number)


def once(factory: pytest.TempPathFactory, name: str, make: typing.Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder `name` that `make(folder)` fills, made by one worker of this test session and used by all of them."""
    base = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder, done = base / "once" / name, base / "once" / f"{name}.done"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def training(text: pathlib.Path, workdir: pathlib.Path, *more: str) -> list[str]:
    """The arguments of `train` for a small run on the `text` fixture."""
    settings = {
        "TRAIN_STEPS": STEPS,
        "BATCH_SIZE": 8,
        "SEQUENCE_LENGTH": 32,
        "TEXT_FILES": text / "*.txt",
        "Vocabulary.size": 400,
        "Corpus.rows_dir": text / "rows",
        "Corpus.processes": 1,
        "Corpus.heldout_fraction": 0.1,
        "Encoder.layers": 1,
        "Encoder.width": 32,
        "Encoder.heads": 2,
        "Encoder.feed_forward": 64,
        "Dropout.hidden": 0.1,
        "Dropout.attention": 0.1,
        "Run.log_every": 1,
        "Run.eval_every": 20,
        "Run.eval_rows": 40,
        "Run.checkpoint_every": 5,
        "Run.rank_every": 30,
    }
    return ["--gin_file=tiny.gin", *(f"--gin.{name}={value}" for name, value in settings.items()), f"--workdir={workdir}", *more]


def metrics(workdir: pathlib.Path) -> list[dict]:
    """The whole lines of a run's metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def steps_of(workdir: pathlib.Path) -> list[dict]:
    """The lines of steps. The others say that the checkpoint of a step is complete."""
    return [line for line in metrics(workdir) if "loss" in line]


def repeated(workdir: pathlib.Path) -> list[tuple]:
    """What a run that is resumed repeats to the last bit."""
    names = ("step", "loss", "accuracy", "grad_norm", "eval_loss", "eval_accuracy")
    return [tuple(line.get(name) for name in names) for line in steps_of(workdir)]


def flat_lines(axes) -> list[str]:
    """The labels of the lines that cross the whole figure at one height."""
    return [line.get_label() for line in axes.lines if list(line.get_xdata()) == [0, 1] and len(set(line.get_ydata())) == 1]


def fresh_model(workdir: pathlib.Path, task):
    """Graph and fresh parameters of a model to fine-tune, with the shape of a pretrained run."""
    from maelm_jax import gin_files
    from maelm_jax.finetuning import heads, initial_encoder

    vocabulary = initial_encoder.load(str(workdir)).vocabulary
    settings = gin_files.load([str(workdir / "config.gin")]).model
    graph, init = heads.define(settings, vocabulary.size, vocabulary.pad, task)
    return graph, jax.jit(init)(jax.random.key(0))


def input_format(vocabulary, length: int):
    """How RoBERTa, MPNet and the published code read examples of at most `length` tokens."""
    from maelm_jax.encoders.family import REPEATED_SEPARATOR
    from maelm_jax.finetuning.task import InputFormat

    return InputFormat(vocabulary, length, REPEATED_SEPARATOR)


def english() -> list[str]:
    """Documents of English, a line each, that come with Python itself: the topics of its help()."""
    return [" ".join(topic.split()) for topic in topics.topics.values()]


def write_corpus(folder: pathlib.Path, *files: list[str], **settings) -> config.Corpus:
    """Writes each list of documents to a file of text: a.txt, b.txt, ... The rows of the corpus are in the folder too."""
    for name, documents in zip("abc", files, strict=False):
        (folder / f"{name}.txt").write_text("\n\n".join(documents))
    defaults = {"sequence_length": 32, "heldout_fraction": 0.1, "rows_dir": str(folder / "rows"), "processes": 1}
    return config.Corpus(text_files=f"{folder}/*.txt", **defaults | settings)


def write_text(path: pathlib.Path, text: str):
    """Writes text, packed as the end of the name says. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with PACK.get(path.suffix, open)(path, "wb") as file:
        file.write(text.encode())


def open_zstd(path: pathlib.Path, mode: str):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.CompressedOutputStream(str(path), "zstd")


PACK = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".zst": open_zstd}  # suffix -> how a packed file is opened


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices with these sizes of its axes data, fsdp and tensor."""
    return jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("data", "fsdp", "tensor"))


# Stock encoders that `stock_config` knows: model types, and a ModernBERT with local attention.
STOCK_ENCODERS = ("bert", "camembert", "distilbert", "electra", "modernbert", "modernbert-local", "mpnet", "roberta", "xlm-roberta")


def stock_config(name: str, vocabulary_size: int):
    """The transformers config of a small encoder of STOCK_ENCODERS."""
    import transformers

    sizes = {
        "vocab_size": vocabulary_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 50,
        "pad_token_id": 1,
    }
    rotary = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    theta = {"full_attention": {"rope_type": "default", "rope_theta": 1000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    makers = {
        "bert": lambda: transformers.BertConfig(**sizes),
        "camembert": lambda: transformers.CamembertConfig(**sizes, type_vocab_size=1),
        "distilbert": lambda: transformers.DistilBertConfig(**sizes | {"hidden_dim": 48}),
        "electra": lambda: transformers.ElectraConfig(**sizes, embedding_size=32),
        "modernbert": lambda: transformers.ModernBertConfig(**sizes, **rotary, layer_types=["full_attention"] * 2, rope_parameters=theta),
        "modernbert-local": lambda: transformers.ModernBertConfig(
            **sizes | {"num_hidden_layers": 4}, **rotary, local_attention=8, rope_parameters=theta
        ),
        "mpnet": lambda: transformers.MPNetConfig(**sizes),
        "roberta": lambda: transformers.RobertaConfig(**sizes, type_vocab_size=1, layer_norm_eps=1e-5),
        "xlm-roberta": lambda: transformers.XLMRobertaConfig(**sizes, type_vocab_size=1, layer_norm_eps=1e-5),
    }
    return makers[name]()


def stock_folder(folder: pathlib.Path, name: str, auto: str, vocabulary) -> pathlib.Path:
    """A folder that transformers saved, of a model in which every parameter is random, with a tokenizer.json.

    `name` is one of STOCK_ENCODERS, `auto` the name of the class that makes the model, such as "AutoModel".
    """
    import torch
    import transformers

    from maelm_jax.encoders import families, tokenizer

    torch.manual_seed(0)
    settings = stock_config(name, vocabulary.size)
    stock = getattr(transformers, auto).from_config(settings)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1) * 0.5, std=0.2)
    stock.save_pretrained(folder)
    tokenizer.write(folder, vocabulary, 48, families.FAMILIES[settings.model_type].pair)
    (folder / "sentencepiece.model").unlink()
    return folder


def fill_cache(cache: pathlib.Path, folder: pathlib.Path):
    """Writes the cache of org/name with the files of a folder, as huggingface_hub lays it out."""
    root = cache / "models--org--name"
    snapshot = root / "snapshots" / COMMIT
    for part in ("blobs", "refs"):
        (root / part).mkdir(parents=True)
    for revision in ("main", "v1"):
        (root / "refs" / revision).write_text(COMMIT)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(pathlib.Path(*[".."] * (1 + len(name.parts)), "blobs", blob.name))


def padded_ids(texts: list[str], vocabulary, length: int) -> np.ndarray:
    """The ids of texts with `<s>` and `</s>`, cut to `length` and padded on the right, int32 [texts, longest]."""
    rows = [[vocabulary.bos, *ids[: length - 2], vocabulary.eos] for ids in vocabulary.encode_batch(texts)]
    longest = max(map(len, rows))
    return np.asarray([row + [vocabulary.pad] * (longest - len(row)) for row in rows], np.int32)


def encoder_states(encoder: dict, model: config.Model, vocabulary, ids: np.ndarray, **more) -> np.ndarray:
    """The hidden states of ids [texts, length], one text in a row, by the parameters of the encoder. `more` are further arguments of the model."""
    from maelm_jax.model import maelm

    graph = maelm.encoder_graph(model, vocabulary.size, vocabulary.pad)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    arrays = {"ids": ids, "positions": positions, "segments": (ids != vocabulary.pad).astype(np.int32), **more}
    return np.asarray(jax.jit(lambda params, arrays: maelm.apply(graph, params)(**arrays))(encoder, arrays))


def little_rows(count: int) -> np.ndarray:
    """Rows of random ids below 99 for `LITTLE`, int32 [count, 16]. Every other row ends in padding."""
    ids = np.random.default_rng(0).integers(4, 99, (count, LITTLE.encoder.max_positions)).astype(np.int32)
    ids[:, 0], ids[:, 12], ids[::2, 13:] = 0, 2, 1
    return ids


def random_parameters(shapes: dict, seed: int) -> dict:
    """Normal matrices; LayerNorms as they begin, so that no common mean hides the rest."""
    rng = np.random.default_rng(seed)

    def leaf(keys, x):
        name = keys[-1].key
        return jnp.ones(x.shape) if name == "scale" else jnp.zeros(x.shape) if name == "bias" else jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


SMALL_ENCODER = {"layers": 4, "width": 16, "heads": 4, "feed_forward": 24, "max_positions": 20}
# Another value of every field of config.Encoder.
OTHER_SETTINGS = {
    "layers": 3,
    "width": 32,
    "heads": 2,
    "feed_forward": 40,
    "feed_forward_gate": (False, True),
    "hidden_act": ("gelu_new", "gelu"),
    "normalization": ("pre", "post"),
    "biases": (False, True),
    "positions": ("rotary", "learned"),
    "rotary_theta": 77.0,
    "max_positions": 30,
    "relative_buckets": ("t5", "none"),
    "num_buckets": 16,
    "max_distance": 99,
    "layer_norm_eps": 1e-3,
    "local_attention": (6, 0),
    "global_every": 2,
    "local_rotary_theta": 55.0,
    "token_types": 2,
    "family": (None, "roberta"),
}


def change_setting(own: config.Encoder, field: str) -> config.Encoder:
    """The encoder with another value of a field. Raises ConfigError if there is no such encoder."""
    values = OTHER_SETTINGS[field] if isinstance(OTHER_SETTINGS[field], tuple) else (OTHER_SETTINGS[field],)
    return dataclasses.replace(own, **{field: next(value for value in values if value != getattr(own, field))})


def random_encoder(model: config.Model, vocabulary):
    """An opened encoder whose parameters are random."""
    from maelm_jax.encoders import layouts
    from maelm_jax.model import maelm

    draw = np.random.default_rng(0)
    _, init = maelm.create(model, vocabulary.size, vocabulary.special)
    shapes = layouts.unpad_shapes({path: leaf.shape for path, leaf in flatten(jax.eval_shape(init, jax.random.key(0))).items()}, vocabulary.size)
    kept = {path: draw.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    return in_memory(kept, model, vocabulary, 12)


def in_memory(params: dict, model: config.Model, vocabulary, length: int, **more):
    """An opened encoder that was read from nowhere. `more` are other attributes."""
    from maelm_jax.encoders import opened

    parts = {"params": params, "vocabulary": vocabulary, "head": None, "module_files": {}}
    return opened.OpenedModel(model, length, path="memory", kind="in memory").replace(**(parts | more))
