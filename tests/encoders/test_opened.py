"""Weights in: every source that a run can start from gives the parameters it holds, or says what does not fit. No PyTorch needed."""

import json
import pathlib
import shutil
from pydoc_data import topics

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from testing import LITTLE, ROOT, call, flatten, mesh_of, model_of, training

import maelm_jax
from maelm_jax import config, export, gin_files
from maelm_jax.analysis import monitor
from maelm_jax.data import vocabulary_training
from maelm_jax.encoders import adoption, opened, recipes, weight_files
from maelm_jax.finetuning import grid, initial_encoder
from maelm_jax.model import maelm
from maelm_jax.pretraining import start
from maelm_jax.training import step
from maelm_jax.training.workdir import Workdir


def one_line(caught) -> str:
    """The message of a caught error, which is one printable line."""
    message = str(caught.value)
    assert "\n" not in message and message.isprintable()
    return message


def read_params(path, step=None):
    return opened.find_model(path, step).read_params()


def write(workdir, output) -> pathlib.Path:
    assert export.main([f"--workdir={workdir}", f"--output={output}", "--no-verify"]) == 0
    return output


def change_config(folder: pathlib.Path, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def change_tensors(folder: pathlib.Path, **changes):
    """Rewrites a folder's tensors: name -> function of the old array, or an array; None takes it away."""
    path = folder / "model.safetensors"
    tensors = weight_files.read_safetensors(path)
    for name, change in changes.items():
        tensors[name] = change(tensors[name]) if callable(change) else change
    safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in tensors.items() if value is not None}, path)


def blank_params(model: config.Model, vocabulary_size: int) -> dict:
    """Parameters of 0 for a run of this model."""
    _, init = maelm.create(model, vocabulary_size, config.SpecialIds.of_size(vocabulary_size))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), jax.eval_shape(init, jax.random.key(0)))


@pytest.fixture(scope="module")
def other_vocabulary():
    return vocabulary_training.train([topics.topics["if"], topics.topics["for"]], config.Vocabulary(size=300))


# Find and read.


def test_steps(workdirs):
    newest, older = read_params(workdirs["mpnet"]), read_params(workdirs["mpnet"], 6)
    assert opened.find_model(workdirs["mpnet"]).step == 12
    assert not np.array_equal(newest["encoder/norm/scale"], older["encoder/norm/scale"])
    assert len(newest["encoder/token_embedding"]) == 600, "rows of padding are not given away"


def test_half_precision_and_parts(copy_export, tmp_path):
    """Folders in several files, and tensors of other float types."""
    folder = copy_export("mpnet", tmp_path / "out")
    expected, tensors = read_params(folder), weight_files.read_folder(folder)
    names = sorted(tensors)
    safetensors.numpy.save_file({name: tensors[name].astype(np.float16) for name in names[::2]}, folder / "a.safetensors")
    safetensors.numpy.save_file({name: tensors[name].astype(ml_dtypes.bfloat16) for name in names[1::2]}, folder / "b.safetensors")
    index = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_params(folder).keys() == expected.keys(), "the single file goes before an index that was left behind"
    (folder / "model.safetensors").unlink()
    assert weight_files.read_folder(folder)[names[0]].dtype == np.float16
    for path, value in read_params(folder).items():
        assert value.dtype == np.float32 and np.allclose(value, expected[path], rtol=0.01, atol=1e-3), path
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(config.ConfigError, match="absent"):
        read_params(folder)


def test_the_head_of_a_stock_model_needs_a_tied_table(copy_export, tmp_path):
    folder = copy_export("mpnet-mlm", tmp_path / "out")
    table = weight_files.read_folder(folder)["mpnet.embeddings.word_embeddings.weight"]
    change_tensors(folder, **{"lm_head.decoder.weight": table})
    assert "head/dense/kernel" in read_params(folder)
    expected = read_params(folder)
    change_tensors(folder, **{"mpnet.embeddings.word_embeddings.weight": None})  # as safetensors.torch.save_model leaves it
    assert all(np.array_equal(value, expected[path]) for path, value in read_params(folder).items())
    change_tensors(folder, **{"mpnet.embeddings.word_embeddings.weight": table, "lm_head.decoder.weight": table + 1})
    with pytest.raises(config.ConfigError, match="lm_head.decoder.weight"):
        read_params(folder)


