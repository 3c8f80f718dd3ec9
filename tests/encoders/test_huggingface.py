"""Invariant 6: weights out to stock transformers. The same hidden states, gradients and optimiser step; tools run on an exported folder."""

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
from testing import unflatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config, embed, export  # noqa: E402
from maelm_jax.encoders import (  # noqa: E402
    fine_tuned_head,
    huggingface,
    inference,
    layouts,
    mpnet,
    source,
    tokenizer_files,
    verify,
)
from maelm_jax.encoders.layouts import Weights  # noqa: E402
from maelm_jax.encoders.mpnet import MPNET  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]


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
def test_hidden_states(exported, name, stock):
    reports = json.loads((exported[name] / "verification.json").read_text())
    assert len(reports) == (2 if "mlm" in name else 1)
    assert all(0 < report["largest_difference"] < 1e-5 for report in reports), reports
    assert json.loads((exported[name] / "config.json").read_text())["architectures"] == [stock]
    assert "differences: hidden states of" in (exported[name] / "README.md").read_text()


@pytest.mark.parametrize("name", ["mpnet", "roberta"])
def test_every_tensor_is_known_to_the_stock_class(exported, name):
    _, info = transformers.AutoModel.from_pretrained(exported[name], output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {key.split(".")[0] for key in info["missing_keys"]} == {"pooler"}
    _, info = transformers.AutoModelForMaskedLM.from_pretrained(exported[f"{name}-mlm"], output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"] and not info["mismatched_keys"]


def test_the_stock_tokenizer(exported, vocabulary):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["mpnet"])
    for line in tokenizer_files.ODD_LINES:
        assert tokenizer(line, split_special_tokens=True)["input_ids"] == [vocabulary.bos, *vocabulary.encode(line), vocabulary.eos], ascii(line)
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.model_max_length, tokenizer.padding_side) == (599, 1, 48, "right")
    assert tokenizer("a", "b")["input_ids"] == [0, *vocabulary.encode("a"), 2, 2, *vocabulary.encode("b"), 2]
    assert "token_type_ids" not in tokenizer("a", "b")
    assert tokenizer.decode(tokenizer("hello there")["input_ids"], skip_special_tokens=True) == "hello there"
    assert 599 in tokenizer("a <mask> b")["input_ids"], "what the card says"


def test_gradients_and_an_adam_step(exported, workdirs, vocabulary):
    """A classification loss on the first state, through the whole encoder, in both; then one step of Adam."""
    draw = np.random.default_rng(0)
    ids = inference.batch(verify.sample_lines()[:12], vocabulary, 40)
    weight, labels = draw.normal(size=(32, 3)).astype(np.float32), draw.integers(0, 3, len(ids))
    encoder_source = source.find(str(workdirs["mpnet"]))
    model = encoder_source.model(config.Model(dropout=0.0, attention_dropout=0.0))
    params = {path: value for path, value in encoder_source.read(model).items() if path.startswith("encoder/")}
    graph = maelm.encoder_graph(model, vocabulary.size, vocabulary.pad)

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        encoder = maelm.apply(graph, unflatten(params)["encoder"])
        states = encoder(jnp.asarray(ids), positions, jnp.asarray((ids != vocabulary.pad).astype(np.int32)))
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
    mappings = mpnet.MPNET.encoder_mappings(model, vocabulary.pad, "")
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


