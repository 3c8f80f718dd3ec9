"""modeling_mae_lm.py, which travels with an MAE-LM export: transformers predicts what we predict, and an encoder trained there comes back."""

import dataclasses
import logging
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import english, flatten, in_memory, model_of, objective_of, padded_ids

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

from safetensors.torch import load_file  # noqa: E402

import maelm_jax  # noqa: E402
from maelm_jax import config, export  # noqa: E402
from maelm_jax.encoders import decoder_file, opened  # noqa: E402
from maelm_jax.encoders.opened import load_model  # noqa: E402
from maelm_jax.measuring import pairs  # noqa: E402
from maelm_jax.model import maelm, model_inputs  # noqa: E402
from maelm_jax.model.kernels.gather import gather_rows  # noqa: E402

LENGTH = 40
SMALL = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 48, "max_positions": 48, "decoder_layers": 2}
ROBERTA = {"relative_buckets": "none"}
MODERN = ROBERTA | {"positions": "rotary", "normalization": "pre", "feed_forward_gate": True, "biases": False}
CHEAP = {"decoder_attention": "cross", "decoder_slots": "masked"}
# {name: (settings of the model, fields of Encoder)}.
VARIANTS = {
    "mpnet": ({}, {}),
    "mpnet with its own bias": ({"decoder_relative_bias": True, "decoder_width": 64}, {}),
    "mpnet, cheap": (CHEAP | {"decoder_relative_bias": True}, {}),
    "mpnet, renumbered": ({}, {"objective": objective_of(renumber=True)}),
    "bert": (ROBERTA | {"token_types": 2}, {}),
    "distilbert": (ROBERTA | {"family": "distilbert", "layer_norm_eps": 1e-12}, {}),
    "camembert": (ROBERTA | {"family": "camembert"}, {}),
    "xlm-roberta": (ROBERTA | {"family": "xlm-roberta"}, {}),
    "roberta, cross-attention added": (ROBERTA | {"decoder_attention": "self+cross", "decoder_slots": "masked"}, {}),
    "modernbert": (MODERN, {}),
    "modernbert, local and narrow": (MODERN | {"layers": 3, "local_attention": 8, "global_every": 2, "decoder_width": 16}, {}),
    "modernbert, gelu_new": (MODERN | {"hidden_act": "gelu_new"}, {}),
    "modernbert, cheap": (MODERN | CHEAP | {"rotary_theta": 500.0}, {}),
    "modernbert, renumbered and causal": (MODERN | {"decoder_causal": True}, {"objective": objective_of(renumber=True)}),
    "modernbert that reads masks": (MODERN | {"decoder_refills_mask": False}, {"objective": config.Objective.between(1.0)}),
}


