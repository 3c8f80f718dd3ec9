"""Weights in: every encoder_source that a run can start from gives the parameters it holds, or says what does not fit. No PyTorch needed."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from testing import call

from maelm_jax import config, export, gin_files
from maelm_jax.data import vocabulary_training
from maelm_jax.encoders import adoption, export_folder, export_formats, source, weight_files
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.model import maelm

ROOT = pathlib.Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "reference"


def values_of(workdir, step=None):
    return source.find(str(workdir), step).read(config.Model())


def write(workdir, output, format="huggingface"):
    assert export.main([f"--workdir={workdir}", f"--output={output}", f"--format={format}", "--no-verify"]) == 0
    return output


def rewrite(folder, **changes):
    """Rewrites a folder's tensors: name -> function of the old array, or an array; None takes it away."""
    path = folder / "model.safetensors"
    tensors = {name: np.array(value) for name, value in weight_files.Safetensors(path).items()}
    for name, change in changes.items():
        tensors[name] = change(tensors[name]) if callable(change) else change
    weight_files.write_safetensors(path, {name: value.astype(np.float32) for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize(
    "name,format",
    [
        ("mpnet", "huggingface"),
        ("mpnet-mlm", "huggingface"),
        ("roberta-mlm", "huggingface"),
        ("reference", "pytorch"),
        ("mpnet", "pytorch"),
    ],
)
def test_export_import_export_is_byte_identical(workdirs, vocabulary, tmp_path, name, format):
    first = write(workdirs[name], tmp_path / "first", format)
    encoder_source = source.find(str(first))
    experiment = gin_files.load([str(workdirs[name] / "config.gin")])
    values = encoder_source.read(experiment.model)
    original = values_of(workdirs[name])
    if name == "roberta-mlm":  # a run without token types has a row of zeros in the stock model
        assert not values["encoder/token_type_embedding"].any()
        original["encoder/token_type_embedding"] = values["encoder/token_type_embedding"]
    modules = {path.split("/")[0] for path in values}
    assert modules == ({"encoder"} if (name, format) == ("mpnet", "huggingface") else {path.split("/")[0] for path in original})
    for path, value in values.items():
        assert np.array_equal(value, original[path]), path
    assert (
        encoder_source.model(
            config.Model(heads=experiment.model.heads, max_distance=experiment.model.max_distance, decoder_relative_bias=False)
        ).layers
        == 2
    )
    with export_folder.written(tmp_path / "second") as folder:
        model = dataclasses.replace(experiment.model, **encoder_source.settings)
        model = dataclasses.replace(model, decoder_layers=experiment.model.decoder_layers)
        fraction = encoder_source.mask_fraction
        encoder = Encoder(values, model, vocabulary, experiment.corpus.sequence_length, mask_fraction=fraction)
        export_formats.write(format, folder, encoder)
    files = sorted(path.name for path in (tmp_path / "second").iterdir())
    assert "README.md" not in files and len(files) >= 2
    for file in set(files) - {export_folder.MARKER}:
        assert (first / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_encoder_without_decoder_starts_a_run_with_any_decoder():
    settings = gin_files.load(["continue.gin", "ablations/decoder_masked_only.gin"], ["TEXT_FILES='*.txt'"]).model
    values = source.find(str(ROOT / "pretrained")).read(dataclasses.replace(settings, decoder_width=512))
    assert {path.split("/")[0] for path in values} == {"encoder"}


def test_steps(workdirs):
    newest, older = values_of(workdirs["mpnet"]), values_of(workdirs["mpnet"], 6)
    assert source.find(str(workdirs["mpnet"])).step == 12
    assert not np.array_equal(newest["encoder/norm/scale"], older["encoder/norm/scale"])
    assert len(newest["encoder/token_embedding"]) == 600, "rows of padding are not given away"


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_cases_of_the_reference(path):
    data = np.load(path)
    case = json.loads(str(data["config"]))
    encoder_source = source.find(str(path))
    expected = {
        "layers": case["layers"],
        "width": case["dim"],
        "heads": case["heads"],
        "num_buckets": case["rel_pos_bins"],
        "relative_buckets": "reference",
    }
    assert expected.items() <= encoder_source.settings.items() and encoder_source.settings["max_distance"] == case["max_rel_pos"]
    up = encoder_source.read(config.Model())["encoder/blocks/feed_forward/up/kernel"][1]
    assert np.array_equal(up, data["weights/encoder.sentence_encoder.layers.1.fc1.weight"].T)


def test_a_stock_folder_that_does_not_fit_is_listed(workdirs, tmp_path):
    folder = write(workdirs["roberta-mlm"], tmp_path / "out")
    rewrite(
        folder,
        **{
            "roberta.encoder.layer.0.output.dense.bias": None,
            "roberta.extra": np.ones(3),
            "roberta.embeddings.LayerNorm.weight": np.ones(5),
            "lm_head.decoder.weight": np.ones((600, 32)),
            "roberta.pooler.dense.bias": np.ones(32),
        },
    )
    with pytest.raises(config.ConfigError) as error:
        values_of(folder)
    for what in (
        "output.dense.bias is missing",
        "roberta.extra is not a tensor",
        "LayerNorm.weight has shape (5,)",
        "lm_head.decoder.weight is not the same",
    ):
        assert what in str(error.value)
    assert "pooler" not in str(error.value)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"model_type": "xlm"}, "model_type 'xlm'"),
        ({"relative_attention_num_buckets": 64}, "64"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
    ],
)
def test_an_encoder_of_another_function_is_refused(workdirs, tmp_path, change, message):
    folder = write(workdirs["mpnet"], tmp_path / "out")
    content = json.loads((folder / "config.json").read_text())
    with_head = {"architectures": ["MPNetForMaskedLM"]}  # without a head, nothing is tied
    (folder / "config.json").write_text(json.dumps(content | with_head | change))
    with pytest.raises(config.ConfigError, match=message):
        source.find(str(folder))


