"""The rows that a run trains on: those that its workdir records, or newly prepared ones.

`rows.json` in the workdir records the stores of rows and a fingerprint of each. A run goes on only
with these rows. If the source text has changed, the recorded stores are used. If they do not exist
any more, the run is refused unless new data is accepted. `describe_differences` says whether the
losses and ranks of several models compare: it needs the same rows and masks.
"""

import contextlib
import logging
import zlib

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.data import prepare, seqio_tasks
from maelm_jax.data.prepare import Prepared
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.training import distributed
from maelm_jax.training.workdir import Workdir

log = logging.getLogger(__name__)


def choose_rows(
    workdir: Workdir, corpus: config.Corpus, vocabulary: Vocabulary, accept_new_data: bool = False
) -> Prepared:
    """Opens the rows that the run trains on, and prepares those that do not exist.

    Every process of the run calls this function with the same arguments. Process 0 prepares rows
    while the others wait, and they open what it prepared. Raises ConfigError if the run began with
    other rows whose stores do not exist any more, unless new data is accepted, and the errors of
    `prepare.prepare`.
    """
    workdir.check_vocabulary(vocabulary)
    recorded = workdir.read_rows()
    with distributed.process_zero_first("rows"):
        if recorded and not accept_new_data:
            chosen = _open_or_remake(workdir, recorded, corpus, vocabulary)
        else:
            chosen = _prepare(corpus, vocabulary)
    distributed.check_equal("fingerprint of rows", fingerprints(chosen.record))
    return chosen


def open_recorded(
    workdir: Workdir, corpus: config.Corpus, vocabulary: Vocabulary
) -> Prepared | None:
    """Opens the recorded rows of a run.

    Returns None if there is no record, if the stores do not exist any more, or if `corpus` and
    `vocabulary` ask for other rows. Raises ConfigError if a store is damaged, or holds other rows.
    """
    recorded = workdir.read_rows()
    if recorded is None or recorded["request"] != prepare.hash_settings(corpus, vocabulary):
        return None
    return _open(recorded, corpus)


def _open(recorded: dict, corpus: config.Corpus) -> Prepared | None:
    stores = [entry["store"] for entry in recorded["sources"].values()]
    if not all(prepare.has_store(corpus, store) for store in stores):
        return None
    return prepare.open_record(recorded, corpus)


def _prepare(corpus: config.Corpus, vocabulary: Vocabulary) -> Prepared:
    is_first = jax.process_index() == 0  # the others open what it has prepared
    found = None if is_first else prepare.find(corpus, vocabulary)
    return found or prepare.prepare(corpus, vocabulary)


def _open_or_remake(
    workdir: Workdir, recorded: dict, corpus: config.Corpus, vocabulary: Vocabulary
) -> Prepared:
    """Opens the recorded stores. If one does not exist, prepares the same rows again."""
    if opened := _open(recorded, corpus):
        has_dataset = any(map(seqio_tasks.is_dataset, recorded["sources"]))  # a look-up takes long
        with contextlib.suppress(config.ConfigError, OSError):  # this serves the warning only
            if not has_dataset and (changed := _changed_sources(recorded, corpus, vocabulary)):
                log.warning(
                    "%s goes on with the rows that it began with, although the text of %s has "
                    "changed; --accept_new_data takes the present text",
                    workdir,
                    ", ".join(changed),
                )
        return opened
    gone = f"{workdir}: the rows that the run began with are not in {corpus.rows_dir} any more"
    remedy = "Put them back, or go on with the present text by --accept_new_data"
    changed = [
        source
        for source, name in _changed_sources(recorded, corpus, vocabulary).items()
        if not prepare.has_store(corpus, name)
    ]
    if changed:  # making other rows could take hours, only to refuse them
        raise config.ConfigError(
            f"{gone}, and the text of {', '.join(changed)} has other names, sizes or times. "
            f"{remedy}"
        )
    chosen = _prepare(corpus, vocabulary)
    if fingerprints(chosen.record) != fingerprints(recorded):
        raise config.ConfigError(f"{gone}, and the present text gives others. {remedy}")
    return chosen


def _changed_sources(
    recorded: dict, corpus: config.Corpus, vocabulary: Vocabulary
) -> dict[str, str]:
    """Returns the sources whose text has changed, {source: name of its present store}."""
    names = {entry["store"] for entry in recorded["sources"].values()}
    present = prepare.store_names(corpus, vocabulary)
    return {source: name for source, name in present.items() if name not in names}


def fingerprints(record: dict) -> dict[str, str]:
    """Returns what must be equal for a run to go on: {source: rate and fingerprint}."""
    return {
        source: f"{entry['rate']} {entry['fingerprint']}"
        for source, entry in record["sources"].items()
    }


def write(workdir: Workdir, chosen: Prepared, step: int):
    """Writes `rows.json` of a run that is at `step`. Process 0 calls this function."""
    before = workdir.read_rows()
    if before and fingerprints(before) != fingerprints(chosen.record):
        print(f"{workdir}: new data after step {step}")
    means = {"words_per_row": chosen.words_per_row, "tokens_per_row": chosen.tokens_per_row}
    workdir.write_rows(chosen.record | means)


def words_per_row(workdir: Workdir) -> float | None:
    """Returns the mean number of words in a row of a run. None: it is not recorded."""
    return (workdir.read_rows() or {}).get("words_per_row")


def _describe_masks(objective: config.Objective, seed: int) -> str:
    masking = objective.masking
    drawn = f"{masking.rate:g} of the tokens by {masking.unit}, seed {seed}"
    masks = "none, next tokens" if objective.name == "causal" else drawn
    return masks + (", special tokens too" if masking.mask_special_tokens else "")


def describe_differences(models: list, rows: list[np.ndarray], seeds: list[int]) -> list[str]:
    """Returns what prevents a comparison of models token by token, one line each.

    A model has a `path`, a `vocabulary` and the `experiment` that it is measured with. Each is
    measured on its own `rows` [R, L], with masks of its own seed.
    """
    objectives = [model.experiment.evaluated.objective for model in models]
    losses = [
        "predicted tokens" if objective.kind.predicts_tokens else objective.name
        for objective in objectives
    ]
    compared = {
        "losses": losses,
        "vocabularies": [model.vocabulary.fingerprint[:12] for model in models],
        "rows": [f"{len(x)} of {x.shape[1]}, CRC-32 {zlib.crc32(x.tobytes()):08x}" for x in rows],
        "masks": [
            _describe_masks(objective, seed)
            for objective, seed in zip(objectives, seeds, strict=True)
        ],
    }
    lines = []
    for what, values in compared.items():
        if len(set(values)) > 1:
            pairs = zip(models, values, strict=True)
            listed = "; ".join(f"{model.path}: {value}" for model, value in pairs)
            lines.append(f"not comparable token by token: different {what} ({listed})")
    return lines
