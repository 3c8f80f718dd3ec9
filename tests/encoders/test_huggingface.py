"""Invariant 6: weights out to stock transformers. The same hidden states and gradients; tools run on an exported folder."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import ROOT, encoder_states, padded_ids, unflatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax import config, export  # noqa: E402
from maelm_jax.encoders import export as folders  # noqa: E402
from maelm_jax.encoders import families, family, layouts, mpnet, verify  # noqa: E402
from maelm_jax.encoders.results import Results  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402


@pytest.fixture(scope="module")
def exported(workdirs, tmp_path_factory) -> dict[str, pathlib.Path]:
    """{kind: folder}, verified as they were written."""
    root = tmp_path_factory.mktemp("exported")
    for name in ("mpnet", "roberta-mlm", "modernbert"):
        assert export.main([f"--workdir={workdirs[name]}", f"--output={root / name}", "--verify"]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name,stock", [("mpnet", "MPNetModel"), ("roberta-mlm", "RobertaForMaskedLM"), ("modernbert", "ModernBertModel")])
def test_what_was_verified(exported, name, stock):
    assert json.loads((exported[name] / "config.json").read_text())["architectures"] == [stock]
    card = (exported[name] / "README.md").read_text()
    assert f"hidden states of {stock.replace('ForMaskedLM', 'Model')}" in card and (f"logits of {stock}" in card) == ("mlm" in name)


def test_the_stock_tokenizer(exported, vocabulary):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["mpnet"])
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.model_max_length, tokenizer.padding_side) == (599, 1, 48, "right")
    assert tokenizer("a", "b")["input_ids"] == [0, *vocabulary.encode("a"), 2, 2, *vocabulary.encode("b"), 2]
    assert "token_type_ids" not in tokenizer("a", "b")
    assert tokenizer.decode(tokenizer("hello there")["input_ids"], skip_special_tokens=True) == "hello there"


def test_gradients(exported, workdirs, vocabulary):
    """Of a classification loss on the first state, through the whole encoder, in both."""
    draw = np.random.default_rng(0)
    ids = padded_ids(verify.sample_texts()[:12], vocabulary, 40)
    weight, labels = draw.normal(size=(32, 3)).astype(np.float32), draw.integers(0, 3, len(ids))
    encoder = maelm_jax.load_encoder(workdirs["mpnet"])
    params = {path: value for path, value in encoder.params.items() if path.startswith("encoder/")}
    graph = maelm.encoder_graph(encoder.model, vocabulary.size, vocabulary.pad)

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        segments = jnp.asarray((ids != vocabulary.pad).astype(np.int32))
        states = maelm.apply(graph, unflatten(params)["encoder"])(jnp.asarray(ids), positions, segments)
        return optax.softmax_cross_entropy_with_integer_labels(states[:, 0] @ weight, jnp.asarray(labels)).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jax.tree.map(jnp.asarray, params))
    stock = transformers.AutoModel.from_pretrained(exported["mpnet"], add_pooling_layer=False).eval()
    attention = torch.tensor(ids != vocabulary.pad).long()
    logits = stock(input_ids=torch.tensor(ids).long(), attention_mask=attention).last_hidden_state[:, 0] @ torch.tensor(weight)
    their_loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    their_loss.backward()
    assert abs(their_loss.item() - float(value)) < 1e-5 * float(value)
    mappings = mpnet.MPNET.encoder_mappings(encoder.model.encoder, vocabulary.pad, "")
    expected = layouts.export_tensors({path: np.asarray(value) for path, value in gradient.items()}, mappings, vocabulary.size)
    for name, ours in expected.items():
        theirs = stock.get_parameter(name).grad.numpy()
        if name.endswith(".k.bias"):  # analytically zero
            assert max(np.abs(theirs).max(), np.abs(ours).max()) < 1e-6
        else:
            assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max(), name


@pytest.mark.parametrize("name", ["mpnet", "modernbert"])
@pytest.mark.parametrize("task_class", family.HEADS)
def test_fine_tuned_heads(workdirs, tmp_path, name, task_class):
    """The stock heads compute ours, which `verify` computes by itself."""
    draw = np.random.default_rng(1)
    encoder = maelm_jax.load_encoder(workdirs[name])
    module = family.HEADS[task_class]
    outputs, is_modern, is_span = 2 if module == "span" else 3, name == "modernbert", module == "span"
    out = module if is_span and not is_modern else f"{module}/out"
    shapes = {f"{out}/kernel": (32, outputs), f"{out}/bias": (outputs,)}
    if is_modern:
        shapes |= {f"{module}/dense/kernel": (32, 32), f"{module}/norm/scale": (32,)}
    elif module == "classifier":
        shapes |= {"classifier/dense/kernel": (32, 32), "classifier/dense/bias": (32,)}
    params = {path: value for path, value in encoder.params.items() if path.startswith("encoder/")}
    params |= {path: draw.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    head = family.find_head(params, Results(labels=["B-X", "I-X", "O"]))
    tuned = encoder.replace(params=params, head=head)
    folders.write("huggingface", tmp_path, tuned)
    stock, info = getattr(transformers, f"AutoModel{task_class}").from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert is_span or stock.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
    reports = verify.verify("huggingface", tmp_path, tuned)
    assert reports[1].subject.endswith(task_class) and 0 < reports[1].largest_difference < 1e-4 and reports[1].largest_value > 0.1


def test_a_folder_that_computes_something_else_is_not_kept(workdirs, tmp_path, monkeypatch):
    swapped = {"attention/key": "attention.attn.q", "attention/query": "attention.attn.k"}
    wrong = dataclasses.replace(mpnet.MPNET, part_names=mpnet.MPNET.part_names | swapped)
    monkeypatch.setitem(families.FAMILIES, "mpnet", wrong)
    with pytest.raises(config.RunError, match="MPNetModel"):
        export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


def test_mlm_predicts_as_the_fill_mask_of_transformers(exported, workdirs):
    texts = ["The value of the <mask> is used.", "A <mask> of an object, and an object has a <mask>."]
    pipeline = transformers.pipeline("fill-mask", str(exported["roberta-mlm"]), device="cpu")
    for folder in (workdirs["roberta-mlm"], exported["roberta-mlm"]):
        for text, masks in zip(texts, maelm_jax.load_encoder(folder).fill_mask(texts, top=4), strict=True):
            theirs = pipeline(text, top_k=4)
            for ours, expected in zip(masks, theirs if len(masks) > 1 else [theirs], strict=True):
                np.testing.assert_allclose([one.probability for one in ours], [one["score"] for one in expected], rtol=1e-4)


def test_the_lines_of_a_card_run(exported, monkeypatch):
    """In the folder above the export, as its reader would type them."""
    monkeypatch.chdir(exported["mpnet"].parent)
    lines = re.findall(r"```python\n(.*?)```", (exported["mpnet"] / "README.md").read_text(), re.S)[0]
    names: dict = {}
    exec(lines, names)
    states = names["output"].last_hidden_state
    assert states.shape[0] == 1 and states.shape[2] == 32 and bool(states.isfinite().all())


def test_the_lines_of_the_readme(exported, workdirs, tmp_path):
    """Run as they stand, in a Python that has neither JAX nor this project: the hidden state is ours."""
    readme = (ROOT / "README.md").read_text()
    [block] = re.findall(r"<!-- run: torch -->\n```python\n(.*?)```", readme, re.S)
    (tmp_path / "exported").symlink_to(exported["mpnet"])
    absent = "import sys\nfor name in ('maelm_jax', 'jax', 'flax', 'tensorflow', 'seqio', 'sentencepiece'): sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-P", "-c", absent + block], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
    [sentence] = re.findall(r'"([^"]*\.)"', block)
    encoder = maelm_jax.load_encoder(workdirs["mpnet"])
    ids = padded_ids([sentence], encoder.vocabulary, 48)
    expected = encoder_states(encoder.tree(), encoder.model, encoder.vocabulary, ids)[0, 0, :4]
    # The tokenizer of transformers reads [MASK] in the sentence as text, as we do: its mask is <mask>.
    assert len(printed) == 4 and np.allclose(printed, expected, atol=1e-4)
