"""Scripts of launch/ and configs/recipes/: shellcheck finds nothing, and dry runs print every command with the user's arguments, spaces and all."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from testing import ROOT, environment

from maelm_jax import gin_files
from maelm_jax.encoders import opened
from maelm_jax.training import metrics
from maelm_jax.training.workdir import Workdir

FOLDERS = (ROOT / "launch", ROOT / "configs" / "recipes")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.suffix in (".sh", ".sbatch"))
ARGUMENTS = ["--gin_file=tiny.gin", "--gin.TEXT_FILES=my books/*.txt", "--workdir=gs://bucket/runs/a"]


def dry(script: str, *before: str, **environment: str) -> list[list[str]]:
    """The commands that a dry run prints, each as words. Nothing may be found on PATH that could do harm."""
    path = os.pathsep.join(["/usr/bin", "/bin"])
    argv = ["bash", str(ROOT / "launch" / script), *before, *ARGUMENTS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"PATH": path, "HOME": "/nowhere"} | environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line[2:]) for line in (done.stdout + done.stderr).splitlines() if line.startswith("+ ")]


def test_shellcheck_finds_nothing():
    checker = shutil.which("shellcheck") or pathlib.Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_without_arguments_it_says_how(script):
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere"})
    usage = f"{script.relative_to(ROOT)}"
    assert done.returncode == 2 and usage in done.stdout and "#" not in done.stdout.split(usage)[0]


def test_local():
    commands = dry("local.sh", "--dry-run", PYTHON="python3.12")
    assert commands[0] == ["python3.12", "-m", "venv", ".venv"]
    assert commands[-1] == [".venv/bin/python", "-m", "maelm_jax.train", *ARGUMENTS]


@pytest.mark.parametrize(
    "names,message",
    [
        ({"VARIANTS": "mae-lm mml"}, "VARIANTS: there is no variant mml"),
        ({"TASKS": "rte cola"}, "TASKS: no data of cola in"),
    ],
)
def test_a_name_that_miniature_does_not_know_is_refused_before_anything_runs(tmp_path, names, message):
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    line = ["bash", str(ROOT / "launch/miniature.sh"), "*.txt", str(tmp_path / "out"), str(tmp_path / "glue")]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | names | {"PYTHON": "false"})
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}") and not done.stdout


def test_slurm():
    srun, requeue = dry("slurm.sbatch", DRY_RUN="1", SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="17")
    assert srun[0] == "srun" and srun[-len(ARGUMENTS) - 3 :] == [".venv/bin/python", "-m", "maelm_jax.train", *ARGUMENTS]
    assert requeue == ["scontrol", "requeue", "17"]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (ROOT / "launch/slurm.sbatch").read_text(), re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"] and options["signal"].startswith("TERM@")


def test_a_task_of_an_array_does_its_part_of_a_grid_and_one_job_joins_them():
    given = {"DRY_RUN": "1", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
    command = ["srun", "--ntasks=1", ".venv/bin/python", "-m", "maelm_jax.finetune"]
    assert dry("grid.sbatch", **given) == [[*command, *ARGUMENTS, "--part=3", "--parts=8"]]
    assert dry("grid.sbatch", "--join", **given) == [[*command, "--join", *ARGUMENTS]]


def test_tpu_pod_needs_a_clone_for_its_workers(tmp_path):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    line = ["bash", str(tmp_path / "launch" / "tpu_pod.sh"), "--dry-run", "my-slice", "zone", "v5p-8", *ARGUMENTS]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"error: {tmp_path} is no git clone; the workers get the commit HEAD of one\n"


def test_tpu_pod_shows_the_whole_sequence():
    commands = dry("tpu_pod.sh", "--dry-run", "my-slice", "us-west4-a", "v5litepod-256", CREATE="--spot --network=mine", VERSION="mine")
    assert all(command[:3] == ["gcloud", "compute", "tpus"] or command[0] == "git" for command in commands)
    words = [" ".join(command[3:5]).removeprefix("tpu-vm ") if command[0] == "gcloud" else "git" for command in commands]
    in_order = "describe, queued-resources describe, queued-resources create, ssh, git, scp, ssh, ssh, ssh"
    assert words == in_order.split(", ")
    assert all("--zone=us-west4-a" in command for command in commands if command[0] == "gcloud")
    asked = {"--node-id=my-slice", "--accelerator-type=v5litepod-256", "--runtime-version=mine", "--spot", "--network=mine"}
    assert asked <= set(commands[2])
    install, start, watch = (command[-1].removeprefix("--command=") for command in commands[-3:])
    assert [command[-2] for command in commands[-3:]] == ["--worker=all", "--worker=all", "--worker=0"]
    assert shlex.split(install)[-3:] == ["maelm_jax/launch/worker.sh", "install", "tpu,bucket,data"], "there are rows to prepare"
    assert shlex.split(start) == ["maelm_jax/launch/worker.sh", "start", *ARGUMENTS]
    assert shlex.split(watch) == ["maelm_jax/launch/worker.sh", "watch"]


@pytest.mark.parametrize(
    "kind,software,rows,extras",
    [
        ("v4-8", "tpu-ubuntu2204-base", "gs://bucket/rows", "tpu,bucket"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite", "s3://bucket/rows", "tpu,bucket"),
        ("v5p-8", "v2-alpha-tpuv5", "/disk/rows", "tpu,bucket,data"),
        ("v6e-8", "v2-alpha-tpuv6e", "/disk/rows", "tpu,bucket,data"),
    ],
)
def test_a_slice_has_the_software_of_its_type_and_prepares_rows_unless_a_bucket_has_them(kind, software, rows, extras):
    commands = dry("tpu_pod.sh", "--dry-run", "my-slice", "us-west4-a", kind, "--gin_file=base.gin", f"--gin.Corpus.rows_dir={rows}")
    assert f"--runtime-version={software}" in commands[2]
    assert sum(command[-1].endswith(f"worker.sh install {extras}") for command in commands) == 1


@pytest.mark.parametrize("place,tool", [("gs://bucket/rows", "gcloud"), ("s3://bucket/rows/", "aws"), ("/shared/rows", None), ("mine", None)])
def test_prepare_data(place, tool):
    commands = dry("prepare_data.sh", "--dry-run", place)
    made = f"--gin.Corpus.rows_dir={'rows' if tool else os.path.abspath(place)}"
    assert commands[0] == [".venv/bin/python", "-m", "maelm_jax.prepare", *ARGUMENTS, made]
    assert [command[0] for command in commands[1:]] == ([tool] * 2 if tool else [])
    if tool:
        assert "store" in " ".join(commands[1]) and "store" not in " ".join(commands[2]), "what says that a store is whole goes last"


def test_jobset():
    text = (ROOT / "launch" / "jobset.yaml").read_text()
    example = dict(re.findall(r"\b([A-Z_]+)=(\S+)", text.partition("envsubst")[0]))
    assert set(re.findall(r"\$\{(\w+)\}", text)) == set(example)
    for name, value in example.items():
        text = text.replace(f"${{{name}}}", value)
    (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    workers = job["template"]["spec"]
    (final,) = workers["podFailurePolicy"]["rules"]
    (container,) = workers["template"]["spec"]["containers"]
    assert final["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 3]}
    assert container["resources"]["limits"] == {"google.com/tpu": int(example["CHIPS"])}
    assert container["command"] == ["python", "-m", "maelm_jax.train"] and "--coordinator=auto" in container["args"]
    assert f"--gin_file={example['GIN_FILE']}" in container["args"]
    gin_files.load([example["GIN_FILE"]])


def test_the_image_copies_what_its_installation_reads():
    text = (ROOT / "launch" / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"pyproject.toml", "requirements.txt", project["project"]["readme"], *wheel["packages"], *wheel["force-include"]} <= copied
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.M)[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"]) and "bucket" in extras
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1])[0] in project["project"]["scripts"]


def test_the_example_of_a_slice_reads_rows_that_all_its_workers_see():
    examples = re.findall(r"launch/tpu_pod\.sh .*--gin_file.*", (ROOT / "docs" / "tpus.md").read_text())
    assert examples and all("--gin.Corpus.rows_dir=gs://" in example for example in examples)


@pytest.mark.slow
def test_three_phases_go_on_from_each_other(text, tmp_path, monkeypatch):
    """Stable at the peak, longer rows with another theta at the same rate, then a decay."""
    steps = {"STABLE_STEPS": "6", "EXTEND_STEPS": "3", "DECAY_STEPS": "4", "BATCH": "8"}
    flags = ["Vocabulary.size=400", "Corpus.processes=1", "Corpus.heldout_fraction=0.1", f"Corpus.rows_dir={tmp_path / 'rows'}"]
    flags += ["Run.log_every=1", "Run.eval_rows=8", "Run.rank_every=0", "Optimizer.warmup_steps=2"]
    names = environment() | steps | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TEXT": str(text / "*.txt")}
    argv = ["bash", str(ROOT / "configs" / "recipes" / "three_phases.sh"), "phases", *(f"--gin.{flag}" for flag in flags)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=names)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)  # the parents have relative paths
    curves = metrics.read_curves(Workdir("phases/decay"))
    assert [curve.first_token for curve in curves] == [0, 6 * 8 * 64, 9 * 8 * 64]
    stable, extend, decay = (
        [line["learning_rate"] for line in metrics.read(Workdir(f"phases/{name}")) if "loss" in line] for name in ("stable", "extend", "decay")
    )
    assert stable[2:] + extend + decay[:1] == [stable[-1]] * 8 and 0 < decay[-1] < decay[1] < decay[0]
    model = opened.find_model("phases/decay").model
    assert (model.encoder.max_positions, model.encoder.rotary_theta) == (256, 160_000.0)
