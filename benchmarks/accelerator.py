"""Check and time every attention backend on the devices of this machine.

    python benchmarks/accelerator.py --workdir=runs/accelerator

First each backend is compared with `xla` in float32: states, gradients of queries, keys and values,
and the gradient of the bias, which must not be zero. Then the training step of base and large is
timed with each backend, in bfloat16 and without attention dropout, on a GPU also against PyTorch if
it is installed (`against_torch.py`). What does not start within --minutes is left out.

WORKDIR/accelerator.json and WORKDIR/accelerator.md hold the results. Exit status 1: a backend does
not agree with `xla`. A backend that cannot compute here is left out with its reason.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from maelm_jax import cli, config, gin_files, tables

BACKENDS = ("xla", "cudnn", "pallas_tpu")
PLATFORMS = {"cudnn": "gpu", "pallas_tpu": "tpu"}
CASES = ("bias", "segments", "bias, segments, dropout")
NAMES = ("states", "dq", "dk", "dv", "d_bias")
# Most relative error of a bfloat16 backend against xla in float32, in norms of whole arrays.
TOLERANCE = 0.02
CONFIGS = {"base": ["base.gin"], "large": ["large_plus.gin"]}
LARGE_IS_SMALLER = 2  # large has half of base's rows


class Shape(typing.NamedTuple):
    """Shape of a compared attention."""

    rows: int
    slots: int
    heads: int
    head_size: int


class Check(typing.NamedTuple):
    """The comparison of one backend with xla."""

    backend: str
    case: str
    errors: dict[str, float]  # relative, by array
    agrees: bool | None  # None: the backend cannot compute here
    problem: str = ""  # why there is nothing to compare


class Measurement(typing.NamedTuple):
    """The training step of one model with one backend."""

    model: str
    backend: str
    seconds: float | None = None  # of a step, median
    tokens: float | None = None  # a second
    mfu: float | None = None  # None beside a time: the peak of the device is unknown
    memory: float | None = None  # bytes of a device: arguments and temporaries of the program
    problem: str = ""  # why there is no figure


def main(argv: list[str]) -> int:
    """Runs the command with these arguments."""
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    flags.add_argument("--workdir", required=True, metavar="DIR", help="folder of the results")
    flags.add_argument("--minutes", type=float, default=8.0, help="time for everything")
    number = cli.whole_number(1)
    flags.add_argument("--rows", type=number, default=32, help="rows a device of base's step")
    flags.add_argument("--steps", type=number, default=10, help="steps timed, after two others")
    flags.add_argument("--interpret", action="store_true", help="take Pallas kernels on CPU too")
    args = flags.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    end = time.monotonic() + 60 * args.minutes
    experiments = {name: experiment_of(name, args.rows) for name in CONFIGS}
    folder, pending = pathlib.Path(args.workdir), ["PyTorch: not measured yet"]
    write(folder, [], [], pending)  # what is measured later may end the process
    checks = check_all(Shape(2, 440, 12, 64), args.interpret)
    write(folder, checks, [], pending)
    measurements = measure_all(experiments, args.steps, end, args.interpret)
    write(folder, checks, measurements, pending)
    text = write(folder, checks, measurements, against_torch(args.rows, end))
    print(text)
    return 1 if any(check.agrees is False for check in checks) else 0


def experiment_of(name: str, rows: int) -> config.Experiment:
    """The experiment of a model, as one microbatch of `rows` rows a device."""
    import jax

    experiment = gin_files.load(CONFIGS[name])
    rows = rows if name == "base" else max(rows // LARGE_IS_SMALLER, 1)
    dropout = dataclasses.replace(experiment.dropout, attention=0.0)
    run = dataclasses.replace(experiment.run, batch_size=rows * jax.device_count(), accumulate=1)
    return dataclasses.replace(experiment, dropout=dropout, run=run)


def available(backend: str, interpret: bool) -> bool:
    """Whether the platform is one that the backend is for."""
    import jax

    if backend == "xla" or (backend == "pallas_tpu" and interpret):
        return True
    return jax.default_backend() == PLATFORMS[backend]


def check_all(shape: Shape, interpret: bool) -> list[Check]:
    """Compares every backend, in bfloat16, with xla in float32 on the same numbers."""
    import jax.numpy as jnp

    checks = []
    for case in CASES:
        expected = results("xla", case, shape, jnp.float32)
        backends = [backend for backend in BACKENDS if available(backend, interpret)]
        checks.extend(check(backend, case, shape, expected) for backend in backends)
    return checks


def check(backend: str, case: str, shape: Shape, expected: dict) -> Check:
    """Compares the results of a backend with those expected."""
    import jax.numpy as jnp

    try:
        actual = results(backend, case, shape, jnp.bfloat16)
    except config.ConfigError as error:
        return Check(backend, case, {}, None, str(error))
    except Exception as error:  # of the compiler or the device: the other backends still count
        return Check(backend, case, {}, False, " ".join(f"failed: {error}".split())[:200])
    errors = {}
    for name, value in expected.items():
        difference = actual[name].astype(jnp.float32) - value
        errors[name] = float(jnp.linalg.norm(difference) / jnp.linalg.norm(value))
    # The error of a gradient that is zero is 1. NaN is in no range.
    return Check(backend, case, errors, all(0.0 <= error < TOLERANCE for error in errors.values()))


class Inputs(typing.NamedTuple):
    """The arrays of a compared attention."""

    q: typing.Any  # [rows, slots, heads * head_size], as k, v and d_states
    k: typing.Any
    v: typing.Any
    d_states: typing.Any  # the gradient of the states
    bias: typing.Any  # [rows, heads, slots, slots], or None
    segments: typing.Any  # [rows, slots], or None
    dropout_keys: typing.Any


def results(backend: str, case: str, shape: Shape, dtype) -> dict:
    """The states and all gradients of an attention, by name."""
    inputs = make_inputs(case, shape, dtype)
    values = zip(NAMES, differentiated(our_states(backend, inputs, shape), inputs)(), strict=True)
    return {name: value for name, value in values if value is not None}


def make_inputs(case: str, shape: Shape, dtype) -> Inputs:
    """Draws the arrays of a case. The numbers are those of bfloat16 in any dtype."""
    import jax
    import jax.numpy as jnp

    rows, slots, heads, head_size = shape
    keys = jax.random.split(jax.random.key(0), 6)
    wide = (rows, slots, heads * head_size)

    def normal(key, *sizes):
        return jax.random.normal(key, sizes).astype(jnp.bfloat16).astype(dtype)

    segments = jnp.broadcast_to(1 + jnp.arange(slots) // (slots // 2), (rows, slots))
    return Inputs(
        *(normal(key, *wide) for key in keys[:4]),
        bias=normal(keys[4], rows, heads, slots, slots) if "bias" in case else None,
        segments=segments if "segments" in case else None,
        dropout_keys=jax.random.split(keys[5], rows) if "dropout" in case else None,
    )


def our_states(backend: str, inputs: Inputs, shape: Shape) -> typing.Callable:
    """Our attention of these segments and this dropout as a function of q, k, v and bias."""
    from maelm_jax.model import attention, positions
    from maelm_jax.model.kernels import backends

    mask = None if inputs.segments is None else positions.Mask(inputs.segments, inputs.segments)

    chosen = backends.Backend(backend, backends.one_device())

    def states(q, k, v, bias):
        return attention.attend(
            q,
            k,
            v,
            heads=shape.heads,
            terms=attention.ScoreTerms(bias, mask, backend=chosen),
            dropout_rate=0.1,
            dropout_keys=inputs.dropout_keys,
        ).states

    return states


def differentiated(states: typing.Callable, inputs: Inputs) -> typing.Callable:
    """A function without arguments that computes the states of `inputs` and all gradients."""
    import jax

    @jax.jit
    def states_and_gradients(q, k, v, d_states, bias):
        value, pull = jax.vjp(states, q, k, v, bias)
        return value, *pull(d_states)

    arrays = (inputs.q, inputs.k, inputs.v, inputs.d_states, inputs.bias)
    return lambda: states_and_gradients(*arrays)


def measure_all(
    experiments: dict[str, config.Experiment], steps: int, end: float, interpret: bool
) -> list[Measurement]:
    """Times the step of every model with every backend, until the time `end`."""
    measured = []
    for name, experiment in experiments.items():
        for backend in BACKENDS:
            if not available(backend, interpret):
                continue
            if time.monotonic() > end:
                measured.append(Measurement(name, backend, problem="not started: out of time"))
                continue
            compute = dataclasses.replace(experiment.compute, attention_backend=backend)
            chosen = dataclasses.replace(experiment, compute=compute)
            try:
                measured.append(measure(name, chosen, steps))
            except Exception as error:  # as out of memory: the other figures still count
                problem = " ".join(str(error).split())[:200]
                measured.append(Measurement(name, backend, problem=problem))
    return measured


def measure(name: str, experiment: config.Experiment, steps: int) -> Measurement:
    """Times `steps` training steps, after two that are not counted."""
    import training_setup

    from maelm_jax.training import flops

    setup = training_setup.set_up(experiment)
    program = setup.train_step.lower(setup.state, setup.batch, setup.learning_rate).compile()
    memory = program.memory_analysis()
    seconds = training_setup.time_steps(setup._replace(train_step=program), steps + 2)
    median = statistics.median(seconds[2:])
    step_flops = sum(flops.flops_terms(experiment, experiment.vocabulary.size).values())
    peak = flops.peak_flops()
    tokens = experiment.run.batch_size * experiment.corpus.sequence_length
    return Measurement(
        name,
        experiment.compute.attention_backend,
        median,
        tokens / median,
        step_flops / median / peak if peak else None,
        memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    )


def against_torch(rows: int, end: float) -> list[str]:
    """The last lines of `against_torch.py` at base, or a line that says why there are none."""
    import jax

    if importlib.util.find_spec("torch") is None or jax.default_backend() != "gpu":
        return ["PyTorch: not measured; it needs the extra [torch] and a GPU"]
    if jax.device_count() > 1:
        return ["PyTorch: not measured; its steps take one device"]
    command = [
        *(sys.executable, str(pathlib.Path(__file__).parent / "against_torch.py")),
        *("--gin_file=base.gin", f"--gin.BATCH_SIZE={rows}", "--gin.Run.accumulate=1"),
        "--gin.Dropout.attention=0.0",
    ]
    seconds = end - time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return ["PyTorch: not measured: out of time"]
    output = done.stdout if done.returncode == 0 else done.stderr
    return output.strip().splitlines()[-5:]


def write(
    folder: pathlib.Path, checks: list[Check], measurements: list[Measurement], torch: list[str]
) -> str:
    """Writes accelerator.json and accelerator.md. Returns the text of the latter."""
    import jax

    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    content = {
        "device": device,
        "jax": jax.__version__,
        "checks": [check._asdict() for check in checks],
        "measurements": [measurement._asdict() for measurement in measurements],
        "torch": torch,
    }
    checked = tables.markdown(
        ("backend", "case", "largest relative error", "agrees with xla in float32"),
        [
            (x.backend, x.case, f"{max(x.errors.values(), default=0):.1e}", x.problem or x.agrees)
            for x in checks
        ],
    )
    measured = tables.markdown(
        ("model", "backend", "step, ms", "tokens/s", "MFU", "GiB a device"),
        [_row(measurement) for measurement in measurements],
    )
    text = "\n\n".join([f"{device}, jax {jax.__version__}", checked, measured, "\n".join(torch)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accelerator.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "accelerator.md").write_text(text + "\n")
    return text


def _row(measurement: Measurement) -> tuple[str, ...]:
    name, backend = measurement.model, measurement.backend
    if measurement.problem:
        return name, backend, measurement.problem, "", "", ""
    mfu = f"{measurement.mfu:.1%}" if measurement.mfu else "peak unknown"
    return (
        name,
        backend,
        f"{1e3 * measurement.seconds:.1f}",
        f"{measurement.tokens:,.0f}",
        mfu,
        f"{measurement.memory / 2**30:.2f}",
    )


if __name__ == "__main__":
    cli.run(main)
