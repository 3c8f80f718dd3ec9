"""Converts parameters between the layout of this project and the layouts of other software.

A format is a list of `TensorMapping`, which works in both directions: `export_tensors` and
`import_tensors`. Both refuse a parameter that the list does not have.

The parameters here are {path: array}, stacked over the layers:
encoder/blocks/feed_forward/up/kernel is [layers, in, out]. Other software has one tensor for each
layer, with linear weights [out, in].
"""

import collections
import collections.abc
import typing

import numpy as np

from maelm_jax import config

# Tables with one row for each id. They are padded with further rows here, but not in other layouts.
VOCABULARY = ("encoder/token_embedding", "head/bias")
TYPE_TABLE = "encoder/token_type_embedding"
MOST_FAULTS = 8  # that one error message names
Tensors = collections.abc.Mapping[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]  # {parameter path: shape}
# The settings of config.Encoder that make its layers BERT's.
BERT_LAYERS = {
    "normalization": "post",
    "positions": "learned",
    "feed_forward_gate": False,
    "biases": True,
    "local_attention": 0,
}
# The parts of a block with these settings, in the order of `part_names`.
PARTS = (
    "attention/query",
    "attention/key",
    "attention/value",
    "attention/out",
    "attention_norm",
    "feed_forward/up",
    "feed_forward/down",
    "feed_forward_norm",
)


def list_misfits(
    encoder: config.Encoder, fixed: dict[str, typing.Any], carried: collections.abc.Collection[str]
) -> list[str]:
    """Returns the settings with which a format does not hold the encoder, in words.

    Args:
        encoder: The encoder.
        fixed: {field: the only value that the format has}.
        carried: The fields whose value the format states.
    """
    own, default = encoder.canonical, config.Encoder()
    misfits = [
        f"Encoder.{name} is {getattr(own, name)!r}, not {value!r}"
        for name, value in fixed.items()
        if getattr(own, name) != value
    ]
    unstated = [
        name for name in config.field_names(config.Encoder) if name not in {*fixed, *carried}
    ]
    return misfits + [
        f"Encoder.{name} is {getattr(own, name)!r}, which the format does not state"
        for name in unstated
        if getattr(own, name) != getattr(default, name)
    ]


class TensorMapping(typing.NamedTuple):
    """The correspondence of one tensor of another format and a parameter here.

    Attributes:
        name: The name in the other format.
        path: The parameter path here.
        layer: The index into a parameter that is stacked over the layers; None if it is not.
        transposed: Whether the other format has the transposed matrix.
        offset: The number of unused rows at the start of the other tensor (position tables of MPNet
            and RoBERTa). They are written as 0.
        part: The other tensor joins `parts` parameters of one size along its first axis. This one
            is number `part`.
        parts: The number of joined parameters.
    """

    name: str
    path: str
    layer: int | None = None
    transposed: bool = False
    offset: int = 0
    part: int = 0
    parts: int = 1


