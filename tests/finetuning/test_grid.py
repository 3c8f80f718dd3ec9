"""The command: plans, a grid that is killed, a table, and bad input."""

import dataclasses
import json
import pathlib
import shutil
import signal
import types

import numpy as np
import pytest
from testing import call, finish, in_memory, once, send_when, start

from maelm_jax import config, finetune, gin_files
from maelm_jax.encoders.results import Results
from maelm_jax.finetuning import grid, initial_encoder, predict, table
from maelm_jax.finetuning.initial_encoder import InitialEncoder
from maelm_jax.training import loop
from maelm_jax.training.workdir import Workdir

pytestmark = pytest.mark.long

# Two tasks, two cells, two seeds.
TABLE = ("--gin_file=finetune/glue.gin", "--gin.Finetune.tasks=('rte', 'cola')", "--gin.SEEDS=[1, 2]", "--gin.LEARNING_RATE=[1e-3, 3e-3]")


@pytest.fixture(scope="module")
def whole(arguments, pretrained, tmp_path_factory) -> pathlib.Path:
    def make(folder: pathlib.Path):
        done = call("finetune", *arguments(pretrained, folder / "table", *TABLE), "--gin.Run.checkpoint_every=1000")
        assert done.status == 0, done.stderr
        assert "| little " in done.stdout
        assert "(1 of 4)" in done.stdout and "(4 of 4)" in done.stdout  # of which other tests find nothing when nothing is run

    return once(tmp_path_factory, "grid", make) / "table"


def runs(workdir: pathlib.Path) -> dict[str, tuple]:
    """What must repeat to the last bit: every logged number but the speeds, and the predictions."""
    found = {}
    for path in sorted(workdir.glob("*/*/*/seed*/results.json")):
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        kept = [{name: value for name, value in line.items() if "second" not in name and name != "mfu"} for line in lines]
        found[str(path.parent.relative_to(workdir))] = (kept, (path.parent / "predictions.tsv").read_text())
    return found


def test_a_grid_leaves_a_table_and_the_chosen_models(whole):
    assert len(runs(whole)) == 8
    content = json.loads((whole / "table.json").read_text())
    assert list(content["columns"]) == ["little"] and list(content["columns"]["little"]) == ["RTE accuracy", "CoLA mcc"]
    for task, column in (("rte", "RTE accuracy"), ("cola", "CoLA mcc")):
        report = content["reports"]["little"][task]
        medians = {row["name"]: sum(row["scores"]) / 2 for row in report["cells"]}
        assert report["chosen"] == max(medians, key=medians.get) and content["columns"]["little"][column]["median"] == pytest.approx(
            100 * max(medians.values())
        )
        kept = {path.parent.parent.name for path in (whole / "little" / task).glob("*/seed*/checkpoints")}
        assert kept == {report["chosen"]} and (whole / report["model"] / "checkpoints").is_dir()
    dropped = next(path for path in (whole / "little" / task).glob("*/seed*") if path.parent.name not in kept)
    with pytest.raises(config.ConfigError, match="table.json"):  # its checkpoints were removed
        finetune.main([f"--workdir={dropped}", f"--predict={__file__}"])
    text = (whole / "table.md").read_text()
    assert "CoLA mcc" in text and "b16-lr0.003-e2-w0.06" in text


@pytest.mark.slow
def test_killed_three_times_the_grid_goes_on_where_it_was(whole, arguments, pretrained, tmp_path):
    argv = arguments(pretrained, tmp_path, *TABLE)

    def lines() -> int:
        return sum(path.read_text().count("\n") for path in tmp_path.glob("*/*/*/seed*/metrics.jsonl"))

    for at in (6, 15, 33):  # within the first, a later, and the second task's runs
        killed = start("finetune", *argv)
        send_when(killed, signal.SIGKILL, lambda at=at: lines() >= at)
        assert finish(killed).status == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/*/seed*/results.json")}
    done = finish(start("finetune", *argv))
    assert done.status == 0, done.stderr
    assert len(before) >= 4 and all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert runs(tmp_path) == runs(whole)
    assert not list(tmp_path.glob("**/unfinished"))