@pytest.fixture(scope="module", autouse=True)
def modules_folder(tmp_path_factory):
    """Where transformers copies the code of folders to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def make_encoder(vocabulary, name: str) -> opened.OpenedModel:
    """An encoder of VARIANTS in which every parameter is random."""
    settings, fields = VARIANTS[name]
    model, draw = model_of(**SMALL | settings), np.random.default_rng(0)
    _, init = maelm.create(model, vocabulary.size, vocabulary.special)
    params = {}
    for path, leaf in flatten(jax.eval_shape(init, jax.random.key(0))).items():
        params[path] = (draw.normal(size=leaf.shape) * 0.15 + path.endswith("scale")).astype(np.float32)
    params |= {path: params[path][: vocabulary.size] for path in ("encoder/token_embedding", "head/bias")}
    return in_memory(params, model, vocabulary, LENGTH, **fields)


def load(folder: pathlib.Path):
    return transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()


def draw_masks(rows: list[list[int]], count: float) -> list[list[bool]]:
    """Masks `count` tokens of each row, or this share of them; not the ends."""
    draw, masks = np.random.default_rng(1), []
    for row in rows:
        number = int(count) if count >= 1 else max(1, round(count * len(row)))
        chosen = draw.choice(np.arange(1, len(row) - 1), number, replace=False)
        masks.append(np.isin(np.arange(len(row)), chosen).tolist())
    return masks


def compare(encoder: opened.OpenedModel, model, tolerance: float = 1e-4):
    """Compares logits at masks with those of a PyTorch model, on real text of several lengths in one padded batch."""
    texts = [text[20 * number : 20 * number + 50 + 15 * number] for number, text in enumerate(english()[:7])]
    rows = encoder.add_ends(encoder.vocabulary.encode_batch(texts))
    padded = torch.tensor(padded_ids(texts, encoder.vocabulary, encoder.length)).long()
    assert len({len(row) for row in rows}) > 3
    for count in (1, 3, 0.4):
        masks = draw_masks(rows, count)
        ours = encoder.masked_logits(rows, masks)
        ids = padded.clone()
        for number, mask in enumerate(masks):
            ids[number, : len(mask)][torch.tensor(mask)] = encoder.vocabulary.mask
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=(padded != encoder.vocabulary.pad).long()).logits
        assert logits.shape == (*ids.shape, encoder.vocabulary.size) and bool(logits.isfinite().all())
        for number, mask in enumerate(masks):
            theirs = logits[number, : len(mask)][torch.tensor(mask)].numpy()
            np.testing.assert_allclose(theirs, ours[number], atol=tolerance, rtol=0)
    assert max(float(np.abs(of_text).max()) for of_text in ours) > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_ours_at_any_share_of_masks(vocabulary, tmp_path, name):
    encoder = make_encoder(vocabulary, name)
    encoder.save_pretrained(tmp_path / "folder")
    compare(encoder, load(tmp_path / "folder"))
    again = maelm_jax.load_encoder(tmp_path / "folder")
    stated = {"family": again.model.encoder.family, "token_types": again.model.encoder.token_types}
    assert again.model.encoder == dataclasses.replace(encoder.model.encoder, **stated)
    assert (again.model.decoder, again.objective) == (encoder.model.decoder, encoder.objective)
    assert again.params.keys() == encoder.params.keys() | {path for path in again.params if "token_type" in path}


def test_logits_at_a_visible_token_are_those_of_the_decoder_there(vocabulary, tmp_path):
    encoder = make_encoder(vocabulary, "mpnet")
    encoder.save_pretrained(tmp_path / "folder")
    ids = padded_ids(["The value of the object is a number."], vocabulary, LENGTH)
    masked = np.zeros(ids.shape, bool)
    masked[0, 3] = True
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    budget = model_inputs.Budget(ids.shape[1], 1)
    inputs = model_inputs.split(*map(jnp.asarray, (ids, np.ones_like(ids), positions, masked, ~masked & masked)), budget, vocabulary.mask)
    graph, _ = maelm.create(encoder.model, vocabulary.size, vocabulary.special)
    model = maelm.apply(graph, jax.tree.map(jnp.asarray, encoder.read_prediction_tree()))
    encoded = model.encode(inputs)
    states = model._decode(gather_rows(encoded, inputs.encoder_index, inputs.encoder_slots), encoded, inputs)
    expected = np.asarray(model.head(states, model.encoder.token_embedding[...]).logits)[0, :, : vocabulary.size]
    with torch.no_grad():
        theirs = load(tmp_path / "folder")(torch.tensor(np.where(masked, vocabulary.mask, ids)).long()).logits[0]
    np.testing.assert_allclose(theirs.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["mpnet", "modernbert"])
def test_the_fill_mask_pipeline_gives_our_words(copy_export, tmp_path, name):
    folder = copy_export(name, tmp_path / "folder")
    texts = ["The value of the <mask> is used.", "A <mask> of an object, and an object has a <mask>."]
    pipeline = transformers.pipeline("fill-mask", model=str(folder), trust_remote_code=True, device="cpu")
    for text, masks in zip(texts, maelm_jax.load_encoder(folder).fill_mask(texts), strict=True):
        theirs = pipeline(text)
        for ours, expected in zip(masks, theirs if len(masks) > 1 else [theirs], strict=True):
            assert [one.token for one in ours] == [one["token_str"] for one in expected]
            np.testing.assert_allclose([one.probability for one in ours], [one["score"] for one in expected], rtol=1e-3)


SENTENCES = ["The value of the object is a number.", "A class.", "Lists may be compared, and the order is that of the items in the lists."]


@pytest.mark.parametrize("name", ["mpnet", "roberta-mlm"])
def test_sums_of_the_babylm_evaluation_are_ours(copy_export, tmp_path, name):
    """Its `sentence_zero_shot` with the backend `mlm` masks each token that stands for a piece of the text, and reads logits there."""
    folder = copy_export(name, tmp_path / "folder")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, revision=None).eval()
    tokenizer = transformers.AutoProcessor.from_pretrained(folder, padding_side="right", revision=None, trust_remote_code=True)
    for sentence, ours in zip(SENTENCES, pairs.log_likelihoods(load_model(folder), SENTENCES), strict=True):
        encoded = tokenizer(text=sentence, return_offsets_mapping=True)
        slots = [slot for slot, (_, end) in enumerate(encoded["offset_mapping"]) if end > 0]
        ids, mask = torch.tensor(encoded["input_ids"]).repeat(len(slots), 1), torch.tensor(encoded["attention_mask"]).repeat(len(slots), 1)
        targets = ids[0, slots]
        ids[range(len(slots)), slots] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask)["logits"][range(len(slots)), slots]
        assert logits.log_softmax(-1).gather(1, targets[:, None]).sum().item() == pytest.approx(ours, abs=1e-3)


@pytest.mark.parametrize("name", ["modernbert", "mpnet", "roberta-mlm"])
def test_sums_of_minicons_are_ours(copy_export, tmp_path, name):
    """`sequence_score`, given ids: minicons 0.3.39 asks a tokenizer for what transformers 5 has no more."""
    scorer = pytest.importorskip("minicons.scorer", reason="minicons is not installed: pip install -r requirements-torch.txt")
    folder = copy_export(name, tmp_path / "folder")
    model = scorer.MaskedLMScorer(str(folder), "cpu", trust_remote_code=True)
    theirs = model.sequence_score(model.tokenizer(SENTENCES, padding="longest"), reduction=lambda x: x.sum(0).item())
    np.testing.assert_allclose(theirs, pairs.log_likelihoods(load_model(folder), SENTENCES), atol=1e-3)


@pytest.mark.parametrize("name", ["mpnet", "roberta-mlm"])
def test_the_lines_of_a_card_predict(copy_export, tmp_path, monkeypatch, name):
    """In the folder above the export, as its reader would type them."""
    folder = copy_export(name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    lines, names = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[-1], {}
    exec(lines, names)
    assert type(names["model"]).__name__.endswith("ForMaskedLM")


def test_the_stock_class_reads_the_folder_as_before(copy_export, tmp_path, caplog):
    folder = copy_export("modernbert", tmp_path / "folder")
    model, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(model) is transformers.ModernBertModel and not any(info.values()) and not caplog.records


def train(model, ids: torch.Tensor, labels: torch.Tensor):
    """Takes a few steps, which change every parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["mpnet", "modernbert, cheap", "bert"])
