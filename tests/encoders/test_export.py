"""The command `export`: what it refuses, that nothing half-written is left, memory. No PyTorch needed."""

import json
import pathlib
import shutil
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from testing import flatten

import maelm_jax
from maelm_jax import config, embed, export, gin_files
from maelm_jax.encoders import encoder as encoders
from maelm_jax.encoders import export_formats, huggingface, verify
from maelm_jax.model import maelm

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(workdir, output, *more) -> int:
    return export.main([f"--workdir={workdir}", f"--output={output}", "--no-verify", *more])


def test_the_folder_of_an_mae_lm_run(workdirs, tmp_path, capsys):
    assert run(workdirs["mpnet"], tmp_path / "out") == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "README.md",
        "config.json",
        "maelm_jax_export.json",
        "model.safetensors",
        "sentencepiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (tmp_path / "out" / "README.md").read_text()
    for what in (
        "MAE-LM (arXiv 2302.02060)",
        "`installed_docs` 100%",
        "12 of 12, each of 32 rows of 48 tokens",
        "held-out, at mask rate 0.15, 6.1250",
        "Not verified",
        "48 tokens",
    ):
        assert what in card, what
    output = capsys.readouterr().out
    assert "MPNetModel of step 12" in output and "unverified: --no-verify was given" in output
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 48
    assert run(workdirs["mpnet"], tmp_path / "old", "--step=6") == 0
    card = (tmp_path / "old" / "README.md").read_text()
    assert "6.5000 (batch of step 6)" in card and "6.1250" not in card, "a card tells nothing of later steps"


