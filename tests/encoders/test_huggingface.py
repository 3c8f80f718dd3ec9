"""Invariant 6: weights out to stock transformers. The same hidden states, gradients and optimiser step; tools run on an exported folder."""

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
from testing import ROOT, call, encoder_states, padded_ids, training, unflatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax import config, export  # noqa: E402
from maelm_jax.encoders import export as folders  # noqa: E402
from maelm_jax.encoders import families, family, layouts, mpnet, source, verify  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402


@pytest.fixture(scope="module")
def exported(workdirs, tmp_path_factory) -> dict[str, pathlib.Path]:
    """{kind: folder}, verified as they were written."""
    root = tmp_path_factory.mktemp("exported")
    for name in ("mpnet", "mpnet-mlm", "roberta", "roberta-mlm", "modernbert"):
        assert export.main([f"--workdir={workdirs[name]}", f"--output={root / name}", "--verify"]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    "name,stock",
    [
        ("mpnet", "MPNetModel"),
        ("mpnet-mlm", "MPNetForMaskedLM"),
        ("roberta", "RobertaModel"),
        ("roberta-mlm", "RobertaForMaskedLM"),
        ("modernbert", "ModernBertModel"),
    ],
)
def test_what_was_verified(exported, name, stock):
    assert json.loads((exported[name] / "config.json").read_text())["architectures"] == [stock]
    card = (exported[name] / "README.md").read_text()
    assert f"hidden states of {stock.replace('ForMaskedLM', 'Model')}" in card and (f"logits of {stock}" in card) == ("mlm" in name)


def test_an_encoder_that_goes_on_with_longer_rows_and_another_theta(exported, text, tmp_path):
    """Stock ModernBERT agrees at the new length, where the source had 160 positions."""
    longer = ["SEQUENCE_LENGTH=256", "Model.max_positions=256", "Model.rotary_theta=160000.0", f"Run.init_from={exported['modernbert']}"]
    flags = [f"--gin.{flag}" for flag in (*longer, "TRAIN_STEPS=1", "Run.rank_every=0")]
    done = call("train", *training(text, tmp_path / "run", "--gin_file=recipes/modern_layers.gin", *flags))
    assert done.status == 0 and "rotary_theta stays 160000.0" in done.stdout, done.stderr
    folder = tmp_path / "longer"
    assert export.main([f"--workdir={tmp_path / 'run'}", f"--output={folder}"]) == 0
    ids = np.random.default_rng(0).integers(5, 590, (2, 256)).astype(np.int32)
    stock = transformers.AutoModel.from_pretrained(folder).eval()
    assert (stock.config.max_position_embeddings, stock.config.rope_parameters["full_attention"]["rope_theta"]) == (256, 160_000.0)
    assert transformers.AutoTokenizer.from_pretrained(folder).model_max_length == 256
    with torch.no_grad():
        theirs = stock(input_ids=torch.tensor(ids).long()).last_hidden_state.numpy()
    ours = np.stack(maelm_jax.load_encoder(folder).hidden_states(ids.tolist()))
    assert np.abs(theirs - ours).max() < 1e-5 * np.abs(ours).max()


def test_the_stock_tokenizer(exported, vocabulary):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["mpnet"])
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.model_max_length, tokenizer.padding_side) == (599, 1, 48, "right")
    assert tokenizer("a", "b")["input_ids"] == [0, *vocabulary.encode("a"), 2, 2, *vocabulary.encode("b"), 2]
    assert "token_type_ids" not in tokenizer("a", "b")
    assert tokenizer.decode(tokenizer("hello there")["input_ids"], skip_special_tokens=True) == "hello there"


def test_gradients_and_an_adam_step(exported, workdirs, vocabulary):
    """A classification loss on the first state, through the whole encoder, in both; then one step of Adam."""
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
    optimiser = optax.adam(1e-3, b1=0.9, b2=0.98, eps=1e-6)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimiser.update(gradient, optimiser.init(params))
    stepped = {path: params[path] + np.asarray(updates[path]) for path in params}

    stock = transformers.AutoModel.from_pretrained(exported["mpnet"], add_pooling_layer=False).eval()
    their_optimiser = torch.optim.Adam(stock.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    attention = torch.tensor(ids != vocabulary.pad).long()
    logits = stock(input_ids=torch.tensor(ids).long(), attention_mask=attention).last_hidden_state[:, 0] @ torch.tensor(weight)
    their_loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    their_loss.backward()
    assert abs(their_loss.item() - float(value)) < 1e-5 * float(value)
    mappings = mpnet.MPNET.encoder_mappings(encoder.model, vocabulary.pad, "")
    expected = layouts.export_tensors({path: np.asarray(value) for path, value in gradient.items()}, mappings, vocabulary.size)
    for name, ours in expected.items():
        theirs = stock.get_parameter(name).grad.numpy()
        if name.endswith(".k.bias"):  # analytically zero
            assert max(np.abs(theirs).max(), np.abs(ours).max()) < 1e-6
        else:
            assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max(), name
    their_optimiser.step()
    for name, ours in layouts.export_tensors(stepped, mappings, vocabulary.size).items():
        theirs = stock.get_parameter(name).detach().numpy()
        # Adam divides by the gradient's size: where that is noise about 0, so is the step.
        settled = np.abs(expected[name]) > 1e-5 * np.abs(expected[name]).max()
        if not name.endswith(".k.bias"):
            assert settled.mean() > 0.05 and np.abs(theirs - ours)[settled].max() < 1e-5, name


@pytest.mark.parametrize("name", ["mpnet", "roberta", "modernbert"])
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
    head = family.find_head(params, {"labels": ["B-X", "I-X", "O"]})
    tuned = dataclasses.replace(encoder, params=params, head=head)
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
    with pytest.raises(config.RunError, match="verification failed: hidden states of MPNetModel differ by"):
        export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_step(exported, tmp_path):
    """transformers' own training loop moves the exported encoder and saves it; what it saves comes back in."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["mpnet"])
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported["mpnet"], num_labels=2)
    before = model.mpnet.encoder.layer[0].attention.attn.q.weight.detach().clone()
    rows = [{"labels": number % 2, **tokenizer(line, truncation=True)} for number, line in enumerate(verify.sample_texts()[:8])]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, data_collator=collate, processing_class=tokenizer)
    assert np.isfinite(trainer.train().training_loss)
    moved = (model.mpnet.encoder.layer[0].attention.attn.q.weight.detach() - before).abs().max().item()
    assert 1e-5 < moved < 1e-2
    trainer.save_model(str(tmp_path / "saved"))
    values = source.find_encoder(tmp_path / "saved").read_params()
    assert np.array_equal(values["encoder/blocks/attention/query/kernel"][0].T, model.mpnet.encoder.layer[0].attention.attn.q.weight.detach().numpy())


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
