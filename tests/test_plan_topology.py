"""How many CPU devices `plan` pretends to have."""

import pytest

from maelm_jax import config, plan


@pytest.mark.parametrize("topology", ["cpu:99999999", "cpu:1025", "cpu:²", "cpu:-1", "cpu:", "cpu:01", "cpu:1e3", "cpu:" + "9" * 5000])
def test_a_number_of_cpu_devices_that_cannot_be_is_refused(topology):
    with pytest.raises(config.ConfigError, match="and cpu:N, N from 1 to 1024$"):
        plan.slice_of(topology)


def test_as_many_as_there_may_be():
    assert plan.slice_of("cpu:1024").devices == 1024
