"""Functions of the user's own: what they are called with, what is refused, and who may name them. Invariant 11."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import LITTLE, ROOT, call, experiment_of, metrics, objective_of, training

from maelm_jax import config, gin_files
from maelm_jax.model import masking
from maelm_jax.pretraining import objective as objectives
from maelm_jax.pretraining import run
from maelm_jax.training import optimizers

OWN = """
import json
import pathlib

import jax.numpy as jnp
import numpy as np

pathlib.Path(__file__).with_name("imported").touch()


def halved(step, steps, peak, warmup_steps, factor=0.5):
    return peak * factor if step >= warmup_steps else 0.0


def negative(step, steps, peak, warmup_steps):
    return -1.0


def nothing(step, steps, peak, warmup_steps):
    pass


def failing(step, steps, peak, warmup_steps):
    return peak / 0


def long_words(ids, segments, tokens, letters=4):
    return jnp.array([len(token) >= letters for token in tokens])[ids] * (segments > 0)


def scalar(ids, segments, tokens):
    return 1.0


def of_numpy(ids, segments, tokens):
    return np.asarray(ids) > 3


class Lines:
    def __init__(self, folder, settings):
        self.path, self.lines = pathlib.Path(folder) / "own.json", [settings["Run.batch_size"]]

    def write(self, step, values):
        self.lines.append([step, values])

    def close(self):
        self.path.write_text(json.dumps(self.lines))


