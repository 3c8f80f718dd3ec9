"""Invariant 8 (statistics of the masks) and the arithmetic of slots."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from testing import objective_of

from maelm_jax import config, gin_files
from maelm_jax.model import masking, model_inputs

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
WORDS = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99, continues_word=tuple(index % 3 == 0 for index in range(100)))
MASKINGS = strategies.fixed_dictionaries(
    {"rate": strategies.floats(0.05, 0.95)},
    optional={
        "unit": strategies.sampled_from(("token", "word", "span")),
        "replaced": strategies.tuples(strategies.sampled_from((0.0, 0.25, 0.5)), strategies.sampled_from((0.0, 0.25, 0.5))),
        "renumber": strategies.booleans(),
        "mask_special_tokens": strategies.booleans(),
    },
)
LENGTH, ROWS = 64, 4096


def rows_of_two_segments(length=LENGTH, rows=ROWS, pads=5):
    """<s> words </s> <s> words </s> pads."""
    ids = np.random.default_rng(0).integers(4, 99, (rows, length)).astype(np.int32)
    ids[:, [0, 20]], ids[:, [19, length - pads - 1]] = 0, 2
    ids[:, length - pads :] = 1
    return jnp.asarray(ids)


def draw(ids, seed=0, **settings):
    settings = objective_of(**settings)
    sizes = masking.budget(settings, ids.shape[1])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(ids.shape[0], dtype=jnp.uint32))
    return jax.jit(lambda keys, ids: masking.draw(keys, ids, settings, sizes, SPECIAL))(keys, ids), sizes


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_rate_and_uniformity(rate):
    ids = rows_of_two_segments()
    inputs, sizes = draw(ids, rate=rate)
    masked = np.asarray(inputs.masked_index) < sizes.masked
    tokens = int((np.asarray(ids[0]) != 1).sum())
    counts = masked.sum(1)
    assert set(np.unique(counts)) <= {int(np.floor(rate * tokens)), int(np.ceil(rate * tokens))}
    assert abs(counts.mean() - rate * tokens) < 0.05, "the number masked is floor(rate n + u): its mean is rate n"
    text = (np.asarray(ids[0]) > 3).nonzero()[0]
    per_slot = masked.mean(0)
    assert per_slot[np.asarray(ids[0]) <= 3].max() == 0, "special tokens and padding are never masked"
    expected = rate * tokens / len(text)
    assert np.abs(per_slot[text] - expected).max() < 5 * np.sqrt(expected * (1 - expected) / ROWS), "every text position alike"


def test_special_tokens_as_in_the_reference():
    ids = rows_of_two_segments()
    inputs, sizes = draw(ids, mask_special_tokens=True)
    per_slot = (np.asarray(inputs.masked_index) < sizes.masked).mean(0)
    real = np.asarray(ids[0]) != 1
    assert np.abs(per_slot[real] - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / ROWS)
    assert per_slot[~real].max() == 0


def test_every_token_is_read_or_predicted():
    ids = rows_of_two_segments()
    inputs, sizes = draw(ids)
    read = np.asarray(inputs.encoder_index) < sizes.visible
    masked = np.asarray(inputs.masked_index) < sizes.masked
    real = np.asarray(ids) != 1
    assert (read ^ masked)[real].all() and not (read | masked)[~real].any()
    for slots, index, size in ((inputs.encoder_slots, read, sizes.visible), (inputs.masked_slots, masked, sizes.masked)):
        for row in range(50):
            held = np.asarray(slots[row])
            assert held[held < LENGTH].tolist() == np.flatnonzero(index[row]).tolist(), "slots ascend, empty ones last"
            assert held.shape == (size,)


def any_rows(segments: list[list[int]], length: int) -> np.ndarray:
    """A row for each list of sizes of segments: <s> text </s>, cut at `length`, then padding."""
    draw = np.random.default_rng(0)
    ids = np.full((len(segments), length), SPECIAL.pad, np.int32)
    for row, sizes in zip(ids, segments, strict=True):
        text = [token for size in sizes for token in (SPECIAL.bos, *draw.integers(3, 99, size).tolist(), SPECIAL.eos)][:length]
        row[: len(text)] = text
    return ids


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    segments=strategies.lists(strategies.lists(strategies.integers(1, 40), max_size=6), min_size=4, max_size=4),
    length=strategies.sampled_from((8, 45)),
    delta=strategies.sampled_from((0.0, 1.0)) | strategies.floats(0, 1),
    values=MASKINGS,
    seed=strategies.integers(0, 2**32 - 1),
)
def test_each_slot_of_any_rows_is_visible_masked_dropped_or_empty(segments, length, delta, values, seed):
    replaced = values.pop("replaced", (0.0, 0.0))
    if delta:
        values |= {"random_fraction": replaced[0], "keep_fraction": replaced[1]}
    masking_settings = config.Masking(**values)
    objective = config.Objective(name="mlm", masking=masking_settings) if delta == 1 else config.Objective.between(delta, masking_settings)
    ids, sizes = any_rows(segments, length), masking.budget(objective, length)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(len(ids), dtype=jnp.uint32))
    inputs = jax.tree.map(np.asarray, masking.draw(keys, jnp.asarray(ids), objective, sizes, WORDS))
    assert sizes.visible <= length and sizes.masked <= length
    longest_unit = 1 if masking_settings.unit == "token" else masking.UNIT_LIMIT
    for row, ids_of_row in enumerate(ids):
        own = type(inputs)(*(values[row] for values in inputs))
        tokens, masked, visible = ids_of_row != SPECIAL.pad, own.masked_index < sizes.masked, own.encoder_index < sizes.visible
        check_inverse(own.masked_slots, own.masked_index, np.flatnonzero(masked), sizes.masked)
        if sizes.visible < length:
            check_inverse(own.encoder_slots, own.encoder_index, np.flatnonzero(visible), sizes.visible)
        else:
            assert (own.encoder_slots == np.where(visible, np.arange(length), length)).all()
        assert not (masked | visible)[~tokens].any(), "padding is empty"
        left_out = tokens & ~masked & ~visible
        if left_out.any():  # V is too small: see `masking.budget`
            assert visible.sum() == sizes.visible and np.flatnonzero(left_out).min() > np.flatnonzero(visible).max()
        never = () if masking_settings.mask_special_tokens else WORDS.never_masked
        eligible = tokens & ~np.isin(ids_of_row, never)
        assert not masked[~eligible].any()
        share = masking_settings.rate * tokens.sum()
        least, most = (min(count, eligible.sum()) for count in (math.floor(share), math.ceil(share)))
        assert least - longest_unit < masked.sum() < most + longest_unit
        entered, dropped = masked & visible, masked & ~visible
        if not left_out.any():
            assert math.floor(delta * masked.sum()) <= entered.sum() <= math.ceil(delta * masked.sum())
        assert not (entered.any() and delta == 0) and not (dropped.any() and delta == 1)
        check_replacements(own, visible, masked, masking_settings)
        expected = own.positions
        if masking_settings.renumber:
            expected = np.zeros(length, int)
            for segment in set(own.segments[tokens]):
                places = np.flatnonzero((own.segments == segment) & visible)
                expected[places] = np.arange(len(places))
        slots = own.encoder_slots[own.encoder_slots < length]
        assert (own.encoder_positions[own.encoder_slots < length] == expected[slots]).all()


def check_inverse(slots, index, chosen, size):
    """Checks that slots are the chosen ones, in order, then empty, and that the index says where each of them is."""
    assert slots.shape == (size,) and slots[: len(chosen)].tolist() == chosen.tolist() and (slots[len(chosen) :] == len(index)).all()
    assert index[chosen].tolist() == list(range(len(chosen)))


def check_replacements(own, visible, masked, settings):
    """Checks what the encoder reads at each slot that it sees."""
    slots = own.encoder_slots[own.encoder_slots < len(own.ids)]
    read = np.full(len(own.ids), -1)
    read[slots] = own.encoder_ids[own.encoder_slots < len(own.ids)]
    assert (read[visible & ~masked] == own.ids[visible & ~masked]).all()
    text = ~np.isin(read, (SPECIAL.bos, SPECIAL.pad, SPECIAL.eos, SPECIAL.unk, SPECIAL.mask))
    allowed = (read == SPECIAL.mask) | (text & (settings.random_fraction > 0)) | ((read == own.ids) & (settings.keep_fraction > 0))
    assert allowed[visible & masked].all()


@pytest.mark.parametrize("length,rate,expected", [(512, 0.15, (440, 77)), (128, 0.15, (112, 20)), (512, 0.4, (312, 205))])
def test_budget(length, rate, expected):
    sizes = masking.budget(objective_of(rate=rate), length)
    assert (sizes.visible, sizes.masked) == expected


def test_a_row_has_the_same_mask_alone_and_in_a_batch():
    ids = rows_of_two_segments(rows=8)
    together, _ = draw(ids)
    settings = objective_of()
    key = jax.random.fold_in(jax.random.key(0), jnp.uint32(5))
    alone = jax.jit(lambda keys, ids: masking.draw(keys, ids, settings, masking.budget(settings, LENGTH), SPECIAL))(key[None], ids[5:6])
    assert (together.masked_slots[5] == alone.masked_slots[0]).all()


def test_what_overflows_the_budget_stays_visible():
    ids = rows_of_two_segments(rows=1)
    segments, positions = model_inputs.segments_and_positions(ids, 0, 1)
    masked = (ids > 3) & (jnp.arange(LENGTH) < 30)[None]
    inputs = model_inputs.split(ids, segments, positions, masked, jnp.zeros_like(masked), model_inputs.Budget(60, 10), SPECIAL.mask)
    assert int((inputs.masked_index < 10).sum()) == 10
    assert int((inputs.encoder_index < 60).sum()) == int((ids != 1).sum()) - 10


def test_the_modern_preset_has_whole_tiles_of_128_slots():
    settings = gin_files.load(["modern_base.gin"])
    assert masking.budget(settings.objective, settings.corpus.sequence_length) == model_inputs.Budget(384, 128)


def test_segments_and_positions():
    ids = jnp.asarray([[0, 9, 9, 2, 0, 9, 2, 1, 1], [1] * 9])
    segments, positions = model_inputs.segments_and_positions(ids, bos=0, pad=1)
    assert segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0], [0] * 9]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0], [0] * 9]