def test_a_grid_in_parts_is_joined_to_the_same_table(one_device, whole, arguments, pretrained, tmp_path, capsys):
    argv = arguments(pretrained, tmp_path, *TABLE, "--gin.SEEDS=1", "--gin.Run.checkpoint_every=1000")  # a part has whole cells
    assert finetune.main([*argv, "--part=1", "--parts=2"]) == 0
    assert not (tmp_path / "table.json").exists() and len(runs(tmp_path)) == 2
    with pytest.raises(config.ConfigError, match="1 of 2.*rte"):
        finetune.main([*argv, "--join"])
    before = runs(tmp_path)
    for flags in (["--part=1", "--parts=2"], ["--part=0", "--parts=2"], ["--join"]):
        with pytest.raises(config.ConfigError, match="max_length"):
            finetune.main([*argv, *flags, "--gin.MAX_LENGTH=32"])
    assert runs(tmp_path) == before and not (tmp_path / "table.json").exists()
    assert finetune.main([*argv, "--part=0", "--parts=2"]) == 0
    assert finetune.main([*argv, "--join"]) == 0
    assert list(runs(tmp_path)) == [name for name in runs(whole) if name.endswith("seed1")]
    for task in ("rte", "cola"):
        ours, theirs = (table.read(Workdir(folder))["little"][task] for folder in (tmp_path, whole))
        assert [row["name"] for row in ours["cells"]] == [row["name"] for row in theirs["cells"]]
        best = max(ours["cells"], key=lambda row: row["median"])
        assert ours["chosen"] == best["name"] and (tmp_path / ours["model"] / "checkpoints").is_dir()
        kept = {path.parent.parent.name for path in (tmp_path / "little" / task).glob("*/seed*/checkpoints")}
        assert kept == {ours["chosen"]}


@pytest.mark.parametrize("flags", [("--part=0",), ("--part=2", "--parts=2"), ("--part=0", "--parts=2", "--join")])
def test_parts_that_do_not_fit_are_refused(flags, tmp_path):
    with pytest.raises(config.ConfigError, match="--part"):
        finetune.main(["--gin_file=finetune/rte.gin", "--init_from=none", f"--workdir={tmp_path / 'run'}", *flags])


def test_nothing_that_is_finished_is_run_again(one_device, whole, arguments, pretrained, tmp_path, capsys):
    """Also if the encoder has a slash more than before, or if only a part of the table is asked for."""
    workdir = shutil.copytree(whole, tmp_path / "table")
    assert finetune.main(arguments(f"{pretrained}/", workdir, *TABLE)) == 0
    said = capsys.readouterr().out
    assert " of 4)" not in said and "| little " in said and "Means over 2 seeds" in said
    part = ["--gin.SEEDS=1", "--gin.LEARNING_RATE=1e-3", "--gin.Finetune.tasks=('rte',)"]
    assert finetune.main(arguments(pretrained, workdir, *TABLE, *part)) == 0
    said = capsys.readouterr().out
    assert " of 1)" not in said and "over 1 or 2 seeds" in said


def test_a_later_command_adds_to_the_table_and_the_table_can_be_copied(one_device, whole, arguments, pretrained, tmp_path, capsys):
    workdir = shutil.copytree(whole, tmp_path / "table")
    before = table.read(Workdir(workdir))
    more = ["--gin_file=finetune/glue.gin", "--gin.Finetune.tasks=('rte',)", "--gin.EPOCHS=1"]
    assert finetune.main(arguments(f"random:{pretrained}", workdir, *more)) == 0
    said = capsys.readouterr().out
    assert "| little " in said and "| random-little " in said and (workdir / "differences.png").stat().st_size > 5000
    after = table.read(Workdir(workdir))
    assert list(after) == ["little", "random-little"] and {*after["little"]} == {"rte", "cola"}
    assert after["little"] == before["little"] and json.loads((workdir / "table.json").read_text())["missing"] == {"cola": ["random-little"]}
    assert predict.find_models(Workdir(workdir), "random-little") == [Workdir(workdir / after["random-little"]["rte"]["model"])]
    # A row is of one encoder and of one checkpoint.
    for name, value in (("init_from", "old/little"), ("start_step", 2), ("encoder", "0")):
        changed = table.read(Workdir(workdir))
        changed["little"]["rte"][name] = value
        table.write(changed, Workdir(workdir))
        with pytest.raises(config.ConfigError, match=f"table.json.*'{name}': '?{value}"):
            finetune.main(arguments(pretrained, workdir, *TABLE))
        table.write(before, Workdir(workdir))


