"""What pretraining optimises. Data, mesh, loop and checkpoints are the same for every objective.

A new objective is a subclass of `Objective`, a line in `CLASSES`, and a line in
`config.OBJECTIVES` (CONTRIBUTING.md).
"""

import abc
import collections.abc
import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.data import prepare
from maelm_jax.model import keys, loss, maelm, masking
from maelm_jax.model.kernels import backends
from maelm_jax.pretraining import unigram
from maelm_jax.training import optimizers, sharding, step


def create(
    experiment: config.Experiment,
    vocabulary_size: int,
    special: config.SpecialIds,
    target: backends.Target | None = None,
    strategy: masking.Strategy | None = None,
) -> "Objective":
    """Returns the objective of an experiment.

    `target` is that of `maelm.create`. `strategy` is that of `Masking.strategy`, if loaded. What
    reads a run leaves it out, and masks all tokens alike.
    """
    chosen = choose_class(experiment.objective)
    definition = chosen.define(experiment.model, vocabulary_size, special, target)
    return chosen(experiment, vocabulary_size, special, definition, target, strategy)


def choose_class(objective: config.Objective) -> type["Objective"]:
    """Returns the class of an objective."""
    return HybridRows if objective.causal_share else CLASSES[objective.name]


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """What a run optimises. The subclasses are the objectives.

    Parameters of an objective's own are in the module `own_head` (`sharding.OWN_HEAD`). They are
    replicated over the devices, checkpoints hold them, and exports leave them out with a line that
    names them.
    """

    experiment: config.Experiment
    vocabulary_size: int
    special: config.SpecialIds
    definition: maelm.Definition
    target: backends.Target | None = None
    strategy: masking.Strategy | None = None

    @staticmethod
    def define(
        model: config.Model,
        vocabulary_size: int,
        special: config.SpecialIds,
        target: backends.Target | None,
    ) -> maelm.Definition:
        """Returns the model. By default it has the encoder, the decoder and the token head."""
        return maelm.create(model, vocabulary_size, special, target)

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What the loss is, and of which part of the model."""

    @abc.abstractmethod
    def loss(
        self,
        params: dict,
        rows: Int[Array, "B L"],
        row_numbers: UInt32[Array, " B"],
        key: Key[Array, ""],
        train: bool,
    ) -> loss.Sums:
        """Returns the sum of the loss over a batch of rows, and its count. It is a `step.LossFn`.

        Randomness depends on (key, row number) alone, so that it is the same on every mesh. Rows of
        padding, which fill the last batch of an evaluation, count nothing.
        """

    def init(self, key: Key[Array, ""]) -> dict:
        """Returns fresh parameters."""
        return self.definition.init(key)

    def evaluated(self) -> "Objective":
        """Returns the objective of evaluations: its mask rate is the held-out one."""
        return dataclasses.replace(self, experiment=self.experiment.evaluated)

    def make_baseline(self, rows: prepare.Prepared) -> unigram.Unigram | None:
        """Returns what a useful encoder must beat, from the training rows. None: it is unknown."""
        return None

    def set_initial_values(self, params: dict, baseline: unigram.Unigram | None):
        """Sets initial values that depend on the baseline. By default there are none."""
        return


class MaskedTokens(Objective):
    """Predict the tokens at masked slots: MAE-LM, MLM and between (paper, section 3).

    Next tokens are predicted in the same way. There each token counts as masked, and the encoder
    reads those before it.

    Masks and dropout depend on (key, the row's number in the global batch). They are therefore the
    same on every mesh, with any number of hosts and microbatches.
    """

    @property
    def description(self) -> str:
        """What the loss is, and of which part of the model."""
        if self.experiment.model.causal:
            return "loss of the encoder at next tokens, from the tokens before them"
        if not self.experiment.decoder:
            return "loss of the encoder, which reads [MASK] at masked tokens"
        return "loss of the decoder, which is discarded after pretraining"

    def loss(
        self,
        params: dict,
        rows: Int[Array, "B L"],
        row_numbers: UInt32[Array, " B"],
        key: Key[Array, ""],
        train: bool,
    ) -> loss.Sums:
        """Draws masks for a batch of rows and sums the loss over the masked positions.

        It is a `step.LossFn`.
        """
        settings = self.experiment.objective
        sizes = masking.budget(settings, rows.shape[1])
        mask_key, dropout_key = jax.random.split(key)
        mask_keys = keys.make_row_keys(mask_key, row_numbers)
        dropout_keys = keys.make_row_keys(dropout_key, row_numbers) if train else None
        inputs = masking.draw(mask_keys, rows, settings, sizes, self.special, self.strategy)
        if self.experiment.model.causal:
            params = maelm.encoder_and_head(params)
        network = maelm.apply(self.definition.graph, params)
        prediction = network.predict(inputs, dropout_keys)
        return loss.masked_cross_entropy(prediction, inputs)

    def left_to_right(self) -> "MaskedTokens":
        """Returns the objective of next tokens, with the encoder and the head of this model."""
        settings = self.experiment.left_to_right
        return create(settings, self.vocabulary_size, self.special, self.target)

    def make_baseline(self, rows: prepare.Prepared) -> unigram.Unigram:
        """Returns the unigram distribution of the training rows."""
        masks_all = self.experiment.objective.masking.mask_special_tokens
        never_predicted = (self.special.pad,) if masks_all else self.special.never_masked
        return unigram.Unigram.of_rows(rows, self.vocabulary_size, never_predicted)

    def set_initial_values(self, params: dict, baseline: unigram.Unigram):
        """Sets the bias of the prediction head to log frequencies, with `Init.unigram_bias`."""
        if self.experiment.init.unigram_bias:
            old = params["head"]["bias"]
            bias = baseline.head_bias(len(old))
            params["head"]["bias"] = jax.make_array_from_callback(
                old.shape, old.sharding, lambda index: bias[index]
            )


class HybridRows(MaskedTokens):
    """Some rows of a batch predict next tokens, the others masked tokens, by one head.

    Source: GPT-BERT (arXiv 2410.24159), with two differences. A masked token is predicted at its
    own slot, where stock classes of transformers have its logits, not at the slot before. And the
    decoder of MAE-LM takes no part in causal rows: the head reads the encoder there.

    Of `causal_rows` = n of m, each m rows that follow each other have n causal ones. A permutation
    that is new in each step says which, so that no source of text gets them all. A next token
    weighs `Masking.rate`, and so a causal row weighs as much as a masked one.
    """

    def loss(
        self,
        params: dict,
        rows: Int[Array, "B L"],
        row_numbers: UInt32[Array, " B"],
        key: Key[Array, ""],
        train: bool,
    ) -> loss.Sums:
        """Sums the loss over masked tokens and next tokens. It is a `step.LossFn`."""
        share = self.experiment.objective.causal_rows
        order_key = jax.random.fold_in(key, keys.CAUSAL_STREAM)
        order = jax.random.permutation(order_key, share.denominator)

        def take(chosen):
            return (
                x.reshape(-1, share.denominator, *x.shape[1:])[:, chosen].reshape(-1, *x.shape[1:])
                for x in (rows, row_numbers)
            )

        masked = super().loss(params, *take(order[share.numerator :]), key, train)
        next_tokens = self.left_to_right()
        causal = next_tokens.loss(params, *take(order[: share.numerator]), key, train)
        weight = self.experiment.objective.masking.rate
        sums = (x + weight * y for x, y in zip(masked[:3], causal[:3], strict=True))
        return loss.Sums(*sums, causal.loss_nats, causal.count)

    def evaluated(self) -> MaskedTokens:
        """Returns the objective of evaluations, in which all rows are masked."""
        return MaskedTokens(**vars(self)).evaluated()


class AbstractStep(typing.NamedTuple):
    """A training step, and the shapes and shardings of its arguments.

    `train_step.lower(*arguments).compile()` compiles it.
    """

    train_step: collections.abc.Callable
    arguments: tuple[step.State, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def abstract_step(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> AbstractStep:
    """Returns the training step of an experiment, without allocating anything.

    The devices of the mesh need not exist on this machine. The vocabulary is assumed to have
    `Vocabulary.size` ids.
    """
    size, run = experiment.vocabulary.size, experiment.run
    target = backends.mesh_target(mesh)
    objective = create(experiment, size, config.SpecialIds.of_size(size), target)
    optimizer = optimizers.create(experiment.optimizer, experiment.compute.dtype)
    state = step.state_shapes(objective.init, optimizer, mesh)
    rows = NamedSharding(mesh, sharding.BATCH)
    shape = (run.batch_size, experiment.corpus.sequence_length)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    learning_rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, jax.P()))
    return AbstractStep(
        step.make_train_step(objective.loss, optimizer, state, run.seed, run.accumulate, mesh),
        (state, batch, learning_rate),
    )


# By `Objective.name`. Rows with causal ones among them are `HybridRows`.
CLASSES: dict[str, type[Objective]] = {
    "mae_lm": MaskedTokens,
    "mlm": MaskedTokens,
    "between": MaskedTokens,
    "causal": MaskedTokens,
}
