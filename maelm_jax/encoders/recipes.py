"""What a folder of sentence-transformers does with a text beside its encoder.

modules.json lists the modules: the encoder, the pooling of its states, and what follows. Files of
every version of sentence-transformers from 1.0 to 6 are read. No module's code is imported.
"""

import collections.abc
import dataclasses
import functools
import json
import os
import pathlib
import tempfile
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config, storage
from maelm_jax.encoders import layouts, weight_files
from maelm_jax.training import workdir

# The list of the modules, and the settings beside it.
MODULES = workdir.MODULES
PROMPTS = "config_sentence_transformers.json"
# The settings of the encoder: the present name first, then those of earlier versions.
ENCODER_SETTINGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
# {entry of the settings of a pooling before version 6: its mode}, in the order of the values.
OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "SiLU": jax.nn.silu,
    "GELU": functools.partial(jax.nn.gelu, approximate=False),
}
# Settings of the encoder that change its function, with the only value that is computed here.
SUPPORTED = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "processing_kwargs": {},
    "config_args": {},
    "config_kwargs": {},
}
Step = collections.abc.Callable[[np.ndarray], np.ndarray]  # of vectors [texts, width]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is done with a text and its states. The default is the mean of the states.

    Attributes:
        modes: How the states are pooled: values of OLDER_MODES. Several are concatenated.
        steps: What is done with the pooled vectors, in order.
        names: The names of the modules, for messages; () without modules.json.
        length: The longest input in tokens, with `<s>` and `</s>`; None for that of the encoder.
        prompt: The beginning of every text.
        pools_prompt: Whether the states of the prompt are pooled too.
        lowercases: Whether a text is lowercased first.
    """

    modes: tuple[str, ...] = ("mean",)
    steps: tuple[Step, ...] = ()
    names: tuple[str, ...] = ()
    length: int | None = None
    prompt: str = ""
    pools_prompt: bool = True
    lowercases: bool = False

    def prepare(self, texts: list[str]) -> list[str]:
        """Returns the texts that the encoder reads."""
        texts = [self.prompt + text for text in texts]
        if self.lowercases:
            import tokenizers

            texts = list(map(tokenizers.normalizers.Lowercase().normalize_str, texts))
        return texts

    def describe(self) -> str:
        """Returns what the vectors are, in words."""
        if not self.names:
            return f"{'first' if self.modes == ('cls',) else 'mean'} of the states"
        prompt = f" after the prompt {self.prompt!r}" if self.prompt else ""
        return f"{', '.join(self.names)} of {MODULES}{prompt}"


def read(files: dict[str, bytes]) -> Recipe:
    """Reads the recipe of a folder.

    Args:
        files: {path in the folder: content} of its modules; {} for any other folder.

    Raises:
        ConfigError: A file is damaged, or a module or a setting is not computed here.
    """

    def settings(name: str) -> dict[str, typing.Any]:
        with storage.reading(name):
            return dict(json.loads(files.get(name, b"{}")))

    if MODULES not in files:
        return Recipe()
    with storage.reading(MODULES):
        modules = [(str(one["type"]), str(one["path"])) for one in json.loads(files[MODULES])]
    kinds = [_kind(type_name) for type_name, _ in modules]
    for place, kind in enumerate(("Transformer", "Pooling")):
        if kinds[place : place + 1] != [kind]:
            name = modules[place][0] if place < len(modules) else "no module"
            raise _not_computed(f"{name} in the place of {kind}")
    pooling = f"{modules[1][1]}/config.json"
    with storage.reading(pooling):
        modes, pools_prompt = _read_pooling(settings(pooling))
    steps = []
    for (type_name, path), kind in zip(modules[2:], kinds[2:], strict=True):
        content = settings(f"{path}/config.json")
        names = [content.get(f"module_{side}_name") for side in ("input", "output")]
        make = MAKERS.get(kind)
        if make is None or any(name not in (None, "sentence_embedding") for name in names):
            raise _not_computed(f"the module {type_name} in {path}")
        with storage.reading(f"{path}/config.json"):
            steps.append(make(content, files, path))
    name = next((name for name in ENCODER_SETTINGS if name in files), ENCODER_SETTINGS[0])
    encoder, prompts = settings(name), settings(PROMPTS)
    with storage.reading(name):
        length = _read_length(encoder)
    with storage.reading(PROMPTS):
        prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""
        if prompts.get("truncate_dim") is not None:
            steps.append(_make_cut(int(prompts["truncate_dim"])))
    return Recipe(
        modes,
        tuple(steps),
        (*modes, *kinds[2:]),
        length,
        str(prompt),
        pools_prompt,
        bool(encoder.get("do_lower_case")),
    )


def _read_pooling(content: dict[str, typing.Any]) -> tuple[tuple[str, ...], bool]:
    """Returns the modes of a pooling, and whether the prompt is pooled."""
    modes = content.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in OLDER_MODES.items() if content.get(name)] or "mean"
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    if unknown := [mode for mode in modes if mode not in OLDER_MODES.values()]:
        raise _not_computed(f"the pooling {unknown[0]!r}")
    return modes, bool(content.get("include_prompt", True))


def _read_length(content: dict[str, typing.Any]) -> int | None:
    """Returns the longest input that the settings of the encoder state, after checking these."""
    for name, value in SUPPORTED.items():
        if content.get(name, value) != value:
            raise _not_computed(f"{name} {content[name]!r} of its encoder")
    of_tokenizer = content.get("processor_kwargs") or content.get("tokenizer_args") or {}
    if others := sorted(set(of_tokenizer) - {"model_max_length"}):
        raise _not_computed(f"the options {', '.join(others)} of its tokenizer")
    length = content.get("max_seq_length") or of_tokenizer.get("model_max_length")
    if length is not None and int(length) < 2:
        raise ValueError(f"max_seq_length {length}")
    return length and int(length)


def _kind(type_name: str) -> str:
    """Returns the class of a module of sentence-transformers, "" for anybody else's."""
    package, _, name = type_name.rpartition(".")
    return name if package.split(".")[0] == "sentence_transformers" else ""