def test_a_cell_that_diverges_ranks_last_and_alone_it_ends_the_command(one_device, arguments, pretrained, tmp_path, capsys):
    argv = arguments(pretrained, tmp_path / "grid", "--gin_file=finetune/rte.gin", "--gin.LEARNING_RATE=[1e30, 1e-3]", "--gin.EPOCHS=1")
    assert finetune.main(argv) == 0
    report = table.read(Workdir(tmp_path / "grid"))["little"]["rte"]
    assert report["chosen"] == "b16-lr0.001-e1-w0.06" and [row["scores"][0] is None for row in report["cells"]] == [True, False]
    assert "b16-lr1e+30-e1-w0.06 | diverged" in (tmp_path / "grid" / "table.md").read_text()
    with pytest.raises(config.ConfigError, match=r"step \d"):
        finetune.main([f"--workdir={tmp_path / 'grid' / 'little' / 'rte' / 'b16-lr1e+30-e1-w0.06' / 'seed1'}", f"--predict={__file__}"])
    capsys.readouterr()
    assert finetune.main(argv) == 0 and " of 2)" not in capsys.readouterr().out  # that it diverged is a result
    with pytest.raises(loop.Diverged):
        finetune.main([*argv, "--gin.LEARNING_RATE=1e30", f"--workdir={tmp_path / 'alone'}"])