def test_an_encoder_that_was_trained_elsewhere_comes_back(vocabulary, tmp_path, name):
    encoder = make_encoder(vocabulary, name)
    encoder.save_pretrained(tmp_path / "first")
    model, tokenizer = load(tmp_path / "first"), transformers.AutoTokenizer.from_pretrained(tmp_path / "first")
    ids = torch.tensor(padded_ids(english()[:4], vocabulary, LENGTH)).long()
    labels = torch.full_like(ids, -100)
    labels[:, 3:20:4] = ids[:, 3:20:4]
    ids[:, 3:20:4] = vocabulary.mask
    output = model(input_ids=ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, 3:20:4].flatten(0, 1), labels[:, 3:20:4].flatten())
    assert output.loss.item() == pytest.approx(expected.item())
    train(model.train(), ids, labels)
    model.eval().save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    saved = load_file(tmp_path / "tuned" / "model.safetensors")
    with pytest.raises(ValueError):  # as Trainer would
        model.load_state_dict(saved, strict=False)
    back = maelm_jax.load_encoder(tmp_path / "tuned")
    assert not any(np.array_equal(back.params[path], value) for path, value in encoder.params.items())
    compare(back, model)
    compare(back, load(tmp_path / "tuned"))
    stock, info = transformers.AutoModel.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not info["unexpected_keys"] and all("pooler" in key for key in info["missing_keys"])
    with torch.no_grad():
        states = stock.eval()(input_ids=ids).last_hidden_state
    np.testing.assert_allclose(states[0].numpy(), back.hidden_states(ids[:1].tolist())[0], atol=1e-4)