def _not_computed(what: str) -> config.ConfigError:
    return config.ConfigError(
        f"{MODULES}: maelm_jax does not compute {what}. Name a pooling (pooling='mean', "
        "--pooling=mean) for vectors of the encoder alone"
    )


# The modules after the pooling. Each maker takes the settings, all files and the path.


def _make_dense(content: dict, files: dict[str, bytes], path: str) -> Step:
    """Returns `activation(x W + b)`, plus x or its linear map if the layer is residual."""
    name = content.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.") else None
    if activation is None:
        raise _not_computed(f"the activation {name} in {path}")
    shape = int(content["in_features"]), int(content["out_features"])
    tensors = _read_tensors(files, path)
    weights = {"linear.weight": shape[::-1]}
    if content.get("bias", True):
        weights["linear.bias"] = shape[1:]
    is_residual = content.get("use_residual", False)
    if is_residual and shape[0] != shape[1]:
        weights["residual.weight"] = shape[::-1]
    _check_shapes(tensors, weights, path)

    def apply(x: np.ndarray) -> np.ndarray:
        y = x @ tensors["linear.weight"].T + tensors.get("linear.bias", np.float32(0))
        y = np.asarray(activation(y))
        if is_residual:
            y = y + (x @ tensors["residual.weight"].T if shape[0] != shape[1] else x)
        return y

    return apply


def _make_norm(content: dict, files: dict[str, bytes], path: str) -> Step:
    """Returns a LayerNorm."""
    tensors, size = _read_tensors(files, path), int(content["dimension"])
    weights = {"norm.weight": (size,), "norm.bias": (size,)}
    _check_shapes(tensors, weights, path)

    def apply(x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(1e-5))
        return x * tensors["norm.weight"] + tensors["norm.bias"]

    return apply


def normalize(x: np.ndarray) -> np.ndarray:
    """Divides each vector [texts, width] by its Euclidean norm."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def _make_cut(width: int) -> Step:
    """Returns the first numbers of each vector, `width` or fewer."""
    if width < 1:
        raise ValueError(f"truncate_dim {width}")
    return lambda x: x[:, :width]


MAKERS = {
    "Dense": _make_dense,
    "LayerNorm": _make_norm,
    "Normalize": lambda *_: normalize,
    "Dropout": lambda *_: lambda x: x,  # only in training
}


def _read_tensors(files: dict[str, bytes], path: str) -> dict[str, np.ndarray]:
    """Reads the weights of a module as float32."""
    names = (weight_files.WEIGHTS, weight_files.PYTORCH_WEIGHTS)
    name = next((name for name in names if f"{path}/{name}" in files), None)
    if name is None:
        raise config.ConfigError(f"{path} holds neither {' nor '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, name).write_bytes(files[f"{path}/{name}"])
        tensors = weight_files.read_folder(pathlib.Path(folder))
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def _check_shapes(tensors: layouts.Tensors, expected: layouts.Shapes, path: str):
    """Raises ConfigError unless the tensors have the expected names and shapes."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if faults := layouts.compare_shapes(shapes, expected):
        raise config.ConfigError(
            f"{path}: its weights contradict its config.json: {layouts.list_faults(faults)}"
        )


