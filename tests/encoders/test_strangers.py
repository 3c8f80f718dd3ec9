"""Folders of strangers (invariant 13): nothing in one makes a command write outside of its output, read without end, or run code.

docs/other_peoples_folders.md is the page about it.
"""

import json
import os
import pathlib
import re
import shutil

import pytest
import safetensors
import safetensors.numpy
from testing import call, training

import maelm_jax
from maelm_jax import config, export, gin_files, storage
from maelm_jax.data import prepare, vocabularies
from maelm_jax.encoders import opened, tokenizer, weight_files
from maelm_jax.encoders.mpnet import MPNET
from maelm_jax.finetuning import predict
from maelm_jax.training.workdir import Workdir

PRECIOUS = "alias ll='ls -l'\n"


@pytest.fixture
def home(tmp_path) -> pathlib.Path:
    """A folder of the user, with a file that a stranger would like to overwrite."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bashrc").write_text(PRECIOUS)
    return tmp_path / "home"


def content(folder: pathlib.Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Names in files.


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """A folder with a file, links in it and out of it, and a pipe."""
    (tmp_path / "folder" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "file").touch()
    (tmp_path / "secret").touch()
    links = {"own": "deep", "out": "..", "secret": "../secret", "own_secret": "secret", "zero": "/dev/zero", "nowhere": "/nowhere/a", "loop": "loop"}
    for name, target in links.items():
        (tmp_path / "folder" / name).symlink_to(target)
    os.mkfifo(tmp_path / "folder" / "pipe")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    "name,plain", [("deep/file", "deep/file"), ("./deep//file", "deep/file"), ("own/file", "own/file"), ("new/x", "new/x"), (".", ""), ("", "")]
)
def test_a_name_in_a_folder_is_read_and_written_there(folder, name, plain):
    assert storage.inside(folder, name) == (folder / plain, plain)


@pytest.mark.parametrize(
    "name", ["..", "../secret", "own/../deep/file", "/etc/passwd", "out", "out/secret", "secret", "own_secret", "zero", "nowhere", "pipe"]
)
def test_a_name_that_leads_out_is_refused(folder, name):
    with pytest.raises(config.ConfigError, match=str(folder)):
        storage.inside(folder, name)


def test_a_link_to_a_folder_is_that_folder(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert storage.inside(tmp_path / "link", "deep/file").path.is_file()


@pytest.mark.parametrize("blobs_are_a_link", [False, True])
def test_only_the_blobs_of_the_hub_s_cache_are_outside_and_read(home, tmp_path, blobs_are_a_link):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    if blobs_are_a_link:
        blobs.symlink_to(home)
    else:
        blobs.mkdir()
        (blobs / ".bashrc").touch()
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/.bashrc")
    if blobs_are_a_link:
        with pytest.raises(config.ConfigError, match="1_Pooling/config.json"):
            storage.inside(snapshot, "1_Pooling/config.json")
    else:
        assert storage.inside(snapshot, "1_Pooling/config.json").name == "1_Pooling/config.json"


# A stock folder.


def modules(*paths: str) -> str:
    return json.dumps([{"idx": number, "name": str(number), "path": path, "type": "x"} for number, path in enumerate(paths)])


@pytest.fixture
def stock(copy_export, tmp_path) -> pathlib.Path:
    """A stranger's folder, from which an export of `tmp_path/in` goes to `tmp_path/out`."""
    return copy_export("mpnet", tmp_path / "in")


@pytest.mark.parametrize("path", ["l/../../../home", "l/../../..", "{tmp}/home", "../home", "link"])
def test_a_module_s_path_writes_nothing_outside(stock, home, tmp_path, path):
    """`l` leads to a deep folder of the stranger's: the path lies in the folder for who follows `l`, and outside for who writes."""
    (stock / "a" / "b" / "c" / "d").mkdir(parents=True)
    (stock / "l").symlink_to("a/b/c/d")
    (stock / "home").mkdir()  # what the path leads to from `d`
    for parent in (stock / "home", stock / "a" / "home", stock):
        if parent.is_dir():
            (parent / ".bashrc").write_text("evil")
    (stock / "link").symlink_to(home)
    (stock / "modules.json").write_text(modules("", path.format(tmp=tmp_path)))
    before = content(tmp_path)
    with pytest.raises(config.ConfigError):
        maelm_jax.load_encoder(stock).save_pretrained(tmp_path / "out")
    done = call("export", f"--workdir={stock}", f"--output={tmp_path / 'out'}", "--no-verify")
    assert done.status == 2 and done.stderr.count("\n") == 1, done
    assert content(tmp_path) == before