def test_tensors_that_do_not_fit_are_listed(copy_export, tmp_path):
    folder = copy_export("roberta-mlm", tmp_path / "out")
    changes = {
        "encoder.layer.0.output.dense.bias": None,
        "extra": np.ones(3, np.float32),
        "embeddings.LayerNorm.weight": np.ones(5, np.float32),
        "encoder.layer.1.output.dense.bias": np.full(32, np.nan, np.float32),
        "pooler.dense.bias": np.ones(32, np.float32),
    }
    change_tensors(folder, **{f"roberta.{name}": value for name, value in changes.items()})
    with pytest.raises(config.ConfigError) as error:
        read_params(folder)
    for what in ("output.dense.bias is missing", "roberta.extra", "LayerNorm.weight has shape (5,)", "not finite"):
        assert what in one_line(error)
    assert "pooler" not in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"model_type": ["mpnet"]}'])
def test_a_config_json_that_is_none_is_one_line(copy_export, tmp_path, content):
    folder = copy_export("mpnet", tmp_path / "out")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(config.ConfigError) as error:
        opened.find_model(folder)
    assert str(folder) in one_line(error)


def test_a_damaged_file_is_named(copy_export, tmp_path):
    file = copy_export("mpnet", tmp_path / "out") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(config.ConfigError, match=r"model\.safetensors") as error:
        read_params(file.parent)
    one_line(error)


def test_what_is_nothing_of_the_kind_is_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(config.ConfigError, match="notes"):
        opened.find_model(tmp_path / "notes")
    with pytest.raises(config.ConfigError, match="notes.txt"):
        opened.find_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    with pytest.raises(config.ConfigError, match=r"tokenizer\.json"):
        opened.find_model(tmp_path)


def test_a_step_that_is_none_is_refused(copy_export, workdirs, tmp_path):
    folder = copy_export("mpnet", tmp_path / "out")
    with pytest.raises(config.ConfigError, match=f"step 3: {folder}"):
        opened.find_model(folder, 3)
    assert maelm_jax.load_encoder(workdirs["mpnet"], step=6).step == 6


def test_an_export_keeps_its_dropout_and_changes_none_of_a_run(make_workdir, tmp_path):
    run = make_workdir(tmp_path / "run", {"Dropout.hidden": 0.25, "Dropout.attention": 0.2, "Decoder.refills_mask": False})
    found = opened.find_model(write(run, tmp_path / "out"))
    assert (found.model.dropout.hidden, found.model.dropout.attention, found.model.decoder.refills_mask) == (0.25, 0.2, False)
    before = gin_files.load(["tiny.gin"])
    after = adoption.adopt_settings(before, found).experiment.model
    assert after.dropout == before.dropout
    assert after.decoder.refills_mask is False, "part of the decoder's function"


# A workdir whose files contradict each other.


@pytest.fixture
def edited(workdirs, tmp_path):
    """(name, changes to Model) -> a workdir with these in its config.gin, and another's weights."""

    def make(name, **changes):
        folder = tmp_path / "run"
        shutil.copytree(workdirs[name], folder)
        experiment = gin_files.load([str(workdirs[name] / "config.gin")])
        experiment = experiment.with_model(model_of(experiment.model, **changes))
        (folder / "config.gin").write_text(gin_files.render(experiment))
        return folder

    return make


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"feed_forward": 64}, "encoder/blocks/feed_forward/up/kernel is (2, 32, 48), expected (2, 32, 64)"),
        ({"relative_buckets": "none"}, "encoder/relative_bias/table is (64, 4), expected no parameter"),
        ({"decoder_relative_bias": True}, "decoder/relative_bias/table is missing"),
    ],
)
def test_settings_that_contradict_the_weights_are_named(edited, changes, message):
    with pytest.raises(config.ConfigError) as error:
        read_params(edited("reference", **changes))
    assert message in one_line(error)


