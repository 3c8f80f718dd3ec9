"""How processes are told where to meet: what cannot be is one line before JAX is asked."""

import jax
import pytest

from maelm_jax import config
from maelm_jax.training import distributed


def join(coordinator=None, processes=None, process=None):
    with distributed.joined(coordinator, processes, process, timeout=60):
        pytest.fail("it joined")


@pytest.mark.parametrize(
    "given",
    [
        ("a:b", 2, 0),
        ("localhost:99999999", 2, 0),
        ("localhost:0", 2, 0),
        (":8476", 2, 0),
        ("localhost:²", 2, 0),
        ("localhost", 2, 0),
        ("localhost:8476", -1, 0),
        ("localhost:8476", 2, 2),
        ("localhost:8476", 2, -1),
        ("localhost:8476", None, None),
        ("auto", -1, None),
        ("auto", 0, None),
        ("auto", None, -1),
        ("auto", 2, 5),
    ],
    ids=str,
)
def test_flags_that_cannot_be_are_refused(monkeypatch, given):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("JAX was asked"))
    monkeypatch.setattr(distributed.process_exit, "set_abort_message", lambda text: None)
    with pytest.raises(config.ConfigError, match="expected HOST:PORT, the number of processes"):
        join(*given)


@pytest.mark.parametrize("variable", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["abc", "²", "1e3", "9" * 5000])
def test_a_variable_that_holds_no_number_is_named(monkeypatch, variable, value):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "host[0-1]")
    monkeypatch.setenv(variable, value)
    with pytest.raises(config.ConfigError, match=f"^{variable}='.*' in the environment is not a number"):
        join("localhost:8476")


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "")
    with distributed.joined(None, None, None, 60):
        pass