@pytest.mark.parametrize("path", [".", "./", "./."])
def test_the_root_as_a_module_replaces_nothing_that_the_export_writes(stock, tmp_path, path):
    settings = json.loads((stock / "config.json").read_text())
    (stock / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "evil.Model"}}))
    (stock / "evil.py").write_text("import this")
    (stock / "modules.json").write_text(modules("", path))
    maelm_jax.load_encoder(stock).save_pretrained(tmp_path / "out")
    assert "evil" not in (tmp_path / "out" / "config.json").read_text()
    assert not (tmp_path / "out" / "evil.py").exists()


@pytest.mark.parametrize("name", ["README.md", "Config.json", "tokenizer_config.json"])
def test_a_module_is_not_written_over_a_file_of_the_export(stock, tmp_path, name):
    (stock / name).unlink(missing_ok=True)
    (stock / name).mkdir()
    (stock / name / "x").touch()
    (stock / "modules.json").write_text(modules("", name))
    with pytest.raises(config.ConfigError, match=f"modules.json|{name}"):
        export.main([f"--workdir={stock}", f"--output={tmp_path / 'out'}", "--no-verify"])
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_the_hub_s_cache_is_exported_under_plain_names(stock, tmp_path):
    """Every file is a link into `blobs`, as huggingface_hub lays them out."""
    (stock / "modules.json").write_text(modules("", "1_Pooling"))
    (stock / "1_Pooling").mkdir()
    (stock / "1_Pooling" / "config.json").write_text("{}")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(stock, snapshot)
    for number, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    for number, folder in enumerate((stock, snapshot)):
        maelm_jax.load_encoder(folder).save_pretrained(tmp_path / "out" / str(number))
    assert content(tmp_path / "out" / "0") == content(tmp_path / "out" / "1")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0", "1"]


@pytest.mark.parametrize("name", ["../model.safetensors", "{tmp}/model.safetensors", "link", "pipe", "nowhere", "."])
def test_the_index_of_weights_names_files_of_the_folder_only(tmp_path, name):
    (tmp_path / "in").mkdir()
    tensors = {"a": weight_files.np.zeros(3, "float32")}
    weight_files.write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "in" / "link").symlink_to("../model.safetensors")
    os.mkfifo(tmp_path / "in" / "pipe")
    weight_files.write_safetensors(tmp_path / "in" / "part.safetensors", tensors)
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert set(weight_files.read_folder(tmp_path / "in")) == {"a"}
    index.write_text(json.dumps({"weight_map": {"a": name.format(tmp=tmp_path)}}))
    with pytest.raises(config.ConfigError):
        weight_files.read_folder(tmp_path / "in")