@pytest.mark.parametrize(
    "name,more,message",
    [
        ("mpnet", ["--step=7"], "holds no checkpoint of step 7; it holds 6, 12"),
        ("reference", [], "reference buckets 64/128. Use --format=pytorch, which holds any model"),
        ("mpnet", ["--format=reference"], "--gin_file=ablations/reference_positions.gin"),
        ("mpnet", ["--gin.Model.layers=3"], "Model.layers: 2 -> 3"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(workdirs, tmp_path, name, more, message):
    with pytest.raises(config.ConfigError) as error:
        export.main([f"--workdir={workdirs[name]}", f"--output={tmp_path / 'out'}", "--no-verify", f"--gin_file={workdirs[name]}/config.gin", *more])
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_every_checkpoint_has_a_folder_of_its_own(workdirs, tmp_path, capsys):
    flags = [f"--workdir={workdirs['mpnet']}", "--no-verify"]
    assert export.main([*flags, f"--output={tmp_path / 'all'}", "--all_steps"]) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["step-12", "step-6"]
    assert "step-6: MPNetModel of step 6" in capsys.readouterr().out
    for step in (6, 12):
        assert export.main([*flags, f"--output={tmp_path / str(step)}", f"--step={step}"]) == 0
        alone, one_of_all = ((path / "model.safetensors").read_bytes() for path in (tmp_path / str(step), tmp_path / "all" / f"step-{step}"))
        assert alone == one_of_all
    shutil.rmtree(tmp_path / "all" / "step-6")
    with pytest.raises(config.ConfigError, match="step-12 exists"):
        export.main([*flags, f"--output={tmp_path / 'all'}", "--all_steps"])
    assert not (tmp_path / "all" / "step-6").exists(), "all folders are checked before any is written"
    with pytest.raises(config.ConfigError, match="--step and --all_steps contradict each other"):
        export.main([*flags, f"--output={tmp_path / 'both'}", "--all_steps", "--step=6"])


def test_a_workdir_without_a_checkpoint(workdirs, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.gin", "vocabulary"):
        (tmp_path / "run" / name).symlink_to(workdirs["mpnet"] / name)
    with pytest.raises(config.ConfigError, match="no checkpoints/ folder"):
        run(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(config.ConfigError, match="holds no checkpoint"):
        run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(config.ConfigError, match="workdir"):
        run(tmp_path / "nothing", tmp_path / "out")


def test_what_fails_half_way_leaves_the_old_folder(workdirs, tmp_path, monkeypatch):
    assert run(workdirs["mpnet"], tmp_path / "out") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(huggingface, "write", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        run(workdirs["mpnet"], tmp_path / "out", "--overwrite")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("missing,named", [(("torch", "transformers"), "PyTorch"), (("transformers",), "transformers")])
def test_verification_without_a_library_says_how_to_get_it(workdirs, tmp_path, monkeypatch, capsys, missing, named):
    original, libraries = verify.importlib.util.find_spec, ("torch", "transformers")
    found = {name: None if name in missing else object() for name in libraries}  # whatever is installed here
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name, *more: found[name] if name in found else original(name, *more))
    with pytest.raises(config.ConfigError, match=f"--verify needs {named}, which is not installed here: pip install torch"):
        export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}", "--verify"])
    assert export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"]) == 0
    assert f"unverified: {named} is not installed (pip install torch" in capsys.readouterr().out
    assert f"Not verified when this was written: {named} is not installed" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("format", ["huggingface", "pytorch"])
def test_writing_streams(tmp_path, vocabulary, format):
    """Beside the parameters themselves, less than half of them is in memory while they are written."""
    bindings = [
        "Model.width=512",
        "Model.feed_forward=512",
        "Model.layers=6",
        "Model.decoder_relative_bias=False",
    ]
    experiment = gin_files.load(["tiny.gin"], bindings)
    _, init = maelm.create(experiment.model, vocabulary.size, vocabulary.special)
    params = {path: np.ones(leaf.shape, np.float32) for path, leaf in flatten(jax.eval_shape(init, jax.random.key(0))).items()}
    params |= {path: params[path][: vocabulary.size] for path in ("encoder/token_embedding", "head/bias")}
    size = sum(value.nbytes for value in params.values())
    assert size > 30e6
    tracemalloc.start()
    try:
        export_formats.write(format, tmp_path, encoders.Encoder(params, experiment.model, vocabulary, 64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * size


def test_a_fine_tuned_run(workdirs, vocabulary, make_workdir, tmp_path):
    """The head's names and labels; the function is tested beside PyTorch."""
    draw = np.random.default_rng(0)
    model = gin_files.load([str(workdirs["mpnet"] / "config.gin")]).model
    shapes = jax.eval_shape(maelm.create(model, vocabulary.size, vocabulary.special)[1], jax.random.key(0))
    params = {"encoder": jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes["encoder"])}
    head = lambda outputs: {"kernel": np.ones((32, outputs), np.float32), "bias": np.ones(outputs, np.float32)}  # noqa: E731
    results = {
        "task": "rte",
        "labels": ["entailment", "not_entailment"],
        "main_metric": "accuracy",
        "score": 0.625,
        "max_length": 96,
        "init_from": "runs/tiny",
    }

    tuned = make_workdir(tmp_path / "rte", {}, params | {"classifier": {"dense": head(32), "out": head(2)}})
    (tuned / "results.json").write_text(json.dumps(results))
    assert run(tuned, tmp_path / "out") == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["MPNetForSequenceClassification"] and content["id2label"] == {"0": "entailment", "1": "not_entailment"}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 96
    card = (tmp_path / "out" / "README.md").read_text()
    assert "fine-tuned on | rte" in card and "accuracy 0.6250" in card and "AutoModelForSequenceClassification" in card
    with pytest.raises(config.ConfigError, match="fine-tuned run"):
        run(tuned, tmp_path / "out2", "--format=pytorch")
    (tuned / "results.json").write_text(json.dumps(results | {"labels": ["one"]}))
    with pytest.raises(config.ConfigError, match="2 classes, results.json names 1: one"):
        run(tuned, tmp_path / "out2")

    (tuned / "results.json").write_text(json.dumps(results | {"task": "own", "label_separator": ","}))
    assert run(tuned, tmp_path / "out6") == 0
    assert json.loads((tmp_path / "out6" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert "A text has the labels whose logit is above 0" in (tmp_path / "out6" / "README.md").read_text()

    squad = make_workdir(tmp_path / "squad", {}, params | {"span": head(2)})
    (squad / "results.json").write_text(json.dumps(results | {"task": "squad1", "labels": []}))
    assert run(squad, tmp_path / "out3") == 0
    assert "MPNetForQuestionAnswering" in (tmp_path / "out3" / "config.json").read_text()
    assert "training ruled these out" in (tmp_path / "out3" / "README.md").read_text()
    words = make_workdir(tmp_path / "conll", {}, params | {"token": {"out": head(3)}})
    (words / "results.json").write_text(json.dumps(results | {"task": "conll", "labels": ["B-X", "I-X", "O"]}))
    assert run(words, tmp_path / "out5") == 0
    content = json.loads((tmp_path / "out5" / "config.json").read_text())
    assert content["architectures"] == ["MPNetForTokenClassification"] and "problem_type" not in content
    assert "the label of a word is that of its first token" in (tmp_path / "out5" / "README.md").read_text()
    score = make_workdir(tmp_path / "stsb", {}, params | {"classifier": {"dense": head(32), "out": head(1)}})
    (score / "results.json").write_text(json.dumps(results | {"task": "stsb", "labels": []}))
    assert run(score, tmp_path / "out4") == 0
    assert json.loads((tmp_path / "out4" / "config.json").read_text())["problem_type"] == "regression"
    assert "from 0 to 1 (STS-B: score / 5)" in (tmp_path / "out4" / "README.md").read_text()


def test_every_command_takes_an_exported_folder(workdirs, tmp_path, capsys):
    """`embed` and `export` read a folder as they read the run that it came from."""
    (tmp_path / "lines.txt").write_text("a short line\n" + "a line of more than 48 tokens " * 9 + "\n", encoding="utf-8")
    assert run(workdirs["mpnet"], tmp_path / "out") == 0
    for path, name in ((workdirs["mpnet"], "a.npy"), (tmp_path / "out", "b.npy")):
        argv = [f"--workdir={path}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / name}"]
        assert embed.main(argv) == 0
    assert f"mean of the states of {tmp_path / 'out'}; 1 lines cut to 48" in capsys.readouterr().out
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    assert run(tmp_path / "out", tmp_path / "again") == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        first = (tmp_path / "out" / name).read_bytes()
        assert name == "config.json" or (tmp_path / "again" / name).read_bytes() == first
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"converted from | `{tmp_path / 'out'}`" in card and "encoder converted with" in card and "mae-lm" not in card
    assert "encoder trained with" in (tmp_path / "out" / "README.md").read_text()
    refused = {"--step=3": "need a workdir", "--gin.Model.layers=3": "is no workdir. Leave it out", "--gin_file=tiny.gin": "is no workdir. Leave it"}
    for more, message in refused.items():
        with pytest.raises(config.ConfigError, match=message):
            run(tmp_path / "out", tmp_path / "third", more)
    with pytest.raises(config.ConfigError, match="step 3: .* is no workdir, so it has no checkpoints by step. Leave the step out"):
        embed.main([f"--workdir={tmp_path / 'out'}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'c.npy'}", "--step=3"])
    assert not (tmp_path / "c.npy").exists()


def test_the_three_lines_of_the_readme(workdirs, tmp_path, monkeypatch):
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    [row] = [line for line in readme.splitlines() if line.startswith("| use it in Python |")]
    lines = row.split("`")[1::2]
    assert len(lines) == 3
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(workdirs["mpnet"])
    monkeypatch.chdir(tmp_path)
    names = {"maelm_jax": maelm_jax}
    for line in lines:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_the_encoder_of_the_repository_is_the_one_that_was_verified():
    [report] = json.loads((ROOT / "pretrained" / "verification.json").read_text())
    loaded = maelm_jax.load_encoder(ROOT / "pretrained")
    assert [loaded.vocabulary.bos, *loaded.vocabulary.encode(report["sentence"]), loaded.vocabulary.eos] == report["input_ids"]
    [state] = loaded.encode([report["sentence"]], pooling="first")
    assert np.allclose(state[:4], report["hidden_state_of_<s>"], atol=1e-4)
    texts = ["The film was wonderful.", "A great movie, I loved it.", "The river runs through the valley."]
    film, movie, river = loaded.encode(texts, pooling="mean")
    cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)  # noqa: E731
    assert cosine(film, movie) > cosine(film, river) + 0.1, "it has learned something"