def test_a_vocabulary_of_another_run_is_refused(edited, tmp_path, vocabulary, other_vocabulary):
    run = edited("mpnet")
    shutil.rmtree(run / "vocabulary")
    other_vocabulary.save(run / "vocabulary")
    with pytest.raises(config.ConfigError, match="encoder/token_embedding"):
        write(run, tmp_path / "out")
    (run / "rows.json").write_text(json.dumps({"vocabulary": vocabulary.fingerprint}))
    with pytest.raises(config.ConfigError, match="vocabulary"):
        write(run, tmp_path / "out")


@pytest.mark.parametrize(("results", "started_from", "length"), [({}, None, 48), ({}, 100, 100), ({}, 20, 48), ({"max_length": 32}, 100, 32)])
def test_the_longest_input_is_what_was_trained(edited, results, started_from, length):
    run = edited("mpnet")
    (run / "results.json").write_text(json.dumps(results))
    if started_from:
        opened.OpenedModel(config.Model(), started_from, path="stock", kind="bert folder").write_origin(Workdir(run))
    assert opened.find_model(run).length == length


@pytest.mark.parametrize(
    ("name", "stated", "length"),
    [("model_max_length", None, 160), ("model_max_length", 128, 128), ("model_max_length", 10**30, 160), ("max_len", 128, 128)],
)
def test_the_longest_input_of_a_folder_is_what_it_states(copy_export, tmp_path, name, stated, length):
    """max_len is an older spelling, which transformers reads."""
    folder = copy_export("mpnet", tmp_path / "out")
    options = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": None, name: stated}
    (folder / "tokenizer_config.json").write_text(json.dumps({name: value for name, value in options.items() if value is not None}))
    assert opened.find_model(folder).length == length


def test_a_tokenizer_that_contradicts_the_weights_is_refused(copy_export, tmp_path):
    folder = copy_export("roberta", tmp_path / "out")
    change_config(folder, pad_token_id=0)
    with pytest.raises(config.ConfigError, match="pad_token_id 0"):
        read_params(folder)
    (folder / "decoder.safetensors").unlink()  # it has 600 rows too
    change_config(folder, pad_token_id=1, vocab_size=590)
    change_tensors(folder, **{"embeddings.word_embeddings.weight": lambda table: table[:590]})
    with pytest.raises(config.ConfigError, match="590.*600"):
        read_params(folder)


def test_a_tokenizer_json_that_contradicts_the_sentencepiece_model_beside_it_is_refused(copy_export, tmp_path):
    """transformers reads tokenizer.json, and we read sentencepiece.model."""
    folder = copy_export("roberta", tmp_path / "out")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": None}))
    with pytest.raises(config.ConfigError, match="tokenizer.json"):
        opened.find_model(folder)


# Modules of sentence-transformers.

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture
def with_modules(copy_export, tmp_path) -> pathlib.Path:
    """An exported folder, with the modules of sentence-transformers added."""
    folder = copy_export("mpnet", tmp_path / "in")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    return folder


def test_the_modules_go_out_as_they_came_in(with_modules, workdirs, tmp_path):
    maelm_jax.load_encoder(with_modules).save_pretrained(tmp_path / "out")
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (with_modules / name).read_bytes()
    assert not (tmp_path / "out" / "2_Normalize").exists(), "a module without settings has no folder"
    assert recipes.read_module_files(workdirs["mpnet"]) == {}