def test_what_is_nothing_of_the_kind_is_one_line(tmp_path):
    with pytest.raises(config.ConfigError, match="no such file"):
        source.find(str(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(config.ConfigError, match="it holds notes.txt"):
        source.find(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    with pytest.raises(config.ConfigError, match="no tokenizer.json"):
        source.find(str(tmp_path))


def stock_roberta(folder, workdir) -> pathlib.Path:
    """A folder as transformers users have them: another epsilon, a token-type row, a pooler, a tokenizer.json alone, a table longer than it."""
    write(workdir, folder)
    (folder / "sentencepiece.model").unlink()
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"layer_norm_eps": 1e-6, "vocab_size": 608}))
    lengthen = lambda table: np.concatenate([table, np.ones((8, *table.shape[1:]))])  # noqa: E731
    rewrite(
        folder,
        **{
            "roberta.embeddings.token_type_embeddings.weight": np.linspace(-1, 1, 32)[None],
            "roberta.pooler.dense.bias": np.ones(32),
            "roberta.embeddings.word_embeddings.weight": lengthen,
            "lm_head.bias": lengthen,
        },
    )
    return folder


def test_a_stock_folder_is_taken_over(workdirs, tmp_path):
    folder = stock_roberta(tmp_path / "stock", workdirs["roberta-mlm"])
    original = values_of(workdirs["roberta-mlm"])
    encoder_source = source.find(str(folder))
    experiment = gin_files.load(["tiny.gin"])
    adopted, changes = adoption.adopt(experiment, encoder_source)
    assert adopted.model.layer_norm_eps == 1e-6 and adopted.model.relative_buckets == "none" and adopted.model.max_positions == 160
    assert adopted.model.decoder_layers == experiment.model.decoder_layers and adopted.vocabulary.file == str(folder)
    assert any("layer_norm_eps: 1e-05 -> 1e-06" in line for line in changes)
    assert adopted.model.decoder_relative_bias, "so that the fresh decoder begins at neighbours, which RoBERTa's positions do not tell it"
    values = encoder_source.read(adopted.model)
    assert np.array_equal(values["encoder/position_embedding"], original["encoder/position_embedding"])
    assert np.array_equal(values["encoder/token_type_embedding"], np.linspace(-1, 1, 32, dtype=np.float32)[None])
    assert np.array_equal(values["encoder/token_embedding"], original["encoder/token_embedding"]), "cut to the tokenizer's ids"

    _, init = maelm.create(adopted.model, 600, config.SpecialIds(0, 1, 2, 3, 599))
    params, fresh, unused = adoption.load_params(values, jax.jit(init)(jax.random.key(0)), 600, str(folder))
    assert (fresh, unused) == (["decoder"], [])
    assert np.array_equal(np.asarray(params["encoder"]["token_embedding"])[:600], values["encoder/token_embedding"])
    with pytest.raises(config.ConfigError, match=r"encoder/token_embedding has shape \(600, 32\), expected \(500, 32\)"):
        adoption.load_params(values, params, 500, "x")