def test_one_huge_id_of_a_tokenizer_takes_no_memory(stock, tmp_path):
    for name in ("sentencepiece.model", "decoder.safetensors", "vocabulary.sha256"):
        (stock / name).unlink()
    file = json.loads((stock / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    piece = next(piece for piece in reversed(vocabulary) if piece not in vocabularies.SPECIAL)
    vocabulary[piece] = 700
    (tmp_path / "gap.json").write_text(json.dumps(file))
    assert vocabularies.load(tmp_path / "gap.json").size == 701, "an id may be unused"
    vocabulary[piece] = 4_294_967_290
    (stock / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(config.ConfigError, match="4294967290"):
        vocabularies.load(stock)
    done = call("train", "--gin_file=tiny.gin", f"--gin.Vocabulary.file={stock / 'tokenizer.json'}", f"--workdir={tmp_path / 'run'}")
    assert done.status == 2 and "4294967290" in done.stderr


def test_a_huge_number_of_rows_takes_no_memory(stock):
    (stock / "decoder.safetensors").unlink()
    settings = json.loads((stock / "config.json").read_text())
    (stock / "config.json").write_text(json.dumps(settings | {"vocab_size": 10**12}))
    with pytest.raises(config.ConfigError, match="1000000000000"):
        opened.find_model(stock).read_params()


def change_decoder(stock: pathlib.Path, change):
    """Writes decoder.safetensors again after `change` of its tensors and of its settings in config.json."""
    path, content = stock / "decoder.safetensors", json.loads((stock / "config.json").read_text())
    tensors = safetensors.numpy.load_file(path)
    change(tensors, content["mae_lm"])
    safetensors.numpy.save_file({name: value.copy() for name, value in tensors.items()}, path)
    (stock / "config.json").write_text(json.dumps(content))


KERNEL = "decoder/blocks/feed_forward/up/kernel"
DECODERS = {
    "missing": lambda tensors, settings: tensors.pop(KERNEL),
    "name": lambda tensors, settings: tensors.update({f"{KERNEL}s": tensors.pop(KERNEL)}),
    "shape": lambda tensors, settings: tensors.update({KERNEL: tensors[KERNEL].swapaxes(1, 2)}),
    "type": lambda tensors, settings: tensors.update({KERNEL: tensors[KERNEL].view("int32")}),
    "rows": lambda tensors, settings: tensors.update({"head/bias": tensors["head/bias"][:-1]}),
    "layers": lambda tensors, settings: settings["decoder"].update(layers=3),
    "encoder": lambda tensors, settings: settings["decoder"].update(decoder_layers=1),
    "field": lambda tensors, settings: settings["decoder"].pop("layers"),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_that_does_not_fit_is_refused_before_anything_else(stock, tmp_path, kind):
    change_decoder(stock, lambda tensors, settings: None)
    opened.find_model(stock)
    change_decoder(stock, DECODERS[kind])
    with pytest.raises(config.ConfigError, match="decoder.safetensors|config.json"):
        opened.find_model(stock)
    done = call("export", f"--workdir={stock}", f"--output={tmp_path / 'out'}", "--no-verify")
    assert done.status == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


# A file of another form, and an error of the program.


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b""])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(config.ConfigError, match="a.json"):
        storage.read_json(tmp_path / "a.json")


def test_an_error_of_the_program_is_not_one_of_the_file(stock, monkeypatch):
    with pytest.raises(NameError), storage.reading("a.json"):
        raise NameError("a typing error")
    with pytest.raises(MemoryError), storage.reading("a.json"):
        raise MemoryError

    def fail(*_):
        raise TypeError("of the program")

    monkeypatch.setattr(opened.tokenizer, "choose_vocabulary", fail)
    with pytest.raises(TypeError):
        opened.find_model(stock)


WRONG = {
    "config.json": [
        {"hidden_size": "32"},
        {"hidden_size": None},
        {"num_hidden_layers": [2]},
        {"num_hidden_layers": 10**9},
        {"vocab_size": {}},
        {"model_type": ["bert"]},
        [],
    ],
    "tokenizer_config.json": [{"model_max_length": "many"}, {"model_max_length": 1}, []],
}


@pytest.mark.parametrize("name,change", [(name, change) for name, changes in WRONG.items() for change in changes], ids=str)
def test_a_value_of_another_type_is_one_line_about_its_file(stock, name, change):
    content = json.loads((stock / name).read_text())
    (stock / name).write_text(json.dumps(content | change if change else change))
    with pytest.raises(config.ConfigError, match=str(stock)):
        opened.find_model(stock)


# What a folder says, and transformers does, and maelm_jax does not.


ADDED = {"999": {"content": "[E1]", "special": False, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}
LEFT = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
SAID = {
    "truncation_side": ("tokenizer_config.json", lambda content: content.update(truncation_side="left")),
    "add_bos_token": ("tokenizer_config.json", lambda content: content.update(add_bos_token=False)),
    "[E1]": ("tokenizer_config.json", lambda content: content.update(added_tokens_decoder=ADDED)),
    "cabinet": ("tokenizer_config.json", lambda content: content.update(extra_special_tokens=["cabinet"])),
    "[E2]": ("added_tokens.json", lambda content: content.update({"[E2]": 999})),
    "[E3]": ("special_tokens_map.json", lambda content: content.update(additional_special_tokens=["[E3]"])),
    "[SEP2]": ("tokenizer_config.json", lambda content: content.update(sep_token="[SEP2]")),
    "'e'": ("tokenizer_config.json", lambda content: content.update(pad_token="e")),
    "is_causal": ("config.json", lambda content: content.update(is_causal=True)),
    "left": ("tokenizer.json", lambda content: content.update(truncation=LEFT)),
    "dropout": ("tokenizer.json", lambda content: content["model"].update(dropout=0.01)),
    "adapter": ("adapter_config.json", lambda content: content.update(peft_type="LORA")),
}


@pytest.mark.parametrize("named", SAID)
def test_what_the_tokenizer_or_an_adapter_would_change_is_refused_by_name(stock, named):
    (stock / "vocabulary.sha256").unlink()
    (stock / "sentencepiece.model").unlink()
    opened.find_model(stock)
    name, change = SAID[named]
    settings = json.loads((stock / name).read_text()) if (stock / name).exists() else {}
    change(settings)
    (stock / name).write_text(json.dumps(settings))
    with pytest.raises(config.ConfigError, match=re.escape(named)):
        opened.find_model(stock)


def test_whole_numbers_are_no_weights(stock):
    """Those of a quantised model have a scale elsewhere."""
    (stock / "decoder.safetensors").unlink()
    tensors = safetensors.numpy.load_file(stock / "model.safetensors")
    name = next(name for name in tensors if name.endswith("output.dense.weight"))
    tensors[name] = (100 * tensors[name]).astype("int8")
    safetensors.numpy.save_file(tensors, stock / "model.safetensors")
    with pytest.raises(config.ConfigError, match=f"{name}.*int8"):
        opened.find_model(stock).read_params()


def test_a_tokenizer_json_that_the_class_completes_is_compared_too(stock):
    """A class of transformers adds <s> and </s> if the file does not. The file has the ids of the other file all the same."""
    (stock / "vocabulary.sha256").unlink()
    file, settings = (json.loads((stock / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    (stock / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "MPNetTokenizer"}))
    (stock / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    vocabulary = vocabularies.load(stock / "sentencepiece.model")
    tokenizer.check_ids(MPNET, stock, vocabulary)
    (stock / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "MPNetTokenizer", "sep_token": "<pad>"}))
    with pytest.raises(config.ConfigError, match="sep_token"):
        tokenizer.check_ids(MPNET, stock, vocabulary)
    (stock / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "MPNetTokenizer"}))
    pieces = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    one, other = (number for number, piece in enumerate(pieces) if piece in ("e", "a"))
    file["model"]["vocab"] |= {pieces[one]: other, pieces[other]: one}
    (stock / "tokenizer.json").write_text(json.dumps(file | {"post_processor": None}))
    with pytest.raises(config.ConfigError, match="tokenizer.json"):
        tokenizer.check_ids(MPNET, stock, vocabulary)


# A workdir.


@pytest.fixture
def run(workdirs, tmp_path) -> pathlib.Path:
    return shutil.copytree(workdirs["mpnet"], tmp_path / "run")


RECORDS = ["run.lock", "metrics.jsonl", "environment.txt", "parent.json", "rows.json", "loss_curve.png", "config.gin"]


@pytest.mark.parametrize(
    "command", [["train", "--gin.TRAIN_STEPS=24"], ["finetune", "--gin_file=finetune/rte.gin", "--init_from=pretrained"]], ids=["train", "finetune"]
)
@pytest.mark.parametrize("name", RECORDS)
def test_a_linked_record_of_a_workdir_is_refused_and_not_emptied(run, home, name, command):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(home / ".bashrc")
    before = content(run)
    done = call(*command, f"--workdir={run}")
    is_named = name in done.stderr or "is a run of pretraining" in done.stderr
    assert done.status == 2 and done.stderr.count("error:") == 1 and is_named, done
    assert (home / ".bashrc").read_text() == PRECIOUS and content(run) == before


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "vocabulary", "checkpoints/6"])
def test_a_linked_folder_of_a_workdir_is_refused(run, home, tmp_path, name):
    """Pruning would delete numbered folders there."""
    if (run / name).exists():
        shutil.copytree(run / name, home / "mine")
        shutil.rmtree(run / name)
    else:
        (home / "mine").mkdir()
    (run / name).symlink_to(home / "mine")
    before = content(home)
    export_to, evaluate = ["export", f"--workdir={run}", f"--output={tmp_path / 'out'}"], ["evaluate", f"--models={run}", "--text=README.md"]
    for command in (["train", f"--workdir={run}", "--gin.TRAIN_STEPS=24"], export_to, evaluate):
        done = call(*command)
        assert done.status == 2 and "leads out" in done.stderr, (command, done)
    assert content(home) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "parent.json", "run.lock", "vocabulary/tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_a_pipe_or_device_as_a_record_is_not_read(run, tmp_path, name, kind):
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero")
    for command in (["train", "--gin.TRAIN_STEPS=24"], ["export", f"--output={tmp_path / 'out'}"]):
        done = call(*command, f"--workdir={run}")
        assert done.status == 2 and name in done.stderr, (command, done)


