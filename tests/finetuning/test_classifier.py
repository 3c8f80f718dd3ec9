"""`load_classifier`: the numbers of the command, and those of transformers."""

import json

import numpy as np
import pytest
from testing import fill_cache, stock_folder, write_text

import maelm_jax
from maelm_jax import config, export, finetune
from maelm_jax.finetuning import labelled_data

TEXTS = ["The old cat sleeps.", "A dog runs near the river.", "Rain.", "The house " * 60]
FILES = {
    "one": (["sport", "war", "art"], []),
    "several": (["sport|war", "", "art"], ["CustomTask.label_separator='|'"]),
    "score": (["1", "4.5", "2"], ["CustomTask.score_range=(1,5)"]),
}


@pytest.fixture(scope="module", params=FILES)
def tuned(request, pretrained, tmp_path_factory):
    """A run on 30 texts, and the name of its kind of labels."""
    folder = tmp_path_factory.mktemp(request.param)
    labels, settings = FILES[request.param]
    write_text(folder / "train.csv", "text,label\n" + "".join(f"The {word} cat {n}.,{labels[n % 3]}\n" for n, word in enumerate(["big", "old"] * 15)))
    argv = ["--gin_file=finetune/own.gin", f"--init_from={pretrained}", f"--workdir={folder / 'run'}"]
    argv += [
        f"--gin.{one}" for one in (f"TRAIN_FILE={folder / 'train.csv'}", "EPOCHS=1", "BATCH_SIZE=8", "LEARNING_RATE=1e-2", "Mesh.data=1", *settings)
    ]
    return folder / "run", request.param, argv


@pytest.fixture
def run(tuned, one_device):
    workdir, kind, argv = tuned
    assert finetune.main(argv) == 0
    return workdir, kind


def numbers(predictions, kind) -> np.ndarray:
    return np.asarray([[one.label] if kind == "score" else list(one.probabilities.values()) for one in predictions])


def test_a_run_gives_what_the_command_writes(run, tmp_path):
    workdir, kind = run
    labelled_data.write(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    assert finetune.main([f"--workdir={workdir}", f"--predict={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]) == 0
    written = [row.values for row in labelled_data.read(tmp_path / "out.jsonl", [])]
    classifier = maelm_jax.load_classifier(workdir)
    predictions = classifier.predict(TEXTS)
    assert classifier.predict([]) == []
    if kind == "score":
        assert [one.label for one in predictions] == pytest.approx([row["prediction"] for row in written], abs=1e-5)
    else:
        assert [one.label for one in predictions] == [row["prediction"] for row in written]
        for one, row in zip(predictions, written, strict=True):
            assert one.probability == pytest.approx(row["probability"], abs=1e-6)
    for wrong, message in (([("a", "b")], "single texts"), ([None], r"texts\[0\]"), ([1], r"texts\[0\]")):
        with pytest.raises(config.ConfigError, match=message):
            classifier.predict(wrong)
    (alone,) = classifier.predict(TEXTS[:1])
    assert numbers([alone], kind) == pytest.approx(numbers(predictions[:1], kind), abs=1e-6)


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
def test_an_export_gives_what_transformers_gives(run, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    workdir, kind = run
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    named = {"one": "single_label_classification", "several": "multi_label_classification", "score": "regression"}
    assert content["problem_type"] == named[kind]
    classifier = maelm_jax.load_classifier(tmp_path / "out")
    ours = numbers(classifier.predict(TEXTS), kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(**tokenizer(TEXTS, truncation=True, padding=True, return_tensors="pt")).logits
    theirs = {"one": logits.softmax(1), "several": logits.sigmoid(), "score": logits}[kind]
    assert ours == pytest.approx(theirs.numpy(), abs=1e-5)
    if kind == "score":
        of_run = [one.label for one in maelm_jax.load_classifier(workdir).predict(TEXTS)]
        assert of_run == pytest.approx(np.clip(1 + 4 * ours[:, 0], 1, 5), abs=1e-4)


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
def test_the_classifier_of_a_stranger_scores_the_state_that_its_folder_says(vocabulary, tmp_path):
    pytest.importorskip("torch")
    stock = stock_folder(tmp_path / "stock", "modernbert", "AutoModelForSequenceClassification", vocabulary)
    settings = json.loads((stock / "config.json").read_text())
    assert settings["classifier_pooling"] == "cls", "the default of transformers"
    with pytest.raises(config.ConfigError, match="classifier_pooling"):
        maelm_jax.load_classifier(stock)
    (stock / "config.json").write_text(json.dumps(settings | {"classifier_pooling": "mean"}))
    assert len(maelm_jax.load_classifier(stock).labels) == 2


def test_a_name_on_the_hub_is_read_from_the_cache(run, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    workdir, kind = run
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    fill_cache(tmp_path / "cache", tmp_path / "out")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    ours = numbers(maelm_jax.load_classifier("org/name@v1").predict(TEXTS), kind)
    assert np.array_equal(ours, numbers(maelm_jax.load_classifier("out").predict(TEXTS), kind))
    with pytest.raises(config.ConfigError, match="org/other"):
        maelm_jax.load_classifier("org/other")


@pytest.mark.parametrize("name", ["here/absent", "absent", "here"])
def test_a_folder_that_is_none_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(config.ConfigError, match=name):
        maelm_jax.load_classifier(name)


def test_what_is_no_classifier_is_refused(pretrained, tmp_path):
    with pytest.raises(config.ConfigError):
        maelm_jax.load_classifier(pretrained)
    assert export.main([f"--workdir={pretrained}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    with pytest.raises(config.ConfigError):
        maelm_jax.load_classifier(tmp_path / "out")
