"""Labels for words: their files, where they stand, how they are learned, scored and written."""

import json
import lzma
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from testing import ROOT, english, input_format
from tokenizers import models, normalizers, pre_tokenizers, trainers

from maelm_jax import config, export, finetune
from maelm_jax.data import vocabularies
from maelm_jax.encoders.results import Results
from maelm_jax.finetuning import batches, grid, heads, token
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.task import EvaluationSet

NAMES = ["cat", "dog", "bird"]  # the rule: these are entities, and "old" before one begins it
OTHERS = "the a house river quick sleeps runs sees likes under near with and of".split()


def sentence(draw: random.Random) -> list[tuple[str, str]]:
    """Words with labels by the rule."""
    words: list[tuple[str, str]] = []
    for _ in range(draw.randrange(2, 8)):
        kind = draw.randrange(4)
        if kind == 0:
            words += [("old", "B-ANIMAL"), (draw.choice(NAMES), "I-ANIMAL")]
        elif kind == 1:
            words.append((draw.choice(NAMES), "B-ANIMAL"))
        else:
            words.append((draw.choice(OTHERS), "O"))
    return words


def write_conll(path: pathlib.Path, sentences: list[list[tuple[str, str]]]):
    """Writes sentences of (word, label) as CoNLL files are: a line a word, blank lines between."""
    blocks = ["".join(f"{word} {label}\n" for word, label in words) for words in sentences]
    path.write_text("\n".join(blocks))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("conll")
    draw = random.Random(0)
    write_conll(folder / "train.txt", [sentence(draw) for _ in range(160)])
    write_conll(folder / "dev.txt", [sentence(draw) for _ in range(40)])
    return folder


def task(*labels: str) -> token.TokenTask:
    """The task of a finished run with these labels."""
    settings = config.Finetune(tasks="conll", train_file="a", dev_file="b")
    return grid.create_task("conll", settings, Results(labels=list(labels)))


