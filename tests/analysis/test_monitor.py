"""The ranks that training logs are those of the states."""

import dataclasses

import jax
from testing import LITTLE, experiment_of, little_rows, mesh_of, objective_of, random_parameters

from maelm_jax import config
from maelm_jax.analysis import moments, monitor, ranks
from maelm_jax.model import keys, maelm

SPECIAL = config.SpecialIds.of_size(100)
LENGTH, WIDTH, ROWS = LITTLE.encoder.max_positions, LITTLE.encoder.width, 70


def test_the_monitor_measures_what_the_analysis_does():
    params = random_parameters(jax.eval_shape(maelm.create(LITTLE, 100, SPECIAL).init, keys.make_key(0))["encoder"], seed=2)
    corpus, run = config.Corpus(sequence_length=LENGTH), config.Run(batch_size=8)
    settings = experiment_of(corpus=corpus, model=LITTLE, run=run)
    mesh = mesh_of(2, 1, 1)
    ranks_of = monitor.RankMonitor(settings, 100, SPECIAL, little_rows(ROWS), mesh)
    found = ranks_of({"encoder": params})
    assert set(found) == {f"rank_{kind}_{layer}" for kind in ("plain", "real", "all") for layer in ("middle", "last")}
    used = little_rows(ROWS)[: len(ranks_of._rows)]
    assert (used != SPECIAL.pad).sum() * 0.85 >= 40 * WIDTH and len(used) < ROWS, "as many rows as the width asks for"
    assert min(found.values()) > 1
    assert found["rank_all_last"] == found["rank_real_last"], "this encoder reads no [MASK]"
    mlm = objective_of(rate=0.5, encoder_mask_fraction=1.0)
    masked = dataclasses.replace(settings, objective=mlm)
    with_masks = monitor.RankMonitor(masked, 100, SPECIAL, little_rows(ROWS), mesh)
    logged = with_masks({"encoder": params})
    measure = jax.jit(moments.measure(masked, 100, SPECIAL))
    whole = moments.accumulate(measure, params, with_masks._rows, 0, keys.make_stream_key(run.seed, keys.RANK_STREAM), SPECIAL.pad)
    for layer, name in ((1, "middle"), (2, "last")):
        assert logged[f"rank_plain_{name}"] == ranks.effective_rank(ranks.spectrum(whole["plain"].product[layer]), 0.9)
        product = whole["real"].product[layer] + whole["mask"].product[layer]
        assert logged[f"rank_all_{name}"] == ranks.effective_rank(ranks.spectrum(product), 0.9)
    assert any(logged[f"rank_all_{name}"] != logged[f"rank_real_{name}"] for name in ("middle", "last")), logged
    masking = objective_of(rate=0.5, heldout_rate=0.15)
    assert monitor.RankMonitor(dataclasses.replace(settings, objective=masking), 100, SPECIAL, little_rows(ROWS), mesh)({"encoder": params}) == found
    assert monitor.RankMonitor(settings, 100, SPECIAL, little_rows(ROWS)[:4], mesh)({"encoder": params}) == {}, "too few tokens: no rank"