@pytest.mark.parametrize("form", ["safetensors", "parts", "bin"])
def test_norms_with_the_names_of_google_s_bert_files_are_read(workdirs, tmp_path, monkeypatch, form):
    folder = write(workdirs["roberta-mlm"], tmp_path / "out")
    expected, path = values_of(folder), folder / "model.safetensors"
    older = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")  # noqa: E731
    tensors = {older(name): np.array(value) for name, value in weight_files.Safetensors(path).items()}
    assert sum(name.endswith(("LayerNorm.gamma", "LayerNorm.beta")) for name in tensors) == 10
    weight_files.write_safetensors(path, tensors)
    if form == "parts":
        path.rename(folder / "part.safetensors")
        (folder / f"{weight_files.WEIGHTS}{weight_files.INDEX}").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))
    if form == "bin":
        path.rename(folder / weight_files.PYTORCH_WEIGHTS)
        monkeypatch.setattr(weight_files.torch_checkpoint, "read", lambda _: tensors)
    values = values_of(folder)
    assert values.keys() == expected.keys() and all(np.array_equal(values[name], expected[name]) for name in expected)


def test_a_norm_under_both_names_is_refused(workdirs, tmp_path):
    folder = write(workdirs["roberta-mlm"], tmp_path / "out")
    rewrite(folder, **{"roberta.embeddings.LayerNorm.gamma": np.ones(32)})
    with pytest.raises(config.ConfigError, match="roberta.embeddings.LayerNorm.gamma is not a tensor of this model"):
        values_of(folder)


def test_a_step_of_what_is_no_workdir_is_refused(workdirs, tmp_path):
    folder = write(workdirs["mpnet"], tmp_path / "out")
    for path in (folder, next(CASES.glob("*.npz"))):
        with pytest.raises(config.ConfigError, match=f"step 3: {path} is no workdir, so it has no checkpoints by step"):
            source.find(str(path), 3)


def test_the_paper_s_decoder_is_left_out_of_a_run_with_another_kind():
    """Self-attention and cross-attention have parameters of the same names and shapes."""
    case = source.find(str(next(path for path in CASES.glob("*.npz") if "mae" in path.name)))
    base = gin_files.load(["base.gin"]).model
    for changes, decoder in (({}, True), ({"decoder_attention": "cross"}, False), ({"decoder_causal": True}, False)):
        params = case.read(dataclasses.replace(base, heads=case.settings.get("heads", 2), **changes))
        assert any(path.startswith("decoder/") for path in params) == decoder, changes


def test_another_vocabulary_is_refused(workdirs, documents_vocabulary):
    with pytest.raises(config.ConfigError, match="Vocabulary.file is another file than the vocabulary of"):
        source.find(str(workdirs["mpnet"])).check_vocabulary(documents_vocabulary)


@pytest.fixture(scope="module")
def documents_vocabulary():
    from pydoc_data import topics

    return vocabulary_training.train([topics.topics["if"], topics.topics["for"]], config.Vocabulary(size=300))


