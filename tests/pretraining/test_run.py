"""The batches of a run whose batch size changes."""

import types

import jax
import numpy as np
import pytest

from maelm_jax import gin_files
from maelm_jax.pretraining import run
from maelm_jax.training import phases


class Table:
    """Rows in memory: row r is [r, r]."""

    length = 2
    fetches = False

    def __len__(self):
        return 37

    def __getitem__(self, numbers):
        return np.stack([numbers, numbers], 1).astype(np.int32)


def rows_of_steps(*bindings: str) -> list[np.ndarray]:
    """The row numbers of each step, on two devices."""
    experiment = gin_files.load(["tiny.gin"], ["TRAIN_STEPS=20", *bindings])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    setup = types.SimpleNamespace(split=lambda name: {"a": Table()}, rows=types.SimpleNamespace(rates={"a": 1.0}), mesh=mesh)
    batch = run._batches(setup, phases.of_run(experiment))
    return [np.asarray(batch(number))[:, 0] for number in range(20)]


@pytest.mark.parametrize("ramp", ["((2, 5), (4, 6))", "((6, 1),)", "((2, 30),)"])
def test_a_ramp_reads_the_rows_of_a_run_without_one_in_the_same_order(ramp):
    steps = rows_of_steps("BATCH_SIZE=8", f"Run.batch_size_ramp={ramp}", "Masking.rate_plateaus=((0, 0.3), (0.4, 0.15))")
    rows, constant = np.concatenate(steps), np.concatenate(rows_of_steps("BATCH_SIZE=8"))
    np.testing.assert_array_equal(rows, constant[: len(rows)])
    assert len(rows) < len(constant)
    if ramp == "((2, 5), (4, 6))":
        assert [len(rows) for rows in steps] == [2] * 5 + [4] * 6 + [8] * 9