def linear(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    """Returns the mappings of a linear layer: weight and bias."""
    return [
        TensorMapping(f"{name}.weight", f"{path}/kernel", layer, True),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def norm(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    """Returns the mappings of a LayerNorm: weight and bias."""
    return [
        TensorMapping(f"{name}.weight", f"{path}/scale", layer),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def part_names(*names: str) -> dict[str, str]:
    """Returns {part of a block here: its name in the other format} for the names of PARTS."""
    return dict(zip(PARTS, names, strict=True))


def blocks(prefix: str, module: str, layers: int, names: dict[str, str]) -> list[TensorMapping]:
    """Returns the mappings of the Transformer blocks of `module`, "encoder" or "decoder".

    A name in the other format is `prefix`, the number of the layer, and a name of `names`
    (`part_names`).
    """
    mappings = []
    for layer in range(layers):
        for part, name in names.items():
            mapping_of = norm if part.endswith("norm") else linear
            mappings += mapping_of(f"{prefix}{layer}.{name}", f"{module}/blocks/{part}", layer)
    return mappings


def export_tensors(
    params: dict[str, np.ndarray], mappings: list[TensorMapping], vocabulary_size: int
) -> dict[str, np.ndarray]:
    """Converts parameters {path: array} to another format.

    Rows of tables over the vocabulary after `vocabulary_size` are cut.

    Returns:
        {name in the other format: array}. The arrays are views of `params` except where rows are
        added or parts are joined, so that writing them needs little memory.

    Raises:
        ConfigError: The format has no tensor for a parameter. The message lists all of them.
    """
    if faults := _list_unmapped(mappings, {path: value.shape for path, value in params.items()}):
        raise config.ConfigError(
            f"the format does not hold every parameter: {list_faults(faults)}. Add them to its "
            "mappings (CONTRIBUTING.md), or train without them"
        )
    values: dict[str, list[np.ndarray]] = {}
    for mapping in mappings:
        value = params[mapping.path]
        if mapping.layer is not None:
            value = value[mapping.layer]
        if mapping.path in VOCABULARY:
            value = value[:vocabulary_size]
        if mapping.offset:
            unused = np.zeros((mapping.offset, *value.shape[1:]), value.dtype)
            value = np.concatenate([unused, value])
        values.setdefault(mapping.name, []).append(value.T if mapping.transposed else value)
    return {
        name: np.concatenate(parts) if len(parts) > 1 else parts[0]
        for name, parts in values.items()
    }


def import_tensors(
    tensors: Tensors,
    mappings: list[TensorMapping],
    shapes: Shapes,
    source: str,
    tied: dict[str, str],
) -> dict[str, np.ndarray]:
    """Converts the tensors of another format to parameters, and checks each of them.

    Args:
        tensors: {name in the other format: array}.
        mappings: The mappings of the format.
        shapes: {parameter path: shape} of the model.
        source: The file or folder, for error messages.
        tied: {name of an optional tied tensor: name of the tensor that it must equal}.

    Returns:
        {parameter path: float32 array}.

    Raises:
        ConfigError: Tensors are missing, unknown, of the wrong shape, not finite or not equal to
            the tensor they are tied to, or the format has no tensor for a parameter of a module
            that is read. The message lists them.
    """
    params: dict[str, np.ndarray] = {}
    modules = {mapping.path.split("/")[0] for mapping in mappings}
    read = {path: shape for path, shape in shapes.items() if path.split("/")[0] in modules}
    faults = _list_unmapped(mappings, read)
    for mapping in mappings:
        value = tensors.get(mapping.name)
        if fault := _describe_fault(value, _expected_shape(mapping, shapes[mapping.path])):
            faults.append(f"{mapping.name} {fault}")
            continue
        value = np.split(value, mapping.parts)[mapping.part]
        value = (value.T if mapping.transposed else value[mapping.offset :]).astype(np.float32)
        if mapping.layer is None:
            params[mapping.path] = np.ascontiguousarray(value)
        else:
            stacked = params.setdefault(mapping.path, np.empty(shapes[mapping.path], np.float32))
            stacked[mapping.layer] = value
    for name in sorted(set(tensors) - {mapping.name for mapping in mappings}):
        if tied.get(name) not in tensors:
            faults.append(f"{name} is not a tensor of this model")
        elif not np.array_equal(tensors[name], tensors[tied[name]]):
            faults.append(f"{name} is not the same as {tied[name]}, to which it is tied")
    if faults:
        raise config.ConfigError(
            f"{source}: the weights do not fit the model: {list_faults(faults)}"
        )
    return params


def _list_unmapped(mappings: list[TensorMapping], shapes: Shapes) -> list[str]:
    """Returns the parameters that are not mapped exactly once, in each layer of a stack."""
    mapped = collections.Counter((mapping.path, mapping.layer) for mapping in mappings)
    faults = []
    for path, shape in shapes.items():
        layers = range(shape[0]) if "/blocks/" in path else (None,)
        wrong = [layer for layer in layers if mapped[path, layer] != 1]
        if wrong:
            where = f" in layer {wrong[0]}" if len(wrong) < len(layers) else ""
            how = "several tensors" if mapped[path, wrong[0]] else "no tensor"
            faults.append(f"{path} has {how}{where}")
    return faults


def _expected_shape(mapping: TensorMapping, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the tensor of `mapping`, if that of the parameter is `shape`."""
    if mapping.layer is not None:
        shape = shape[1:]
    shape = shape[::-1] if mapping.transposed else shape
    return (shape[0] * mapping.parts + mapping.offset, *shape[1:])


def _describe_fault(value: np.ndarray | None, shape: tuple[int, ...]) -> str:
    """Returns what is wrong with a tensor that must have `shape`, in words; "" if nothing is."""
    if value is None:
        return "is missing"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)}, expected {shape}"
    if value.dtype.kind in "biu":  # its scale is elsewhere
        return f"holds {value.dtype}, no floating-point numbers"
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(value.astype(np.float32, copy=False)).all()
    return "" if is_finite else "holds numbers that are not finite"


def unpad_shapes(shapes: Shapes, rows: int) -> Shapes:
    """Returns the shapes with tables over the vocabulary that have `rows` rows."""
    return shapes | {path: (rows, *shapes[path][1:]) for path in VOCABULARY if path in shapes}


def compare_shapes(shapes: Shapes, expected: Shapes) -> list[str]:
    """Returns the differences of the shapes from those expected, in words."""
    return [
        f"{path} is {shapes.get(path, 'missing')}, expected {expected.get(path, 'no parameter')}"
        for path in sorted({*shapes, *expected})
        if shapes.get(path) != expected.get(path)
    ]


def list_faults(faults: list[str]) -> str:
    """Returns the first MOST_FAULTS faults as one text."""
    more = len(faults) - MOST_FAULTS
    return "; ".join(faults[:MOST_FAULTS]) + (f"; and {more} more" if more > 0 else "")
