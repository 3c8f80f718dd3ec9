"""The three kinds of labels behave alike: what a file says is what is learned, predicted and written."""

import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.finetuning import labelled_data
from maelm_jax.finetuning.labels import AnyOf, OneOf, Score

KINDS = {
    "one": (OneOf(("no", "yes")), ["yes", "no", "yes"]),
    "any": (AnyOf(("art", "sport", "war"), "|"), ["sport|war", "", "art"]),
    "score": (Score(low=1.0, high=5.0), ["1", "5", "2.5"]),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def perfect_scores(one, targets):
    """Scores of a model that has learned the targets."""
    if isinstance(one, Score):
        return targets[:, None]
    return 40.0 * (np.eye(one.outputs, dtype=np.float32)[targets] if targets.ndim == 1 else targets) - 20.0


def test_what_is_read_is_what_a_perfect_model_writes(kind):
    one, cells = kind
    targets = one.targets([one.read(labelled_data.Row("a:1", {"label": cell}), "label") for cell in cells])
    scores = perfect_scores(one, targets).astype(np.float32)
    assert one.texts(one.predict(scores)) == cells == one.texts(targets)
    losses, right = one.losses(jnp.asarray(scores), jnp.asarray(targets))
    assert losses.shape == right.shape == (3,) and right.all() and np.allclose(losses, 0, atol=1e-6)
    assert one.probabilities(scores).shape == (3, len(one.names))
    assert np.all(one.probabilities(scores)[:, : len(one.names)] >= 0)


def test_a_wrong_model_has_a_loss(kind):
    one, cells = kind
    targets = one.targets([one.read(labelled_data.Row("a:1", {"label": cell}), "label") for cell in cells])
    losses, right = one.losses(jnp.asarray(perfect_scores(one, targets[::-1])[[1, 2, 0]], jnp.float32), jnp.asarray(targets))
    assert losses.max() > 0.1 and not right.all()


def test_an_unknown_label_is_named(kind):
    one, _ = kind
    with pytest.raises(config.ConfigError, match="a:7: .*'maybe'"):
        one.read(labelled_data.Row("a:7", {"label": "maybe"}), "label")


def test_a_value_that_was_not_read_has_a_target(kind):
    one, cells = kind
    assert len(one.targets([None] * len(cells))) == len(cells)


def test_balanced_classes_have_the_same_part_of_the_loss():
    one = OneOf(("a", "b", "c", "unseen"))
    targets = np.asarray([0] * 6 + [1] * 3 + [2], np.int32)
    alike = jnp.zeros((10, 4))
    losses = np.asarray(one.balanced(targets).losses(alike, jnp.asarray(targets)).losses)
    by_class = [losses[targets == number].sum() for number in range(3)]
    assert np.allclose(by_class, by_class[0]), "a class without examples takes no part"
    assert losses.sum() == pytest.approx(float(one.losses(alike, jnp.asarray(targets)).losses.sum()), rel=1e-5)


def test_of_several_labels_the_presence_of_a_rare_one_counts_as_much_as_its_absence():
    several = AnyOf(("a", "b"))
    targets = np.asarray([[1, 1], [0, 1], [0, 1], [0, 0]], np.float32)
    losses = several.balanced(targets).losses(jnp.zeros((4, 2)), jnp.asarray(targets)).losses
    assert np.allclose(np.asarray(losses), np.log(2) * np.asarray([(3 + 1 / 3) / 2, (1 + 1 / 3) / 2, (1 + 1 / 3) / 2, 1]))


def test_scores_have_no_balance():
    with pytest.raises(config.ConfigError, match=r"Finetune\.class_weights"):
        Score().balanced(np.zeros(3, np.float32))
