"""Stock encoders of every family: they come in as transformers computes them, and go out with every number they had."""

import json
import pathlib

import jax
import numpy as np
import pytest
from testing import STOCK_ENCODERS, call, stock_folder

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax import config, gin_files  # noqa: E402
from maelm_jax.analysis import runs  # noqa: E402
from maelm_jax.encoders import adoption, families, inference, source, verify, weight_files  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402

# Rows of the stock position table that no position uses. They go out as 0.
UNUSED_ROWS = {"mpnet": 2, "roberta": 2}


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in weight_files.open_folder(folder).items()}


@pytest.fixture(params=STOCK_ENCODERS)
def stock_name(request) -> str:
    return request.param


@pytest.fixture
def model_type(stock_name) -> str:
    return stock_name.removesuffix("-local")


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForMaskedLM"])
def test_a_stock_encoder_goes_out_as_it_came_in(stock_name, model_type, auto, tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", stock_name, auto, vocabulary)
    maelm_jax.load_encoder(folder).save_pretrained(tmp_path / "out")
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    unused = UNUSED_ROWS.get(model_type, 0)
    for name in [name for name in before if name.endswith("position_embeddings.weight")]:
        before[name][:unused] = 0
    not_kept = [name for name in before if name.startswith("pooler.") and model_type != "bert"]
    assert sorted(after) == sorted(set(before) - set(not_kept))
    for name, value in after.items():
        assert value.dtype == np.float32 and np.array_equal(value, before[name]), name
    architecture = json.loads((folder / "config.json").read_text())["architectures"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == architecture
    _, info = getattr(transformers, auto).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {key.split(".")[0] for key in info["missing_keys"]} <= {"pooler"}


def test_hidden_states_are_those_of_transformers(stock_name, tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    stock = transformers.AutoModel.from_pretrained(folder).eval()
    encoder = maelm_jax.load_encoder(folder)
    ids = inference.batch(verify.sample_lines()[:9], vocabulary, 40)
    real, types = ids != vocabulary.pad, np.zeros_like(ids)
    inputs = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(real).long()}
    if encoder.model.token_types > 1:
        types[:, 5:] = 1
        inputs["token_type_ids"] = torch.tensor(types).long()
    with torch.no_grad():
        theirs = stock(**inputs).last_hidden_state.numpy()
    graph = maelm.encoder_graph(encoder.model, vocabulary.size, vocabulary.pad)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    arrays = {"positions": positions, "segments": real.astype(np.int32), "ids": ids, "types": types}
    ours = jax.jit(lambda params, arrays: maelm.apply(graph, params)(**arrays))(encoder.tree(), arrays)
    assert np.abs(np.asarray(ours) - theirs)[real].max() < 1e-5 * np.abs(theirs).max()


def test_the_names_of_google_s_bert_files_are_read_as_transformers_reads_them(tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", "bert", "AutoModelForMaskedLM", vocabulary)
    expected = maelm_jax.load_encoder(folder).params
    older = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")  # noqa: E731
    tensors = {older(name): value for name, value in tensors_of(folder).items()}
    path = folder / "model.safetensors"
    for form in ("safetensors", "bin"):
        if form == "safetensors":
            weight_files.write_safetensors(path, tensors)
        else:
            path.unlink()
            torch.save({name: torch.tensor(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
        params = maelm_jax.load_encoder(folder).params
        assert params.keys() == expected.keys() and all(np.array_equal(params[name], expected[name]) for name in expected)
        norm = transformers.AutoModel.from_pretrained(folder).encoder.layer[1].output.LayerNorm
        assert np.array_equal(norm.weight.detach().numpy(), params["encoder/blocks/feed_forward_norm/scale"][1])
        assert np.array_equal(norm.bias.detach().numpy(), params["encoder/blocks/feed_forward_norm/bias"][1])


def test_sentence_transformers_embeds_with_an_export_as_we_do(stock_name, tmp_path, vocabulary):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    encoder = maelm_jax.load_encoder(stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary))
    encoder.save_pretrained(tmp_path / "out")
    lines = [line for line in verify.sample_lines()[:30] if "<" not in line]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(lines)
    assert np.abs(theirs - encoder.encode(lines)).max() < 1e-5 * np.abs(theirs).max()


def test_the_tokenizer_reads_pairs_as_the_family_does(stock_name, model_type, tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    tokenizer, family = transformers.AutoTokenizer.from_pretrained(folder), families.FAMILIES[model_type]
    encoded, (a, b) = tokenizer("first", "and second"), vocabulary.encode_batch(["first", "and second"])
    assert encoded["input_ids"] == [vocabulary.bos, *a, *[vocabulary.eos] * family.pair.separators, *b, vocabulary.eos]
    if family.pair.has_types:
        assert encoded["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    else:
        assert "token_type_ids" not in encoded


def test_a_fine_tuned_folder_gives_its_encoder(stock_name, tmp_path, vocabulary, capsys):
    folder = stock_folder(tmp_path / "stock", stock_name, "AutoModelForSequenceClassification", vocabulary)
    params = source.find(str(folder)).read(config.Model())
    assert {path.split("/")[0] for path in params} <= {"encoder", "pooler"}
    assert "ForSequenceClassification is ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "deberta"}, "model_type 'deberta' (only 'bert', 'distilbert', 'electra', 'modernbert', 'mpnet', 'roberta')"),
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' (only 'gelu')"),
        ({"is_decoder": True}, "is_decoder True (only False)"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' (only 'absolute')"),
    ],
)
def test_an_encoder_of_another_function_is_refused(tmp_path, vocabulary, change, message):
    folder = stock_folder(tmp_path / "stock", "bert", "AutoModel", vocabulary)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(config.ConfigError) as error:
        source.find(str(folder))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_older_spelling_of_global_and_local_layers_is_read_as_transformers_reads_it(tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", "modernbert-local", "AutoModel", vocabulary)
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


def test_local_attention_is_measured_and_adopted(tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", "modernbert-local", "AutoModel", vocabulary)
    [run] = runs.open_encoders([str(folder)], "some.txt")
    assert run.experiment.model.local_attention == 8
    encoder_source = source.find(str(folder))
    adopted = adoption.adopt(gin_files.load(["tiny.gin"], ["SEQUENCE_LENGTH=32"]), encoder_source)
    assert adopted.experiment.model.global_every == 3


def test_an_encoder_of_other_layers_replaces_those_of_the_config(tmp_path, vocabulary):
    folder = stock_folder(tmp_path / "stock", "bert", "AutoModel", vocabulary)
    model = adoption.adopt(gin_files.load(["modern_tiny.gin"], ["SEQUENCE_LENGTH=32"]), source.find(str(folder))).experiment.model
    assert model.has_bert_blocks and model.token_types == 2


@pytest.mark.slow
def test_mae_lm_trains_from_a_stock_folder(stock_name, model_type, tmp_path, vocabulary):
    """Two steps with a tiny learning rate: the run adopts the family, and its encoder is still the stock one, which it exports as."""
    from pydoc_data import topics

    folder = stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(topics.topics[name].split()) for name in sorted(topics.topics)[:40]))
    settings = {
        "Run.init_from": folder,
        "TEXT_FILES": tmp_path / "text.txt",
        "TRAIN_STEPS": 2,
        "BATCH_SIZE": 8,
        "SEQUENCE_LENGTH": 32,
        "Corpus.rows_dir": tmp_path / "rows",
        "Corpus.heldout_fraction": 0.1,
        "Corpus.processes": 1,
        "Run.eval_rows": 8,
        "Optimizer.learning_rate": 1e-6,
        "Optimizer.muon_learning_rate": 1e-6,
        "Run.rank_every": 0,
    }
    argv = ["--gin_file=tiny.gin", f"--workdir={tmp_path / 'run'}", *(f"--gin.{name}={value}" for name, value in settings.items())]
    done = call("train", *argv)
    assert done.status == 0, done.stderr
    assert f"Model.family: None -> '{model_type}'" in done.stdout and "with fresh weights: decoder and head" in done.stdout
    run, stock = maelm_jax.load_encoder(tmp_path / "run"), maelm_jax.load_encoder(folder)
    for path, value in stock.params.items():
        if path.startswith("encoder/"):
            assert np.abs(run.params[path] - value).max() < 1e-4, path
    run.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
