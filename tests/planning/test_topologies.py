"""Slices and devices by their names."""

import pytest

from maelm_jax import config
from maelm_jax.planning import topologies


@pytest.mark.parametrize("name,chips,devices,cloud", [
    ("v4:2x4x4", 32, 64, "v4-64"), ("v5e:16x16", 256, 256, "v5litepod-256"), ("v5p:4x4x8", 128, 128, "v5p-256"), ("v6e:8x8", 64, 64, "v6e-64"),
])  # fmt: skip
def test_a_slice_has_its_chips_and_its_name(name, chips, devices, cloud):
    topology = topologies.parse(name)
    assert (topology.chips, topology.count) == (chips, devices) and topology.title.endswith(f" calls it {cloud}")


@pytest.mark.parametrize("name", ["v5e:3x5", "v9:2x2", "v5p-256", "cpu:0", ""])
def test_an_unknown_topology_lists_the_known(name):
    with pytest.raises(config.ConfigError, match=r"known are v4: 2x2x1 .*v5e: .*16x16.*; and cpu:N, N from 1 to 1024"):
        topologies.parse(name)


@pytest.mark.parametrize("name", ["cpu:99999999", "cpu:1025", "cpu:²", "cpu:-1", "cpu:", "cpu:01", "cpu:1e3", "cpu:" + "9" * 5000])
def test_a_number_of_cpu_devices_that_cannot_be_is_refused(name):
    with pytest.raises(config.ConfigError, match="and cpu:N, N from 1 to 1024$"):
        topologies.parse(name)


def test_the_largest_number_of_cpu_devices():
    assert topologies.parse("cpu:1024").count == 1024
