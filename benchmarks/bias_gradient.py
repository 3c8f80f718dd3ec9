"""Compare the gradient of the relative bias' table with that of `xla` in float32.

    python benchmarks/bias_gradient.py --gin_file=base.gin --gin.BATCH_SIZE=1

The kernels written here add the gradients of all layers in place, in the dtype of the bias. Each
backend computes the gradient of one batch of random rows, in bfloat16, with the same weights, masks
and dropout. The table has the error relative to `xla` in float32, in norms. The error of `xla` in
bfloat16 is what the rest of the model does. Where a kernel's device is not at hand, Pallas'
interpreter runs it. Base takes some minutes on two CPU cores.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config, tables

EXPECTED = ("xla", "float32")
COMPARED = (("xla", "bfloat16"), ("pallas_tpu", "bfloat16"), ("pallas_gpu", "bfloat16"))


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    _, experiment = cli.parse(flags, argv)
    print(tables.plain(("backend", "dtype", "relative error", "norm"), errors(experiment)))


def errors(experiment: config.Experiment) -> list[tuple[str, ...]]:
    """The rows of the table."""
    import jax.numpy as jnp

    expected = table_gradient(experiment, *EXPECTED)
    rows = []
    for backend, dtype in COMPARED:
        gradient = table_gradient(experiment, backend, dtype)
        error = jnp.linalg.norm(gradient - expected) / jnp.linalg.norm(expected)
        rows.append((backend, dtype, f"{float(error):.3%}", f"{jnp.linalg.norm(gradient):.3e}"))
    return rows


def table_gradient(experiment: config.Experiment, backend: str, dtype: str):
    """The gradient of the encoder's table [R, H] in the first training step."""
    import jax
    import training_setup

    from maelm_jax.model import keys
    from maelm_jax.training import step

    model = dataclasses.replace(experiment.model, attention_backend=backend, dtype=dtype)
    experiment = dataclasses.replace(experiment, model=model)
    setup = training_setup.set_up(experiment)
    loss = step.pretraining_loss(experiment, setup.graph, setup.special)
    numbers = jax.numpy.arange(len(setup.ids), dtype=jax.numpy.uint32)
    key = keys.of_stream(experiment.run.seed, keys.TRAIN_STREAM)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda params: loss(params, setup.ids, numbers, key, True).loss)(params)

    return gradient(setup.state.params)["encoder"]["relative_bias"]["table"]


if __name__ == "__main__":
    main(sys.argv[1:])
