"""Questions whose answer is a span of a context: SQuAD 1.1 and 2.0, from its files or from TFDS.

The method is that of BERT (Devlin et al. 2019, file run_squad.py): windows over long contexts, and
answers from the scores of their slots.
"""

import collections
import dataclasses
import json
import math
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from maelm_jax import config, storage
from maelm_jax.encoders import families
from maelm_jax.finetuning import heads, labelled_data, metrics
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.task import (
    PREDICTION,
    PROBABILITY,
    Column,
    Encoded,
    EvaluationSet,
    InputFormat,
    Splits,
    Task,
)
from maelm_jax.model import layers
from maelm_jax.model.positions import MASKED_OUT

FILES = {
    "squad1": ("train-v1.1.json", "dev-v1.1.json"),
    "squad2": ("train-v2.0.json", "dev-v2.0.json"),
}
TFDS = {"squad1": "squad/v1.1", "squad2": "squad/v2.0"}
QUESTION_LENGTH = 64  # tokens of the longest question, which is cut off there
STRIDE = 128  # tokens between the starts of two windows, at most half a window
ANSWER_LENGTH = 30  # tokens of the longest answer
BEST = 20  # starts, and ends, of a window; every pair of them is a candidate for the answer


class GoldAnswer(typing.NamedTuple):
    """A right answer."""

    text: str
    start: int  # its first character in the context; can be wrong in a file


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context."""

    id: str
    text: str
    context: str
    answers: tuple[GoldAnswer, ...]  # (): unanswerable, or not known
    is_impossible: bool = False  # said to be unanswerable


class CharacterSpan(typing.NamedTuple):
    """A part of a context, in characters."""

    start: int
    end: int  # the character after the last one


class Spans(typing.NamedTuple):
    """The model's output for n windows: the BEST highest scores of starts and ends."""

    start: np.ndarray  # float32 [n, BEST]
    start_slot: np.ndarray  # int32 [n, BEST]
    end: np.ndarray  # float32 [n, BEST]
    end_slot: np.ndarray  # int32 [n, BEST]
    null: np.ndarray  # float32 [n]: score of "no answer", the sum of start and end score of slot 0
    total: np.ndarray  # float32 [n]: log of the sum of exp(score) over all pairs of start and end


class Windows(typing.NamedTuple):
    """Where n windows stand: `<s> question </s> part of the context </s>`."""

    question: np.ndarray  # int32 [n]: index of the question; ascending
    start: np.ndarray  # int32 [n]: index in the context of its first token in the window
    offsets: list[np.ndarray]  # of each question, int32 [tokens of the context, 2]: characters


