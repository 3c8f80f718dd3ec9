"""Labels for words: where they stand, how they are learned, scored and written."""

import json
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import input_format, write_conll

from maelm_jax import config, finetune
from maelm_jax.data import vocabularies
from maelm_jax.finetuning import batches, conll_files, features, heads, token_task
from maelm_jax.finetuning.task_data import Head

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


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("conll")
    draw = random.Random(0)
    write_conll(folder / "train.txt", [sentence(draw) for _ in range(160)])
    write_conll(folder / "dev.txt", [sentence(draw) for _ in range(40)])
    return folder


def settings(files, **more) -> config.Finetune:
    train, dev = str(files / "train.txt"), str(files / "dev.txt")
    return config.Finetune(tasks="conll", conll=config.Conll(train, dev, **more))


class Halves:
    """A vocabulary that cuts each word into pieces of two characters."""

    bos, eos = 0, 2

    def encode_with_offsets(self, text):
        offsets, start = [], 0
        for word in text.split(" "):
            end = start + len(word)
            offsets += [(piece, min(piece + 2, end)) for piece in range(start, end, 2)]
            start = end + 1
        return [5] * len(offsets), offsets


def test_a_label_stands_at_the_first_token_of_its_word():
    sentences = conll_files.Sentences([["Peter", "x", "runs"]], [["B-PER", "O", "unknown"]])
    rows = token_task.encode(sentences, ("B-PER", "O"), input_format(Halves(), 32), "dev")
    assert rows.features.ids[0].tolist() == [0, 5, 5, 5, 5, 5, 5, 2]
    assert rows.features.targets.tolist() == [[-1, 0, -1, -1, 1, -1, -1, -1]]
    assert rows.slots[0].tolist() == [1, 4, 5] and sentences.notes == []


