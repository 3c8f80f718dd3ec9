"""Files of other programs: whatever they hold, reading them ends in success or in one ConfigError."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maelm_jax import config, export
from maelm_jax.encoders import roberta, source, weight_files

CASE = next((pathlib.Path(__file__).parents[1] / "data" / "reference").glob("*.npz"))
QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from([-1, 0, 1, 2, 2**24, 2**32 - 1, 2**63, 10**400, -(10**400), "t5", "\ud800"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def of_type(value) -> str:
    """A short name for a case; pytest numbers those of the same name."""
    return type(value).__name__


def outcome(path, read=lambda encoder_source: encoder_source.read(config.Model())) -> str:
    """ "read", or the one line that says why not."""
    try:
        read(source.find(str(path)))
    except config.ConfigError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 3000, line
        line.encode("utf-8")
        return line
    return "read"


@pytest.fixture(scope="module")
def folders(workdirs, tmp_path_factory) -> dict[str, pathlib.Path]:
    """{kind: an exported folder}."""
    root = tmp_path_factory.mktemp("folders")
    for kind, workdir, form in (
        ("mpnet", "mpnet", "huggingface"),
        ("roberta", "roberta-mlm", "huggingface"),
        ("ours", "mpnet", "pytorch"),
    ):
        argv = [f"--workdir={workdirs[workdir]}", f"--output={root / kind}", f"--format={form}"]
        export.main([*argv, "--no-verify"])
        assert outcome(root / kind) == "read"
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def folder(folders, tmp_path):
    """kind -> a copy of that folder."""
    return lambda kind: shutil.copytree(folders[kind], tmp_path / kind)


def dumped(content) -> bytes:
    """JSON, integers of any length and lone surrogates included."""
    return json.dumps(content).encode()


def mutated(data: st.DataObject, content: dict) -> dict:
    """`content` with one value of it, at any depth, replaced, added or taken away."""
    content, inner = json.loads(json.dumps(content)), None
    place = content
    while True:
        name = data.draw(st.sampled_from([*sorted(place), "new"]))
        inner = place.get(name)
        if not isinstance(inner, dict) or not inner or data.draw(st.booleans()):
            break
        place = inner
    if data.draw(st.integers(0, 4)) == 0:
        place.pop(name, None)
    else:
        place[name] = data.draw(JSON)
    return content


def read_mutations(path: pathlib.Path):
    """Reads the folder of a JSON file, again and again, with another value of the file changed."""
    original = json.loads(path.read_text())

    @QUICK
    @given(st.data())
    def check(data):
        path.write_bytes(dumped(mutated(data, original)))
        outcome(path.parent)

    check()


@pytest.mark.parametrize("kind", ["mpnet", "roberta", "ours"])
def test_any_config_json_ends_in_one_line_or_is_read(folder, kind):
    read_mutations(folder(kind) / "config.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"3",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"hidden_size": 1' + b"0" * 6000 + b"}",
        b'{"model_type": "\\ud800"}',
        b'{"model_type": ["mpnet"]}',
        b'{"format": "maelm_jax"}',
        b'{"format": "maelm_jax", "model": []}',
    ],
    ids=of_type,
)
def test_a_config_json_that_is_none_is_one_line(folder, content):
    path = folder("mpnet") / "config.json"
    path.write_bytes(content)
    assert outcome(path.parent) != "read"


@pytest.mark.parametrize(
    "kind,change,message",
    [
        ("mpnet", {"hidden_size": -32}, "hidden_size -32 (an integer from 1 to 16777216)"),
        ("mpnet", {"num_hidden_layers": -2}, "num_hidden_layers -2"),
        ("mpnet", {"num_attention_heads": 0}, "num_attention_heads 0"),
        ("mpnet", {"num_attention_heads": 5}, "width 32 is not divisible by heads 5"),
        ("mpnet", {"intermediate_size": "48"}, "intermediate_size '48'"),
        ("mpnet", {"max_position_embeddings": -1}, "max_position_embeddings -1"),
        ("mpnet", {"max_position_embeddings": 2}, "max_position_embeddings 2"),
        ("mpnet", {"layer_norm_eps": float("nan")}, "layer_norm_eps nan"),
        ("mpnet", {"layer_norm_eps": None}, "layer_norm_eps None"),
        ("mpnet", {"vocab_size": 2**32}, "vocab_size 4294967296"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id -1"),
        ("roberta", {"pad_token_id": 2**32 - 1}, "pad_token_id 4294967295"),
        ("ours", {"vocabulary_size": True}, "vocabulary_size is True"),
    ],
)
def test_a_size_that_no_model_has_is_named_in_one_line(folder, kind, change, message):
    path = folder(kind) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in outcome(path.parent)


@pytest.mark.parametrize(
    "name,value",
    [
        ("num_buckets", "t5"),
        ("num_buckets", [1]),
        ("layers", 10**9),
        ("width", -32),
        ("width", 32.5),
        ("layer_norm_eps", float("nan")),
        ("rotary_theta", 10**400),
        ("dropout", None),
    ],
)
def test_a_setting_of_our_folder_that_no_model_has_is_one_line(folder, name, value):
    path = folder("ours") / "config.json"
    content = json.loads(path.read_text())
    content["model"][name] = value
    path.write_text(json.dumps(content))
    assert "not an encoder that a run can start from" in outcome(path.parent)


def split(folder: pathlib.Path) -> pathlib.Path:
    """The index of a folder whose weights are in a file that it names."""
    weights = (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = dict.fromkeys(weight_files.Safetensors(weights), weights.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert outcome(folder) == "read"
    return index


def test_any_index_ends_in_one_line_or_is_read(folder):
    read_mutations(split(folder("mpnet")))


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        3,
        {"a": 3},
        {"a": None},
        {"a": ""},
        {"a": "../out"},
        {"a": "/etc/passwd"},
        {"a": "."},
        {"a": "absent.safetensors"},
        {"a": "config.json"},
        {"a": "\0"},
    ],
)
def test_a_weight_map_of_another_type_is_one_line(folder, weight_map):
    index = split(folder("mpnet"))
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert outcome(index.parent) != "read"


def test_any_safetensors_header_ends_in_one_line_or_is_read(folder):
    path = folder("mpnet") / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    original, body = json.loads(content[8 : 8 + size]), content[8 + size :]

    @QUICK
    @given(st.data())
    def check(data):
        header = mutated(data, original)
        name = data.draw(st.sampled_from(sorted(original)))
        if isinstance(header.get(name), dict) and data.draw(st.booleans()):
            types = ["F64", "F16", "BF16", "I32", "BOOL", "F8_E4M3", "C64", "X"]
            header[name]["dtype"] = data.draw(st.sampled_from(types))
        encoded = dumped(header)
        length = data.draw(st.sampled_from([len(encoded), len(encoded) - 1, 0, 2**63, 2**40]))
        path.write_bytes(length.to_bytes(8, "little") + encoded + body)
        outcome(path.parent)

    check()


@pytest.mark.parametrize(
    "value,message",
    [
        (np.zeros(32, np.int32), "holds int32"),
        (np.full(32, np.nan, np.float32), "not finite"),
        (np.full(32, 1e300), "not finite"),
        (np.float32(1), "has shape ()"),
        (np.zeros(32, bool), "holds bool"),
    ],
)
def test_a_weight_that_is_no_number_is_named(folder, value, message):
    import safetensors.numpy

    path = folder("mpnet") / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in weight_files.Safetensors(path).items()}
    safetensors.numpy.save_file(tensors | {"embeddings.LayerNorm.bias": np.asarray(value)}, path)
    line = outcome(path.parent)
    assert "embeddings.LayerNorm.bias" in line and message in line


@pytest.mark.parametrize("shape", [(1, 31), (32,), (), (0, 32), (1, 1)])
def test_a_token_type_table_of_another_shape_is_one_line(folder, shape):
    path = folder("roberta") / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in weight_files.Safetensors(path).items()}
    weight_files.write_safetensors(path, tensors | {"roberta." + roberta.TYPES: np.zeros(shape, np.float32)})
    assert "token_type_embeddings" in outcome(path.parent)


def test_any_npz_ends_in_one_line_or_is_read(tmp_path):
    original = CASE.read_bytes()
    path = tmp_path / "case.npz"

    @QUICK
    @given(st.data())
    def check(data):
        changed = bytearray(original)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(changed[: data.draw(st.sampled_from([len(changed), len(changed) // 2]))])
        outcome(path)

    check()


@pytest.mark.parametrize(
    "case",
    ["3", "[]", "{}", '{"heads": 2}', '{"heads": "x", "max_rel_pos": 128}', "{", "[" * 100_000],
)
def test_a_case_of_another_form_is_one_line(tmp_path, case):
    with np.load(CASE) as data:
        np.savez(
            tmp_path / "case.npz",
            **{name: data[name] for name in data.files if name != "config"},
            config=np.asarray(case),
        )
    assert outcome(tmp_path / "case.npz") != "read"
