"""The command `export`: formats, the card, what it refuses, and that nothing half-written is left. No PyTorch needed unless it says so."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from testing import ROOT, call, flatten, in_memory, model_of, objective_of

import maelm_jax
from maelm_jax import config, export, gin_files
from maelm_jax.data import vocabularies
from maelm_jax.encoders import card, families, family, opened, published
from maelm_jax.encoders import export as folders
from maelm_jax.model import maelm
from maelm_jax.training.workdir import Workdir


def run(workdir, output, *more) -> int:
    return export.main([f"--workdir={workdir}", f"--output={output}", "--no-verify", *more])


def refuse(workdir, output, *more) -> str:
    """Runs an export that is refused. Returns the message."""
    with pytest.raises(config.ConfigError) as error:
        run(workdir, output, *more)
    return str(error.value)


def read_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def workdir(workdirs, tmp_path, monkeypatch) -> pathlib.Path:
    """runs/mpnet in a folder of its own, which is the working directory."""
    shutil.copytree(workdirs["mpnet"], tmp_path / "runs" / "mpnet")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "mpnet"


def make_untrained(model: config.Model, vocabulary, **more) -> opened.OpenedModel:
    """An encoder of a model with parameters of 1."""
    _, init = maelm.create(model, vocabulary.size, vocabulary.special)
    params = {path: np.ones(leaf.shape, np.float32) for path, leaf in flatten(jax.eval_shape(init, jax.random.key(0))).items()}
    params |= {path: params[path][: vocabulary.size] for path in ("encoder/token_embedding", "head/bias")}
    return in_memory(params, model, vocabulary, 64, **more)


# What is written.


def test_the_folder_of_an_mae_lm_run(workdirs, tmp_path, capsys):
    assert run(workdirs["mpnet"], tmp_path / "out") == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    weights, words = (
        "config.json decoder.safetensors model.safetensors modeling_mae_lm.py",
        "sentencepiece.model tokenizer.json tokenizer_config.json vocabulary.sha256",
    )
    assert files == f"README.md {weights} {words}".split()
    text = (tmp_path / "out" / "README.md").read_text()
    for what in ("MAE-LM (arXiv 2302.02060)", "`installed_docs` 100%", "12 of 12, each of 32 rows of 48 tokens", "6.1250", "Not verified"):
        assert what in text, what
    assert "MPNetModel of step 12" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 48
    assert run(workdirs["mpnet"], tmp_path / "old", "--step=6") == 0
    text = (tmp_path / "old" / "README.md").read_text()
    assert "6.5000 (batch of step 6)" in text and "6.1250" not in text, "a card tells nothing of later steps"


@pytest.mark.parametrize("name", ["mpnet", "roberta-mlm", "modernbert"])
def test_an_export_that_is_exported_again_is_byte_identical(copy_export, workdirs, tmp_path, name):
    copy_export(name, tmp_path / "first")
    assert run(tmp_path / "first", tmp_path / "second") == 0
    first, second = (read_files(tmp_path / folder) for folder in ("first", "second"))
    assert first.keys() == second.keys()
    differing = {file for file in first if first[file] != second[file]}
    # The configuration of RoBERTa has a type row then.
    assert differing <= {"README.md", "config.json"}, differing
    original = opened.find_model(workdirs[name]).read_params()
    again = opened.find_model(tmp_path / "second").read_params()
    assert {path.split("/")[0] for path in again} == {path.split("/")[0] for path in original}
    for path, value in again.items():
        assert np.array_equal(value, original.get(path, np.zeros_like(value))), path


def test_the_lines_of_the_readme_s_table(workdirs, tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text()
    [row] = [line for line in readme.splitlines() if line.startswith("| use it in Python |")]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(workdirs["mpnet"])
    monkeypatch.chdir(tmp_path)
    names = {"maelm_jax": maelm_jax}
    for line in row.split("`")[1::2]:
        exec(line, names)
    assert names["vectors"].shape == (1, 32) and (tmp_path / "folder" / "model.safetensors").is_file()


def test_export_and_embed_import_neither_tensorflow_nor_torch(workdirs, tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n")
    code = (
        "import sys\nfor name in ('tensorflow', 'seqio', 'tensorflow_datasets', 'torch', 'transformers'): sys.modules[name] = None\n"
        "from maelm_jax import embed, export\n"
        f"export.main(['--workdir={workdirs['mpnet']}', '--output={tmp_path / 'out'}', '--no-verify'])\n"
        f"embed.main(['--workdir={workdirs['mpnet']}', '--input={tmp_path / 'lines.txt'}', '--output={tmp_path / 'v.npy'}'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing,named", [(("torch", "transformers"), "PyTorch"), (("transformers",), "transformers")])
def test_verification_without_a_library_says_how_to_get_it(workdirs, tmp_path, monkeypatch, missing, named):
    original = importlib.util.find_spec
    found = {name: None if name in missing else object() for name in ("torch", "transformers")}  # whatever is installed here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: found[name] if name in found else original(name, *more))
    with pytest.raises(config.ConfigError, match=named):
        export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}", "--verify"])
    assert export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"]) == 0
    assert f"Not verified when this was written: {named} is not installed" in (tmp_path / "out" / "README.md").read_text()


def test_a_fine_tuned_run(workdirs, vocabulary, make_workdir, tmp_path):
    """The head's names and labels; the function is tested beside PyTorch."""
    draw = np.random.default_rng(0)
    model = gin_files.load([str(workdirs["mpnet"] / "config.gin")]).model
    shapes = jax.eval_shape(maelm.create(model, vocabulary.size, vocabulary.special)[1], jax.random.key(0))
    params = {"encoder": jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes["encoder"])}
    results = {
        "task": "rte",
        "labels": ["yes", "no"],
        "main_metric": "accuracy",
        "score": 0.625,
        "evaluated_on": {"dev": "277 examples"},
        "max_length": 96,
        "init_from": "runs/tiny",
    }

    def linear(outputs: int) -> dict:
        return {"kernel": np.ones((32, outputs), np.float32), "bias": np.ones(outputs, np.float32)}

    def export_tuned(name: str, head: dict, **changes) -> tuple[dict, str]:
        """Returns config.json and the card."""
        tuned = make_workdir(tmp_path / name, {}, params | head) if not (tmp_path / name).exists() else tmp_path / name
        (tuned / "results.json").write_text(json.dumps(results | changes))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert run(tuned, tmp_path / "out") == 0
        return json.loads((tmp_path / "out" / "config.json").read_text()), (tmp_path / "out" / "README.md").read_text()

    classifier = {"classifier": {"dense": linear(32), "out": linear(2)}}
    scores = [{"name": name, "examples": 9, "precision": 0.5, "recall": 0.25, "f1": 0.125} for name in ("yes", "no")]
    content, text = export_tuned("rte", classifier, classes={"classes": scores, "confusion": [[7, 2], [8, 1]]})
    assert "0.1250" in text and "(confusion.png)" in text and (tmp_path / "out" / "confusion.png").is_file()
    measured = {"accuracy": 0.625, "macro_f1": 0.125}
    _, text = export_tuned("rte", classifier, best={"step": 3, "epoch": 1.0, **measured}, baseline={"accuracy": 0.5, "macro_f1": 0.25})
    metrics = front_matter(text)["model-index"][0]["results"][0]["metrics"]
    assert {metric["type"]: metric["value"] for metric in metrics} == measured and "macro_f1 0.1250" in text
    content, text = export_tuned("rte", classifier)
    assert "confusion" not in text
    assert content["architectures"] == ["MPNetForSequenceClassification"] and content["id2label"] == {"0": "yes", "1": "no"}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 96
    entries = front_matter(text)
    assert entries["pipeline_tag"] == "text-classification" and entries["datasets"] == ["nyu-mll/glue"]
    assert entries["model-index"][0]["results"][0]["metrics"] == [{"type": "accuracy", "value": 0.625}]
    assert "labels | `yes`, `no`" in text and 'pipeline("text-classification"' in text and "started from | `tiny`" in text
    assert "fine-tuned on | rte" in text and "accuracy 0.6250" in text and "AutoModelForSequenceClassification" in text
    content, text = export_tuned("rte", classifier, task="own", label_separator=",")
    assert content["problem_type"] == "multi_label_classification" and "A text has the labels whose logit is above 0" in text
    (tmp_path / "rte" / "results.json").write_text(json.dumps(results | {"labels": ["one"]}))
    assert "results.json" in refuse(tmp_path / "rte", tmp_path / "out2")
    (tmp_path / "rte" / "results.json").write_text(json.dumps(results | {"has_stock_class": False}))
    assert "labels.py" in refuse(tmp_path / "rte", tmp_path / "out2"), "no stock class predicts labels of such a kind"
    assert opened.load_model(tmp_path / "rte").params
    score = make_workdir(tmp_path / "score", {}, params | {"classifier": {"dense": linear(32), "out": linear(1)}})
    (score / "results.json").write_text(json.dumps(results))
    assert "yes, no" in refuse(score, tmp_path / "out2"), "it is no regression"

    content, text = export_tuned("squad", {"span": linear(2)}, task="squad2", labels=[], best={"best_f1_threshold": -1.25})
    assert content["architectures"] == ["MPNetForQuestionAnswering"]
    assert "training ruled these out" in text and "is above -1.25." in text
    content, text = export_tuned("conll", {"token": {"out": linear(3)}}, task="conll", labels=["B-X", "I-X", "O"])
    assert content["architectures"] == ["MPNetForTokenClassification"] and "problem_type" not in content
    assert "the label of a word is that of its first token" in text
    content, text = export_tuned("stsb", {"classifier": {"dense": linear(32), "out": linear(1)}}, task="stsb", labels=[])
    assert content["problem_type"] == "regression" and "from 0 to 1 (STS-B: score / 5)" in text


