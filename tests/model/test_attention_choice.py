"""Which attention backend `auto` takes, and what it says of it."""

import types

import jax.numpy as jnp
import pytest

from maelm_jax import config
from maelm_jax.model import attention_choice
from maelm_jax.model.attention_choice import Call, Target

V5E, V4, H100 = Target("tpu", "TPU v5 lite", 1), Target("tpu", "TPU v4", 1), Target("gpu", "NVIDIA H100", 1)
CPU = Target("cpu", "cpu", 1)
BASE = Call(12, 64, 440, 440, jnp.dtype("bfloat16"), 0.0, True)


@pytest.mark.parametrize(
    "target,changes,backend,reason",
    [
        (CPU, {}, "xla", "the platform is cpu"),
        (V5E, {}, "pallas_tpu", "bfloat16 on TPU v5 lite"),
        (V5E, {"dropout_rate": 0.1}, "pallas_tpu", "bfloat16 on TPU v5 lite"),
        (V5E, {"dtype": jnp.dtype("float32")}, "xla", "the dtype is float32"),
        (V5E, {"heads": 11}, "xla", "11 heads are not a multiple of 2"),
        (V5E, {"head_size": 48}, "xla", "heads have size 48"),
        (V5E, {"queries": 436}, "xla", "436 queries or 440 keys are not a multiple of 8"),
        (V5E, {"has_dense_mask": True}, "xla", "the layers attend within a window"),
        (H100, {"has_dense_mask": True}, "cudnn", "bfloat16"),
        (V5E, {"queries": 2048, "keys": 2048}, "xla", "of fast memory, and a kernel gets 102 MiB"),
        (V4, {}, "pallas_tpu", "bfloat16 on TPU v4"),
        (V4, {"queries": 512, "keys": 512}, "xla", "of fast memory, and a kernel gets 13 MiB"),
        (V5E._replace(tensor=4, sharded_rows=True), {}, "xla", "12 heads are not a multiple of 8"),
        (V5E._replace(tensor=2, sharded_rows=True), {}, "pallas_tpu", "bfloat16"),
        (V5E._replace(devices=4), {}, "xla", "XLA shards the arrays over 4 devices"),
        (H100, {}, "cudnn", "bfloat16 on NVIDIA H100"),
        (H100, {"dropout_rate": 0.1}, "pallas_gpu", "Model.attention_dropout=0 makes cuDNN possible"),
        (H100, {"queries": 441}, "pallas_gpu", "441 queries or 440 keys are not even"),
        (H100, {"has_dense_mask": True, "dropout_rate": 0.1}, "xla", "the layers attend within a window"),
        (H100, {"head_size": 96}, "cudnn", "bfloat16 on NVIDIA H100"),
        (H100, {"head_size": 100}, "xla", "heads have size 100, and the kernels take 16, 32, 64, 128"),
        (H100, {"head_size": 96, "dropout_rate": 0.1}, "xla", "heads have size 96, and the kernels take 16, 32, 64, 128"),
        (H100, {"dtype": jnp.dtype("float32")}, "xla", "the dtype is float32, and cudnn and pallas_gpu are for bfloat16"),
        (H100._replace(tensor=8, sharded_rows=True), {"dropout_rate": 0.1}, "xla", "12 heads are not a multiple of 8"),
    ],
)
def test_auto_says_what_it_takes_and_why(target, changes, backend, reason):
    choice = attention_choice.choose("auto", BASE._replace(**changes), target)
    assert choice.backend == backend and reason in choice.reason


@pytest.mark.parametrize(
    "platform,version,expected",
    [
        ("gpu", "cuda 13000", "gpu"),
        ("cuda", "", "gpu"),
        ("gpu", "rocm 70000", "rocm"),
        ("tpu", "", "tpu"),
        ("cpu", "", "cpu"),
    ],
)
def test_an_amd_gpu_computes_attention_by_xla(platform, version, expected):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(platform=platform, device_kind="any", client=client)
    assert attention_choice.platform_of(device) == expected
    if expected == "rocm":
        chosen = attention_choice.choose("auto", BASE, Target(expected, "AMD Instinct", 1))
        assert chosen == ("xla", "the platform is rocm")


def test_a_backend_that_cannot_compute_is_refused_in_one_line():
    refused = "^Model.attention_backend='cudnn' cannot compute this attention: the platform is cpu. Use 'auto' or 'xla'$"
    with pytest.raises(config.ConfigError, match=refused):
        attention_choice.choose("cudnn", BASE, CPU)
    with pytest.raises(config.ConfigError, match="11 heads are not a multiple of 2"):
        attention_choice.choose("pallas_tpu", BASE._replace(heads=11), CPU)
    with pytest.raises(config.ConfigError, match="cannot compute this attention: the platform is tpu"):
        attention_choice.choose("pallas_gpu", BASE, V5E)
    with pytest.raises(config.ConfigError, match="the dtype is float32, and the kernels are for bfloat16"):
        attention_choice.choose("pallas_gpu", BASE._replace(dtype=jnp.dtype("float32")), H100)
    interpreted = "as set, in Pallas' interpreter here: slow, as a check"
    assert attention_choice.choose("pallas_gpu", BASE, CPU) == ("pallas_gpu", interpreted)
    assert attention_choice.choose("pallas_tpu", BASE, H100) == ("pallas_tpu", interpreted)
    assert attention_choice.choose("pallas_tpu", BASE, V5E) == ("pallas_tpu", "as set")