def test_a_run_leaves_its_settings_its_results_and_the_predictions_of_its_best_evaluation(rte_run, data_dir, pretrained):
    said = (rte_run / "printed").read_text()
    assert "rte: training: 32 rows" in said and "predictions.tsv" in said and "attention: xla in encoder" in said
    results = json.loads((rte_run / "results.json").read_text())
    assert len(results["evaluations"]) == 4 and results["labels"] == ["entailment", "not_entailment"]
    saved = gin_files.load([str(rte_run / "config.gin")])
    assert saved.finetune.tasks == "rte" and saved.finetune.init_from == str(pretrained) and saved.model.encoder.width == 32
    header, *rows = [line.split("\t") for line in (rte_run / "predictions.tsv").read_text().splitlines()]
    likeliest = [header[3 + int(np.argmax(list(map(float, row[3:]))))].removeprefix("probability_") for row in rows]
    predicted = [row[1] for row in rows]
    gold = [row.split("\t")[3] for row in (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines()[1:]]
    assert likeliest == predicted
    assert sum(map(str.__eq__, gold, predicted)) / len(gold) == results["score"] == results["best"]["accuracy"]
    commonest = max(gold.count(label) for label in set(gold)) / len(gold)  # the dev set is the training set
    assert results["baseline"] == {"accuracy": commonest} and results["evaluated_on"] == {"dev": "32 examples"}


def test_a_run_keeps_its_settings_its_data_and_its_checkpoint(one_device, rte_run, arguments, data_dir, pretrained, tmp_path, capsys):
    shutil.copytree(rte_run, tmp_path / "out")
    argv = arguments(pretrained, tmp_path / "out", "--gin_file=finetune/rte.gin")
    with pytest.raises(config.ConfigError, match="Grid.epochs: 2 -> 3"):
        finetune.main([*argv, "--gin.EPOCHS=3"])
    # The same data elsewhere is the same run; other data is not, nor is another checkpoint of its start.
    shutil.copytree(data_dir / "glue" / "RTE", tmp_path / "moved" / "RTE")
    capsys.readouterr()
    assert finetune.main([*argv, f"--gin.DATA_DIR={tmp_path / 'moved'}"]) == 0 and "(1 of 1)" not in capsys.readouterr().out
    train = tmp_path / "moved" / "RTE" / "train.tsv"
    train.write_text(train.read_text().replace("not_entailment", "entailment", 1))
    with pytest.raises(config.ConfigError, match=r"out.*inputs.json.*\w+ -> \w+"):
        finetune.main([*argv, f"--gin.DATA_DIR={tmp_path / 'moved'}"])
    inputs = tmp_path / "out" / "inputs.json"
    recorded = json.loads(inputs.read_text())
    inputs.write_text(json.dumps(recorded | {"start_step": 2}))
    with pytest.raises(config.ConfigError, match=r"start_step.*2 -> 3"):
        finetune.main(argv)
    inputs.write_text(json.dumps({name: value for name, value in recorded.items() if name != "encoder"}))  # as of version 1.0
    assert finetune.main(argv) == 0
    inputs.write_text(json.dumps(recorded | {"encoder": "0"}))
    with pytest.raises(config.ConfigError, match="encoder.*0 -> "):
        finetune.main(argv)
    inputs.write_text(json.dumps(recorded))
    with pytest.raises(config.ConfigError, match="copy"):
        finetune.main([*argv, f"--workdir={shutil.copytree(pretrained, tmp_path / 'copy')}"])
    with pytest.raises(config.ConfigError):
        finetune.main([*argv, "--gin.SEEDS=[1, 2]"])


def test_with_a_train_file_alone_columns_and_labels_are_found_and_printed(one_device, arguments, pretrained, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("id,text,label\n" + "".join(f"{n},the {'cat' if n % 2 else 'dog'},{n % 2}\n" for n in range(40)))
    argv = arguments(pretrained, tmp_path / "own", "--gin_file=finetune/own.gin", f"--gin.TRAIN_FILE={tmp_path / 'mine.csv'}", "--gin.EPOCHS=1")
    assert finetune.main(argv) == 0
    said = capsys.readouterr().out
    assert "own: text in 'text', labels '0', '1' in 'label'" in said and "4 of the 40" in said
    recorded = gin_files.load([str(tmp_path / "own" / "config.gin")]).finetune.custom
    assert (recorded.columns, recorded.labels) == (("text",), ("0", "1")), "so --predict and export know them"
    assert finetune.main(argv) == 0 and "(1 of 1)" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "more,message",
    [
        (["--gin_file=finetune/rte.gin"], "--gin_file.*--init_from"),
        (["--gin_file=finetune/rte.gin", "--init_from=nowhere"], "nowhere"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN,RUN/"], "--init_from"),
        (["--gin_file=finetune/grid.gin", "--init_from=RUN"], "task"),
        (["--gin_file=finetune/qnli.gin", "--init_from=RUN"], "train.tsv.*QNLI/"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.BATCH_SIZE=[16, 20]"], "Run.batch_size=20"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Vocabulary.file=x"], "Vocabulary.file"),
        (["--predict=x.tsv", "--step=0"], "--step"),
        (["--submission=x.zip", "--step=3"], "--step"),
        (["--predict=x.tsv"], "fine-tuned run"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--output=x.tsv"], "--predict=FILE"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--score"], "--predict=FILE"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_workdir(more, message, data_dir, pretrained, tmp_path):
    argv = [argument.replace("RUN", str(pretrained)) for argument in more]
    with pytest.raises(config.ConfigError, match=message):
        finetune.main([*argv, f"--gin.DATA_DIR={data_dir}", f"--workdir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


# Plans.


@pytest.mark.parametrize("path", sorted((gin_files.CONFIGS / "finetune").glob("*.gin")), ids=lambda path: path.stem)
def test_every_config_loads_on_a_pretrained_run(path, pretrained, data_dir, tmp_path, monkeypatch):
    for kind in grid.KINDS:
        monkeypatch.setattr(kind, "check_files", lambda self: None)
    (tmp_path / "a.tsv").write_text("text\tlabel\na\tno\nb\tyes\n")
    files = {"base": ["finetune/rte.gin"], "grid": ["finetune/rte.gin", "finetune/grid.gin"]}.get(path.stem, [f"finetune/{path.name}"])
    own = [f"TRAIN_FILE={tmp_path / 'a.tsv'}", "DEV_FILE=b.tsv"] if path.stem in ("own", "conll") else []
    planned = grid.plan([str(pretrained), f"random:{pretrained}"], files, ["SEEDS=[4, 5]", "DATA_DIR=x", *own])
    assert [one.label for one in planned[:2]] == ["little", "random-little"] and planned[0].task == planned[1].task
    for task, _, _, experiment, _ in planned:
        assert experiment.finetune.tasks == task and experiment.finetune.grid.listed("seeds") == (4, 5)
        assert (experiment.model.encoder.width, experiment.model.dropout.hidden, experiment.model.compute.dtype, experiment.mesh.fsdp) == (
            32,
            0.1,
            "float32",
            1,
        )
    if path.stem == "glue":
        (alone,) = grid.plan([str(pretrained)], files, ["Finetune.tasks=('rte',)"])
        assert alone.is_listed and alone.experiment.finetune.grid.epochs == 10, "a table of one task has that task's settings too"
        found = {one.task: one.experiment.finetune for one in planned}
        assert len(found) == 9 and (found["rte"].grid.epochs, found["squad2"].max_length) == (10, 384)


@pytest.mark.parametrize(
    "name,tasks,cells",
    [
        ("glue_small", ("cola", "rte", "mrpc", "stsb"), 80),
        ("glue_large", ("mnli", "qqp", "qnli", "sst2"), 30),
        ("squad", ("squad2",), 16),
    ],
)
def test_the_published_grids(name, tasks, cells, pretrained):
    planned = grid.plan([str(pretrained)], [f"published/{name}.gin"], [])
    assert tuple(one.task for one in planned) == tasks
    for one in planned:
        settings = one.experiment.finetune.grid
        assert len(grid.cells(settings, 5000)) == cells and len(settings.listed("seeds")) == 5
        assert 1 / 16 in settings.listed("warmup")
    large = grid.plan([str(pretrained)], [f"published/{name}.gin", "published/large.gin"], [])
    assert all(max(one.experiment.finetune.grid.listed("learning_rate")) == 2e-5 for one in large)


# Settings of the optimiser that fine-tuning does not read.
OF_PRETRAINING = {"learning_rate", "muon_learning_rate", "warmup_steps", "decay_share"}


def test_the_settings_of_pretraining_do_not_reach_fine_tuning(pretrained, tmp_path):
    """Encoders of a table share a session: its optimiser and mesh."""
    other = {
        "kind": "'muon'",
        "schedule": "'trap:f'",
        "schedule_parameters": {"a": 1},
        "b1": 0.8,
        "b2": 0.9,
        "eps": 1e-4,
        "weight_decay": 0.5,
        "clip_norm": 7.0,
    }
    other["decay_norms_and_biases"] = False
    unknown = {field.name for field in dataclasses.fields(config.Optimizer)} - other.keys() - OF_PRETRAINING
    assert not unknown, "does fine-tuning read it? Bind it in configs/finetune/base.gin and add it here"
    shutil.copytree(pretrained, tmp_path / "other")
    lines = [f"Optimizer.{name} = {value}" for name, value in other.items()]
    lines += [
        "Run.log_to = 'trap:f'",
        "Mesh.data = 2",
        "Mesh.fsdp = 2",
        "Mesh.tensor = 2",
        "Run.accumulate = 4",
        "Run.batch_size = 2048",
        "Masking.heldout_rate = 0.15",
    ]
    with (tmp_path / "other" / "config.gin").open("a") as file:
        file.write("\n".join(lines) + "\n")
    one, another = (grid.plan([str(path)], ["finetune/rte.gin"], [])[0].experiment for path in (pretrained, tmp_path / "other"))
    for name in other:
        assert getattr(one.optimizer, name) == getattr(another.optimizer, name), name
    assert (one.mesh, one.run.accumulate, one.run.log_to) == (another.mesh, another.run.accumulate, another.run.log_to)


def test_a_logger_that_is_missing_or_named_by_a_record_is_refused(pretrained, data_dir, tmp_path):
    where = [f"DATA_DIR={data_dir}"]
    with pytest.raises(config.ConfigError, match="no_such_module_here"):
        grid.plan([str(pretrained)], ["finetune/rte.gin"], [*where, "Run.log_to=no_such_module_here:f"])
    shutil.copytree(pretrained, tmp_path / "run")
    with (tmp_path / "run" / "config.gin").open("a") as file:
        file.write("Run.log_to = 'no_such_module_here:f'\n")
    with pytest.raises(config.ConfigError, match="Run.log_to"):
        grid.plan([str(pretrained)], [str(tmp_path / "run" / "config.gin"), "finetune/rte.gin"], where)
    assert grid.plan([str(tmp_path / "run")], ["finetune/rte.gin"], where)[0].experiment.run.log_to == "tensorboard"


def test_encoders_of_one_name_are_called_by_their_paths(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/tiny", "old/tiny", "x"):
        pathlib.Path(name).parent.mkdir(exist_ok=True)
        pathlib.Path(name).symlink_to(pretrained)
    planned = grid.plan(["runs/tiny", "old/tiny/", "random:x"], ["finetune/rte.gin"], [])
    assert [one.label for one in planned] == ["runs-tiny", "old-tiny", "random-x"]
    planned = grid.plan(["runs/tiny", "old/tiny"], ["finetune/rte.gin"], [], labels={"runs/tiny": "tiny"})
    assert [one.label for one in planned] == ["tiny", "old-tiny"], "a table that is there keeps its rows"


def test_other_weights_are_another_encoder(pretrained, tmp_path):
    first, again = (initial_encoder.load(str(pretrained)) for _ in range(2))
    assert first.fingerprint == again.fingerprint != initial_encoder.load(f"random:{pretrained}").fingerprint
    again = initial_encoder.load(str(pretrained))
    again.source.params["encoder/token_embedding"][7, 3] += 1e-3
    assert again.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "task,metric,is_known", [("mnli", "matched_accuracy", True), ("mnli", "accuracy", True), ("rte", "f1", False), ("mnli", "f1", False)]
)
def test_a_metric_is_checked_before_the_first_run(task, metric, is_known, pretrained, data_dir):
    bindings = [f"DATA_DIR={data_dir}", f"Finetune.metric={metric}"]
    if is_known:
        grid.settings_of(task, initial_encoder.load(str(pretrained)), [], bindings)
        return
    with pytest.raises(config.ConfigError, match=f"{task} has "):
        grid.settings_of(task, initial_encoder.load(str(pretrained)), [], bindings)


def test_more_epochs_are_tried_for_a_small_task():
    settings = config.Grid(epochs=(2, 3), small_task_epochs=(3, 10))
    assert [cell.epochs for cell in grid.cells(settings, grid.SMALL_TASK - 1)] == [2, 3, 10]
    assert [cell.epochs for cell in grid.cells(settings, grid.SMALL_TASK)] == [2, 3]


def test_seeds_that_diverged_are_named(tmp_path):
    task = grid.create_task("rte", config.Finetune())
    current = types.SimpleNamespace(task=task, main_metric="accuracy", baseline={"accuracy": 0.5})
    planned = grid.Planned("rte", InitialEncoder("tiny", in_memory({}, config.Model(), None, 64), is_random=False), "tiny", None, False)
    results = [grid.Finished(Results(seed=seed, score=value, best={"accuracy": value}), "x") for seed, value in ((1, 0.7), (2, 0.5))]
    lost = grid.Finished(Results(seed=3, diverged="nan"), "x")
    report = grid._report(current, planned, {"cell": [*results, lost]}, Workdir(tmp_path))
    assert report["notes"] == ["tiny: 1 of 3 seeds diverged; the figures are those of the others"]
    assert report["columns"]["RTE accuracy"] == {"median": 60, "least": 50, "highest": 70, "baseline": 50, "by_seed": {"1": 70, "2": 50}}
    assert grid._report(current, planned, {"cell": results}, Workdir(tmp_path))["notes"] == []


def test_what_pretraining_did_not_train_is_said():
    experiment = gin_files.load(["tiny.gin", "finetune/base.gin"], ["Finetune.tasks=mnli"])
    data = types.SimpleNamespace(train=types.SimpleNamespace(ids=[0] * 3), dev={"matched": types.SimpleNamespace(size="3 examples")})
    current = types.SimpleNamespace(task=types.SimpleNamespace(notes=["a note"], describe_training=lambda train: ["a count"]), data=data)

    def described(step, trained, max_length=512):
        encoder = InitialEncoder("little", in_memory({}, config.Model(), None, trained, step=step), is_random=False)
        finetuning = dataclasses.replace(experiment.finetune, max_length=max_length)
        return grid.describe_data(current, grid.Planned("mnli", encoder, "little", dataclasses.replace(experiment, finetune=finetuning), False))

    assert all(part in described(3, 64) for part in ("no later position", "matched: 3 examples", "a note", "a count"))
    assert "no later position" not in described(3, 64, max_length=64)
    assert "no later position" not in described(None, 64), "what the pretraining of a stock encoder read is not known"