def test_what_does_not_fit_is_cut_counted_and_predicted_as_outside(tmp_path):
    sentences = conll_files.Sentences([["abcd", "efgh", "ij"], ["a"]], [["B-X", "I-X", "O"], ["O"]])
    labels = ("B-X", "I-X", "O")
    dev = token_task.dev_set(sentences, labels, input_format(Halves(), 5), "dev")
    assert dev.features.ids[0].tolist() == [0, 5, 5, 5, 2]
    assert dev.notes == ["dev: 1 of 2 sentences cut to 5 tokens", "dev: 1 of 4 words have no encoded token"]
    outputs = np.asarray([[9, 0, 9, 1, 9], [9, 2, 9, 9, 9]])
    assert dev.score(outputs) == {"accuracy": 1.0, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    path = dev.write(outputs, tmp_path, "p")
    assert path.read_text() == "abcd B-X\nefgh I-X\nij O\n\na O\n"


def test_a_word_without_a_token_is_no_right_part_of_speech(tmp_path):
    sentences = conll_files.Sentences([["abcd", "ef", "gh"]], [["NN", "AA", "O"]])
    dev = token_task.dev_set(sentences, ("AA", "NN", "O"), input_format(Halves(), 4), "dev")
    outputs = np.asarray([[9, 1, 9, 9]])
    assert dev.score(outputs) == {"accuracy": pytest.approx(1 / 3)}
    assert dev.write(outputs, tmp_path, "p").read_text() == "abcd NN\nef _\ngh _\n"


def test_a_word_without_a_token_is_in_no_entity():
    sentences = conll_files.Sentences([["abcd", "ef"]], [["B-A", "B-A"]])
    dev = token_task.dev_set(sentences, ("B-A", "I-A"), input_format(Halves(), 4), "dev")
    assert dev.score(np.asarray([[9, 0, 9, 9]]))["recall"] == 0.5


def test_the_first_token_of_a_word_may_begin_before_it_or_be_another_word_s():
    # "ab c d e": a space belongs to the token after it, "c d" is one token, and "e" has none.
    offsets = np.asarray([[0, 1], [1, 2], [2, 6]])
    found = token_task.first_tokens(["ab", "c", "d", "e"], offsets)
    assert found.tolist() == [0, 2, -1, -1]
    assert token_task.first_tokens(["ab"], np.zeros((0, 2), int)).tolist() == [-1]
    # "ab , c": the space before the comma is a token of its own, which is the comma's first.
    assert token_task.first_tokens(["ab", ",", "c"], np.asarray([[0, 2], [2, 3], [3, 4], [4, 6]])).tolist() == [0, 1, 3]


def test_a_word_that_is_nothing_to_the_vocabulary_takes_no_token_of_its_neighbours():
    """Its place lies in the token of the next word."""
    assert token_task.first_tokens(["a", "\u200b", "London", "is"], np.asarray([[0, 1], [1, 10], [10, 13]])).tolist() == [0, -1, 1, 2]
    assert token_task.first_tokens(["\u200b", "c"], np.asarray([[0, 3]])).tolist() == [-1, 0]


def test_the_first_token_of_a_word_is_that_of_stock_tokenizers():
    """By which users of an export align words and predictions."""
    tokenizers = pytest.importorskip("tokenizers")
    from pydoc_data import topics

    folder = pathlib.Path(__file__).parents[2] / "pretrained"
    stock = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = vocabularies.load(folder)
    spaces = 0
    for name in sorted(topics.topics)[:40]:
        words = re.findall(r"[a-z]+|[^\sa-zA-Z0-9]", topics.topics[name])
        encoded = stock.encode(words, is_pretokenized=True, add_special_tokens=False)
        tokens, offsets = ours.encode_with_offsets(" ".join(words))
        assert encoded.ids == list(tokens)
        first = token_task.first_tokens(words, np.asarray(offsets, np.int64).reshape(-1, 2))
        assert first.tolist() == [encoded.word_ids.index(number) for number in range(len(words))]
        spaces += sum(encoded.tokens[index] == "▁" for index in first)
    assert spaces > 100


def test_the_tokens_of_words_are_those_of_the_sentence(vocabulary, corpus_words):
    text = " ".join(corpus_words)
    tokens, offsets = vocabulary.encode_with_offsets(text)
    first = token_task.first_tokens(corpus_words, np.asarray(offsets))
    ends = np.append(first[1:], len(tokens))
    starts = np.cumsum([0, *(len(word) + 1 for word in corpus_words)])[:-1]
    for word, start, begin, end in zip(corpus_words, starts, first, ends, strict=True):
        covered = text[offsets[begin][0] : offsets[end - 1][1]].strip()
        assert covered == word and offsets[begin][0] in (start - 1, start)


@pytest.fixture
def corpus_words() -> list[str]:
    from pydoc_data import topics

    words = " ".join(topics.topics.values()).split()
    return [word for word in words if word.isascii()][:500]


def row(length: int, targets: list[int]) -> features.Features:
    ids = [np.arange(4, 4 + length, dtype=np.int32)]
    return features.Features(ids, np.asarray([targets], np.int32), np.zeros(1, np.int32), True)


def test_the_loss_is_the_mean_over_labelled_words(pretrained, vocabulary):
    from maelm_jax import gin_files

    head = Head("token", 3)
    model = gin_files.load([str(pretrained / "config.gin")]).model
    graph, init = heads.create(model, vocabulary.size, vocabulary.pad, head)
    params = jax.tree.map(lambda x: 4 * x, init(jax.random.key(0)))
    loss_fn = heads.loss_of(graph, head)
    numbers = jnp.arange(2, dtype=jnp.uint32)
    loss_of_batch = jax.jit(lambda batch: loss_fn(params, batch, numbers, jax.random.key(0), False))

    def sums(length, targets, size):
        return loss_of_batch(jax.tree.map(jnp.asarray, batches.pack(row(length, targets), size, 2, 1, 0)))

    none, first, second, both = (
        sums(6, targets, 8) for targets in ([-1] * 6, [-1, 2, -1, -1, -1, -1], [-1, -1, 0, -1, -1, -1], [-1, 2, 0, -1, -1, -1])
    )
    assert [float(value.count) for value in (none, first, second, both)] == [0, 1, 1, 2]
    assert float(none.loss_nats) == 0 and float(both.loss_nats) == pytest.approx(float(first.loss_nats + second.loss_nats))
    np.testing.assert_allclose(sums(6, [-1, 2, 0, -1, -1, -1], 16), both, rtol=1e-5)


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


def test_a_rule_is_learned_and_a_file_is_labelled_by_it(one_device, files, pretrained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batches, "MOST_LENGTHS", 1)  # one shape to compile
    assert run(files, pretrained, tmp_path / "run", "--gin.EPOCHS=12", "--gin.LEARNING_RATE=1e-2") == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["main_metric"] == "f1" and results["score"] > 0.98, results["best"]
    assert results["labels"] == ["B-ANIMAL", "I-ANIMAL", "O"]
    assert set(results["best"]) == {"step", "epoch", "f1", "precision", "recall", "accuracy"}
    words = ["the old cat runs", "a bird sees the dog"]
    (tmp_path / "new.txt").write_text("\n\n".join("\n".join(line.split()) for line in words))
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={tmp_path / 'new.txt'}"]) == 0
    written = (tmp_path / "run" / "predictions_new.txt").read_text()
    labels = [line.split()[1] for line in written.split("\n") if line]
    assert labels == "O B-ANIMAL I-ANIMAL O O B-ANIMAL O O B-ANIMAL".split()
    dev = (tmp_path / "run" / "predictions.txt").read_text()
    assert [line.split()[0] for line in dev.split("\n") if line] == [line.split()[0] for line in (files / "dev.txt").read_text().split("\n") if line]
    assert finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={files / 'dev.txt'}", "--score"]) == 0
    scores = json.loads((tmp_path / "run" / "predictions_dev_scores.json").read_text())
    assert scores == {name: results["best"][name] for name in ("accuracy", "precision", "recall", "f1")}
    write_conll(tmp_path / "other.txt", [[("cat", "B-ANIMAL"), ("runs", "VERB")]])
    with pytest.raises(config.ConfigError, match="other.txt: the label 'VERB' is not B-X, I-X or O"):
        finetune.main([f"--workdir={tmp_path / 'run'}", f"--predict={tmp_path / 'other.txt'}", "--score"])


def load(files, vocabulary, **more):
    return token_task.load(settings(files, **more), input_format(vocabulary, 64))


def test_labels_come_from_the_training_file(tmp_path, vocabulary):
    write_conll(tmp_path / "train.txt", [[("cat", "B-A"), ("runs", "O")]])
    write_conll(tmp_path / "dev.txt", [[("cat", "B-B"), ("runs", "O")]])
    data = load(tmp_path, vocabulary)
    assert (data.labels, data.head, data.main) == (("B-A", "O"), ("token", 2), "f1")
    assert data.notes == ["dev: labels that the training file lacks: B-B"]
    scores = data.dev[""].score(np.asarray([[0] * 8]))
    assert scores["accuracy"] == 0.0, "an unknown label counts as missed"
    write_conll(tmp_path / "dev.txt", [[("runs", "O")]])
    outside = load(tmp_path, vocabulary).dev[""].score(np.asarray([[1] * 8]))
    assert outside == {"accuracy": 1.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    write_conll(tmp_path / "train.txt", [[("cat", "NN"), ("runs", "VB")]])
    data = load(tmp_path, vocabulary)
    assert data.main == "accuracy" and "scored by the accuracy of words" in data.notes[-1]


def test_bad_files_end_with_one_line(tmp_path, files, pretrained, vocabulary):
    with pytest.raises(config.ConfigError, match="conll: no file .*gone.txt. Correct Conll.train"):
        run(files, pretrained, tmp_path / "out", f"--gin.TRAIN_FILE={tmp_path / 'gone.txt'}")
    with pytest.raises(config.ConfigError, match="Conll.dev_file is missing. Give --gin_file=fine"):
        config.Finetune(tasks="conll", conll=config.Conll(train_file="a"))
    write_conll(tmp_path / "train.txt", [[("cat", "B-A"), ("runs", "O")]])
    write_conll(tmp_path / "dev.txt", [[("cat", "NN")]])
    with pytest.raises(config.ConfigError, match="dev.txt: the label 'NN' is not B-X, I-X or O"):
        load(tmp_path, vocabulary)
    write_conll(tmp_path / "train.txt", [[("cat", "O"), ("runs", "O")]])
    write_conll(tmp_path / "dev.txt", [[("cat", "O")]])
    with pytest.raises(config.ConfigError, match="every word has the label 'O'. Give a file with"):
        load(tmp_path, vocabulary)


def test_other_answers_and_other_names_of_labels_are_other_data(pretrained, vocabulary, tmp_path):
    (tmp_path / "a.txt").write_text("London B-LOC\nis O\nbig O\n\nNo O\n")
    (tmp_path / "b.txt").write_text("London B-PLACE\nis O\nbig O\n\nNo O\n")
    found = []
    for train, dev in (("a", "a"), ("b", "b"), ("a", "b")):
        files = config.Conll(train_file=str(tmp_path / f"{train}.txt"), dev_file=str(tmp_path / f"{dev}.txt"))
        settings = config.Finetune(tasks="conll", conll=files)
        found.append(token_task.load(settings, input_format(vocabulary, 32)).fingerprint)
    assert len({one["data"] for one in found[:2]}) == 1 and len({one["answers"] for one in found}) == 3
