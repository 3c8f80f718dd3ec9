"""The command: a grid that is killed, a table, predictions for a file, bad input."""

import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
from testing import call, finish, send_when, start

from maelm_jax import config, finetune, gin_files, setting_changes, settings
from maelm_jax.finetuning import initial_encoder, submission, table
from maelm_jax.training import step_log

PRETRAINED = pathlib.Path(__file__).parents[2] / "pretrained"
SMALL = [
    "--gin.EPOCHS=2",
    "--gin.BATCH_SIZE=16",
    "--gin.MAX_LENGTH=64",
    "--gin.Run.log_every=1",
    "--gin.Run.checkpoint_every=3",
    "--gin.Run.rank_every=0",
]


def arguments(data_dir, init_from, workdir, *more) -> list[str]:
    return [f"--gin.DATA_DIR={data_dir}", f"--init_from={init_from}", f"--workdir={workdir}", *SMALL, *more]


def grid(data_dir, pretrained, workdir) -> list[str]:
    """Two tasks, two starts, two cells, two seeds."""
    files = ["--gin_file=finetune/glue.gin", "--gin.Finetune.tasks=('rte', 'cola')", "--gin.SEEDS=[1, 2]", "--gin.LEARNING_RATE=[1e-3, 3e-3]"]
    return [*arguments(data_dir, f"{pretrained},random:{pretrained}", workdir, *files)]