class Halves:
    """A vocabulary that cuts each word into pieces of two characters."""

    bos, eos = 0, 2

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def encode(self, text):
        return [5] * sum((len(word) + 1) // 2 for word in text.split(" "))


def evaluation_set(one: token.TokenTask, sentences: list[tuple[str, str]], length: int) -> EvaluationSet:
    """Sentences of (words, labels), each a text, for a vocabulary that cuts words into halves."""
    examples = [token.Sentence(words.split(), labels.split()) for words, labels in sentences]
    return EvaluationSet(examples, *one.encode(examples, input_format(Halves(), length), "dev"), "")


def encoded_words(words: list[str], vocabulary) -> tuple[list[int], list[int]]:
    """The row of a sentence with these words, and the slot of each word's first token."""
    encoded = task("A").encode([token.Sentence(words, [])], input_format(vocabulary, 100_000), "dev")
    return encoded.features.ids[0].tolist(), encoded.layout[0].tolist()


def test_a_label_stands_at_the_first_token_of_its_word():
    one = task("B-PER", "O")
    dev = evaluation_set(one, [("Peter x runs", "B-PER O unknown")], 32)
    assert dev.features.ids[0].tolist() == [0, 5, 5, 5, 5, 5, 5, 2]
    assert dev.features.targets.tolist() == [[-1, 0, -1, -1, 1, -1, -1, -1]]
    assert dev.layout[0].tolist() == [1, 4, 5] and one.notes == []


def slots_of(classes) -> token.Slots:
    """Outputs of a model that is sure of these classes."""
    classes = np.asarray(classes)
    return token.Slots(classes, np.ones(classes.shape, np.float32))


def test_what_does_not_fit_is_cut_counted_and_predicted_as_outside(tmp_path):
    one = task("B-X", "I-X", "O")
    dev = evaluation_set(one, [("abcd efgh ij", "B-X I-X O"), ("a", "O")], 5)
    assert dev.features.ids[0].tolist() == [0, 5, 5, 5, 2]
    assert one.notes == ["dev: 1 of 2 sentences cut to 5 tokens", "dev: 1 of 4 words have no token, or were cut off"]
    outputs = slots_of([[9, 0, 9, 1, 9], [9, 2, 9, 9, 9]])
    assert one.score(dev, outputs) == {"accuracy": 1.0, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    path = one.write(dev, outputs, tmp_path, "p")
    assert path.read_text() == "abcd B-X\nefgh I-X\nij O\n\na O\n"


def test_a_word_without_a_token_is_no_right_part_of_speech(tmp_path):
    one = task("AA", "NN", "O")
    dev = evaluation_set(one, [("abcd ef gh", "NN AA O")], 4)
    outputs = slots_of([[9, 1, 9, 9]])
    assert one.score(dev, outputs) == {"accuracy": pytest.approx(1 / 3)}
    assert one.write(dev, outputs, tmp_path, "p").read_text() == "abcd NN\nef _\ngh _\n"


def test_the_baseline_is_the_commonest_label():
    one = task("B-A", "O")
    dev = evaluation_set(one, [("a b c", "O O B-A"), ("d", "O")], 16)
    assert one.score(dev, one.constant_outputs(dev.features, dev)) == {"accuracy": 0.75, "precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_the_first_token_of_a_word_is_that_of_stock_tokenizers():
    """By which users of an export align words and predictions."""
    folder = ROOT / "pretrained"
    stock = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = vocabularies.load(folder)
    spaces = 0
    for text in english()[:15]:
        words = re.findall(r"[a-z]+|[^\sa-zA-Z0-9]", text)
        encoded = stock.encode(words, is_pretokenized=True, add_special_tokens=False)
        row, slots = encoded_words(words, ours)
        numbers, pieces = encoded.word_ids, encoded.tokens  # each access makes the list anew
        first = [numbers.index(number) for number in range(len(words))]
        assert row[1:-1] == encoded.ids and slots == [index + 1 for index in first]
        spaces += sum(pieces[index] == "▁" for index in first)
    assert spaces > 20


def prefixing_vocabulary(words: list[str], folder: pathlib.Path) -> vocabularies.Vocabulary:
    """One whose normalizer puts a space before each text, also where the text has one."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    model.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    model.save(str(folder / "tokenizer.json"))
    return vocabularies.load(folder)


def test_the_tokens_of_words_are_those_of_the_sentence(vocabulary, tmp_path):
    words = [word for word in " ".join(english()).split() if word.isascii()][:500]
    text = " ".join(words)
    for one in (vocabulary, prefixing_vocabulary(words, tmp_path)):
        tokens, offsets = one.encode_with_offsets(text)
        row, slots = encoded_words(words, one)
        assert row[1:-1] == tokens
        for word, begin, end in zip(words, slots, [*slots[1:], len(row) - 1], strict=True):
            assert text[offsets[begin - 1][0] : offsets[end - 2][1]].strip() == word


def test_a_word_that_is_nothing_to_the_vocabulary_takes_no_token_of_its_neighbours(vocabulary):
    _, slots = encoded_words(["a", "\u200b", "London"], vocabulary)
    assert slots == [1, -1, 2]


def test_the_loss_is_the_mean_over_labelled_words(pretrained, vocabulary):
    from maelm_jax import gin_files

    one = task("B-A", "I-A", "O")
    model = gin_files.load([str(pretrained / "config.gin")]).model
    graph, init = heads.define(model, vocabulary.size, vocabulary.pad, one)
    params = jax.tree.map(lambda x: 4 * x, init(jax.random.key(0)))
    loss_fn = heads.loss_function(graph, one)
    numbers = jnp.arange(2, dtype=jnp.uint32)
    loss_of_batch = jax.jit(lambda batch: loss_fn(params, batch, numbers, jax.random.key(0), False))

    def sums(length, targets, size):
        ids = [np.arange(4, 4 + length, dtype=np.int32)]
        row = Features(ids, np.asarray([targets], np.int32), np.zeros(1, np.int32), True)
        return loss_of_batch(jax.tree.map(jnp.asarray, batches.pack(row, size, 2, 1, 0)))

    none, first, second, both = (
        sums(6, targets, 8) for targets in ([-1] * 6, [-1, 2, -1, -1, -1, -1], [-1, -1, 0, -1, -1, -1], [-1, 2, 0, -1, -1, -1])
    )
    assert [float(value.count) for value in (none, first, second, both)] == [0, 1, 1, 2]
    assert float(none.loss_nats) == 0 and float(both.loss_nats) == pytest.approx(float(first.loss_nats + second.loss_nats))
    np.testing.assert_allclose(sums(6, [-1, 2, 0, -1, -1, -1], 16)[:3], both[:3], rtol=1e-5)


def run(files, pretrained, workdir, *more) -> int:
    argv = [
        "--gin_file=finetune/conll.gin",
        f"--init_from={pretrained}",
        f"--workdir={workdir}",
        f"--gin.TRAIN_FILE={files / 'train.txt'}",
        f"--gin.DEV_FILE={files / 'dev.txt'}",
        "--gin.MAX_LENGTH=64",
        "--gin.BATCH_SIZE=16",
        "--gin.Finetune.evaluations=1",
        "--gin.Run.log_every=100",
    ]
    return finetune.main([*argv, *more])


def test_a_rule_is_learned_and_a_file_is_labelled_by_it(one_device, files, pretrained, tmp_path):
    assert run(files, pretrained, tmp_path / "run", "--gin.EPOCHS=12", "--gin.LEARNING_RATE=1e-2") == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["main_metric"] == "f1" and results["score"] > 0.98, results["best"]
    assert results["labels"] == ["B-ANIMAL", "I-ANIMAL", "O"]
    assert set(results["best"]) == {"step", "epoch", "f1", "precision", "recall", "accuracy"}
    words_of_lines = ["the old cat runs", "a bird sees the dog"]
    (tmp_path / "new.txt").write_text("\n\n".join("\n".join(line.split()) for line in words_of_lines))
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={tmp_path / 'new.txt'}"]) == 0
    written = (tmp_path / "run" / "predictions_new.txt").read_text()
    words, labels, probabilities = zip(*(line.split() for line in written.split("\n") if line), strict=True)
    assert " ".join(words) == " ".join(words_of_lines) and all(0.3 < float(value) <= 1 for value in probabilities)
    assert list(labels) == "O B-ANIMAL I-ANIMAL O O B-ANIMAL O O B-ANIMAL".split()
    conllu = "# sent_id = 1\n1\tthe\t_\n2\told\t_\n3\tcat\t_\n\n-DOCSTART- -X- O\n"
    (tmp_path / "new.conllu").write_text(conllu)
    column = "--gin.Conll.word_column=1"
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={tmp_path / 'new.conllu'}", column]) == 0
    lines = (tmp_path / "run" / "predictions_new.conllu").read_text().split("\n")
    assert [line.rsplit("\t", 1)[0] for line in lines[1:4]] == ["1\tthe\t_\tO", "2\told\t_\tB-ANIMAL", "3\tcat\t_\tI-ANIMAL"]
    assert [*lines[:1], *lines[4:]] == [*conllu.split("\n")[:1], *conllu.split("\n")[4:]], "other lines stay"
    dev = (tmp_path / "run" / "predictions.txt").read_text()
    assert [line.split()[0] for line in dev.split("\n") if line] == [line.split()[0] for line in (files / "dev.txt").read_text().split("\n") if line]
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={files / 'dev.txt'}", "--score"]) == 0
    scores = json.loads((tmp_path / "run" / "predictions_dev_scores.json").read_text())
    assert {name: scores[name] for name in ("accuracy", "precision", "recall", "f1")} == {
        name: results["best"][name] for name in ("accuracy", "precision", "recall", "f1")
    }
    (animal,) = scores["classes"]
    assert animal["name"] == "ANIMAL" and animal["f1"] == pytest.approx(scores["f1"])


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
def test_the_lines_of_a_card_label_words_as_the_run_does(one_device, files, pretrained, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    assert run(files, pretrained, tmp_path / "run", "--gin.EPOCHS=6", "--gin.LEARNING_RATE=1e-2") == 0
    words = "the old cat , runs % a 7 bird".split()
    (tmp_path / "new.txt").write_text("\n".join(words))
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={tmp_path / 'new.txt'}"]) == 0
    assert export.main([f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    monkeypatch.chdir(tmp_path)
    loading, *_, labelling = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    names: dict = {}
    exec(loading, names)
    exec(re.sub('words = ".*"', f'words = "{" ".join(words)}"', labelling), names)
    lines = (tmp_path / "run" / "predictions_new.txt").read_text().split("\n")
    assert names["labelled"] == [tuple(line.split()[:2]) for line in lines if line]
    assert len({label for _, label in names["labelled"]}) > 1


def load(folder, vocabulary):
    settings = config.Finetune(tasks="conll", train_file=str(folder / "train.txt"), dev_file=str(folder / "dev.txt"))
    one = grid.create_task("conll", settings)
    return one, one.load(input_format(vocabulary, 64))


def test_labels_come_from_the_training_file(tmp_path, vocabulary):
    write_conll(tmp_path / "train.txt", [[("cat", "B-A"), ("runs", "O")]])
    write_conll(tmp_path / "dev.txt", [[("runs", "O")]])
    one, data = load(tmp_path, vocabulary)
    assert (one.labels, one.main_metric, one.notes) == (("B-A", "O"), "f1", [])
    assert one.score(data.dev[""], slots_of([[1] * 8])) == {"accuracy": 1.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    for name in ("train", "dev"):
        write_conll(tmp_path / f"{name}.txt", [[("cat", "NN"), ("runs", "VB")]])
    one, _ = load(tmp_path, vocabulary)
    assert one.main_metric == "accuracy" and "scored by the accuracy of words" in one.notes[-1]


def test_a_label_that_the_training_file_lacks_counts_as_missed(tmp_path, vocabulary):
    """I-PRT stands in the dev file of CoNLL-2000's chunks only."""
    write_conll(tmp_path / "train.txt", [[("cat", "B-A"), ("runs", "O")]])
    write_conll(tmp_path / "dev.txt", [[("cat", "B-A"), ("runs", "B-Rare")]])
    one, data = load(tmp_path, vocabulary)
    assert one.labels == ("B-A", "O") and "dev.txt: 1 words" in one.notes[-1] and "B-Rare" in one.notes[-1]
    dev = data.dev[""]
    slots = dev.layout[0]
    outputs = np.ones((1, max(slots) + 1), int)
    outputs[0, slots[0]] = 0
    assert one.score(dev, slots_of(outputs)) == {"accuracy": 0.5, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)}
    assert (dev.features.targets >= 0).sum() == 1, "no loss of a label that the model does not have"
    scored = task("B-A", "O")
    scored.read_file(str(tmp_path / "dev.txt"), labelled=True)
    assert "B-Rare" in scored.notes[-1]


def test_bad_files_end_with_one_line(tmp_path, files, pretrained, vocabulary):
    with pytest.raises(config.ConfigError, match="Finetune.train_file.*gone.txt"):
        run(files, pretrained, tmp_path / "out", f"--gin.TRAIN_FILE={tmp_path / 'gone.txt'}")
    with pytest.raises(config.ConfigError, match="Finetune.dev_file"):
        config.Finetune(tasks="conll", train_file="a")
    for name in ("train", "dev"):
        write_conll(tmp_path / f"{name}.txt", [[("cat", "O"), ("runs", "O")]])
    with pytest.raises(config.ConfigError, match="'O'"):
        load(tmp_path, vocabulary)
    with pytest.raises(config.ConfigError, match="other.txt.*'VERB'"):
        write_conll(tmp_path / "other.txt", [[("cat", "B-A"), ("runs", "VERB")]])
        task("B-A", "O").read_file(str(tmp_path / "other.txt"), labelled=True)


def test_other_answers_are_other_data(vocabulary, tmp_path):
    (tmp_path / "train.txt").write_text("London B-LOC\nis O\nbig O\n\nNo O\n")
    found = []
    for text in ("London B-LOC\n", "London O\n"):
        (tmp_path / "dev.txt").write_text(text)
        found.append(load(tmp_path, vocabulary)[1].fingerprint())
    assert found[0] != found[1]


# Files.

TEXT = "-DOCSTART- -X- O O\n\nEU B-ORG\nrejects O\n\n\n \ncalls O\n-DOCSTART- -X-\nPeter B-PER"


def read(folder, text, name="x.txt", labelled=True, **columns) -> list[token.Sentence]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return token.read_sentences(folder / name, config.Conll(**columns), labelled)


def test_sentences_stand_between_blank_lines_and_documents(tmp_path):
    sentences = read(tmp_path, TEXT)
    assert sentences == [(["EU", "rejects"], ["B-ORG", "O"]), (["calls"], ["O"]), (["Peter"], ["B-PER"])]
    assert [words for words, _ in read(tmp_path, TEXT, labelled=False)] == [words for words, _ in sentences]
    assert read(tmp_path, "EU\nrejects\n", labelled=False) == [(["EU", "rejects"], [])]
    multiconer = "# id f545-8a3a\tdomain=en\ndoris _ _ B-ART\n# _ _ O\n\n# id 7b1f\tdomain=en\nx _ _ O\n\n#id _ _ O\n"
    assert read(tmp_path, multiconer) == [(["doris", "#"], ["B-ART", "O"]), (["x"], ["O"]), (["#id"], ["O"])]


def test_numbers_of_several_words_and_of_unwritten_words_in_conll_u_are_no_words(tmp_path):
    line = "{}\t{}\t_\t{}\t_\t_\t_\t_\t_\t_\n"
    rows = [("1-2", "don't", "_"), ("1", "do", "AUX"), ("2", "n't", "PART"), ("2.1", "go", "_"), ("3", "1-2", "NUM")]
    text = "# sent_id = 1\n# text = don't 1-2\n" + "".join(line.format(*row) for row in rows)
    assert read(tmp_path, text, word_column=1, label_column=3) == [(["do", "n't", "1-2"], ["AUX", "PART", "NUM"])]


def test_a_comment_has_another_number_of_columns_than_words(tmp_path):
    """In CoNLL-U it can hold anything. A word "#" is a word."""
    assert read(tmp_path, "# a note on this file\nEU B-ORG\n\n# no note\n# O\n") == [(["EU"], ["B-ORG"]), (["#"], ["O"])]
    tags = "#tag " + "_ " * 8 + "O\nx " + "_ " * 8 + "O\n"
    assert read(tmp_path, tags + "\n" + tags) == [(["#tag", "x"], ["O", "O"])] * 2
    with pytest.raises(config.ConfigError, match=r"x\.txt:1"):
        read(tmp_path, "#tag\nEU B-ORG\n")
    line = "1\tdo\t_\tAUX\t_\t_\t_\t_\t_\t_\n"
    ten = "# " + " ".join("abcdefghi") + "\n"
    assert read(tmp_path, "# free comment\n" + ten + line, word_column=1, label_column=3) == [(["do"], ["AUX"])]


def test_columns_are_chosen_and_stand_between_spaces_or_tabs(tmp_path):
    text = "1\tEU\tNNP \r\n2  caf\u00e9\u00a0x \t NN\r\n"
    assert read(tmp_path, text, word_column=1) == [(["EU", "caf\u00e9\u00a0x"], ["NNP", "NN"])]
    assert read(tmp_path, text, word_column=1, label_column=0)[0].labels == ["1", "2"]
    packed = lzma.compress(("\ufeff" + text).encode())
    assert read(tmp_path, packed, name="x.txt.xz", word_column=1)[0].words == ["EU", "caf\u00e9\u00a0x"]


@pytest.mark.parametrize(
    "text,columns,location",
    [
        ("EU B-ORG\nrejects\n", {}, "x.txt:2: 1 columns"),
        ("\nEU NNP O\nnot a call O\n", {}, "x.txt:3: 4 columns"),
        ("EU O\n", {"word_column": 2}, "x.txt:1: .*Conll.word_column"),
        ("EU O\n", {"label_column": 7}, "x.txt:1: .*Conll.label_column"),
        ("EU\n", {}, "x.txt:1"),
        ("\n\n", {}, "x.txt: holds no word"),
    ],
)
def test_a_file_of_another_form_ends_with_its_name_and_line(text, columns, location, tmp_path):
    with pytest.raises(config.ConfigError, match=location):
        read(tmp_path, text, **columns)