def no_logger(folder, settings):
    return print
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of the module `own_for_test`. It has a file `imported` if anybody imported it."""
    (tmp_path / "own_for_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_for_test", raising=False)
    return tmp_path


PARTS = ["Optimizer.schedule=own_for_test:halved", "Masking.strategy=own_for_test:long_words", "Run.log_to=own_for_test:Lines"]
FLAGS = [f"--gin.{part}" for part in PARTS]
SHORT = ["--gin.TRAIN_STEPS=4", "--gin.Optimizer.warmup_steps=2", "--gin.Run.rank_every=0"]


def test_a_run_trains_with_parts_of_the_user_and_records_their_parameters(text, own):
    parameters = ["--gin.Optimizer.schedule_parameters={'factor': 0.25}", "--gin.Masking.strategy_parameters={'letters': 6}"]
    argv = training(text, own / "run", *FLAGS, *parameters, *SHORT, "--gin.Optimizer.learning_rate=0.004")
    done = call("train", *argv)
    assert done.status == 0, done.stderr
    rates = [line["learning_rate"] for line in metrics(own / "run") if "loss" in line]
    assert rates == pytest.approx([0.0, 0.0, 0.001, 0.001])
    recorded = gin_files.load([str(own / "run" / "config.gin")])
    assert recorded.objective.masking.strategy_parameters == {"letters": 6} and recorded.optimizer.schedule_parameters == {"factor": 0.25}
    batch_size, *lines = json.loads((own / "run" / "own.json").read_text())
    assert batch_size == 8 and [step for step, _ in lines] == [1, 2, 3, 4, 4]
    assert lines[0][1]["loss"] == metrics(own / "run")[0]["loss"] and None not in lines[0][1].values()

    # The record alone runs nothing. The user who names the parts again goes on.
    (own / "imported").unlink()
    del sys.modules["own_for_test"]
    longer = [f"--workdir={own / 'run'}", "--gin.Run.train_steps=6"]
    done = call("train", *longer)
    assert done.status == 2 and "own_for_test" in done.stderr and not (own / "imported").exists(), done
    (own / "parts.gin").write_text("\n".join(f"{name} = {value!r}" for name, value in (part.split("=") for part in PARTS)))
    done = call("train", *longer, f"--gin_file={own / 'run' / 'config.gin'}", f"--gin_file={own / 'parts.gin'}")
    assert done.status == 0 and "at step 4" in done.stdout, done
    other = [part for part in argv if "letters" not in part and "TRAIN_STEPS" not in part]
    done = call("train", *other, "--gin.TRAIN_STEPS=6", "--gin.Masking.strategy_parameters={'letters': 5}")
    assert done.status == 2 and "strategy_parameters" in done.stderr, "it is another run"


def test_a_run_goes_on_from_one_whose_schedule_is_not_imported(text, own):
    """A decay begins at the rate that the other run logged last."""
    start = training(text, own / "run", FLAGS[0], *SHORT)
    assert call("train", *start).status == 0
    (own / "imported").unlink()
    del sys.modules["own_for_test"]
    decay = ["--gin.Optimizer.schedule=decay", f"--gin.Run.continue_from={own / 'run'}", "--gin.TRAIN_STEPS=2", "--gin.Run.rank_every=0"]
    done = call("train", *training(text, own / "decay", *decay))
    assert done.status == 0 and not (own / "imported").exists(), done
    logged = [line["learning_rate"] for line in metrics(own / "run") if "loss" in line][-1]
    assert metrics(own / "decay")[0]["learning_rate"] == pytest.approx(logged) and logged > 0


@pytest.mark.parametrize(
    "binding,named",
    [
        ("Optimizer.schedule=no_such_module_here:f", "no_such_module_here"),
        ("Optimizer.schedule=own_for_test:halve", "own_for_test:halved"),
        ("Optimizer.schedule=own_for_test:Path", "own_for_test:Path"),
        ("Optimizer.schedule=own_for_test:scalar", "own_for_test:scalar"),
        ("Optimizer.schedule=own_for_test:negative", "own_for_test:negative"),
        ("Optimizer.schedule=own_for_test:nothing", "own_for_test:nothing"),
        ("Optimizer.schedule=own_for_test:failing", "own_for_test:failing"),
        ("Masking.strategy=own_for_test:missing", "own_for_test"),
        ("Masking.strategy=own_for_test:halved", "own_for_test:halved"),
        ("Masking.strategy=own_for_test:scalar", "own_for_test:scalar"),
        ("Masking.strategy=own_for_test:of_numpy", "own_for_test:of_numpy"),
        ("Masking.strategy=long_words", "Masking.strategy"),
        ("Run.log_to=own_for_test:halved", "own_for_test:halved"),
        ("Run.log_to=own_for_test:no_logger", "own_for_test:no_logger"),
        ("Run.log_to=mlflow", "Run.log_to"),
    ],
)
def test_a_part_that_does_not_fit_is_named_in_one_line(text, own, binding, named):
    done = call("train", *training(text, own / "run", f"--gin.{binding}", "--gin.TRAIN_STEPS=1"))
    assert done.status == 2 and named in done.stderr.splitlines()[-1], done
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1
    assert not (own / "run" / "checkpoints").exists()


def test_other_parameters_are_named(text, own):
    done = call("train", *training(text, own / "run", FLAGS[1], "--gin.Masking.strategy_parameters={'leters': 4}"))
    assert done.status == 2 and "leters" in done.stderr and not (own / "run").exists()
    done = call("train", *training(text, own / "run", "--gin.Masking.strategy_parameters={'letters': 4}"))
    assert done.status == 2 and "Masking.strategy" in done.stderr


# Who may name them.


def test_a_record_names_code_only_together_with_the_user(own):
    (own / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"], PARTS)))
    record, parts = str(own / "config.gin"), own / "parts.gin"
    assert config.values(gin_files.load([record]))["Run.log_to"] == "own_for_test:Lines", "reading it is data"
    assert gin_files.load([record], runs_modules=("Corpus.task_modules",)) == gin_files.load([record]), "as prepare does"
    for some in ((), PARTS[:2], PARTS[1:]):
        with pytest.raises(config.ConfigError, match="own_for_test"):
            gin_files.load([record], some, runs_modules=True)
    parts.write_text("\n".join(f"{name} = {value!r}" for name, value in (part.split("=") for part in PARTS)))
    for names in ([record, str(parts)], [str(parts), record]):
        assert gin_files.load(names, runs_modules=True) == gin_files.load([record])
    parts.write_text("Optimizer.schedule = 'json:loads'\nMasking.strategy = None\nRun.log_to = 'tensorboard'\n")
    assert gin_files.load([record, str(parts)], runs_modules=True).optimizer.schedule == "json:loads"
    with pytest.raises(config.ConfigError, match="own_for_test"):  # the later file wins
        gin_files.load([str(parts), record], runs_modules=True)


def test_plan_runs_nothing_that_it_reads(own):
    (own / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"], PARTS)))
    from maelm_jax import cli, plan

    command = cli.parse(plan._flags(), [f"--workdir={own}", "--topology=cpu:1"], runs_modules=False)
    assert command.experiment.optimizer.schedule == "own_for_test:halved"
    assert not (own / "imported").exists()


# Schedules.


def test_a_cosine_falls_as_half_a_wave_after_the_warm_up():
    settings = config.Optimizer(learning_rate=2.0, warmup_steps=10, schedule="cosine")
    rates = optimizers.LearningRates(settings, 110)
    assert [float(rates[step]) for step in (0, 5, 10, 60, 110)] == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0], abs=1e-6)
    assert float(rates[35]) == pytest.approx(1 + np.cos(np.pi / 4))
    assert [rates[step] for step in range(110)] == list(optimizers.learning_rates(settings, 110))


def test_an_own_schedule_is_called_with_the_settings(own):
    settings = [
        "Optimizer.schedule=own_for_test:halved",
        "Optimizer.schedule_parameters={'factor': 0.5}",
        "TRAIN_STEPS=20",
        "Optimizer.warmup_steps=3",
    ]
    experiment = gin_files.load(["tiny.gin"], [*settings, "Optimizer.learning_rate=4.0"])
    rates = optimizers.LearningRates(experiment.optimizer, 20, own=run.load_own_parts(experiment).schedule)
    assert [float(rates[step]) for step in (0, 2, 3, 19)] == [0.0, 0.0, 2.0, 2.0]


# Masks.

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99, continues_word=tuple(number % 3 == 0 for number in range(100)))
LENGTH, ROWS = 48, 2000
TOKENS = [f"token{number}" for number in range(100)]


def draw(function, ids, sizes=None, **settings):
    """Masked slots [R, L], and the inputs that were drawn."""
    objective = objective_of(strategy="some:function", **settings)
    sizes = sizes or masking.budget(objective, ids.shape[1])
    strategy = masking.bind_strategy(function, objective.masking, TOKENS, ids.shape[1])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), jnp.arange(len(ids), dtype=jnp.uint32))
    inputs = jax.jit(lambda keys, ids: masking.draw(keys, ids, objective, sizes, SPECIAL, strategy))(keys, ids)
    return np.asarray(inputs.masked_index) < sizes.masked, inputs


def some_ids(rows=ROWS):
    ids = np.random.default_rng(0).integers(4, 99, (rows, LENGTH)).astype(np.int32)
    ids[:, [0, 20]], ids[:, [19, LENGTH - 4]] = 0, 2
    ids[:, LENGTH - 3 :] = 1
    return ids


def test_a_strategy_masks_only_what_it_gives_a_weight():
    """And as many as ever, as long as there are so many."""
    ids = some_ids()
    table = np.arange(100) % 2 == 0
    masked, inputs = draw(lambda ids, segments, tokens: jnp.asarray(table)[ids], ids, rate=0.2)
    assert (ids[masked] % 2 == 0).all() and (ids[masked] > 3).all()
    assert masked.sum(1).mean() == pytest.approx(0.2 * (LENGTH - 3), abs=0.1)
    is_read = np.asarray(inputs.encoder_index) < inputs.encoder_slots.shape[1]
    assert ((is_read ^ masked) == (ids != 1)).all()


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_a_row_without_anything_to_mask_is_read_whole(rate):
    ids = some_ids(4)
    masked, inputs = draw(lambda ids, segments, tokens: jnp.where(ids == ids[5], 1.0, 0.0), ids, rate=rate)
    assert (ids[masked] == np.repeat(ids[:, 5], masked.sum(1))).all()
    is_read = np.asarray(inputs.encoder_index) < inputs.encoder_slots.shape[1]
    assert ((is_read ^ masked) == (ids != 1)).all(), "no visible token is left out"


def test_a_weight_is_a_relative_probability():
    ids = some_ids()
    weights = jnp.where(jnp.arange(100) < 50, 1.0, 3.0)
    masked, _ = draw(lambda ids, segments, tokens: weights[ids], ids, rate=0.03)  # one or two of a row
    text = ids > 3
    low, high = (masked[text & choice].mean() for choice in (ids < 50, ids >= 50))
    assert high / low == pytest.approx(3.0, rel=0.15)


def test_a_strategy_gets_segments_and_spellings():
    ids = some_ids(200)
    masked, _ = draw(lambda ids, segments, tokens: (segments == 2) & jnp.asarray([token.endswith("7") for token in tokens])[ids], ids)
    assert masked.any() and not masked[:, :20].any() and (ids[masked] % 10 == 7).all()


def test_words_are_masked_whole_if_one_of_their_tokens_has_a_weight():
    ids = some_ids(500)
    continues = np.asarray(SPECIAL.continues_word)[ids] & (ids > 3)
    masked, _ = draw(lambda ids, segments, tokens: ids % 2 == 0, ids, unit="word", rate=0.1)
    text = ids > 3
    same_word = continues[:, 1:] & text[:, :-1]
    assert (masked[:, 1:] == masked[:, :-1])[same_word].mean() > 0.99, "but for words of more than ten tokens"
    alone = text[:, 1:-1] & ~continues[:, 1:-1] & ~continues[:, 2:]
    assert (ids[:, 1:-1][masked[:, 1:-1] & alone] % 2 == 0).all()


def test_a_mask_depends_on_its_row_alone():
    ids = some_ids(8)
    masked, _ = draw(lambda ids, segments, tokens: ids % 5 + 1.0, ids)
    fewer, _ = draw(lambda ids, segments, tokens: ids % 5 + 1.0, ids[:3])
    assert (masked[:3] == fewer).all()


def test_the_page_is_right(tmp_path, monkeypatch):
    """The files of docs/own_parts.md, as they stand there."""
    module, settings, logger = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_parts.md").read_text(), re.S)
    (tmp_path / "mine.py").write_text(module + logger)
    (tmp_path / "mine.gin").write_text(settings)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    experiment = gin_files.load([str(tmp_path / "mine.gin")], ["Run.log_to=mine:Lines", "Optimizer.warmup_steps=10"], runs_modules=True)
    parts, optimizer, masks = run.load_own_parts(experiment), experiment.optimizer, experiment.objective.masking
    own = optimizers.LearningRates(dataclasses.replace(optimizer, schedule_parameters={}), 60, own=parts.schedule)
    built_in = optimizers.LearningRates(dataclasses.replace(optimizer, schedule="cosine", schedule_parameters={}), 60)
    assert [own[step] for step in range(60)] == pytest.approx([built_in[step] for step in range(60)], abs=1e-9)
    tokens = ["<s>", "▁the", "▁House", "##ing", "."]
    strategy = masking.bind_strategy(parts.strategy, masks, tokens, 5)
    assert strategy(jnp.arange(5), jnp.ones(5, jnp.int32)).tolist() == pytest.approx([0.1, 0.1, 1.0, 1.0, 0.1])
    lines = sys.modules["mine"].Lines(tmp_path, {})
    lines.write(3, {"loss": 6.5})
    lines.close()
    assert (tmp_path / "lines.txt").read_text() == "3 {'loss': 6.5}\n"


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_the_loss_and_the_held_out_loss_are_of_what_the_strategy_masks(is_evaluated):
    masks = config.Masking(rate=0.25, strategy="some:function")
    experiment = experiment_of(LITTLE, objective=config.Objective(masking=masks), corpus=config.Corpus(sequence_length=16))
    ids = jnp.asarray([[0, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 2]] * 2, jnp.int32)

    def count(function) -> float:
        strategy = masking.bind_strategy(function, masks, TOKENS, 16)
        objective = objectives.create(experiment, 100, SPECIAL, strategy=strategy)
        objective = objective.evaluated() if is_evaluated else objective
        params = jax.jit(objective.init)(jax.random.key(0))
        return float(jax.jit(lambda rows: objective.loss(params, rows, jnp.arange(2, dtype=jnp.uint32), jax.random.key(0), False).count)(ids))

    assert count(lambda ids, segments, tokens: jnp.where(ids == 5, 1.0, 0.0)) == 4
    assert count(lambda ids, segments, tokens: jnp.zeros_like(ids)) == 0
