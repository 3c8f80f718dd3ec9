"""Slices and devices by their names."""

import pytest

from maelm_jax import config
from maelm_jax.planning import hlo, topologies


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
    topology = topologies.parse(name)
    assert (topology.chips, topology.count) == (chips, devices) and topology.title.endswith(f" calls it {cloud}")


@pytest.mark.parametrize(
    "name",
    [
        "v5e:3x5",
        "v9:2x2",
        "v5p-256",
        "cpu:0",
        "",
        "h100:9",
        "h100:0x8",
        "h100:513x8",
        "h100:8x",
        "h100:²",
        "b300:8",
        "h100",
    ],
)
def test_an_unknown_topology_lists_the_known(name):
    with pytest.raises(config.ConfigError, match=r"does not exist. Use a TPU slice \(v4: 2x2x1 .*v5e: .*16x16.*\); GPUs .*h100:4x8.*; or cpu:N"):
        topologies.parse(name)


@pytest.mark.parametrize("name", ["cpu:99999999", "cpu:1025", "cpu:²", "cpu:-1", "cpu:", "cpu:01", "cpu:1e3", "cpu:" + "9" * 5000])
def test_a_number_of_cpu_devices_that_cannot_be_is_refused(name):
    with pytest.raises(config.ConfigError, match="or cpu:N, N from 1 to 1024$"):
        topologies.parse(name)


def test_the_largest_number_of_cpu_devices():
    assert topologies.parse("cpu:1024").count == 1024


@pytest.mark.parametrize("name,hosts,gpus_a_host", [("h100:8", 1, 8), ("a100:1", 1, 1), ("h200:4x8", 4, 8), ("h100:512x4", 512, 4)])
def test_gpus_are_hosts_by_gpus(name, hosts, gpus_a_host):
    topology = topologies.parse(name)
    assert (topology.hosts, topology.gpus_a_host, topology.count) == (hosts, gpus_a_host, hosts * gpus_a_host)
    assert topology.gpu.kind.lower() == name[:4] and f"{topology.count} GPUs of" in topology.title


@pytest.mark.parametrize(
    "name,memory,flops,bandwidth",
    [
        ("a100:1", 80e9, 312e12, 2.04e12),
        ("h100:1", 80e9, 989e12, 3.35e12),
        ("h200:1", 141e9, 989e12, 4.8e12),
    ],
)
def test_the_figures_of_a_gpu_are_those_of_its_data_sheet(name, memory, flops, bandwidth):
    gpu = topologies.parse(name).gpu
    assert gpu.memory == pytest.approx(memory, rel=0.08)
    assert gpu.speed == pytest.approx((flops, bandwidth), rel=0.002)


def test_a_collective_across_hosts_takes_the_network():
    cluster = topologies.parse("h100:2x4")
    within, across = (hlo.Collective("all-gather", 8_000_000, members, 1, "") for members in ((0, 1, 2, 3), (0, 4)))
    assert cluster.sending([within]) == pytest.approx(6e6 / cluster.gpu.nvlink)
    assert cluster.sending([across]) == pytest.approx(4e6 / cluster.gpu.network)
    assert cluster.sending([within, across]) == pytest.approx(cluster.sending([within]) + cluster.sending([across]))


def test_a_plan_takes_the_share_of_the_memory_that_jax_is_told_to_take(monkeypatch):
    gpu = topologies.parse("h100:8")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert gpu.memory == 0.75 * gpu.gpu.memory and "JAX takes 75%" in gpu.title
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert gpu.memory == 0.9 * gpu.gpu.memory and "JAX takes 90%" in gpu.title
    for share in ("90%", "1.5", "-1", "", "nan"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
        with pytest.raises(config.ConfigError, match="is no share of the memory. Set a number from 0 to 1"):
            print(gpu.title)
