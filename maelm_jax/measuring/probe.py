"""Linear probes: what a logistic regression reads from the frozen states of every layer.

The input is the mean of a text's states. Scores are of folds of the training examples, so the dev
set stays unseen.
"""

import functools
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config, tables
from maelm_jax.encoders import families, inference, recipes
from maelm_jax.encoders.opened import OpenedModel
from maelm_jax.finetuning import glue, labelled_data, metrics, sentence
from maelm_jax.finetuning.task import InputFormat
from maelm_jax.model import maelm
from maelm_jax.model.kernels import backends

FOLDS = 5
EXAMPLES = 10_000  # the first ones of the training file


class Probe(typing.NamedTuple):
    """The scores of one encoder on one task."""

    task: str
    metric: str
    examples: int
    majority: float  # what the most frequent class scores
    layers: np.ndarray  # float64 [layers + 1, folds]; layer 0 is the input of the first layer


class Data(typing.NamedTuple):
    """The examples of a task."""

    task: sentence.SentenceTask
    examples: list[glue.Example]


def read(folder: str) -> Data:
    """Reads the training examples of a folder of GLUE, such as `glue/RTE`.

    Raises ConfigError if the folder is not of such a task, or its file is not as expected.
    """
    path = pathlib.Path(folder)
    specs = {spec.folder.lower(): spec for spec in glue.SPECS.values() if spec.kind.names}
    spec = specs.get(path.name.lower())
    if spec is None:
        names = ", ".join(spec.folder for spec in specs.values())
        raise config.ConfigError(f"--probe={folder}: name a folder of GLUE, one of {names}")
    train = labelled_data.find_file(folder, "train.tsv") if path.is_dir() else None
    if train is None:
        raise config.ConfigError(f"--probe={folder}: there is no file train.tsv")
    task = sentence.SentenceTask(spec.name, config.Finetune(tasks=spec.name))
    examples = glue.read_table(spec, train, True, task.notes, spec.skips_broken)[:EXAMPLES]
    counts = np.bincount([example.label for example in examples], minlength=len(spec.kind.names))
    if counts.min() < FOLDS:
        raise config.ConfigError(
            f"{train}: a label has {counts.min()} examples, fewer than the {FOLDS} folds"
        )
    return Data(task, examples)


def score(encoder: OpenedModel, data: Data) -> Probe:
    """Scores every layer of an encoder on a task."""
    import sklearn.metrics
    from sklearn import linear_model, model_selection, pipeline, preprocessing

    pair = families.choose_pair_format(encoder.model.encoder)
    input_format = InputFormat(encoder.vocabulary, encoder.length, pair)
    features = data.task.encode(data.examples, input_format, "training").features
    states = mean_states(encoder, [row.tolist() for row in features.ids])
    labels, metric = features.targets, data.task.main_metric
    folds = model_selection.StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    measure = metrics.METRICS[metric]
    classifier = pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=5000)
    )
    scoring = sklearn.metrics.make_scorer(measure)
    scores = np.array(
        [
            model_selection.cross_val_score(classifier, x, labels, cv=folds, scoring=scoring)
            for x in states
        ]
    )
    most_frequent = np.full_like(labels, np.bincount(labels).argmax())
    majority = float(measure(labels, most_frequent))
    return Probe(data.task.spec.folder, metric, len(labels), majority, scores)


def mean_states(encoder: OpenedModel, rows: list[list[int]]) -> np.ndarray:
    """Returns the mean state of each text in each layer, float32 [layers + 1, texts, width].

    `rows` are the ids of each text, with `<s>` and `</s>`.
    """
    vocabulary, target = encoder.vocabulary, backends.one_device()
    graph = maelm.encoder_graph(encoder.model, vocabulary.size, vocabulary.pad, target)

    @jax.jit
    def pool(params, ids, positions, segments, owners):
        states = maelm.apply(graph, params)(ids, positions, segments, all_layers=True)
        of_layer = functools.partial(
            recipes.pool_states,
            positions=positions,
            segments=segments,
            owners=owners,
            modes=("mean",),
            prompt_length=0,
        )
        return jax.vmap(of_layer)(states.astype(jnp.float32))

    params, own = jax.device_put(encoder.tree()), encoder.model.encoder
    result = np.zeros((own.layers + 1, len(rows), own.width), np.float32)
    for batch in inference.pack_texts(rows, encoder.vocabulary.pad):
        pooled = pool(params, batch.ids, batch.positions, batch.segments, batch.owners)
        result[:, batch.texts] = np.asarray(pooled)[:, : len(batch.texts)]
    return result


def table(probes: dict[str, Probe]) -> str:
    """Returns the scores of encoders on one task by layer, as an aligned table.

    `probes` are {name of an encoder: its scores}. The interval is the standard deviation of folds.
    """
    first = next(iter(probes.values()))
    rows = []
    for layer in range(max(len(probe.layers) for probe in probes.values())):
        cells = []
        for probe in probes.values():
            folds = 100 * probe.layers[layer] if layer < len(probe.layers) else None
            cells.append("-" if folds is None else f"{folds.mean():.1f} +- {folds.std():.1f}")
        rows.append([f"layer {layer}" if layer else "embeddings", *cells])
    rows.append(["majority", *(f"{100 * probe.majority:.1f}" for probe in probes.values())])
    title = f"{first.task}, {first.metric} (%), {first.examples:,} examples, {FOLDS} folds"
    return tables.plain((title, *probes), rows)
