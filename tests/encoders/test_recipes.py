"""Folders of sentence-transformers: `encode` and `embed` apply what the folder says. The expected vectors are computed from the hidden states."""

import json
import pathlib

import numpy as np
import pytest

import maelm_jax
from maelm_jax import config, embed
from maelm_jax.encoders import weight_files

TEXTS = ["A short line", "", "The Encoder reads the visible tokens only; the part that is kept after pretraining. " * 2, "x"]
OLDER, NEWER = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.any."
DRAW = np.random.default_rng(0)
KERNEL, BIAS, RESIDUAL = (DRAW.normal(size=shape).astype(np.float32) for shape in ((8, 32), (8,), (8, 32)))
SCALE, SHIFT = (DRAW.normal(size=32).astype(np.float32) for _ in range(2))
ORDINARY = {"Transformer": {"max_seq_length": 40}, "Pooling": {"pooling_mode": "mean"}}


def write_json(path: pathlib.Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def make_folder(copy_export, tmp_path):
    """(settings of each module, weights of each module, package) -> an exported folder with these modules."""

    def make(modules: dict[str, dict], tensors: dict | None = None, package: str = NEWER) -> pathlib.Path:
        folder = copy_export("roberta", tmp_path / "folder")
        listed = []
        for number, (name, settings) in enumerate(modules.items()):
            path = f"{number}_{name}" if number else ""
            listed.append({"idx": number, "name": str(number), "path": path, "type": name if "." in name else package + name})
            write_json(folder / path / ("config.json" if number else "sentence_bert_config.json"), settings)
            if name in (tensors or {}):
                weight_files.write_safetensors(folder / path / "model.safetensors", tensors[name])
        write_json(folder / "modules.json", listed)
        return folder

    return make


def states_of(folder, texts=TEXTS, length=40) -> list[np.ndarray]:
    encoder = maelm_jax.load_encoder(folder)
    return encoder.hidden_states(encoder.add_ends(encoder.vocabulary.encode_batch(texts), length))


def means(states) -> np.ndarray:
    return np.stack([state.mean(0) for state in states])


def weighted_mean(state: np.ndarray) -> np.ndarray:
    weights = np.arange(1, len(state) + 1)[:, None]
    return (state * weights).sum(0) / weights.sum()


POOLED = {
    "cls": lambda state: state[0],
    "max": lambda state: state.max(0),
    "mean": lambda state: state.mean(0),
    "mean_sqrt_len_tokens": lambda state: state.sum(0) / len(state) ** 0.5,
    "weightedmean": weighted_mean,
    "lasttoken": lambda state: state[-1],
}


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        *[({"pooling_mode": mode}, [mode]) for mode in POOLED],
        ({"pooling_mode": ["lasttoken", "cls"]}, ["lasttoken", "cls"]),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["cls"]),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ["max", "mean"]),
        ({"pooling_mode_mean_tokens": False}, ["mean"]),
    ],
    ids=str,
)
def test_the_states_are_pooled_as_the_folder_says(make_folder, settings, modes):
    folder = make_folder(ORDINARY | {"Pooling": settings}, package=OLDER)
    expected = [np.concatenate([POOLED[mode](state) for mode in modes]) for state in states_of(folder)]
    assert np.abs(maelm_jax.load_encoder(folder).encode(TEXTS) - expected).max() < 1e-5


@pytest.mark.parametrize("package", [OLDER, NEWER])
@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ({}, np.tanh),
        ({"activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ({"activation_function": "torch.nn.modules.activation.ReLU"}, lambda x: np.maximum(x, 0)),
    ],
)
def test_the_modules_after_the_pooling_are_applied_in_order(make_folder, package, activation, function):
    dense = {"in_features": 32, "out_features": 8, "bias": True, "use_residual": True, **activation}
    tensors = {
        "LayerNorm": {"norm.weight": SCALE, "norm.bias": SHIFT},
        "Dense": {"linear.weight": KERNEL, "linear.bias": BIAS, "residual.weight": RESIDUAL},
    }
    modules = ORDINARY | {"LayerNorm": {"dimension": 32}, "Dropout": {"dropout": 0.5}, "Dense": dense, "Normalize": {}}
    folder = make_folder(modules, tensors, package)
    x = means(states_of(folder))
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * SCALE + SHIFT
    x = function(x @ KERNEL.T + BIAS) + x @ RESIDUAL.T
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    loaded = maelm_jax.load_encoder(folder)
    assert np.abs(loaded.encode(TEXTS) - x).max() < 1e-5
    loaded.save_pretrained(folder.parent / "again")
    assert np.array_equal(maelm_jax.load_encoder(folder.parent / "again").encode(TEXTS), loaded.encode(TEXTS))