# The card.


def front_matter(text: str) -> dict:
    """What the Hub reads of a card."""
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_says_what_is_known_of_the_training_and_which_output_is_trained(copy_export, tmp_path):
    """The second export is of the first one, a folder of whose training nothing is known."""
    copy_export("mpnet", tmp_path / "first")
    copy_export("mpnet-mlm", tmp_path / "mlm")
    assert run(tmp_path / "first", tmp_path / "second") == 0
    first, second, mlm = ((tmp_path / name / "README.md").read_text() for name in ("first", "second", "mlm"))
    assert "converted from | `first`" in second and "objective" not in second
    for text, has_decoder in ((first, True), (second, True), (mlm, False)):
        assert "random head" not in text and str(tmp_path) not in text
        assert ("`pooler_output` and its weights are not trained" in text) == has_decoder
        assert ("trust_remote_code=True" in text) == has_decoder and "MaskedLMScorer" in text and 'pipeline("fill-mask"' in text
    first, second, mlm = (front_matter(text) for text in (first, second, mlm))
    assert first["pipeline_tag"] == second["pipeline_tag"] == mlm["pipeline_tag"] == "fill-mask"
    assert first["language"] == "en" and first["tags"] == ["mae-lm"] and "tags" not in mlm and "model-index" not in second
    metrics = {metric["type"]: metric["value"] for metric in first["model-index"][0]["results"][0]["metrics"]}
    assert metrics == {"loss": 6.125, "accuracy": 0.25}