def test_an_existing_encoder_is_continued(workdirs, tmp_path):
    """One training run from a stock folder, then its export: the run needs no setting but init_from, and goes on when the folder is gone."""
    from pydoc_data import topics

    folder = stock_roberta(tmp_path / "stock", workdirs["roberta-mlm"])
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(topics.topics[name].split()) for name in sorted(topics.topics)[:40]))
    argv = ["--gin_file=tiny.gin", f"--workdir={tmp_path / 'run'}", f"--gin.Run.init_from={folder}"]
    argv += [f"--gin.TEXT_FILES={tmp_path / 'text.txt'}", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8", "--gin.SEQUENCE_LENGTH=32"]
    argv += [f"--gin.Corpus.rows_dir={tmp_path / 'rows'}", "--gin.Corpus.heldout_fraction=0.1", "--gin.Corpus.processes=1", "--gin.Run.eval_rows=8"]
    argv += ["--gin.Optimizer.learning_rate=1e-6", "--gin.Optimizer.muon_learning_rate=1e-6", "--gin.Run.rank_every=0"]
    done = call("train", *argv)
    assert done.status == 0, done.stderr
    assert "Model.layer_norm_eps: 1e-05 -> 1e-06" in done.stdout and "with fresh weights: decoder; left out of it: nothing" in done.stdout
    before, after = values_of(folder), values_of(tmp_path / "run")
    for path in before:
        assert before[path].shape == after[path].shape and np.abs(before[path] - after[path]).max() < 1e-4, path
    longest = source.find(str(folder)).length
    assert source.find(str(tmp_path / "run")).length == longest > 32
    shutil.rmtree(folder)
    done = call("train", *argv)  # the same command
    assert done.status == 0 and "resuming" in done.stdout, done.stderr
    assert source.find(str(tmp_path / "run")).length == longest, "what the run recorded at its start"
    done = call("train", *argv, "--dry_run")
    assert done.status == 0 and "encoder/token_embedding" in done.stdout, done.stderr


def test_a_tokenizer_with_more_ids_than_the_weights_have_rows_is_refused(workdirs, tmp_path):
    folder = write(workdirs["mpnet"], tmp_path / "out")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"vocab_size": 590}))
    rewrite(folder, **{"embeddings.word_embeddings.weight": lambda table: table[:590]})
    with pytest.raises(config.ConfigError, match="590 rows of tokens, but its vocabulary has 600 ids"):
        values_of(folder)


def test_a_padding_id_that_is_not_the_tokenizer_s_is_refused(workdirs, tmp_path):
    folder = write(workdirs["roberta"], tmp_path / "out")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"pad_token_id": 0}))
    with pytest.raises(config.ConfigError, match="config.json has pad_token_id 0, but its tokenizer pads with 1"):
        values_of(folder)


def test_the_head_of_a_stock_model_needs_a_tied_table(workdirs, tmp_path):
    folder = write(workdirs["mpnet-mlm"], tmp_path / "out")
    table = np.array(weight_files.Safetensors(folder / "model.safetensors")["mpnet.embeddings.word_embeddings.weight"])
    rewrite(folder, **{"lm_head.decoder.weight": table})
    assert "head/dense/kernel" in values_of(folder)
    rewrite(folder, **{"lm_head.decoder.weight": table + 1})
    with pytest.raises(config.ConfigError, match="tied"):
        values_of(folder)


def test_half_precision_and_parts(workdirs, tmp_path):
    """Folders in several files, and tensors of other float types."""
    import ml_dtypes
    import safetensors.numpy

    folder = write(workdirs["mpnet"], tmp_path / "out")
    expected = values_of(folder)
    tensors = {name: np.array(value) for name, value in weight_files.Safetensors(folder / "model.safetensors").items()}
    names = sorted(tensors)
    safetensors.numpy.save_file({name: tensors[name].astype(np.float16) for name in names[::2]}, folder / "a.safetensors")
    safetensors.numpy.save_file({name: tensors[name].astype(ml_dtypes.bfloat16) for name in names[1::2]}, folder / "b.safetensors")
    index = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    assert weight_files.open_folder(folder)[names[0]].dtype == np.float16
    for path, value in values_of(folder).items():
        assert value.dtype == np.float32 and np.allclose(value, expected[path], rtol=0.01, atol=1e-3), path
