"""Does the runs that a command asks for, and writes their table."""

import dataclasses
import pathlib
import time

from maelm_jax import config, gin_files, paths
from maelm_jax.finetuning import (
    experiments,
    grid,
    initial_encoder,
    input_format,
    results,
    session,
    table,
    tasks,
)
from maelm_jax.training import attention_report

# Fields of config.Model that decide the form of an encoder, and that earlier versions lacked.
LATER_FIELDS = ("family", "token_types", "decoder_refills_mask")


def run_all(folder: pathlib.Path, plan: experiments.Plan):
    """Does all runs that are not finished.

    The workdir `folder` is that of the run, if it is a single run and no table is there. Else it
    gets the table and a folder ENCODER/TASK for each pair of task and encoder. The results of other
    pairs in a table that is there already are kept. The caller holds the lock of `folder`.
    """
    began = time.perf_counter()
    sessions = _Sessions()
    reports = _reports_so_far(folder, plan)
    # A run beside a table is one of the table.
    as_table = plan.as_table or (folder / table.JSON_FILE).is_file()
    for planned in plan.planned:
        planned = _as_begun(planned, folder)
        current = sessions.of(planned)
        settings = planned.experiment.finetune.grid
        is_single = not as_table and grid.is_single(settings, len(current.task.train.ids))
        if not is_single and (folder / "config.gin").is_file():
            raise config.ConfigError(
                f"{folder} holds a single run: give another --workdir for a table or a grid"
            )
        grid_folder = folder if is_single else folder / planned.label / planned.task
        runs = grid.GridRun(current, planned.encoder, planned.experiment, grid_folder, is_single)
        with paths.writing("--workdir", folder):
            reports[planned.label][planned.task] = runs.run_all()
        if not is_single:
            with paths.writing("--workdir", folder):
                # After every task, so that a stopped command leaves the table of what is done.
                table.write(reports, folder, dict.fromkeys(one.task for one in plan.planned))
    if is_single:
        print(results.summary(folder))
    else:
        print(f"{table.markdown(reports)}\n{folder / table.MARKDOWN_FILE}")
    print(f"{time.perf_counter() - began:.0f} s in all")


def _reports_so_far(folder: pathlib.Path, plan: experiments.Plan) -> table.Reports:
    """The reports of the table in `folder`, with a row for each encoder of `plan`.

    Raises:
        ConfigError: table.json is damaged, or has an encoder of `plan` with the label of another.
    """
    reports = {label: by_task for label, by_task in table.read(folder).items() if by_task}
    for planned in plan.planned:
        name, step = planned.encoder.name, planned.encoder.step
        for report in reports.setdefault(planned.label, {}).values():
            # Earlier versions recorded neither.
            if initial_encoder.normalised(report.get("init_from", name)) != name:
                raise config.ConfigError(
                    f"{folder / table.JSON_FILE}: {planned.label} is {report['init_from']}, not "
                    f"{name}. Name the encoder as before, or give another --workdir"
                )
            before = report.get("start_step", step)
            if before != step:
                give = "" if before is None else f"--step={before}, or "
                raise config.ConfigError(
                    f"{folder / table.JSON_FILE}: {planned.label} is step {before} of {name}, not "
                    f"{step}. Give {give}another --workdir"
                )
    return reports


def _as_begun(planned: experiments.Planned, folder: pathlib.Path) -> experiments.Planned:
    """Returns a pair of task and encoder with the model that its unfinished runs began with.

    Earlier versions had no `Model.family`. They added RoBERTa's token-type row to its positions.
    """
    grid_folder = folder / planned.label / planned.task
    records = [*folder.glob("config.gin"), *grid_folder.glob("**/config.gin")]
    if not records:
        return planned
    recorded = gin_files.load([str(records[0])]).model
    if recorded.family is not None:
        return planned
    model = dataclasses.replace(
        planned.experiment.model,
        **{name: getattr(recorded, name) for name in LATER_FIELDS},
    )
    return planned._replace(experiment=dataclasses.replace(planned.experiment, model=model))


class _Sessions:
    """The session of the current task, which all encoders of one shape share."""

    def __init__(self):
        self._key: tuple | None = None
        self._session: session.FinetuneSession | None = None

    def of(self, planned: experiments.Planned) -> session.FinetuneSession:
        """The session of a pair of task and encoder. Reads the data of a new task."""
        experiment, vocabulary = planned.experiment, planned.encoder.vocabulary
        # Fine-tuning drops the decoder. The key leaves it out, so that MAE-LM and MLM runs share
        # data and compiled steps.
        default = config.Model()
        encoder = dataclasses.replace(
            experiment.model,
            **{
                name: getattr(default, name)
                for name in config.field_names(config.Model, part="decoder")
            },
        )
        key = (planned.task, vocabulary.fingerprint, encoder, experiment.finetune.max_length)
        if key != self._key:
            self._session = None  # before the next one is made, to free its memory
            data = tasks.load(
                planned.task,
                experiment.finetune,
                experiment.corpus,
                input_format.of(experiment, vocabulary),
            )
            self._session = session.FinetuneSession(experiment, data, vocabulary)
            self._key = key
            lengths, mesh = self._session.sizes, self._session.mesh
            print(describe_data(self._session, planned))
            print(attention_report.describe_encoder(experiment, lengths, mesh), flush=True)
        return self._session


def describe_data(current: session.FinetuneSession, planned: experiments.Planned) -> str:
    """The sizes of a task's data and the notes made while reading it, as text."""
    experiment, data = planned.experiment, current.task
    length = input_format.length_of(experiment)
    dev = ", ".join(
        f"{len(dev.features.ids):,}" + (f" {name}" if name else "")
        for name, dev in data.dev.items()
    )
    sizes = ", ".join(map(str, current.sizes))
    counts = f"{len(data.train.ids):,} training {data.unit}, {dev} dev {data.unit}"
    lines = [f"{counts} of at most {length} tokens, padded to {sizes}"]
    if length < experiment.finetune.max_length:
        lines.append(
            f"the encoder has {length} positions, MAX_LENGTH is {experiment.finetune.max_length}"
        )
    # Without a checkpoint of ours, it is not known which positions were trained.
    if planned.encoder.step is not None and length > planned.encoder.length:
        lines.append(
            f"pretraining read rows of {planned.encoder.length} tokens, and trained no later "
            "position"
        )
    return "\n".join(f"{data.name}: {line}" for line in [*lines, *data.notes])