class QuestionTask(Task):
    """SQuAD 1.1, or 2.0 where questions can be unanswerable.

    The loss of a window is the mean of the cross-entropies of the answer's first and last slot.
    Slot 0 stands for "no answer". A window is right when both slots are.
    """

    names = tuple(FILES)
    module = "span"
    unit = "questions"
    ending = ".json"

    def __init__(self, name, settings, results=None):
        super().__init__(name, settings, results)
        self.has_unanswerable = is_2 = name == "squad2"
        prefix, title = ("best_", "SQuAD2") if is_2 else ("", "SQuAD1")
        self.main_metric = f"{prefix}f1"
        self.columns = (
            Column(f"{title} EM", f"{prefix}exact", 1.0),
            Column(f"{title} F1", f"{prefix}f1", 1.0),
        )
        # Answers whose null margin is above it are empty, in files and scores. None: in files, the
        # threshold with the best F1 on the same questions.
        self.threshold = results.best.get("best_f1_threshold") if results else None

    # Data.

    def check_files(self):
        if self.settings.data_dir is not None:
            self._find_files()

    def _find_files(self) -> list[pathlib.Path]:
        """Returns the training file and the dev file."""
        paths = [labelled_data.find_file(self.settings.data_dir, name) for name in FILES[self.name]]
        for name, path in zip(FILES[self.name], paths, strict=True):
            if path is None:
                raise config.ConfigError(
                    f"{self.name}: no {name} in {self.settings.data_dir} (also in its squad/). "
                    "Give the folder with --gin.DATA_DIR=FOLDER, or other tasks with "
                    "--gin.Finetune.tasks"
                )
        return paths

    def read(self) -> Splits:
        if self.settings.data_dir is None:
            sources = [f"TFDS dataset {TFDS[self.name]}"] * 2
            train, dev = (self._read_tfds(split) for split in ("train", "validation"))
        else:
            sources = self._find_files()
            train, dev = map(read_questions, sources)
        for source, questions in zip(sources, (train, dev), strict=True):
            self._check_answers(questions, source)
        if self.has_unanswerable and all(question.answers for question in (*train, *dev)):
            self.notes.append(
                "no question is unanswerable: the null threshold has nothing to decide"
            )
        return Splits(train, {"": dev})

    def _read_tfds(self, split: str) -> list[Question]:
        questions = []
        for record in labelled_data.tfds_records(TFDS[self.name], split):
            answers = record["answers"]
            pairs = zip(answers["text"], map(int, answers["answer_start"]), strict=True)
            golds = tuple(GoldAnswer(*pair) for pair in pairs)
            texts = record["id"], record["question"], record["context"]
            questions.append(Question(*texts, golds, self.has_unanswerable and not golds))
        return questions

    def read_file(self, path, labelled):
        questions = read_questions(path)
        if labelled:
            self._check_answers(questions, path)
        return questions

    def _check_answers(self, questions: list[Question], source: str | pathlib.Path):
        """Raises ConfigError unless each question has a right answer, or is said to have none."""
        for question in questions:
            if not (question.answers or (self.has_unanswerable and question.is_impossible)):
                remedy = "one, or is_impossible: true" if self.has_unanswerable else "one"
                raise config.ConfigError(
                    f"{source}: the question {question.id[:50]!r} has no right answer. Give a file "
                    f"in which every question has {remedy}"
                )

    def encode_training(self, examples, input_format):
        if self.settings.class_weights != "none":
            raise config.ConfigError(
                f"Finetune.class_weights needs classes, and {self.name} has answers. Leave it out"
            )
        features = self._windows(examples, input_format, "training", training=True).features
        if not len(features.ids) or not features.targets.any():
            raise config.ConfigError(
                f"{self.name}: none of the {len(examples)} training questions has an answer that "
                f"stands in its context at answer_start and fits into {input_format.length} "
                "tokens. Check text and answer_start of the answers"
            )
        return features

    def encode(self, examples, input_format, which) -> Encoded:
        ((name, count),) = collections.Counter(q.id for q in examples).most_common(1)
        if count > 1:
            raise config.ConfigError(
                f"{which}: {count} questions have the id {name!r}, and answers are written by id. "
                "Give each question its own"
            )
        return self._windows(examples, input_format, which)

    def _windows(
        self,
        questions: list[Question],
        input_format: InputFormat,
        which: str,
        training: bool = False,
    ) -> Encoded:
        """Makes windows of the tokens of questions. Notes what is cut or left out.

        In training, targets are the (first, last) slot of the answer, or (0, 0) in a window that
        does not hold all of one. A question whose answer is not in its context gets no window.
        """
        eos, length = input_format.vocabulary.eos, input_format.length
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}  # text -> tokens, offsets
        offsets_of, rows, targets, prefixes, owners, starts = [], [], [], [], [], []
        cut = lost = split = 0
        encoded = input_format.encode([question.text for question in questions])
        for number, (question, tokens) in enumerate(zip(questions, encoded, strict=True)):
            if question.context not in contexts:
                ids, offsets = input_format.vocabulary.encode_with_offsets(question.context)
                contexts[question.context] = ids, np.asarray(offsets, np.int32).reshape(-1, 2)
            context, offsets = contexts[question.context]
            offsets_of.append(offsets)
            answer = None
            if training and question.answers:
                answer = answer_span(question)
                if answer is None:
                    lost += 1
                    continue
            limit = min(QUESTION_LENGTH, length // 2 - 4)
            cut += len(tokens) > limit
            prefix = input_format.prefix(tokens[:limit])
            size = length - len(prefix) - 1  # largest number of tokens of the context
            step = max(1, min(STRIDE, size // 2))
            begins = range(0, max(len(context) - size, 0) + step, step)
            split += len(begins) > 1
            for begin in begins:
                part = context[begin : begin + size]
                rows.append(np.asarray([*prefix, *part, eos], np.int32))
                targets.append(_target(answer, offsets, begin, len(part), len(prefix)))
                prefixes.append(len(prefix))
                owners.append(number)
                starts.append(begin)
        if cut:
            self.notes.append(f"{which}: {cut} questions cut to their first tokens")
        if lost:
            self.notes.append(
                f"{which}: {lost} questions left out: the answer is not in the context"
            )
        if split:
            self.notes.append(
                f"{which}: {split} of {len(questions)} questions do not fit {length} tokens "
                f"with their context: {len(rows)} windows"
            )
        features = Features(
            rows, np.asarray(targets, np.int32).reshape(-1, 2), np.asarray(prefixes, np.int32)
        )
        layout = Windows(np.asarray(owners, np.int32), np.asarray(starts, np.int32), offsets_of)
        return Encoded(features, layout)

    # Model.

    def create_head(self, model, rngs):
        if families.choose_family(model.encoder).classifier.transforms_tokens:
            return heads.Classifier(model, 2, rngs)
        return layers.Linear(model.encoder.width, 2, model.encoder_settings, rngs)

    def scores(self, head, states, batch, keys) -> Float[Array, "B T 2"]:
        """Computes the scores of each slot as start and end; MASKED_OUT outside of the context."""
        slots = jnp.arange(batch.ids.shape[1], dtype=jnp.int32)[None]
        allowed = (slots == 0) | (
            (slots >= batch.context[:, None]) & (slots < batch.lengths[:, None] - 1)
        )
        has_dropout = isinstance(head, heads.Classifier)
        scores = head(states, keys) if has_dropout else head(states)
        return jnp.where(allowed[:, :, None], scores.astype(jnp.float32), MASKED_OUT)

    def loss(self, scores, batch):
        by_end = jnp.moveaxis(scores, 2, 1)  # [B, 2, T]
        right = jnp.argmax(by_end, axis=2).astype(batch.targets.dtype) == batch.targets
        losses = optax.softmax_cross_entropy_with_integer_labels(by_end, batch.targets).mean(axis=1)
        return heads.weighted_sums(losses, right.all(axis=1), batch.weights)

    def predict(self, scores) -> Spans:
        short = max(BEST - scores.shape[1], 0)
        padded = jnp.pad(scores, ((0, 0), (0, short), (0, 0)), constant_values=MASKED_OUT)
        start, start_slot = jax.lax.top_k(padded[:, :, 0], BEST)
        end, end_slot = jax.lax.top_k(padded[:, :, 1], BEST)
        total = jax.nn.logsumexp(scores, axis=1).sum(axis=1)
        return Spans(start, start_slot, end, end_slot, scores[:, 0].sum(axis=1), total)

    # Results.

    def constant_outputs(self, train, dev):
        """Returns outputs without any span: every answer is empty."""
        windows = len(dev.features.ids)
        none = np.zeros((windows, BEST), np.float32)
        return Spans(none, none.astype(int), none, none.astype(int), none[:, 0], none[:, 0])

    def score(self, dev, outputs):
        threshold = self.threshold or 0.0
        scores = metrics.questions(answers(dev, outputs), self.has_unanswerable, threshold)
        if self.threshold is None:
            return scores
        # The best threshold of these questions would be chosen by their right answers.
        return {name: value for name, value in scores.items() if not name.startswith("best_")}

    def write(self, dev, outputs, folder, stem):
        """Writes answers as SQuAD's evaluation takes them, and the null margins of SQuAD 2.0."""
        ids = [question.id for question in dev.examples]
        answered = answers(dev, outputs)
        if self.has_unanswerable:
            margins = dict(zip(ids, (answer.null_margin for answer in answered), strict=True))
            storage.write(folder / f"{stem}_null_margins.json", json.dumps(margins, indent=1))
        limit = self._null_limit(dev, outputs)
        texts = ("" if answer.null_margin > limit else answer.text for answer in answered)
        path = folder / f"{stem}.json"
        content = dict(zip(ids, texts, strict=True))
        storage.write(path, json.dumps(content, indent=1, ensure_ascii=False))
        return path

    def _null_limit(self, dev: EvaluationSet, outputs: Spans) -> float:
        """Returns the null margin above which there is no answer."""
        if not self.has_unanswerable:
            return math.inf
        if self.threshold is not None:
            return self.threshold
        return self.score(dev, outputs)["best_f1_threshold"]

    def endings(self, input_file):
        return (self.ending, *labelled_data.TABLES)

    def write_predictions(self, input_file, dev, outputs, path, with_all):
        """Writes answers as `write`, or as a table with the questions and probabilities."""
        if path.suffix == self.ending:
            self.write(dev, outputs, path.parent, path.stem)
            return
        limit, rows = self._null_limit(dev, outputs), []
        for question, answer in zip(dev.examples, answers(dev, outputs), strict=True):
            text, probability = answer.text, answer.probability
            if answer.null_margin > limit:
                text, probability = "", answer.null_probability
            rows.append(
                {"id": question.id, "question": question.text, "context": question.context}
                | {PREDICTION: text, PROBABILITY: probability}
            )
        labelled_data.write(path, rows)


def read_questions(path: str | pathlib.Path) -> list[Question]:
    """Reads a file in SQuAD's JSON format. Raises ConfigError if it is of another form."""
    questions = []
    with storage.reading(path, "SQuAD's JSON is data > paragraphs > qas"):
        articles = json.loads("\n".join(labelled_data.read_lines(path)))["data"]
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            for entry in paragraph["qas"]:
                impossible = entry.get("is_impossible", False)
                answers = [] if impossible else entry.get("answers", [])
                golds = [GoldAnswer(gold["text"], gold.get("answer_start", -1)) for gold in answers]
                texts = str(entry["id"]), entry["question"], paragraph["context"]
                questions.append(Question(*texts, tuple(golds), impossible))
    if not questions:
        raise config.ConfigError(f"{path}: holds no question. Give a file with questions")
    return questions


def answer_span(question: Question) -> CharacterSpan | None:
    """Returns where the first answer stands, or its nearest occurrence; None if nowhere."""
    text, start = question.answers[0]
    # The tokens of a space at an end may be those of the next word.
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return None
    if not (start >= 0 and question.context.startswith(text, start)):
        occurrences = [match.start() for match in re.finditer(re.escape(text), question.context)]
        if not occurrences:
            return None
        start = min(occurrences, key=lambda occurrence: abs(occurrence - start))
    return CharacterSpan(start, start + len(text))


def _target(
    answer: CharacterSpan | None, offsets: np.ndarray, begin: int, size: int, prefix: int
) -> tuple[int, int]:
    """Returns first and last slot of the answer in a window; (0, 0) if it does not hold all of it.

    The window has `prefix` slots, then `size` tokens of the context from its token `begin` on.
    `offsets` are the characters of the context's tokens, int32 [tokens, 2].
    """
    if answer is None:
        return 0, 0
    tokens = np.flatnonzero((offsets[:, 0] < answer.end) & (offsets[:, 1] > answer.start))
    if not len(tokens) or tokens[0] < begin or tokens[-1] >= begin + size:
        return 0, 0
    return int(prefix + tokens[0] - begin), int(prefix + tokens[-1] - begin)


def answers(dev: EvaluationSet, spans: Spans) -> list[metrics.Answered]:
    """Returns the best span of at most ANSWER_LENGTH tokens for each question.

    A span in several windows has the score of one of them (see `_window_of`). The null score of a
    question is the smallest of its windows.
    """
    bounds = np.searchsorted(dev.layout.question, np.arange(len(dev.examples) + 1))
    return [
        _best_answer(question, dev, spans, np.arange(first, last))
        for question, first, last in zip(dev.examples, bounds[:-1], bounds[1:], strict=True)
    ]


def _best_answer(
    question: Question, dev: EvaluationSet, spans: Spans, indices: np.ndarray
) -> metrics.Answered:
    """Returns the answer to one question. `indices` are those of its windows."""
    windows, features = dev.layout, dev.features
    golds = tuple(gold.text for gold in question.answers)
    offsets = windows.offsets[windows.question[indices[0]]]
    begin, prefix = windows.start[indices], features.context[indices]
    end = begin + features.lengths[indices] - prefix - 1
    slot_to_token = (begin - prefix)[:, None]
    first, last = spans.start_slot[indices] + slot_to_token, spans.end_slot[indices] + slot_to_token
    inside_first, inside_last = (
        (token >= begin[:, None]) & (token < end[:, None]) for token in (first, last)
    )
    size = last[:, None, :] - first[:, :, None] + 1
    allowed = inside_first[:, :, None] & inside_last[:, None, :]
    allowed &= (size >= 1) & (size <= ANSWER_LENGTH)
    total = spans.start[indices][:, :, None] + spans.end[indices][:, None, :]
    score = np.where(allowed, total, -np.inf)
    least = indices[spans.null[indices].argmin()]
    null = float(spans.null[least])
    null_probability = math.exp(null - spans.total[least])
    for index in np.argsort(-score, axis=None, kind="stable"):
        window, i, j = np.unravel_index(index, score.shape)
        if not np.isfinite(score[window, i, j]):
            break
        if window == _window_of(first[window, i], last[window, j], begin, end):
            characters = slice(offsets[first[window, i], 0], offsets[last[window, j], 1])
            text = question.context[characters].strip()
            best = float(score[window, i, j])
            probability = math.exp(best - spans.total[indices[window]])
            return metrics.Answered(golds, text, null - best, probability, null_probability)
    return metrics.Answered(golds, "", 0.0, null_probability, null_probability)


def _window_of(first: int, last: int, begin: np.ndarray, end: np.ndarray) -> int:
    """Of the windows [begin, end) that hold a whole span, the one with most context around `first`.

    This is the rule of BERT's run_squad.py with one difference. BERT picks the window among all
    that hold `first`, so that it never gives an answer that ends after that window.
    """
    holds = (begin <= first) & (last < end)
    context = np.minimum(first - begin, end - 1 - first) + 0.01 * (end - begin)
    return int(np.where(holds, context, -np.inf).argmax())
