"""The fused attention in programs compiled by the TPU compiler, without a TPU: calls of kernels, no array of scores, memory."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from testing import ROOT

LAYERS, DECODER_LAYERS = 3, 2
SETTINGS = {
    "Encoder.layers": LAYERS,
    "Decoder.layers": DECODER_LAYERS,
    "Encoder.width": 256,
    "Encoder.heads": 4,
    "Encoder.feed_forward": 256,
    "Compute.dtype": "bfloat16",
    "Encoder.max_positions": 256,
    "Vocabulary.size": 512,
    "SEQUENCE_LENGTH": 256,
    "BATCH_SIZE": 32,
}
VISIBLE = 224  # slots of the encoder
COMPILE = """
import json, re, sys
# The weights of 3 and of 2 layers are [3, 1, 256, 256] and [2, 1, 256, 256].
SCORES = '(f32|bf16).(?![23],1,)[0-9]+,[0-9]+,(?:224,224|256,256).'
from maelm_jax import cli
from maelm_jax.planning import targets
_, experiment = cli.parse(cli.parser(""), sys.argv[1:])
devices = targets.start_compiler(targets.parse("v5e:2x2"))
from maelm_jax.planning import estimate
from maelm_jax.training import attention_report
mesh, lowered, _ = estimate.lower_step(experiment, devices)
program = lowered.compile()
text = program.as_text()
scores, is_fused = set(), False
for line in text.splitlines():
    if line.endswith("{"):
        is_fused = "fused_computation" in line
    elif not is_fused and " = " in line:
        output = line.split(" = ")[1].split("(%")[0]
        scores.update(re.findall(SCORES, output))
print(json.dumps({
    "report": attention_report.describe(experiment, mesh), "temporaries": program.memory_analysis().temp_size_in_bytes,
    "calls": text.count('custom_call_target="tpu_custom_call"'), "scores": sorted(scores),
}))
"""


def compiled(**settings) -> dict:
    values = {**SETTINGS, **{name.replace("__", "."): value for name, value in settings.items()}}
    flags = ["--gin_file=tiny.gin", *(f"--gin.{name}={value}" for name, value in values.items())]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", COMPILE, *flags], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_compiled_step_keeps_no_scores(tensor):
    """`auto` takes the kernels. Only the bias has the shape of scores, in bfloat16. With `tensor`, the layers are a loop."""
    program = compiled(Mesh__tensor=tensor)
    by_layer = tensor == 1
    report = "attention: pallas_tpu in encoder, decoder (bfloat16 on TPU v5 lite)"
    assert program["report"] == report + ("; each layer compiled by itself" if by_layer else "")
    bodies = LAYERS + DECODER_LAYERS if by_layer else 2
    assert program["calls"] == 2 * bodies, "forward and backward, no forward again"
    assert program["scores"] == ["bf16"]
    if tensor == 1:  # XLA divides the other layers of the model over `tensor` with large copies
        stacked_scores = 4 * LAYERS * SETTINGS["BATCH_SIZE"] // 4 * SETTINGS["Encoder.heads"] * VISIBLE**2
        assert program["temporaries"] < stacked_scores, "those of the encoder's layers, in float32"