@pytest.mark.parametrize("way", ["link", "folder link", "path", "modules.json"])
def test_what_leads_out_of_a_downloaded_folder_is_not_copied(with_modules, tmp_path, way):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    if way == "link":
        (with_modules / "1_Pooling" / "key").symlink_to(tmp_path / "private" / "key")
    elif way == "folder link":
        (with_modules / "2_Normalize").symlink_to(tmp_path / "private")
    elif way == "path":
        (with_modules / "modules.json").write_text('[{"path": "../private"}]')
    else:
        (with_modules / "sentence_bert_config.json").unlink()
        (with_modules / "sentence_bert_config.json").symlink_to(tmp_path / "private" / "key")
    with pytest.raises(config.ConfigError, match="private"):
        write(with_modules, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_links_in_the_cache_of_the_hub_are_followed(with_modules, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(with_modules, snapshot)
    for number, name in enumerate(("modules.json", "1_Pooling/config.json")):
        (snapshot / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(blobs / str(number))
    assert recipes.read_module_files(snapshot) == recipes.read_module_files(with_modules)


# What a run takes over.


def stock_roberta(copy_export, folder) -> pathlib.Path:
    """A folder as transformers users have them: another epsilon, a token-type row, a pooler, a tokenizer.json alone, a table longer than it."""
    copy_export("roberta-mlm", folder)
    (folder / "sentencepiece.model").unlink()
    change_config(folder, layer_norm_eps=1e-6, vocab_size=608)

    def lengthen(table):
        return np.concatenate([table, np.ones((8, *table.shape[1:]), np.float32)])

    changes = {
        "roberta.embeddings.token_type_embeddings.weight": np.linspace(-1, 1, 32, dtype=np.float32)[None],
        "roberta.pooler.dense.bias": np.ones(32, np.float32),
        "roberta.embeddings.word_embeddings.weight": lengthen,
        "lm_head.bias": lengthen,
    }
    change_tensors(folder, **changes)
    return folder


def test_a_stock_folder_is_taken_over(copy_export, workdirs, tmp_path):
    folder = stock_roberta(copy_export, tmp_path / "stock")
    original, found, experiment = read_params(workdirs["roberta-mlm"]), opened.find_model(folder), gin_files.load(["tiny.gin"])
    adopted, changes = adoption.adopt_settings(experiment, found)
    assert (
        adopted.model.encoder.layer_norm_eps == 1e-6
        and adopted.model.encoder.relative_buckets == "none"
        and adopted.model.encoder.max_positions == 160
    )
    assert adopted.model.decoder.layers == experiment.model.decoder.layers and adopted.vocabulary.file == str(folder / "tokenizer.json")
    assert any("layer_norm_eps: 1e-05 -> 1e-06" in line for line in changes)
    assert adopted.model.decoder.relative_bias, "so that the fresh decoder begins at neighbours, which RoBERTa's positions do not tell it"
    values = found.read_params(adopted.model)
    assert np.array_equal(values["encoder/position_embedding"], original["encoder/position_embedding"])
    assert np.array_equal(values["encoder/token_type_embedding"], np.linspace(-1, 1, 32, dtype=np.float32)[None])
    assert np.array_equal(values["encoder/token_embedding"], original["encoder/token_embedding"]), "cut to the tokenizer's ids"

    params, fresh, unused = adoption.load_params(values, blank_params(adopted.model, 600), 600, str(folder))
    assert (fresh, unused) == (["decoder"], [])
    assert np.array_equal(np.asarray(params["encoder"]["token_embedding"])[:600], values["encoder/token_embedding"])
    with pytest.raises(config.ConfigError, match=r"encoder/token_embedding.*600.*500"):
        adoption.load_params(values, params, 500, "x")


@pytest.mark.parametrize(
    ("changes", "taken", "is_kept"),
    [
        ({}, {}, True),
        ({"layers": 1, "decoder_layers": 3}, {"layers": 2, "decoder_layers": 1}, True),
        ({"decoder_attention": "cross", "decoder_layers": 3}, {}, False),
        ({"decoder_causal": True}, {}, False),
    ],
)
def test_a_workdir_gives_its_shape_and_its_decoder_unless_the_run_has_an_ablation(workdirs, changes, taken, is_kept):
    """Self-attention and cross-attention have parameters of the same names and shapes."""
    found, experiment = opened.find_model(workdirs["mpnet"]), gin_files.load([str(workdirs["mpnet"] / "config.gin")])
    run = experiment.with_model(model_of(experiment.model, **changes))
    model = adoption.adopt_settings(run, found).experiment.model
    assert model == model_of(run.model, **taken)
    assert any(path.startswith("decoder/") for path in found.read_params(model)) == is_kept


def test_another_vocabulary_than_that_of_the_encoder_is_refused(other_vocabulary, tmp_path):
    found = opened.find_model(ROOT / "pretrained")
    settings = ["TEXT_FILES='*.txt'", f"Run.init_from='{found.path}'"]
    other_vocabulary.save(tmp_path)
    with pytest.raises(config.ConfigError, match=r"Vocabulary\.file"):
        adoption.adopt_settings(gin_files.load(["continue.gin"], [*settings, f"Vocabulary.file='{tmp_path}'"]), found)


def test_rows_longer_than_those_of_a_rotary_encoder_are_read_if_the_run_has_the_positions(workdirs):
    """A larger theta of the run stays too, a smaller one does not."""
    found = opened.find_model(workdirs["modernbert"])
    longer = ["SEQUENCE_LENGTH=256", "Encoder.max_positions=256", "Encoder.rotary_theta=160000.0"]
    adopted, changes = adoption.adopt_settings(gin_files.load(["modern_tiny.gin"], longer), found)
    assert (adopted.model.encoder.max_positions, adopted.model.encoder.rotary_theta) == (256, 160_000.0) and adopted.model.encoder.layers == 2
    assert sum("stays" in line for line in changes) == 2
    smaller = ["Encoder.max_positions=64", "Encoder.rotary_theta=5000.0"]
    model = adoption.adopt_settings(gin_files.load(["modern_tiny.gin"], smaller), found).experiment.model
    assert (model.encoder.max_positions, model.encoder.rotary_theta) == (160, 10_000.0)
    short = {"positions": "rotary", "max_positions": 64, "rotary_theta": 1000.0}
    kept = adoption.keep_raised(short, config.Encoder(max_positions=128))
    assert kept == short | {"max_positions": 128}, "a theta that nobody has set does not replace the source's"
    with pytest.raises(config.ConfigError, match="Encoder.max_positions=256"):
        adoption.adopt_settings(gin_files.load(["modern_tiny.gin"], [longer[0], "Run.init_from='there'"]), found)


def test_a_table_of_learned_positions_is_repeated_for_longer_rows(workdirs, tmp_path):
    found = opened.find_model(workdirs["mpnet"])
    settings = ["SEQUENCE_LENGTH=319", f"Run.init_from='{found.path}'"]
    adopted, changes = adoption.adopt_settings(gin_files.load(["tiny.gin"], settings), found)
    model = adopted.model
    assert model.encoder.max_positions == 319 and "160 learned positions" in " ".join(changes)
    fresh = step.State(np.int32(0), blank_params(model, 600), ())
    loaded = start.load_state(start.StartingPoint(adopted, encoder=found), Workdir(tmp_path), fresh, lambda: fresh, 600)
    before, after = found.read_params(model)["encoder/position_embedding"], loaded.state.params["encoder"]["position_embedding"]
    assert after.shape == (319, 32) and after.dtype == np.float32
    assert np.array_equal(after[:160], before) and np.array_equal(after[160:], before[:159])


def test_published_buckets_are_not_numbered_anew_for_longer_rows(workdirs):
    """Their numbers depend on the positions, if these are fewer than the largest distance."""
    found = opened.find_model(workdirs["mpnet"])
    published = found.settings | {"relative_buckets": "reference", "max_distance": 256}
    fits, shifts = (gin_files.load(["tiny.gin"], [f"SEQUENCE_LENGTH={n}", "Run.init_from='there'"]) for n in (160, 161))
    found = found.replace(settings=published)
    assert adoption.adopt_settings(fits, found).experiment.model.encoder.max_positions == 160
    with pytest.raises(config.ConfigError, match="Corpus.sequence_length 161"):
        adoption.adopt_settings(shifts, found)


def test_the_width_of_a_decoder_is_that_of_heads_of_the_encoder_that_is_taken_over(workdirs):
    """Its heads have 8 values, those of base.gin 64."""
    found = opened.find_model(workdirs["mpnet"])
    settings = ["TEXT_FILES='*.txt'", f"Run.init_from='{found.path}'"]
    fitting, other = (gin_files.load(["continue.gin"], [*settings, f"Decoder.width={width}"]) for width in (24, 20))
    assert adoption.adopt_settings(fitting, found).experiment.model.decoder.width == 24
    with pytest.raises(config.ConfigError, match="Decoder.width 20"):
        adoption.adopt_settings(other, found)


@pytest.mark.parametrize("theirs,ours", [(None, None), (64, 64), (None, 64), (64, None), (64, 96)])
def test_a_head_that_reads_another_width_is_left_out(theirs, ours):
    source_params, run_params = (blank_params(model_of(LITTLE, decoder_layers=1, decoder_width=width), 128) for width in (theirs, ours))
    values = {path: np.asarray(value) for path, value in flatten(source_params).items() if not path.startswith("decoder/")}
    fresh = adoption.load_params(values, run_params, 128, "source").fresh
    assert fresh == (["decoder"] if theirs == ours else ["decoder", "head"])


def test_an_existing_encoder_is_continued(copy_export, text, tmp_path):
    """The settings of a stock folder replace those of the run, which goes on when the folder is gone."""
    folder = stock_roberta(copy_export, tmp_path / "stock")
    more = [f"Run.init_from={folder}", f"Corpus.rows_dir={tmp_path / 'rows'}", "TRAIN_STEPS=2", "Run.rank_every=0"]
    more += ["Optimizer.learning_rate=1e-6", "Optimizer.muon_learning_rate=1e-6"]
    argv = training(text, tmp_path / "run", *(f"--gin.{one}" for one in more))
    done = call("train", *argv)
    assert done.status == 0, done.stderr
    assert "Encoder.layer_norm_eps: 1e-05 -> 1e-06" in done.stdout and "with fresh weights: decoder; left out of it: nothing" in done.stdout
    before, after = read_params(folder), read_params(tmp_path / "run")
    for path in before:
        assert before[path].shape == after[path].shape and np.abs(before[path] - after[path]).max() < 1e-4, path
    longest = opened.find_model(folder).length
    assert opened.find_model(tmp_path / "run").length == longest > 32
    shutil.rmtree(folder)
    assert opened.find_model(tmp_path / "run").length == longest, "what the run recorded at its start"


def test_what_a_stranger_s_run_names_is_not_run(workdirs, tmp_path, monkeypatch, vocabulary):
    """A recorded config.gin is data: readers of a run neither import nor call what it names."""
    run = tmp_path / "run"
    shutil.copytree(workdirs["mpnet"], run)
    record = (run / "config.gin").read_text()
    code = {"Corpus.task_modules": ("trap",), "Optimizer.schedule": "trap:f", "Masking.strategy": "trap:f", "Run.log_to": "trap:f"}
    (tmp_path / "trap.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [line for line in record.splitlines() if line.partition(" =")[0] not in code]
    (run / "config.gin").write_text("\n".join([*lines, *(f"{name} = {value!r}" for name, value in code.items())]) + "\n")
    assert config.values(Workdir(run).read_settings()).items() >= code.items()
    encoder = maelm_jax.load_encoder(run)
    assert encoder.encode(["a text"]).shape == (1, 32)
    write(run, tmp_path / "out")
    assert "trap:f" in (tmp_path / "out" / "README.md").read_text(), "the card says how tokens were masked"
    bindings = [f"Run.init_from='{run}'", "TEXT_FILES='*.txt'", "SEQUENCE_LENGTH=32", "Optimizer.warmup_steps=1"]
    assert start.find_starting_point(gin_files.load(["continue.gin"], bindings), Workdir(tmp_path / "next")).encoder.path == str(run)
    finetuned = grid._load(initial_encoder.load(str(run)), ["finetune/rte.gin"], [])
    assert (finetuned.optimizer.schedule, finetuned.run.log_to) == ("linear", "tensorboard")
    rows = np.full((2, 32), vocabulary.encode("text")[0], np.int32)
    rows[:, 0] = vocabulary.bos
    recorded = gin_files.load([str(run / "config.gin")])
    monitor.RankMonitor(recorded, vocabulary.size, vocabulary.special, rows, mesh_of(1, 1, 1))({"encoder": encoder.tree()})
    (tmp_path / "a.txt").write_text("\n\n".join(topics.topics.values()))
    assert call("evaluate", f"--models={run}", f"--text={tmp_path}/a.txt", "--tokens=500").status == 0
    (run / "config.gin").write_text(record + "import trap\n")
    with pytest.raises(config.ConfigError, match=r"config\.gin"):
        opened.find_model(run)
    assert not (tmp_path / "sprung").exists()