@pytest.mark.parametrize("pools_prompt", [True, False])
def test_prompt_length_and_lower_case_are_applied_and_a_pooling_leaves_all_out(make_folder, tmp_path, pools_prompt, capsys):
    pooling = {"pooling_mode": "mean", "include_prompt": pools_prompt}
    folder = make_folder({"Transformer": {"max_seq_length": 20, "do_lower_case": True}, "Pooling": pooling, "Normalize": {}})
    stated = {"prompts": {"query": "which: ", "document": "This text: "}, "default_prompt_name": "document"}
    write_json(folder / "config_sentence_transformers.json", stated)
    loaded, unpooled = maelm_jax.load_encoder(folder), 0
    if not pools_prompt:
        unpooled = 1 + len(loaded.vocabulary.encode("this text: "))
    expected = means([state[unpooled:] for state in states_of(folder, [f"This text: {text}".lower() for text in TEXTS], 20)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(loaded.encode(TEXTS) - expected).max() < 1e-5
    plain = states_of(folder, length=loaded.length)
    assert np.abs(loaded.encode(TEXTS, pooling="mean") - means(plain)).max() < 1e-5
    assert np.abs(loaded.encode(TEXTS, pooling="first") - [state[0] for state in plain]).max() < 1e-5

    (tmp_path / "lines.txt").write_text("\n".join(TEXTS) + "\n")
    argv = [f"--workdir={folder}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'v.npy'}"]
    assert embed.main(argv) == 0 and "cut to 20 tokens" in capsys.readouterr().out
    assert np.array_equal(np.load(tmp_path / "v.npy"), loaded.encode(TEXTS))
    assert embed.main([*argv, "--pooling=mean"]) == 0
    assert np.array_equal(np.load(tmp_path / "v.npy"), loaded.encode(TEXTS, pooling="mean"))


def test_vectors_are_cut_as_the_folder_says(make_folder):
    folder = make_folder(ORDINARY)
    whole = maelm_jax.load_encoder(folder).encode(TEXTS)
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 5})
    loaded = maelm_jax.load_encoder(folder)
    assert np.array_equal(loaded.encode(TEXTS), whole[:, :5])
    assert np.linalg.norm(loaded.encode(TEXTS, normalize=True), axis=1) == pytest.approx(1, abs=1e-6)
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 0})
    with pytest.raises(config.ConfigError, match="truncate_dim"):
        maelm_jax.load_encoder(folder).encode(TEXTS)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (ORDINARY | {"WordWeights": {}}, "WordWeights"),
        (ORDINARY | {"somebodys.Normalize": {}}, "somebodys.Normalize"),
        ({"Transformer": {}, "CNN": {}, "Pooling": {}}, "CNN"),
        ({"Transformer": {}}, "Pooling"),
        (ORDINARY | {"Pooling": {"pooling_mode": "median"}}, "median"),
        (ORDINARY | {"Pooling": {"pooling_mode": 5}}, "1_Pooling"),
        (ORDINARY | {"Transformer": {"transformer_task": "fill-mask"}}, "fill-mask"),
        (ORDINARY | {"Normalize": {"module_input_name": "token_embeddings"}}, "Normalize"),
        (ORDINARY | {"Dense": {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.ELU"}}, "ELU"),
        (ORDINARY | {"Dense": {"in_features": 32, "out_features": 8}}, "2_Dense"),
        (ORDINARY | {"Dense": []}, "2_Dense"),
        (ORDINARY | {"Transformer": {"max_seq_length": -1}}, "max_seq_length"),
        (ORDINARY | {"Transformer": {"tokenizer_args": {"truncation_side": "left"}}}, "truncation_side"),
    ],
)
def test_a_module_that_is_not_computed_is_refused_by_name_unless_a_pooling_is_named(make_folder, modules, named):
    loaded = maelm_jax.load_encoder(make_folder(modules))
    with pytest.raises(config.ConfigError, match=named) as error:
        loaded.encode(TEXTS)
    assert "\n" not in str(error.value)
    assert loaded.encode(TEXTS, pooling="mean").shape == (4, 32)


def test_weights_of_another_shape_than_stated_are_refused(make_folder):
    tensors = {"Dense": {"linear.weight": KERNEL, "linear.bias": BIAS}}
    loaded = maelm_jax.load_encoder(make_folder(ORDINARY | {"Dense": {"in_features": 32, "out_features": 9}}, tensors))
    with pytest.raises(config.ConfigError, match=r"linear\.weight"):
        loaded.encode(TEXTS)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_an_encoder_in_a_folder_of_its_own_as_before_version_2(make_folder, name):
    folder = make_folder(ORDINARY | {"Pooling": {"pooling_mode_cls_token": True}}, package=OLDER)
    expected = [state[0] for state in states_of(folder)]
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in list(folder.iterdir()):
        if file.is_file() and file.name != "modules.json":
            file.rename(inner / (name if file.name == "sentence_bert_config.json" else file.name))
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [modules[0] | {"path": inner.name}, *modules[1:]])
    write_json(folder / "config.json", {"__version__": "0.3.8"})
    loaded = maelm_jax.load_encoder(folder)
    assert np.abs(loaded.encode(TEXTS) - expected).max() < 1e-5
    loaded.save_pretrained(folder.parent / "again")
    assert not (folder.parent / "again" / inner.name).exists(), "a folder as of today"
    assert np.array_equal(maelm_jax.load_encoder(folder.parent / "again").encode(TEXTS), loaded.encode(TEXTS))
