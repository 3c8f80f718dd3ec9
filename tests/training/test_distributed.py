"""How processes are told where to meet: what cannot be is one line before JAX is asked."""

import pytest

from maelm_jax import config
from maelm_jax.training import distributed


def join(coordinator=None, processes=None, process=None):
    with distributed.joined(coordinator, processes, process, timeout=60):
        pytest.fail("it joined")


@pytest.mark.parametrize(
    "given",
    [
        ("localhost", 2, 0),
        ("localhost:", 2, 0),
        ("localhost:x", 2, 0),
        ("localhost:8476", -1, 0),
        ("localhost:8476", 2, 2),
        ("localhost:8476", 2, -1),
        ("localhost:8476", None, None),
        (None, 2, None),
    ],
    ids=str,
)
def test_flags_that_cannot_be_are_refused(given):
    with pytest.raises(config.ConfigError, match="--coordinator="):
        join(*given)


@pytest.mark.parametrize("variable", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_that_holds_no_number_is_named(monkeypatch, variable):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "host[0-1]")
    monkeypatch.setenv(variable, "abc")
    with pytest.raises(config.ConfigError, match=f"{variable}='abc'"):
        join(None if "TASKS" in variable or "SIZE" in variable else "localhost:8476")


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "")
    with distributed.joined(None, None, None, 60):
        pass
