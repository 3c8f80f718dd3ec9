"""The loss of every file of configs/ablations/ trains every parameter. What the encoder reads is as the files of masks say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ablations import LENGTH, ROWS, SIZE, SPECIAL, draw, encoded, is_masked, load, make, make_model, some_rows
from testing import objective_of

from maelm_jax import config, gin_files
from maelm_jax.model import maelm, masking
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import sharding

# No other code than the rest: points on the same scale, masks that other tests of this file look at, gradients that test_maelm_parity.py compares.
SELDOM = """
    delta_0 delta_25 delta_50 delta_75 delta_100 decoder_depth_2 decoder_depth_4 decoder_depth_6 decoder_depth_8 decoder_width_1024 mlm_80_10_10
    random_tokens rate_15 rate_30 rate_40 rate_50 reference_positions renumbered spans whole_words
""".split()
FILES = sorted(path.stem for path in (gin_files.CONFIGS / "ablations").glob("*.gin") if path.stem not in SELDOM)


@pytest.mark.parametrize("name", FILES)
def test_the_loss_has_a_gradient_for_every_parameter(name):
    experiment = load(name)
    _, params = make_model(experiment)
    loss_of_rows = objectives.create(experiment, SIZE, SPECIAL).loss

    def mean_loss(params, rows):
        sums = loss_of_rows(params, rows, jnp.arange(ROWS, dtype=jnp.uint32), jax.random.key(0), True)
        return sums.loss_nats / sums.count, sums.count

    (value, count), gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(params, some_rows())
    assert float(count) > 0, "nothing is masked in these rows: more rows, or a higher Masking.rate"
    assert np.isfinite(float(value))
    norms = {sharding.parameter_path(keys): float(jnp.abs(x).sum()) for keys, x in jax.tree_util.tree_leaves_with_path(gradient)}
    assert all(np.isfinite(norm) for norm in norms.values())
    assert [path for path, norm in norms.items() if norm == 0.0] == [], "no gradient reaches these parameters"


def test_each_file_of_delta_has_the_share_of_its_name():
    for percent in (0, 25, 50, 75, 100):
        experiment = load(f"delta_{percent}")
        assert experiment.objective.encoder_mask_fraction == percent / 100 and experiment.model.decoder.layers > 0


@pytest.mark.parametrize("percent", [0, 50])
def test_delta_is_the_share_of_masks_the_encoder_sees(percent):
    experiment, graph, params, inputs = make(f"delta_{percent}", "Masking.rate=0.4")
    drawn = draw(experiment.objective, some_rows(2000))
    masked = is_masked(drawn)
    entered = masked & (np.asarray(drawn.encoder_index) < drawn.encoder_slots.shape[1])
    assert abs(entered.sum() / masked.sum() - percent / 100) < 0.005
    reads_mask = (np.asarray(drawn.encoder_ids) == SPECIAL.mask) & (np.asarray(drawn.encoder_slots) < LENGTH)
    assert reads_mask.sum() == entered.sum(), "the encoder reads <mask> at the masked slots that it sees"

    gradient = jax.jit(jax.grad(lambda p: (maelm.apply(graph, p).encode(inputs) ** 3).sum()))(params)["encoder"]["token_embedding"]
    reached = np.abs(np.asarray(gradient[SPECIAL.mask])).sum()
    assert (reached > 0) == (percent > 0), "whether the row of [MASK] takes part in the encoder"
    other = draw(experiment.objective, jnp.where(is_masked(inputs), 7, inputs.ids))
    assert np.array_equal(encoded(graph, params, inputs), encoded(graph, params, other)), "the token under a mask reaches the encoder"


def test_random_tokens_stand_where_masks_would():
    drawn = draw(load("random_tokens").objective, some_rows(4000))
    masked = is_masked(drawn)
    assert drawn.encoder_slots.shape[1] == LENGTH, "nothing is dropped"
    replacement = np.asarray(drawn.encoder_ids)[masked]
    counts = np.bincount(replacement, minlength=SIZE)
    special = [0, 1, 2, 3, SIZE - 1]
    assert counts[special].sum() == 0 and counts[4:-1].min() > 0.7 * len(replacement) / (SIZE - 5), "every text token, no special one"
    assert abs(np.corrcoef(replacement, np.asarray(drawn.ids)[masked])[0, 1]) < 0.03, "whatever stood there before"


def test_80_10_10():
    experiment = load("mlm_80_10_10")
    drawn = draw(experiment.objective, some_rows(8000))
    masked = is_masked(drawn)
    replacement, original = np.asarray(drawn.encoder_ids)[masked], np.asarray(drawn.ids)[masked]
    unchanged, mask = (replacement == original).mean(), (replacement == SPECIAL.mask).mean()
    tolerance = 5 * np.sqrt(0.1 * 0.9 / len(replacement))
    assert abs(mask - 0.8) < 1.5 * tolerance and abs(unchanged - 0.1 - 0.1 / (SIZE - 5)) < tolerance
    assert abs((1 - unchanged - mask) - 0.1) < tolerance + 0.1 / (SIZE - 5)
    assert (np.asarray(drawn.encoder_ids)[~masked] == np.asarray(drawn.ids)[~masked]).all(), "only masked positions are corrupted"
    assert experiment.decoder is None


def test_renumbered_positions_count_the_visible_tokens_of_each_segment():
    inputs = draw(load("renumbered").objective, some_rows())
    for row in range(ROWS):
        slots = np.asarray(inputs.encoder_slots[row])
        read = slots < LENGTH
        segments = np.asarray(inputs.segments[row])[slots[read]]
        expected = np.concatenate([np.arange((segments == number).sum()) for number in (1, 2)])
        assert np.asarray(inputs.encoder_positions[row])[read].tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["no_relative", "delta_0"])
def test_without_relative_positions_only_the_position_table_orders_tokens(name):
    _, graph, params, _ = make(name)
    params["encoder"]["position_embedding"] = jnp.zeros_like(params["encoder"]["position_embedding"])
    ids = np.asarray(some_rows())[:1, 1:13]
    order = np.random.default_rng(1).permutation(12)
    positions, segments = jnp.arange(12, dtype=jnp.int32)[None], jnp.ones((1, 12), jnp.int32)
    encode = jax.jit(lambda p, x: maelm.apply(graph, p).encoder(x, positions, segments))
    states, permuted = (np.asarray(encode(params, jnp.asarray(x))) for x in (ids, ids[:, order]))
    same = np.abs(permuted - states[:, order]).max() < 1e-4
    assert same == (name == "no_relative")


def test_a_unit_without_a_case_is_refused():
    with pytest.raises(ValueError, match="Masking.unit='verse'"):
        masking._find_unit_starts(jax.random.key(0), jnp.arange(8), jnp.ones(8, bool), "verse", SPECIAL)


@pytest.mark.parametrize("name", ["whole_words", "spans"])
def test_units_are_masked_whole_at_the_right_rate(name):
    settings = load(name, "Masking.rate=0.15").objective
    rows = 4000
    drawn = draw(settings, some_rows(rows))
    masked, ids = is_masked(drawn), np.asarray(drawn.ids)
    tokens = LENGTH - 2
    assert abs(masked.sum() / (rows * tokens) - 0.15) < 0.002
    read = np.asarray(drawn.encoder_index) < drawn.encoder_slots.shape[1]
    assert (read ^ masked)[:, :tokens].all(), "every token is read or masked: the budgets have room for a unit too many or too few"
    assert not masked[np.isin(ids, SPECIAL.never_masked)].any()
    lengths = []
    for row in range(rows):
        edges = np.diff(np.concatenate([[0], masked[row].astype(int), [0]]))
        lengths += (np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)).tolist()
    if name == "whole_words":
        continues = np.asarray(SPECIAL.continues_word)[ids]
        joined = continues[:, 1:] & ~np.isin(ids[:, :-1], SPECIAL.never_masked)
        assert (masked[:, 1:] == masked[:, :-1])[joined].mean() > 0.999, "a word is cut only where it is longer than ten pieces"
        assert (masked[:, 1:] == masked[:, :-1])[~joined].mean() < 0.9
    else:
        assert np.mean(lengths) > 3.0 and max(lengths) >= masking.UNIT_LIMIT
        assert np.mean(np.asarray(lengths) > 15) < 0.01


@pytest.mark.parametrize("unit,length,rate", [("word", 8, 0.15), ("word", 32, 0.9), ("span", 16, 0.5), ("span", 32, 0.9)])
def test_the_rate_holds_where_a_unit_more_does_not_fit_into_the_row(unit, length, rate):
    ids = jnp.full((4000, length), 7, jnp.int32).at[:, 0].set(SPECIAL.bos)
    settings = objective_of(unit=unit, rate=rate, mask_special_tokens=True)
    assert abs(is_masked(draw(settings, ids)).mean() - rate) < 0.02


def test_a_word_longer_than_the_limit_is_cut():
    ids = jnp.full((1, LENGTH), 60, jnp.int32).at[0, 0].set(0)
    first = masking._find_unit_starts(jax.random.key(0), ids[0], ids[0] != 0, "word", SPECIAL)
    assert np.unique(np.asarray(first), return_counts=True)[1].tolist() == [1, 10, 10, 10, 1]


def test_pieces_of_a_vocabulary_are_needed():
    bare = config.SpecialIds(0, 1, 2, 3, SIZE - 1)
    settings = objective_of(unit="word")
    draw_masks = functools.partial(masking.draw, objective=settings, sizes=masking.budget(settings, LENGTH), special=bare)
    with pytest.raises(ValueError, match="continues_word"):
        jax.eval_shape(draw_masks, jax.random.split(jax.random.key(0), ROWS), some_rows())