@pytest.mark.parametrize("name", ["mpnet", "roberta"])
def test_fine_tuned_heads(workdirs, vocabulary, tmp_path, name):
    """The stock heads compute ours: first state -> linear -> tanh -> linear, and one linear map to start and end."""
    draw = np.random.default_rng(1)
    encoder_source = source.find(str(workdirs[name]))
    model = encoder_source.model(config.Model(dropout=0.1))
    params = {path: value for path, value in encoder_source.read(model).items() if path.startswith("encoder/")}
    ids = inference.batch(verify.sample_lines()[:9], vocabulary, 40)
    states = inference.hidden_states(unflatten(params), model, vocabulary, ids)
    batch = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(ids != vocabulary.pad).long()}
    array = lambda *shape: draw.normal(size=shape).astype(np.float32)  # noqa: E731
    weights = lambda params: Weights(params, model, vocabulary.size, vocabulary.special)  # noqa: E731

    classifier = {"classifier/dense/kernel": array(32, 32), "classifier/dense/bias": array(32), "classifier/out/kernel": array(32, 3)}
    classifier |= {"classifier/out/bias": array(3)}
    tuned = fine_tuned_head.FineTunedHead.of(params | classifier, {"labels": ["no", "maybe", "yes"]})
    tokenizer_files.write(tmp_path, vocabulary, 48, MPNET.pair)
    huggingface.write(tmp_path, weights(params | classifier), tuned)
    stock, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and stock.config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    hidden = np.tanh(states[:, 0] @ classifier["classifier/dense/kernel"] + classifier["classifier/dense/bias"])
    expected = hidden @ classifier["classifier/out/kernel"] + classifier["classifier/out/bias"]
    with torch.no_grad():
        assert np.abs(stock.eval()(**batch).logits.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    reports = verify.huggingface(tmp_path, unflatten(params | classifier), model, vocabulary)
    assert reports[1]["of"].endswith("ForSequenceClassification")

    span = {"span/kernel": array(32, 2), "span/bias": array(2)}
    huggingface.write(tmp_path, weights(params | span), fine_tuned_head.FineTunedHead.of(params | span, {}))
    stock, info = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        outputs = stock.eval()(**batch)
    expected = states @ span["span/kernel"] + span["span/bias"]
    real = ids != vocabulary.pad
    for side, logits in enumerate((outputs.start_logits, outputs.end_logits)):
        assert np.abs(logits.numpy() - expected[:, :, side])[real].max() < 1e-5 * np.abs(expected).max()
    assert verify.huggingface(tmp_path, unflatten(params | span), model, vocabulary)[1]["of"].endswith("ForQuestionAnswering")

    token = {"token/out/kernel": array(32, 3), "token/out/bias": array(3)}
    head = fine_tuned_head.FineTunedHead.of(params | token, {"labels": ["B-X", "I-X", "O"]})
    huggingface.write(tmp_path, weights(params | token), head)
    stock, info = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and stock.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
    with torch.no_grad():
        logits = stock.eval()(**batch).logits.numpy()
    expected = states @ token["token/out/kernel"] + token["token/out/bias"]
    assert np.abs(logits - expected)[real].max() < 1e-5 * np.abs(expected).max()
    assert verify.huggingface(tmp_path, unflatten(params | token), model, vocabulary)[1]["of"].endswith("ForTokenClassification")


def test_a_folder_that_computes_something_else_is_not_kept(workdirs, tmp_path, monkeypatch):
    swapped = {"attention/key": "attention.attn.q", "attention/query": "attention.attn.k"}
    monkeypatch.setattr(mpnet.Mpnet, "part_names", mpnet.Mpnet.part_names | swapped)
    with pytest.raises(config.RunError, match="verification failed: hidden states of MPNetModel differ by"):
        export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"])
    assert list(tmp_path.iterdir()) == []


def test_stock_folders_come_in_as_transformers_computes_them(workdirs, tmp_path, vocabulary):
    """Random stock models with other epsilons, a token-type row that is not 0: our encoder on their weights has their hidden states."""
    ids = inference.batch(verify.sample_lines()[:9], vocabulary, 40)
    batch = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(ids != vocabulary.pad).long()}
    shared = {
        "vocab_size": 600,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    models = {
        "roberta": transformers.RobertaModel(
            transformers.RobertaConfig(**shared, max_position_embeddings=50, layer_norm_eps=1e-3, type_vocab_size=2)
        ),
        "mpnet": transformers.MPNetModel(transformers.MPNetConfig(**shared, max_position_embeddings=50, layer_norm_eps=1e-12)),
    }
    for name, stock in models.items():
        folder = tmp_path / name
        stock.eval().save_pretrained(folder)
        tokenizer_files.write(folder, vocabulary, 48, MPNET.pair)
        for older in (False, True):
            if older:  # as folders were saved before there was safetensors
                (folder / "model.safetensors").unlink()
                torch.save(stock.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
            encoder_source = source.find(str(folder))
            model = encoder_source.model(config.Model(decoder_layers=1))
            ours = inference.hidden_states(unflatten(encoder_source.read(model)), model, vocabulary, ids)
            with torch.no_grad():
                theirs = stock(**batch).last_hidden_state.numpy()
            assert np.abs(ours - theirs)[ids != vocabulary.pad].max() < 1e-5


LINES = ["a short line", "", "The encoder reads the visible tokens only; the part that is kept after pretraining. " * 9, "é 🙂"]


def test_sentence_transformers(exported, workdirs, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    embed.main([f"--workdir={workdirs['mpnet']}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'v.npy'}"])
    theirs = sentence_transformers.SentenceTransformer(str(exported["mpnet"]), device="cpu").encode(LINES)
    assert np.abs(theirs - np.load(tmp_path / "v.npy")).max() < 1e-5


def test_a_trainer_step(exported, tmp_path):
    """transformers' own training loop moves the exported encoder and saves it; what it saves comes back in."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["mpnet"])
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported["mpnet"], num_labels=2)
    before = model.mpnet.encoder.layer[0].attention.attn.q.weight.detach().clone()
    rows = [{"labels": number % 2, **tokenizer(line, truncation=True)} for number, line in enumerate(verify.sample_lines()[:8])]
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
    values = source.find(str(tmp_path / "saved")).read(config.Model())
    assert np.array_equal(values["encoder/blocks/attention/query/kernel"][0].T, model.mpnet.encoder.layer[0].attention.attn.q.weight.detach().numpy())


def test_the_four_lines_of_the_readme(exported, tmp_path):
    """Run as they stand, in a Python that has neither JAX nor this project: the hidden state is the one that verification printed."""
    readme = (ROOT / "README.md").read_text()
    [block] = re.findall(r"<!-- run: torch -->\n```python\n(.*?)```", readme, re.S)
    assert len(block.strip().splitlines()) == 4 and '"exported"' in block
    (tmp_path / "exported").symlink_to(exported["mpnet"])
    absent = "import sys\nfor name in ('maelm_jax', 'jax', 'flax', 'tensorflow', 'seqio', 'sentencepiece'): sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-P", "-c", absent + block], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+", done.stdout)]
    [report] = json.loads((exported["mpnet"] / "verification.json").read_text())
    assert report["sentence"] in block
    assert len(printed) == 4 and np.allclose(printed, report["hidden_state_of_<s>"], atol=1e-4)
