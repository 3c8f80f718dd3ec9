"""Compare the gradient of the relative bias' table with that of `xla` in float32.

    python benchmarks/bias_gradient.py --gin_file=base.gin --gin.BATCH_SIZE=1

The TPU kernels add the gradients of all layers in place, in the dtype of the bias. Each backend
computes the gradient of one batch of random rows in bfloat16. The errors are relative to `xla` in
float32, in norms:
- of the model: with the same weights, masks and dropout. All of the model rounds to bfloat16. The
  error of `xla` in bfloat16 is what it would be without kernels.
- of attention alone: random queries, keys and values of each layer, the same bfloat16 numbers in
  both. Only the kernels and their sum over the layers round.
Where a kernel's device is not at hand, Pallas' interpreter runs it. Base takes some minutes on two
CPU cores.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config, tables

EXPECTED = ("xla", "float32")
COMPARED = (("xla", "bfloat16"), ("pallas_tpu", "bfloat16"))


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    _, experiment = cli.parse(flags, argv)
    alone, model = (errors(experiment, of) for of in (attention_gradient, table_gradient))
    rows = [(*choice, alone[choice], model[choice]) for choice in COMPARED]
    print(tables.plain(("backend", "dtype", "attention alone", "the model"), rows, left=2))


def errors(experiment: config.Experiment, gradient) -> dict[tuple[str, str], str]:
    """The relative error of a gradient by backend and dtype."""
    import jax.numpy as jnp

    expected = gradient(experiment, *EXPECTED)
    differences = {choice: gradient(experiment, *choice) - expected for choice in COMPARED}
    norm = jnp.linalg.norm(expected)
    return {name: f"{float(jnp.linalg.norm(x) / norm):.2%}" for name, x in differences.items()}


def attention_gradient(experiment: config.Experiment, backend: str, dtype: str):
    """The gradient of a table [R, H] through the attention of all layers of the encoder."""
    import flax.nnx
    import jax
    import jax.numpy as jnp

    from maelm_jax.model import attention, masking, positions

    model = dataclasses.replace(experiment.model, relative_bias_init="normal")
    slots = masking.budget(experiment.masking, experiment.corpus.sequence_length).visible
    shape = (4, model.layers, experiment.run.batch_size, slots, model.width)
    arrays = jax.random.normal(jax.random.key(0), shape).astype(jnp.bfloat16).astype(dtype)
    numbers = jnp.broadcast_to(jnp.arange(slots), shape[2:4])
    graph, table = flax.nnx.split(positions.RelativeBias(model, flax.nnx.Rngs(0)))
    model = dataclasses.replace(model, dtype=dtype, attention_backend=backend)

    def total(table):
        bias = flax.nnx.merge(graph, table)(numbers, arrays.dtype)
        terms = attention.prepare_terms(attention.ScoreTerms(bias), model, slots, slots, 0.0)

        def layer(carrier, inputs):
            q, k, v, d_states = inputs
            output = attention.attend(
                q, k, v, heads=model.heads, terms=terms._replace(carrier=carrier), backend=backend
            )
            return output.carrier, (output.states * d_states).astype(jnp.float32).sum()

        return jax.lax.scan(layer, terms.carrier, tuple(arrays))[1].sum()

    return jax.jit(jax.grad(total))(table)["table"][...]


def table_gradient(experiment: config.Experiment, backend: str, dtype: str):
    """The gradient of the encoder's table [R, H] in the first training step of the model."""
    import jax
    import training_setup

    from maelm_jax.model import keys

    model = dataclasses.replace(experiment.model, attention_backend=backend, dtype=dtype)
    experiment = dataclasses.replace(experiment, model=model)
    setup = training_setup.set_up(experiment)
    loss = setup.objective.loss
    numbers = jax.numpy.arange(len(setup.ids), dtype=jax.numpy.uint32)
    key = keys.make_stream_key(experiment.run.seed, keys.TRAIN_STREAM)

    @jax.jit
    def gradient(params):
        def loss_nats(params):
            return loss(params, setup.ids, numbers, key, True).loss_nats

        return jax.grad(loss_nats)(params)

    return gradient(setup.state.params)["encoder"]["relative_bias"]["table"]


if __name__ == "__main__":
    cli.run(main)