@pytest.fixture(scope="module")
def whole(data_dir, pretrained, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("grid") / "whole"
    done = call("finetune", *grid(data_dir, pretrained, workdir), "--gin.Run.checkpoint_every=1000")
    assert done.status == 0, done.stderr
    assert "| little " in done.stdout and "| random-little " in done.stdout
    assert "(1 of 4)" in done.stdout and "(4 of 4)" in done.stdout  # of which other tests find nothing when nothing is run
    return workdir


def runs(workdir: pathlib.Path) -> dict[str, tuple]:
    """What must repeat to the last bit: every logged number but the speeds, and the predictions."""
    found = {}
    for path in sorted(workdir.glob("*/*/*/seed*/results.json")):
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        kept = [{name: value for name, value in line.items() if "second" not in name and name != "mfu"} for line in lines]
        found[str(path.parent.relative_to(workdir))] = (kept, (path.parent / "predictions.tsv").read_text())
    return found


def test_a_grid_leaves_a_table_and_the_chosen_models(whole):
    assert len(runs(whole)) == 16
    table = json.loads((whole / "table.json").read_text())
    assert list(table["columns"]) == ["little", "random-little"] and list(table["columns"]["little"]) == ["CoLA", "RTE"]
    for label, task in (("little", "rte"), ("random-little", "cola")):
        report = table["reports"][label][task]
        medians = {row["name"]: sum(row["scores"]) / 2 for row in report["cells"]}
        assert report["chosen"] == max(medians, key=medians.get) and report["metrics"][report["main_metric"]]["median"] == max(medians.values())
        kept = {path.parent.parent.name for path in (whole / label / task).glob("*/seed*/checkpoints")}
        assert kept == {report["chosen"]} and (whole / report["model"] / "checkpoints").is_dir()
    dropped = next(path for path in (whole / label / task).glob("*/seed*") if path.parent.name not in kept)
    with pytest.raises(config.ConfigError, match="only the chosen cell of a grid keeps its own"):
        finetune.main([f"--workdir={dropped}", f"--predict={__file__}"])
    text = (whole / "table.md").read_text()
    assert "CoLA" in text and "b16-lr0.003-e2-w0.06" in text
    assert (whole / "differences.png").stat().st_size > 5000


def test_predictions_are_the_best_evaluation_s(whole, data_dir):
    gold = [row.split("\t")[3] for row in (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines()[1:]]
    found = [(path.parent, json.loads(path.read_text())) for path in whole.glob("*/rte/*/seed*/results.json")]
    assert len(found) > 1
    for folder, results in found:
        given = [row.split("\t")[1] for row in (folder / "predictions.tsv").read_text().splitlines()[1:]]
        assert sum(map(str.__eq__, gold, given)) / len(gold) == results["score"] == results["best"]["accuracy"]


@pytest.mark.slow
def test_killed_three_times_the_grid_goes_on_where_it_was(whole, data_dir, pretrained, tmp_path):
    argv = grid(data_dir, pretrained, tmp_path)

    def lines() -> int:
        return sum(path.read_text().count("\n") for path in tmp_path.glob("*/*/*/seed*/metrics.jsonl"))

    for at in (6, 15, 45):  # within the first, a later, and the second task's runs
        killed = start("finetune", *argv)
        send_when(killed, signal.SIGKILL, lambda at=at: lines() >= at)
        assert finish(killed).status == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/*/seed*/results.json")}
    done = finish(start("finetune", *argv))
    assert done.status == 0, done.stderr
    assert len(before) >= 4 and all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert runs(tmp_path) == runs(whole)
    assert not list(tmp_path.glob("**/unfinished"))


def test_nothing_that_is_finished_is_run_again(whole, data_dir, pretrained):
    """Also if the encoder has a slash more than before."""
    done = call("finetune", *grid(data_dir, f"{pretrained}/", whole))
    assert done.status == 0 and " of 4)" not in done.stdout and "| little " in done.stdout


def test_a_table_of_one_seed_and_cell_is_a_part_of_the_grid(one_device, whole, data_dir, pretrained, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "part")
    assert finetune.main([*grid(data_dir, pretrained, tmp_path / "part"), "--gin.SEEDS=1", "--gin.LEARNING_RATE=1e-3"]) == 0
    said = capsys.readouterr().out
    assert " of 1)" not in said and "Medians over 1 seed(s)" in said
    alone = arguments(data_dir, pretrained, tmp_path / "part", "--gin_file=finetune/glue.gin", "--gin.LEARNING_RATE=1e-3")
    assert finetune.main([*alone, "--gin.Finetune.tasks=('rte',)", "--gin.SEEDS=1"]) == 0  # of a list of tasks, if only of one
    assert " of 1)" not in capsys.readouterr().out


def test_a_later_command_adds_to_the_table_and_the_table_can_be_copied(one_device, whole, data_dir, pretrained, tmp_path, capsys):
    workdir = tmp_path / "table"
    shutil.copytree(whole, workdir)
    before = (workdir / "table.json").read_text()
    (tmp_path / "other").symlink_to(pretrained)
    more = [*arguments(data_dir, tmp_path / "other", workdir, "--gin_file=finetune/glue.gin"), "--gin.Finetune.tasks=('rte',)", "--gin.EPOCHS=1"]
    assert finetune.main(more) == 0
    assert "| little " in capsys.readouterr().out
    after = table.read(workdir)
    assert list(after) == ["little", "random-little", "other"] and {*after["little"]} == {*after["random-little"]} == {"rte", "cola"}
    stored = json.loads((workdir / "table.json").read_text())
    assert stored["reports"]["little"] == json.loads(before)["reports"]["little"] and stored["missing"] == {"cola": ["other"]}
    assert submission.models_of(str(workdir), "other") == [str(workdir / stored["reports"]["other"]["rte"]["model"])]
    (tmp_path / "table.json").write_text("[]")
    with pytest.raises(config.ConfigError, match="table.json: damaged: .* remove .*table.json and give the commands"):
        finetune.main([*more, f"--workdir={tmp_path}"])


def test_a_cell_that_diverges_ranks_last_and_alone_it_ends_the_command(one_device, data_dir, pretrained, tmp_path, capsys):
    argv = arguments(data_dir, pretrained, tmp_path / "grid", "--gin_file=finetune/rte.gin", "--gin.LEARNING_RATE=[1e30, 1e-3]")
    assert finetune.main(argv) == 0
    report = json.loads((tmp_path / "grid" / "table.json").read_text())["reports"]["little"]["rte"]
    assert report["chosen"] == "b16-lr0.001-e2-w0.06" and [row["scores"][0] is None for row in report["cells"]] == [True, False]
    assert "b16-lr1e+30-e2-w0.06 | diverged" in (tmp_path / "grid" / "table.md").read_text()
    with pytest.raises(config.ConfigError, match=r"holds no model: step \d: loss"):
        finetune.main([f"--workdir={tmp_path / 'grid' / 'little' / 'rte' / 'b16-lr1e+30-e2-w0.06' / 'seed1'}", f"--predict={__file__}"])
    capsys.readouterr()
    assert finetune.main(argv) == 0 and " of 2)" not in capsys.readouterr().out  # that it diverged is a result
    with pytest.raises(step_log.Diverged):
        finetune.main([*argv, "--gin.LEARNING_RATE=1e30", f"--workdir={tmp_path / 'alone'}"])


def test_one_run_and_a_file_to_label(one_device, data_dir, pretrained, tmp_path, capsys):
    argv = arguments(data_dir, pretrained, tmp_path / "out", "--gin_file=finetune/rte.gin")
    assert finetune.main(argv) == 0
    said = capsys.readouterr().out
    assert "rte: 32 training examples, 32 dev examples" in said and "predictions.tsv" in said
    assert "attention: xla in encoder (the platform is cpu)" in said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["evaluations"]) == 4 and results["labels"] == ["entailment", "not_entailment"]
    assert results["score"] == max(line["accuracy"] for line in results["evaluations"]) == results["best"]["accuracy"]
    saved = gin_files.load([str(tmp_path / "out" / "config.gin")])
    assert saved.finetune.tasks == "rte" and saved.finetune.init_from == str(pretrained) and saved.model.width == 32
    rows = (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines()
    (tmp_path / "new.tsv").write_text("\n".join("\t".join(row.split("\t")[:3]) for row in rows) + "\n")
    assert finetune.main([f"--workdir={tmp_path / 'out'}", f"--predict={tmp_path / 'new.tsv'}"]) == 0
    assert (tmp_path / "out" / "RTE.tsv").read_text() == (tmp_path / "out" / "predictions.tsv").read_text()
    header, *rows = [line.split("\t") for line in (tmp_path / "out" / "RTE_probabilities.tsv").read_text().splitlines()]
    likeliest = [header[1 + int(np.argmax(list(map(float, row[1:]))))] for row in rows]
    assert likeliest == [line.split("\t")[1] for line in (tmp_path / "out" / "RTE.tsv").read_text().splitlines()[1:]]
    with pytest.raises(config.ConfigError, match="Grid.epochs: 2 -> 3"):
        finetune.main([*argv, "--gin.EPOCHS=3"])
    capsys.readouterr()
    # The same data elsewhere is the same run; other data is not, nor is a later checkpoint of its start.
    shutil.copytree(data_dir / "glue" / "RTE", tmp_path / "moved" / "RTE")
    assert finetune.main([*argv, f"--gin.DATA_DIR={tmp_path / 'moved'}"]) == 0 and "(1 of 1)" not in capsys.readouterr().out
    train = tmp_path / "moved" / "RTE" / "train.tsv"
    train.write_text(train.read_text().replace("not_entailment", "entailment", 1))
    with pytest.raises(config.ConfigError, match=r"out holds a run with other data or answers, or .* \(data: \w+ -> \w+\)"):
        finetune.main([*argv, f"--gin.DATA_DIR={tmp_path / 'moved'}"])
    inputs = tmp_path / "out" / "inputs.json"
    inputs.write_text(inputs.read_text().replace('"start_step": 3', '"start_step": 2'))
    with pytest.raises(config.ConfigError, match="start_step: 2 -> 3"):
        finetune.main(argv)


@pytest.mark.parametrize(
    "more,message",
    [
        (["--gin_file=finetune/rte.gin"], "give --gin_file=finetune/TASK.gin .* and --init_from=RUN"),
        (["--gin_file=finetune/rte.gin", "--init_from=nowhere"], "nowhere: no such file or folder"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN,RUN"], "names a run twice"),
        (["--gin_file=finetune/grid.gin", "--init_from=RUN"], "names no task; stack a task's file"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Finetune.tasks=rta"], "Finetune.tasks must be one of 'cola', 'sst2'.*got 'rta'"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.EPOCH=3"], "no macro of this name.*did you mean EPOCHS"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.SEEDS=[1, 1]"], "Grid.seeds names a value twice"),
        (["--gin_file=finetune/qnli.gin", "--init_from=RUN"], "qnli: no train in .*QNLI/"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.BATCH_SIZE=[16, 20]"], "Run.batch_size=20 .* is not divisible by 8 devices"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Run.seed=7"], "fine-tuning does not read Run.seed; set Grid.seeds"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Optimizer.learning_rate=1"], "fine-tuning does not read Optimizer.learning_rate"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN,"], "has a comma too many"),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN,RUN/"], "names a run twice"),
        (
            ["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Model.layers=7"],
            "Model.layers=7: .* has 1, and fine-tuning keeps the shape of its",
        ),
        (["--gin_file=finetune/rte.gin", f"--init_from={PRETRAINED}", "--gin.Model.layers=2"], "Model.layers=2: .*pretrained has 4, and fine-tuning"),
        (
            ["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Run.init_from=nowhere"],
            "fine-tuning does not read Run.init_from; set --init_from",
        ),
        (
            ["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Corpus.sequence_length=64"],
            "read Corpus.sequence_length; set Finetune.max_length",
        ),
        (["--gin_file=finetune/rte.gin", "--init_from=RUN", "--gin.Optimizer.schedule=wsd"], "fine-tuning does not read Optimizer.schedule"),
        (["--predict=x.tsv", "--step=0"], "--predict uses the encoder and the settings of the run in --workdir. Leave --step out"),
        (["--predict=x.tsv", "--init_from=RUN"], "--predict uses the encoder and the settings of the run in --workdir. Leave --init_from out"),
        (["--submission=x.zip", "--step=3"], "--submission uses the encoder and the settings of the run in --workdir. Leave --step out"),
        (["--predict=x.tsv"], "--predict needs --workdir=RUN of a finished"),
    ],
)
def test_bad_input(more, message, data_dir, pretrained, tmp_path):
    argv = [argument.replace("RUN", str(pretrained)) for argument in more]
    with pytest.raises(config.ConfigError, match=message) as error:
        finetune.main([*argv, f"--gin.DATA_DIR={data_dir}", f"--workdir={tmp_path / 'out'}"])
    left = [path.name for path in (tmp_path / "out").iterdir()] if (tmp_path / "out").exists() else []
    assert "\n" not in str(error.value) and left in ([], ["run.lock"])


def test_settings_that_are_refused_exist():
    known = {f"{section.__name__}.{name}" for section in config.SECTIONS for name in settings.field_names(section)}
    assert set(finetune.REPLACED) <= known
    assert [name for name in finetune.UNREAD if not any(setting_changes.is_listed(one, (name,)) for one in known)] == []


@pytest.mark.parametrize("setting", ["Vocabulary.file='x'", "Corpus.text_field='body'", "Model.decoder_layers=4", "Model.logit_tile=64"])
def test_settings_of_pretraining_are_refused(setting, tmp_path):
    with pytest.raises(config.ConfigError, match=f"fine-tuning does not read {setting.partition('=')[0]}$"):
        finetune.main(["--gin_file=finetune/rte.gin", "--init_from=runs/tiny", f"--gin.{setting}", f"--workdir={tmp_path}"])


def test_bad_input_ends_with_one_line_and_status_2(data_dir, pretrained, tmp_path):
    shutil.copytree(data_dir / "glue" / "RTE", tmp_path / "RTE")
    with (tmp_path / "RTE" / "train.tsv").open("a") as file:
        file.write("9\tA.\tB.\tmaybe\n")
    done = call("finetune", "--gin_file=finetune/rte.gin", *arguments(tmp_path, pretrained, tmp_path / "out"))
    assert done.status == 2 and done.stderr.splitlines()[-1].startswith("error: ") and "train.tsv:34: unknown label 'maybe'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_can_start_from_an_earlier_checkpoint(data_dir, pretrained, tmp_path):
    """--step picks the checkpoint of a workdir, and the command passes it on."""
    import jax

    from maelm_jax.training import checkpoint, checkpoint_params

    source = tmp_path / "source"
    shutil.copytree(pretrained, source)
    params = checkpoint_params.read_params(str(source), 3)
    store = checkpoint.Checkpoints(str(source))
    store.save(5, {"params": jax.tree.map(lambda x: x * 2, params)})
    store.close()
    encoders = {step: initial_encoder.load(str(source), step) for step in (None, 3, 5)}
    assert {step: encoder.step for step, encoder in encoders.items()} == {None: 5, 3: 3, 5: 5}
    assert initial_encoder.load(f"random:{source}", 3).step is None
    with pytest.raises(config.ConfigError, match="holds no checkpoint of step 4; it holds 3, 5"):
        initial_encoder.load(str(source), 4)
    argv = ["--gin_file=finetune/rte.gin", *arguments(data_dir, source, tmp_path / "run"), "--gin.EPOCHS=1"]
    with pytest.raises(config.ConfigError, match="holds no checkpoint of step 4; it holds 3, 5"):
        finetune.main([*argv, "--step=4"])


def test_a_folder_without_steps_refuses_a_step(pretrained, tmp_path):
    from maelm_jax import export

    export.main([f"--workdir={pretrained}", f"--output={tmp_path / 'stock'}", "--no-verify"])
    with pytest.raises(config.ConfigError, match=r"step 3: \S+stock is no workdir, so it has no checkpoints by step. Leave the step out"):
        initial_encoder.load(str(tmp_path / "stock"), 3)


@pytest.mark.parametrize(
    "workdir",
    ["file", "file/under/it", "/dev/null/x", "/proc/nowhere/x", "x" * 300],
    ids=lambda path: path[:20],
)
def test_a_workdir_that_cannot_be_one(workdir, tmp_path, data_dir, pretrained):
    (tmp_path / "file").write_text("mine")
    argv = [
        "--gin_file=finetune/rte.gin",
        f"--init_from={pretrained}",
        f"--workdir={tmp_path / workdir}",
        "--gin.BATCH_SIZE=16",
    ]
    with pytest.raises(config.ConfigError, match="--workdir=.*(is a file; give|cannot be written to|too long)") as error:
        finetune.main([*argv, f"--gin.DATA_DIR={data_dir}", "--gin.MAX_LENGTH=64"])
    assert len(str(error.value).splitlines()) == 1 and (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_workdir(tmp_path, data_dir, pretrained):
    (tmp_path / "out").mkdir(mode=0o500)
    argv = [
        "--gin_file=finetune/rte.gin",
        f"--init_from={pretrained}",
        f"--workdir={tmp_path / 'out'}",
        "--gin.BATCH_SIZE=16",
    ]
    with pytest.raises(config.ConfigError, match="cannot be written to .Permission denied"):
        finetune.main([*argv, f"--gin.DATA_DIR={data_dir}", "--gin.MAX_LENGTH=64"])


@pytest.mark.parametrize("name", ["inputs.json", "results.json", "config.gin", "vocabulary"])
def test_what_is_in_the_way_inside_a_workdir_is_named(name, tmp_path, data_dir, pretrained):
    """A folder in the place of a file, a file in the place of a folder."""
    place = tmp_path / "out" / name
    place.parent.mkdir()
    place.write_text("") if name == "vocabulary" else place.mkdir()
    argv = [
        "--gin_file=finetune/rte.gin",
        f"--init_from={pretrained}",
        f"--workdir={tmp_path / 'out'}",
        "--gin.BATCH_SIZE=16",
    ]
    with pytest.raises(config.ConfigError, match=name) as error:
        finetune.main([*argv, f"--gin.DATA_DIR={data_dir}", "--gin.MAX_LENGTH=64"])
    assert len(str(error.value).splitlines()) == 1


def test_a_single_run_beside_a_table_is_one_of_the_table(data_dir, pretrained, tmp_path):
    argv = ["--gin_file=finetune/rte.gin", *arguments(data_dir, f"random:{pretrained}", tmp_path / "table"), "--gin.EPOCHS=1", "--gin.SEEDS=1"]
    assert finetune.main([*argv, "--gin.Finetune.tasks=('rte',)"]) == 0
    argv[1:] = [*arguments(data_dir, pretrained, tmp_path / "table"), "--gin.EPOCHS=1", "--gin.SEEDS=1"]
    assert finetune.main(argv) == 0
    table = json.loads((tmp_path / "table" / "table.json").read_text())
    assert list(table["reports"]) == ["random-little", "little"] and not (tmp_path / "table" / "results.json").exists()


def test_a_table_in_the_folder_of_a_single_run_is_refused(data_dir, pretrained, rte_run):
    with pytest.raises(config.ConfigError, match="holds a single run: give another --workdir for a table or a grid"):
        finetune.main(["--gin_file=finetune/rte.gin", *arguments(data_dir, pretrained, rte_run), "--gin.SEEDS=[1, 2]"])
