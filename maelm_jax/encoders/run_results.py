"""What the files of a run say about its encoder: results of fine-tuning, the longest input."""

import os
import pathlib

from maelm_jax import config, json_files
from maelm_jax.encoders import origin

RESULTS = "results.json"


def read(workdir: str | os.PathLike) -> dict:
    """Reads the results.json of a fine-tuned run.

    Returns:
        The content of the file; {} if there is no such file.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """
    path = pathlib.Path(workdir) / RESULTS
    if not path.is_file():
        return {}
    results = json_files.read_object(path)
    best = results.get("best", {})
    is_valid = {
        "task": isinstance(results.get("task", ""), str),
        "labels": json_files.is_texts(results.get("labels", [])),
        "label_separator": isinstance(results.get("label_separator"), str | None),
        "max_length": json_files.is_integer(results.get("max_length", 1), 1, json_files.LARGEST),
        "score": results.get("score") is None
        or json_files.is_number(results["score"], -1000.0, 1000.0),
        "best": isinstance(best, dict)
        and json_files.is_number(best.get("best_f1_threshold", 0.0), -1e9, 1e9),
        "main_metric": results.get("score") is None or isinstance(results.get("main_metric"), str),
    }
    faults = [
        f"{name} is {json_files.shown(results.get(name))}"
        for name, valid in is_valid.items()
        if not valid
    ]
    if faults:
        raise config.ConfigError(f"{path} is damaged: {', '.join(faults)}. Fine-tune the run again")
    return results


def longest_input(
    experiment: config.Experiment, results: dict, started_from: origin.Origin | None
) -> int:
    """Returns the longest input in tokens whose positions are trained, with `<s>` and `</s>`.

    A fine-tuned run states this length in `results`. For any other run it is the sequence length,
    or the longest input of the source that the run started from if that is longer.

    For a run of a version without origin.json, a source counts if it is no workdir: with the
    `model_max_length` of its tokenizer_config.json, else with the number of positions.
    """
    length, positions = experiment.corpus.sequence_length, experiment.model.max_positions
    if "max_length" in results:
        return results["max_length"]
    if started_from:
        return max(length, started_from.length)
    start, vocabulary = experiment.run.init_from, experiment.vocabulary.file
    if start is None or (pathlib.Path(start) / "config.gin").is_file():
        return length
    # The vocabulary lies in a workdir that has been removed since the run started from it.
    if vocabulary and pathlib.Path(vocabulary) == pathlib.Path(start) / "vocabulary":
        return length
    return max(length, stated_length(start, positions))


def stated_length(folder: str | os.PathLike, positions: int) -> int:
    """Returns the longest input that the tokenizer_config.json of a folder states.

    It is `positions` if there is no such file, or if the file states more.
    """
    file = pathlib.Path(folder) / "tokenizer_config.json"
    stated = json_files.read_object(file).get("model_max_length") if file.is_file() else None
    return stated if json_files.is_integer(stated, 1, positions) else positions
