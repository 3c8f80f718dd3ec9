r"""Compare the training step with two PyTorch implementations, interleaved in one process.

Prints the tokens/s of each implementation, and their ratios to ours. Needs the extra [torch].

    python benchmarks/against_torch.py --gin_file=benchmarks/shapes/tiny.gin \
        --gin.Dropout.attention=0.0

hidden    The code that a user of transformers would write. RobertaModel reads the whole row, and
          the attention mask hides the masked positions. [MASK] is put back before a decoder of
          RobertaLayers; the head reads the masked positions. There is no relative bias.
gathered  The same computation as ours in plain PyTorch: gathered visible tokens, relative bias,
          scaled_dot_product_attention. With our weights and without dropout, its loss must equal
          ours before anything is timed. The relative tolerance is 1e-4 (1e-2 unless float32).

All three do forward, backward, clipping and AdamW (fused in PyTorch) with the same dropout rates.
On CPU, PyTorch computes in float32; on CUDA, it uses bfloat16 autocast and torch.compile. Rows are
random ids of one segment without padding. Our step draws its masks. PyTorch's masks are drawn
before, which is in its favour.

The first step of a turn is not timed. Our step returns its memory after each step and takes it
again in the next. After a pause, a virtual machine may have given that memory to its host, so the
first step is slower than in training.
"""

import os
import pathlib
import statistics
import sys
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the device is shared with PyTorch
# PyTorch's threads must not spin while ours work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from maelm_jax import cli, config, tables

PATTERNS = 4  # masks that PyTorch's steps take in turn
LOSS_TOLERANCE = {"float32": 1e-4}  # relative, by dtype
LOSS_TOLERANCE_OTHERWISE = 1e-2

# Starts one step; returns a function that waits for its end.
Starter = typing.Callable[[], typing.Callable[[], typing.Any]]


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    times = cli.whole_number(1)
    rounds = "times that every step gets its turn"
    flags.add_argument("--rounds", type=times, default=5, help=rounds)
    flags.add_argument("--steps", type=times, default=3, help="steps timed in a turn")
    args, experiment = cli.parse(flags, argv)

    import jax
    import torch
    import training_setup

    if experiment.optimizer.kind != "adamw":
        raise config.ConfigError("PyTorch's steps have AdamW: give --gin.Optimizer.kind=adamw")
    if jax.device_count() > 1:
        raise config.ConfigError(
            f"PyTorch's steps take one device, and there are {jax.device_count()}: hide the others"
        )
    torch.manual_seed(0)
    setup = training_setup.set_up(experiment)
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    seconds = take_turns(contenders(experiment, setup, device), args.rounds, args.steps)
    model = experiment.model
    print(
        f"{training_setup.shape_of(experiment)}, {model.compute.dtype}, "
        f"dropout {model.dropout.hidden}, "
        f"attention dropout {model.dropout.attention}, {device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    print(table(seconds, experiment.run.batch_size * experiment.corpus.sequence_length))


def contenders(experiment: config.Experiment, setup, device: str) -> dict[str, Starter]:
    """The steps to compare, by name. Checks first that PyTorch's computes the same loss as ours.

    Raises:
        RunError: The losses differ.
    """
    import jax
    import torch_models

    size, length = experiment.vocabulary.size, experiment.corpus.sequence_length
    masked = draw_masks(experiment, setup, PATTERNS)
    patterns = [as_tensors(inputs, device) for inputs in masked]
    weights = jax.device_get(setup.state.params)
    gathered = torch_models.Gathered(weights, experiment.model, size, setup.special).to(device)
    hidden = torch_models.Hidden(experiment.model, size, length, setup.special).to(device)
    check_same_loss(experiment, setup, masked[0], gathered, patterns[0])
    return {
        "ours": our_step(setup),
        "gathered": torch_step(gathered, patterns, experiment, device),
        "hidden": torch_step(hidden, patterns, experiment, device),
    }


def draw_masks(experiment: config.Experiment, setup, count: int) -> list:
    """Draws masks for the batch, `count` times. Each result is a `model_inputs.Inputs`."""
    import jax

    from maelm_jax.model import masking

    sizes = masking.budget(experiment.objective, experiment.corpus.sequence_length)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, experiment.run.batch_size)
        return masking.draw(keys, setup.ids, experiment.objective, sizes, setup.special)

    return [draw(jax.random.key(number)) for number in range(count)]


def as_tensors(inputs, device: str) -> dict:
    """The fields of `model_inputs.Inputs` as tensors."""
    import numpy as np
    import torch

    return {
        name: torch.tensor(np.asarray(value), dtype=torch.long, device=device)
        for name, value in inputs._asdict().items()
    }


def check_same_loss(experiment: config.Experiment, setup, inputs, module, tensors: dict):
    """Raises RunError unless PyTorch's loss on our weights and masks is ours."""
    import torch

    from maelm_jax.model import loss, maelm

    model = maelm.apply(setup.objective.definition.graph, setup.state.params)
    sums = loss.masked_cross_entropy(model.predict(inputs), inputs)
    ours = float(sums.loss_nats / sums.count)
    with torch.no_grad():
        theirs = float(module.eval()(tensors))
    tolerance = LOSS_TOLERANCE.get(experiment.compute.dtype, LOSS_TOLERANCE_OTHERWISE)
    if abs(theirs - ours) > tolerance * abs(ours):
        raise config.RunError(
            f"the PyTorch step computes something else: loss {theirs:.6f}, ours {ours:.6f}"
        )
    print(f"loss on the same weights and masks: ours {ours:.6f}, gathered {theirs:.6f}")


def our_step(setup) -> Starter:
    """Our training step. It keeps its state."""
    import jax

    state = setup.state

    def start():
        nonlocal state
        state, _ = setup.train_step(state, setup.batch, setup.learning_rate)
        return lambda: jax.block_until_ready(state)

    return start


def torch_step(module, patterns: list[dict], experiment: config.Experiment, device: str) -> Starter:
    """The training step of a torch Module: forward, backward, clipping, AdamW."""
    import torch

    settings = experiment.optimizer
    module.train()
    forward = torch.compile(module) if device == "cuda" else module
    adam = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=(settings.b1, settings.b2), eps=settings.eps, fused=True
    )
    count = 0

    def start():
        nonlocal count
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = forward(patterns[count % len(patterns)])
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        count += 1
        return torch.cuda.synchronize if device == "cuda" else lambda: None

    return start


def take_turns(starters: dict[str, Starter], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, by name. The first step of a turn is not timed."""
    for start in starters.values():  # compilation and PyTorch's first allocations
        for _ in range(2):
            start()()
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    for _ in range(rounds):
        for name, start in starters.items():
            start()()
            began = time.perf_counter()
            for _ in range(steps):
                wait = start()
            wait()
            seconds[name].append((time.perf_counter() - began) / steps)
    return seconds


def table(seconds: dict[str, list[float]], tokens: int) -> str:
    """The rates of each step of `tokens` tokens, and their ratios to ours."""
    ours = statistics.median(seconds["ours"])
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        rates = (f"{tokens / value:,.0f}" for value in (median, max(times), min(times)))
        rows.append((name, *rates, f"{median / ours:.2f}x"))
    return tables.plain(("step", "tokens/s", "slowest", "fastest", "ours is"), rows)


if __name__ == "__main__":
    cli.run(main, trains=True)