def pool_states(
    states: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    owners: jax.Array,
    modes: tuple[str, ...],
    prompt_length: jax.Array,
) -> jax.Array:
    """Pools the states of packed texts. To be compiled.

    Args:
        states: float32 [rows, slots, width].
        positions: int32 [rows, slots], of an `inference.PackedBatch`.
        segments: int32 [rows, slots], of it too.
        owners: int32 [rows, slots], of it too.
        modes: `Recipe.modes`.
        prompt_length: The number of tokens at the start of each text that are not pooled.

    Returns:
        float32 [slots / 2, modes * width]: a text has two tokens or more.
    """
    width, owners, positions = states.shape[2], owners.reshape(-1), positions.reshape(-1)
    states, real, count = states.reshape(-1, width), segments.reshape(-1) > 0, owners.size // 2
    lengths = jax.ops.segment_sum(real.astype(jnp.int32), owners, count)[owners]
    pooled = real & (positions >= prompt_length)
    first = jnp.where(prompt_length < lengths, prompt_length, 0)
    weights = {
        "cls": real & (positions == first),
        "mean": pooled,
        "mean_sqrt_len_tokens": pooled,
        "weightedmean": jnp.where(pooled, positions + 1, 0),
        "lasttoken": real & (positions == lengths - 1),
    }
    vectors = []
    for mode in modes:
        if mode == "max":
            shown = jnp.where(pooled[:, None], states, -jnp.inf)
            vectors.append(jax.ops.segment_max(shown, owners, count))
            continue
        weight = weights[mode].astype(jnp.float32)
        shown = jnp.where(weight[:, None] > 0, states, 0.0)
        total = jax.ops.segment_sum(shown * weight[:, None], owners, count)
        share = jnp.maximum(jax.ops.segment_sum(weight, owners, count), 1e-9)
        if mode == "mean_sqrt_len_tokens":
            share = jnp.sqrt(share)
        vectors.append(total / share[:, None])
    return jnp.concatenate(vectors, axis=1)


def read_module_files(folder: str | os.PathLike) -> dict[str, bytes]:
    """Reads the modules that sentence-transformers applies to the encoder in a folder.

    Before version 2.0 of sentence-transformers the encoder itself was in a folder of its own. Its
    settings are returned as if it was not.

    Returns:
        {plain relative name: content}; {} if there is no modules.json. A name stands in a folder of
        a module, or is one of MODULES and MODULE_SETTINGS.

    Raises:
        ConfigError: modules.json is damaged, or a module or a link leads out of the folder.
    """
    folder = pathlib.Path(folder).expanduser().absolute()
    modules = find_modules(folder)
    if not modules:
        return {}
    first, *others = (module["path"] for module in modules)
    names = {name: name for name in (MODULES, PROMPTS)}
    names |= {name: f"{first}/{name}" if first else name for name in ENCODER_SETTINGS}
    for module in filter(None, others):  # else it is the encoder itself
        found = [f"{module}/{file.name}" for file in sorted((folder / module).glob("*"))]
        # An export has code of this package only.
        names |= {name: name for name in found if not name.endswith(".py")}
    files = {name: storage.inside(folder, place).path for name, place in names.items()}
    content = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    if first:
        modules = [modules[0] | {"path": ""}, *modules[1:]]
        content[MODULES] = json.dumps(modules, indent=2).encode()
    return content


def find_modules(folder: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Returns the modules that modules.json lists; [] if there is no such file.

    Raises ConfigError if it is damaged, or the path of a module leads out of the folder.
    """
    file = folder / MODULES
    if not file.is_file():
        return []
    with storage.reading(file):
        modules = [dict(module) for module in storage.read_json(file)]
        paths = [storage.inside(folder, module["path"]).name for module in modules]
        return [module | {"path": path} for module, path in zip(modules, paths, strict=True)]
