"""Compiles the attention kernels for GPUs that are not here, and reads registers and spills.

    PYTHONPATH=. python tests/gpu_kernels.py

Needs the extra [cuda] and no GPU: XLA writes the kernels' PTX, and `ptxas -v` compiles it. The exit
status is 1 if a kernel spills registers on an H100. docs/notes/gpu_kernels.txt has the last output.
"""

import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import typing

ARCHITECTURES = {"h100": "sm_90a", "a100": "sm_80"}  # of ptxas
MUST_NOT_SPILL = "h100"
HEAD_SIZES = (16, 32, 64, 128)
TERMS = ("bias dropout", "segments dropout", "bias")
SLOTS, HEADS = 440, 12


class Kernel(typing.NamedTuple):
    """What ptxas says of a kernel."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread, stored


def main(argv: list[str]) -> int:
    """Compiles all kernels, or those of one topology if `argv` names it. Returns the exit status."""
    if argv:
        compile_kernels(argv[0], json.loads(argv[1]), argv[2])
        return 0
    spills = 0
    for gpu, head_size, terms in itertools.product(ARCHITECTURES, HEAD_SIZES, TERMS):
        for kernel in compiled(gpu, head_size, terms):
            print(f"{gpu}  heads of {head_size:3}  {terms:16}  {kernel.name:29} registers {kernel.registers:3}  spilled {kernel.spilled}", flush=True)
            spills += kernel.spilled > 0 and gpu == MUST_NOT_SPILL
    print(f"{spills} kernels spill on {MUST_NOT_SPILL}")
    return int(spills > 0)


def compiled(gpu: str, head_size: int, terms: str) -> list[Kernel]:
    """Compiles the forward and backward kernels in a process of their own."""
    [toolkit] = importlib.util.find_spec("nvidia.cu13").submodule_search_locations
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, gpu, json.dumps([head_size, terms]), folder], check=True, capture_output=True)
        kernels = []
        for ptx in pathlib.Path(folder).glob("*.ptx"):
            if ".entry attention_" not in ptx.read_text():
                continue
            command = [f"{toolkit}/bin/ptxas", "-v", f"-arch={ARCHITECTURES[gpu]}", "-o", "/dev/null", ptx]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            kernels += re.findall(r"function '(attention_\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", said, re.DOTALL)
    assert len(kernels) == 3, kernels
    return [Kernel(name, int(registers), int(spilled)) for name, spilled, registers in sorted(kernels)]


def compile_kernels(gpu: str, shape: list, folder: str) -> None:
    """Compiles the kernels. XLA writes their PTX to `folder`."""
    import os

    from maelm_jax.planning import topologies

    head_size, terms = shape
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"
    device = topologies.parse(f"{gpu}:1").devices()[0]
    import jax
    import jax.numpy as jnp

    from maelm_jax.model import attention_fused, attention_triton

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    states, vector = shaped(jnp.bfloat16, 1, SLOTS, HEADS * head_size), shaped(jnp.float32, 1, HEADS, SLOTS)
    bias = shaped(jnp.bfloat16, 1, HEADS, SLOTS, SLOTS) if "bias" in terms else None
    operands = attention_fused.Operands()
    if "segments" in terms:
        operands = attention_fused.Operands(*[shaped(jnp.float32, 1, 1, SLOTS)] * 2)
    if "dropout" in terms:
        operands = operands._replace(head_words=shaped(jnp.uint32, 1, HEADS), row_words=shaped(jnp.uint32, 1))
    settings = attention_fused.Settings(HEADS, 0.1 if "dropout" in terms else 0.0)

    def forward(*arrays):
        return attention_triton.run_forward_kernel(settings, *arrays)

    def backward(*arrays):
        return attention_triton.run_backward_kernels(settings, *arrays)

    jax.jit(forward).lower(states, states, states, bias, operands).compile()
    donated = [] if bias is None else [4]
    arrays = (states, states, states, bias, bias, operands, states, [vector, vector], states)
    jax.jit(backward, donate_argnums=donated).lower(*arrays).compile()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
