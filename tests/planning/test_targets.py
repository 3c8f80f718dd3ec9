"""Slices and devices by their names."""

import pytest

from maelm_jax import config
from maelm_jax.planning import targets


@pytest.mark.parametrize(
    "name,chips,devices,cloud",
    [
        ("v4:2x4x4", 32, 64, "v4-64"),
        ("v5e:16x16", 256, 256, "v5litepod-256"),
        ("v5p:4x4x8", 128, 128, "v5p-256"),
        ("v6e:8x8", 64, 64, "v6e-64"),
    ],
)
def test_a_slice_has_its_chips_and_its_name(name, chips, devices, cloud):
    target = targets.parse(name)
    assert (target.chips, target.count) == (chips, devices) and target.title.endswith(f" calls it {cloud}")


@pytest.mark.parametrize(
    "name,slice_",
    [
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5litepod-256", "v5e:16x16"),
        ("v6e-8", "v6e:2x4"),
        ("v5p-256", "v5p:4x4x8"),  # cores
        ("v4-32", "v4:2x2x4"),
    ],
)
def test_the_name_of_the_cloud_is_that_of_a_slice(name, slice_):
    assert targets.parse(name) == targets.parse(slice_)


@pytest.mark.parametrize(
    "name",
    ["v5e:3x5", "v9:2x2", "v5e-255", "v5p-255", "v4-4", "v5litepod:256", "cpu:0", "cpu:", "", "h100:9", "h100:0x8", "h100:8x", "b300:8", "h100"],
)
def test_an_unknown_target_is_refused_by_its_name(name):
    with pytest.raises(config.ConfigError, match=f"--topology={name}"):
        targets.parse(name)


@pytest.mark.parametrize("name,count,gpus_a_host", [("h100:8", 8, 8), ("a100:1", 1, 1), ("h200:4x8", 32, 8), ("h100:512x4", 2048, 4)])
def test_gpus_are_hosts_by_gpus(name, count, gpus_a_host):
    target = targets.parse(name)
    assert (target.count, target.devices_a_host) == (count, gpus_a_host)


@pytest.mark.parametrize("name,memory,bandwidth", [("a100:1", 80e9, 2.04e12), ("h100:1", 80e9, 3.35e12), ("h200:1", 141e9, 4.8e12)])
def test_the_figures_of_a_gpu_are_those_of_its_data_sheet(name, memory, bandwidth, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1")
    target = targets.parse(name)
    assert target.memory == pytest.approx(memory, rel=0.08) and target.bandwidth == pytest.approx(bandwidth, rel=0.002)


def test_a_program_has_the_share_of_the_memory_that_jax_takes(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    three_quarters = targets.parse("h100:8").memory
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1")
    assert three_quarters == 0.75 * targets.parse("h100:8").memory