def test_new_tokens_of_a_tokenizer_are_predicted_too(vocabulary, tmp_path):
    make_encoder(vocabulary, "mpnet").save_pretrained(tmp_path)
    model = load(tmp_path)
    ids = torch.tensor(padded_ids(english()[:4], vocabulary, LENGTH)).long()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        count = before.shape[-1]
        model.resize_token_embeddings(count + 8)
        larger = model(input_ids=ids).logits
        assert larger.shape[-1] == count + 8 and torch.equal(model.head.bias[count:], torch.zeros(8))
        torch.testing.assert_close(larger[..., :count], before)
        model.save_pretrained(tmp_path / "larger")
        torch.testing.assert_close(load(tmp_path / "larger")(input_ids=ids).logits, larger)


def test_a_stock_class_that_saves_the_encoder_leaves_an_encoder(copy_export, tmp_path):
    """It writes no decoder, though its config.json still describes one."""
    folder = copy_export("modernbert", tmp_path / "folder")
    transformers.AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    back = maelm_jax.load_encoder(tmp_path / "saved")
    assert back.model.decoder is None
    with pytest.raises(config.ConfigError, match="head"):
        back.fill_mask(["A [MASK]."])


def test_an_export_of_an_export_warns_of_nothing(copy_export, tmp_path, caplog, monkeypatch):
    folder = copy_export("mpnet", tmp_path / "folder")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.utils.logging.set_verbosity_warning()
    assert export.main([f"--workdir={folder}", f"--output={tmp_path / 'again'}"]) == 0
    assert not caplog.text


# Wrong input.


def test_a_folder_without_the_decoder_is_named(copy_export, tmp_path):
    folder = copy_export("mpnet", tmp_path / "folder")
    (folder / decoder_file.FILE).unlink()
    with pytest.raises(Exception, match=r"decoder\.safetensors"):
        load(folder)
    with pytest.raises(Exception, match=r"decoder\.safetensors"):  # not a missing 'logits' of the stock encoder
        transformers.pipeline("fill-mask", model=str(folder), trust_remote_code=True, device="cpu")("A <mask>.")


def test_a_decoder_of_another_width_is_refused(vocabulary, tmp_path):
    for name, folder in (("mpnet", "one"), ("mpnet with its own bias", "other")):
        make_encoder(vocabulary, name).save_pretrained(tmp_path / folder)
    shutil.copy(tmp_path / "other" / decoder_file.FILE, tmp_path / "one")
    with pytest.raises(Exception, match=r"config.json.*decoder\.\S+ ") as error:
        transformers.pipeline("fill-mask", model=str(tmp_path / "one"), trust_remote_code=True, device="cpu")("A <mask>.")
    assert "\n" not in str(error.value)
    with pytest.raises(config.ConfigError, match="decoder.safetensors.*config.json.*decoder/"):
        opened.find_model(tmp_path / "one").read_params()


def test_an_older_transformers_says_so(copy_export, tmp_path, monkeypatch):
    folder = copy_export("mpnet", tmp_path / "folder")
    code = (folder / decoder_file.CODE).read_text()
    monkeypatch.setattr("transformers.__version__", "4.48.0")
    with pytest.raises(ImportError, match=r"4\.51.*4\.48\.0"):
        exec(compile(code, decoder_file.CODE, "exec"), {"__name__": "modeling_mae_lm"})