def test_a_lock_is_no_link_and_no_pipe(home, tmp_path):
    (tmp_path / "lock").symlink_to(home / ".bashrc")
    os.mkfifo(tmp_path / "pipe")
    for name in ("lock", "pipe"):
        with pytest.raises(config.ConfigError, match=name), storage.locked(tmp_path / name, "works"):
            pass
    assert (home / ".bashrc").read_text() == PRECIOUS


def test_a_workdir_behind_a_link_of_the_user_is_a_workdir(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    (run / "newest").symlink_to("checkpoints/12")
    assert maelm_jax.load_encoder(tmp_path / "link").step == 12


@pytest.mark.parametrize("recorded", [{}, [], {"../../../../home/.bashrc": "0"}, {"zero": "0"}, "less", "more", "zero"], ids=str)
def test_the_list_of_checksums_is_that_of_the_files(run, home, tmp_path, recorded):
    step = run / "checkpoints" / "12"
    list_file = step / "checksums.json"
    written = json.loads(list_file.read_text())
    if recorded == "zero":
        list_file.unlink()
        list_file.symlink_to("/dev/zero")
    elif recorded == "less":
        list_file.write_text(json.dumps(dict(list(written.items())[1:])))
    elif recorded == "more":
        (step / "more").touch()
    else:
        if recorded:
            recorded = written | recorded
        list_file.write_text(json.dumps(recorded))
    for command in (["export", f"--output={tmp_path / 'out'}"], ["embed", "--input=README.md", f"--output={tmp_path / 'v.npy'}"]):
        done = call(*command, f"--workdir={run}")
        assert done.status == 2 and "12" in done.stderr, (command, done)
    assert not (tmp_path / "out").exists()


def test_a_table_names_models_in_its_folder_only(tmp_path):
    def write(model: str):
        content = {"reports": {"a": {"rte": {"model": model}}}}
        (tmp_path / "table.json").write_text(json.dumps(content))

    write("rte/seed-1")
    assert predict.find_models(Workdir(tmp_path), None) == [Workdir(tmp_path / "rte" / "seed-1")]
    for model in ("../other", "/etc"):
        write(model)
        with pytest.raises(config.ConfigError, match=model):
            predict.find_models(Workdir(tmp_path), None)


# Rows.


@pytest.mark.parametrize("name", ["", "/lock", "/joined", "/plan.json"])
def test_rows_of_a_stranger_are_prepared_without_following_links(text, home, tmp_path, name):
    argv = training(text, tmp_path / "run", f"--gin.Corpus.rows_dir={tmp_path / 'rows'}")
    argv = [one for one in argv if not one.startswith("--workdir")]
    vocabulary_file = next(text.glob("rows/vocabulary-*.model"))
    argv.append(f"--gin.Vocabulary.file={vocabulary_file}")
    experiment = gin_files.load(["tiny.gin"], [one.removeprefix("--gin.") for one in argv if one.startswith("--gin.")])
    [store] = prepare.store_names(experiment.corpus, vocabularies.load(vocabulary_file)).values()
    link = tmp_path / "rows" / f"{store}.parts{name}"
    link.parent.mkdir(parents=True)
    link.symlink_to(home / ".bashrc" if name in ("/lock", "/plan.json") else home)
    before = content(home)
    done = call("prepare", *argv)
    assert done.status == 2 and ".parts" in done.stderr, done
    assert content(home) == before


# A recorded config.gin.


@pytest.mark.parametrize("way", ["config.gin", "./config.gin", "link", "copy", "included", "changed copy"])
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_record_given_as_a_gin_file_runs_no_code(text, tmp_path, monkeypatch, command, way):
    (tmp_path / "trap_of_record.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ["Corpus.task_modules=('trap_of_record',)", "Corpus.sources={'seqio:x': 1.0}", f"Corpus.rows_dir={tmp_path / 'rows'}"]
    settings.append(f"Vocabulary.file={next(text.glob('rows/vocabulary-*.model'))}")
    record = gin_files.render(gin_files.load(["tiny.gin"], settings))
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.gin").write_text(record)
    (stranger / "link.gin").symlink_to("config.gin")
    (stranger / "copy.gin").write_text(record)
    (stranger / "changed.gin").write_text("# mine\n" + record.replace("Run.train_steps", "Run.eval_rows = 8\n\n  Run.train_steps"))
    (stranger / "mine.gin").write_text(f"include '{stranger / 'config.gin'}'\nRun.eval_rows = 16\n")
    names = {"link": "link.gin", "copy": "copy.gin", "included": "mine.gin", "changed copy": "changed.gin"}
    done = call(command, f"--gin_file={stranger}/{names.get(way, way)}", f"--workdir={tmp_path / 'run'}")
    assert done.status == 2 and not (tmp_path / "sprung").exists(), done
    assert "record" in done.stderr, done


def test_modules_of_the_user_s_own_gin_file_are_the_user_s(tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("include 'tiny.gin'\nCorpus.task_modules = ('antigravity',)\n")
    assert gin_files.load([str(own)], runs_modules=True).corpus.task_modules == ("antigravity",)
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"])))
    own.write_text("Corpus.task_modules = ('antigravity',)\n")
    names = [str(tmp_path / "config.gin"), str(own)]
    assert gin_files.load(names, runs_modules=True).corpus.task_modules == ("antigravity",)