def test_what_only_the_user_knows_is_given_for_the_hub(workdirs, tmp_path):
    given = ["--metadata=license=apache-2.0", "--metadata=datasets=user/corpus", "--metadata=language=en,de"]
    assert run(workdirs["roberta"], tmp_path / "out", *given) == 0
    entries = front_matter((tmp_path / "out" / "README.md").read_text())
    assert (entries["license"], entries["datasets"], entries["language"]) == ("apache-2.0", ["user/corpus"], ["en", "de"])
    assert "--metadata=license" in refuse(workdirs["roberta"], tmp_path / "other", "--metadata=license")


@pytest.mark.parametrize("file", sorted(path.stem for path in (ROOT / "configs" / "ablations").glob("*.gin")))
def test_a_card_describes_every_ablation(file, tmp_path, vocabulary):
    experiment = gin_files.load(["tiny.gin", f"ablations/{file}.gin"], [f"Run.init_from='{tmp_path}/start'", f"Corpus.text_files='{tmp_path}/*.txt'"])
    origin = {"path": str(tmp_path), "experiment": experiment, "step": 12, "workdir": Workdir(tmp_path)}
    untrained = in_memory({}, experiment.model, vocabulary, 48, objective=experiment.objective, **origin)
    text = card.render("huggingface", "name", untrained, folders.Written("MPNetModel", 3), True, "x")
    masking = experiment.objective.masking
    assert f"{masking.rate:.0%} of the tokens are masked" in text and (f"in whole {masking.unit}s" in text) == (masking.unit != "token")
    assert (f"{masking.random_fraction:.0%} become random tokens" in text) == (masking.random_fraction > 0)
    assert str(tmp_path) not in text and "`start`" in text and " 0%" not in text


