"""The model card of an export."""

import io
import re
import sys
import types
from pydoc_data import topics

import pytest
import sentencepiece

from maelm_jax import config, export, gin_files
from maelm_jax.data import vocabularies
from maelm_jax.encoders import card


@pytest.mark.parametrize(
    "settings,words",
    [
        ({}, "t5 buckets 32/128"),
        ({"relative_buckets": "none"}, "no relative positions"),
        ({"relative_buckets": "none", "positions": "rotary"}, "rotary positions"),
        ({"relative_buckets": "none", "positions": "rotary", "local_attention": 64}, "rotary positions, local attention 64"),
    ],
)
def test_a_card_names_the_positions(settings, words):
    assert card.positions(config.Model(**settings)) == words


@pytest.mark.parametrize("masking,words", [("rate=0.4", "40% of"), ("rate_plateaus=((0, 0.3), (0.5, 0.15))", "30%, then 15% of")])
def test_a_card_names_the_mask_rates_of_the_training(masking, words):
    assert f": {words} the tokens are masked, none" in card.objective(gin_files.load(["tiny.gin"], [f"Masking.{masking}"]))


def test_a_card_says_that_the_weights_are_averaged():
    assert card.averaged(config.Optimizer()) == {}
    assert card.averaged(config.Optimizer(ema_decay=0.99)) == {"averaging": "the parameters are a moving average over the steps, decay 0.99"}


@pytest.mark.parametrize(
    "form,present,absent",
    [
        ("huggingface", "Read back with transformers", "PyTorch's torch.load"),
        ("pytorch", "Read back with maelm.py", "transformers"),
        ("reference", "torch.load reads the same numbers", "compared with the JAX model"),
    ],
)
def test_a_card_says_read_back_of_what_was(form, present, absent):
    reports = [{"of": "hidden states", "largest_difference": 1e-7, "largest_value": 2.0}]
    text = card.verification(form, reports, "")
    assert present in text and absent not in text
    assert card.verification(form, None, "--no-verify was given") == "Not verified when this was written: --no-verify was given."


@pytest.mark.parametrize(
    "file,words",
    [
        ("random_tokens", "(100% of these become random tokens and 0% stay as they are where the encoder reads them)"),
        ("mlm_80_10_10", "(10% of these become random tokens and 10% stay as they are where the encoder reads them)"),
        ("spans", "of the tokens are masked, in spans"),
        ("whole_words", "of the tokens are masked, by whole words"),
    ],
)
def test_a_card_names_what_stands_for_a_masked_token(file, words):
    text = card.objective(gin_files.load(["tiny.gin", f"ablations/{file}.gin"]))
    assert words in text and "each [MASK]" not in text


def test_a_card_says_nothing_of_a_training_that_is_unknown(workdirs, tmp_path):
    """The second export is of the first one, a folder of whose training nothing is known."""
    for origin, name in ((workdirs["mpnet"], "first"), (tmp_path / "first", "second"), (workdirs["mpnet-mlm"], "mlm")):
        assert export.main([f"--workdir={origin}", f"--output={tmp_path / name}", "--no-verify"]) == 0
    first, second, mlm = ((tmp_path / name / "README.md").read_text() for name in ("first", "second", "mlm"))
    assert "In training" in first and "In training" not in second
    assert "tags: [mae-lm]" in first and "mae-lm" not in second and "tags:" not in mlm


@pytest.fixture(scope="module")
def unigram() -> vocabularies.Vocabulary:
    """A vocabulary without an equal tokenizer.json."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(topics.topics["for"].split("\n")),
        model_writer=model,
        vocab_size=80,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return vocabularies.SentencePieceVocabulary(model.getvalue())


def test_a_vocabulary_without_tokenizer_json_is_exported_for_pytorch_only(make_workdir, unigram, tmp_path, capsys):
    workdir = make_workdir(tmp_path / "run", {}, vocabulary=unigram)
    argv = [f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--no-verify"]
    with pytest.raises(config.ConfigError, match="only BPE has an equal Hugging Face tokenizer. `export --format=pytorch` goes without"):
        export.main(argv)
    assert export.main([*argv, "--format=pytorch"]) == 0
    printed = capsys.readouterr().out
    assert "no tokenizer.json: of SentencePiece models only BPE" in printed and "--format=pytorch" not in printed
    assert "tokenizer.json" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("form,kind", [("pytorch", "bpe"), ("pytorch", "unigram"), ("huggingface", "bpe")])
def test_the_lines_of_a_card_run(workdirs, make_workdir, unigram, tmp_path, monkeypatch, form, kind):
    """In the folder above the export, as its reader would type them."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "maelm", raising=False)
    workdir = workdirs["mpnet"] if kind == "bpe" else make_workdir(tmp_path / "run", {}, vocabulary=unigram)
    assert export.main([f"--workdir={workdir}", "--output=out", f"--format={form}"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    [lines] = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    names: dict = {}
    exec(lines, names)
    states = names["states"] if form == "pytorch" else names["output"].last_hidden_state
    assert states.shape[0] == 1 and states.shape[2] == 32 and bool(states.isfinite().all())


def fine_tuned_about(architecture: str, **results):
    return types.SimpleNamespace(results=results, step=3, architecture=architecture)


def test_a_card_says_when_a_question_has_no_answer():
    rows = card.fine_tuning(fine_tuned_about("MPNetForQuestionAnswering", task="squad2", best={"best_f1_threshold": -1.25}))
    assert "minus that of the best span is above -1.25." in rows["no answer"]
    assert "no answer" not in card.fine_tuning(fine_tuned_about("MPNetForQuestionAnswering", task="squad1", best={"f1": 50.0}))


def test_a_card_says_how_words_become_text():
    rows = card.fine_tuning(fine_tuned_about("RobertaForTokenClassification", task="conll"))
    assert "Give the words as one text with a space between two" in rows["logits"]


def test_a_card_gives_the_range_of_scores_of_ones_own():
    own = config.Finetune(tasks="own", train_file="a", custom=config.CustomTask(score_range=(1, 5)))
    experiment = types.SimpleNamespace(finetune=own)
    about = types.SimpleNamespace(results={"task": "own"}, step=3, architecture="MPNetForSequenceClassification", experiment=experiment)
    assert card.fine_tuning(about)["output"].endswith("a score of the files is 1 + output * 4")