def test_every_user_can_read_an_export(workdirs, tmp_path):
    before = os.umask(0o022)
    try:
        assert run(workdirs["mpnet"], tmp_path / "out") == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


# What is refused.


@pytest.mark.parametrize(
    "name,more,message",
    [
        ("mpnet", ["--step=7"], "step 7; it holds 6, 12"),
        ("reference", [], "docs/encoders.md"),
        ("mpnet", ["--format=reference"], "--gin_file=ablations/reference_positions.gin"),
        ("mpnet", ["--gin.Encoder.layers=3"], "unrecognized arguments: --gin.Encoder.layers=3"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(workdirs, tmp_path, name, more, message):
    if "--format=reference" in more:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    assert message in refuse(workdirs[name], tmp_path / "out", *more)
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_without_a_checkpoint(workdirs, tmp_path):
    shutil.copytree(workdirs["mpnet"], tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert "checkpoint" in refuse(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir()
    assert "checkpoint" in refuse(tmp_path / "run", tmp_path / "out")
    assert "no such file" in refuse(tmp_path / "nothing", tmp_path / "out", "--step=3")


def test_what_a_format_cannot_hold_is_refused_with_the_format_to_use(vocabulary, monkeypatch):
    monkeypatch.setattr(folders.weight_files, "require_torch", lambda purpose: None)
    usual = model_of(layers=2, width=32, heads=4, feed_forward=48)

    def refuse_format(format: str, model: config.Model, **more) -> str:
        with pytest.raises(config.ConfigError) as error:
            folders.check_format(format, make_untrained(model, vocabulary, **more))
        return str(error.value)

    modern = gin_files.load(["modern_tiny.gin"]).model
    folders.check_format("huggingface", make_untrained(modern, vocabulary))
    assert "biases" in refuse_format("huggingface", model_of(modern, biases=True))
    published_model = model_of(usual, relative_buckets="reference")
    assert "--format=huggingface" in refuse_format("reference", modern)
    folders.check_format("reference", make_untrained(published_model, vocabulary))
    for change in ({"decoder_causal": True}, {"decoder_attention": "self+cross"}, {"decoder_width": 64}):
        assert "--format=huggingface" in refuse_format("reference", model_of(published_model, **change))
    assert "fine-tuned" in refuse_format("reference", published_model, head=family.FineTunedHead(family.QUESTION_ANSWERING))
    assert "Objective.name" in refuse_format("reference", published_model, objective=config.Objective.between(0.5))
    assert "renumber" in refuse_format("reference", published_model, objective=objective_of(renumber=True))
    assert "token_types" in refuse_format("reference", model_of(published_model, token_types=2))
    folders.check_format("huggingface", make_untrained(model_of(usual, decoder_causal=True), vocabulary))


@pytest.mark.parametrize("ids", [(1, 1000, 2, 0, 1001), (0, 1, 2, 3, 4)])
def test_special_ids_that_the_published_code_changes_are_refused(ids):
    published.check_special_ids(config.SpecialIds(0, 1, 2, 3, 1001), 1002, "vocabulary")
    with pytest.raises(config.ConfigError, match="vocabulary"):
        published.check_special_ids(config.SpecialIds(*ids), 1002, "vocabulary")


def test_a_vocabulary_that_has_no_tokenizer_json_is_exported_without_it(make_workdir, tmp_path, capsys):
    import io
    from pydoc_data import topics

    import sentencepiece

    model, lines = io.BytesIO(), topics.topics["for"].split("\n")
    ids = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=80, **ids)
    workdir = make_workdir(tmp_path / "run", {}, vocabulary=vocabularies.SentencePieceVocabulary(model.getvalue()))
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}"]) == 0
    assert "no tokenizer.json" in capsys.readouterr().out
    assert "out/sentencepiece.model" in (tmp_path / "out" / "README.md").read_text()
    one, other = (maelm_jax.load_encoder(path) for path in (workdir, tmp_path / "out"))
    assert one.vocabulary.fingerprint == other.vocabulary.fingerprint
    assert one.length == other.length < one.model.encoder.max_positions


# The folder.


def test_what_exists_is_never_replaced(workdir, tmp_path):
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for output in ("runs/mpnet", "runs", ".", "/", "link", "file"):
        done = call("export", f"--workdir={workdir}", f"--output={tmp_path / output}", "--no-verify")
        assert done.status == 2 and done.stderr.count("\n") == 1 and output in done.stderr, done.stderr
        assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_filled_also_behind_a_link(workdir, tmp_path):
    (tmp_path / "version-1").mkdir()
    (tmp_path / "newest").symlink_to("version-1")
    assert run("runs/mpnet", "newest/") == 0
    assert (tmp_path / "newest").is_symlink() and (tmp_path / "version-1" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "runs", "version-1"]
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "version-1").stat().st_mode == (tmp_path / "usual").stat().st_mode, "others may read it"


def test_a_changed_vocabulary_of_an_export_is_found(copy_export, tmp_path):
    for number, name in enumerate(("sentencepiece.model", "tokenizer.json")):
        folder = copy_export("mpnet", tmp_path / f"out{number}")
        content = (folder / name).read_bytes()
        place = content.index(b"the")
        (folder / name).write_bytes(content[:place] + b"thf" + content[place + 3 :])
        with pytest.raises(config.ConfigError, match=name):
            maelm_jax.load_encoder(folder)


def test_a_folder_that_python_saved_is_not_replaced(workdir, tmp_path, monkeypatch):
    loaded = maelm_jax.load_encoder(workdir)
    loaded.save_pretrained(tmp_path / "out")
    with pytest.raises(config.ConfigError, match="out"):
        loaded.save_pretrained(tmp_path / "out")
    with pytest.raises(config.ConfigError, match="gs://bucket/out"):
        loaded.save_pretrained("gs://bucket/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(config.ConfigError):
        loaded.save_pretrained(".")
    loaded.save_pretrained("inside")
    assert (tmp_path / "here" / "inside" / "config.json").is_file()


def test_what_appears_meanwhile_is_kept(workdir, tmp_path, monkeypatch):
    write = folders.write

    def slow(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("x")
        return write(*arguments)

    monkeypatch.setattr(folders, "write", slow)
    with pytest.raises(OSError):
        run("runs/mpnet", "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_a_full_disk_leaves_nothing_and_names_the_folder(workdirs, tmp_path, monkeypatch):
    """Status 1, one line. Libraries do not say which file it was."""

    def fail(*_):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(folders.weight_files, "write_safetensors", fail)
    done = call("export", f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}", "--no-verify")
    assert done.status == 1 and done.stderr.count("\n") == 1 and str(tmp_path / "out") in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_halves_the_files_and_only_rounds(workdirs, tmp_path):
    for dtype in ("float32", "bfloat16"):
        argv = [f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / dtype}", f"--dtype={dtype}", "--no-verify"]
        assert export.main(argv) == 0
    whole, rounded = (maelm_jax.load_encoder(tmp_path / dtype).params for dtype in ("float32", "bfloat16"))
    for path, value in whole.items():
        assert rounded[path].dtype == np.float32 and np.allclose(rounded[path], value, rtol=2**-8, atol=0), path
    for name in ("model.safetensors", "decoder.safetensors"):
        sizes = [(tmp_path / dtype / name).stat().st_size for dtype in ("float32", "bfloat16")]
        assert sizes[1] < 0.6 * sizes[0]


def test_the_encoder_of_the_repository_has_learned_something():
    loaded = maelm_jax.load_encoder(ROOT / "pretrained")
    texts = ["The film was wonderful.", "A great movie, I loved it.", "The river runs through the valley."]
    film, movie, river = loaded.encode(texts, pooling="mean", normalize=True)
    assert film @ movie > film @ river + 0.05
    [[candidates]] = loaded.fill_mask(["She was [MASK] in 1925."])
    assert candidates[0].token == "born" and candidates[0].probability > 0.5
    [state] = loaded.encode(["Representations that were never trained on [MASK] have nothing to forget."], pooling="first")
    assert np.allclose(state[:4], [1.0393, 0.3664, 0.3709, -0.0590], atol=1e-4), "as PyTorch computed them when it was exported"


def test_an_id_of_padding_that_mpnet_does_not_have_names_the_settings_to_change():
    model, special = config.Encoder(relative_buckets="t5"), config.SpecialIds.of_size(600)
    assert families.require_stock_family(model, special).model_type == "mpnet"
    for setting in (r"Vocabulary\.file", r"Encoder\.relative_buckets"):
        with pytest.raises(config.ConfigError, match=setting):
            families.require_stock_family(model, dataclasses.replace(special, pad=0, bos=1))
