"""The wheel carries the configs and the commands, and works in a fresh environment from any folder."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
from testing import ROOT

import maelm_jax
from maelm_jax import __main__, train

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("scripts", {})


def test_every_module_that_is_a_command_has_an_entry_point_of_its_name():
    modules = sorted((ROOT / "maelm_jax").glob("*.py"))
    names = [path.stem for path in modules if "cli.run(main" in path.read_text()]
    assert {f"maelm-{name}": f"maelm_jax.{name}:command" for name in names} == SCRIPTS and "train" in names


def test_the_package_lists_its_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["maelm_jax"])  # not those of pytest
    __main__.main()
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[2].removeprefix("maelm_jax.") for line in lines if line.startswith("python -m ")]
    assert {f"maelm-{name}" for name in names} == set(SCRIPTS)
    assert lines[0].endswith(train.__doc__.splitlines()[0])


def test_the_pinned_versions_can_be_given_as_constraints():
    """As launch/Dockerfile and launch/worker.sh do: pip takes no extras there."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert all(re.match(r"(#|[\w-]+==[\w.]+( |$))", line) for line in lines) and len(lines) > 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel that pip builds of this checkout; needs the package registry for the build backend."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    done = subprocess.run([*pip, "--wheel-dir", folder, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_every_config_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {folder: [path for path in (ROOT / folder).rglob("*") if path.is_file()] for folder in ("maelm_jax", "configs")}
    package = {str(path.relative_to(ROOT)) for path in files["maelm_jax"] if "__pycache__" not in path.parts}
    configs = {f"maelm_jax/{path.relative_to(ROOT)}" for path in files["configs"]}
    assert configs and names == package | configs


def fresh_environment(folder: pathlib.Path, *install: str | pathlib.Path) -> pathlib.Path:
    """The folder of commands of a new virtual environment; its dependencies are this environment's, seen through a .pth file."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    commands_folder = folder / "bin"
    subprocess.run([commands_folder / "python", "-m", "pip", "install", "-q", "--no-deps", *install], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = subprocess.run([commands_folder / "python", "-c", query], capture_output=True, text=True, check=True)
    pathlib.Path(asked.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands_folder


def run_in(folder: pathlib.Path, *command: str | pathlib.Path) -> subprocess.CompletedProcess:
    """What a command does in `folder`, when nothing but its environment says where maelm_jax is."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_an_installed_wheel_trains_from_any_folder(wheel, tmp_path):
    installed, elsewhere = fresh_environment(tmp_path / "fresh", wheel), tmp_path / "elsewhere"
    done = run_in(elsewhere, installed / "python", "-c", "import maelm_jax; print(maelm_jax.__file__)")
    assert done.stdout.startswith(str(tmp_path / "fresh"))
    query = "import importlib.metadata; print(importlib.metadata.version('maelm_jax'))"
    assert run_in(elsewhere, installed / "python", "-c", query).stdout.strip() == maelm_jax.__version__
    done = run_in(elsewhere, installed / "maelm-train", "--gin_file=tiny.gin", "--gin_file=ablations/delta_50.gin", "--dry_run")
    assert done.returncode == 0 and "FLOPs a step" in done.stdout, done.stderr
    for name in SCRIPTS:
        done = run_in(elsewhere, installed / name, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}"), (name, done.stderr)
    done = run_in(elsewhere, installed / "maelm-train", "--gin_file=missing.gin")
    assert done.returncode == 2 and "missing.gin" in done.stderr, done.stderr
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_an_editable_installation_reads_the_configs_of_the_checkout(tmp_path):
    installed = fresh_environment(tmp_path / "fresh", "-e", ROOT)
    query = "import maelm_jax; from maelm_jax import gin_files; print(maelm_jax.__file__, gin_files.CONFIGS)"
    done = run_in(tmp_path / "elsewhere", installed / "python", "-c", query)
    assert done.stdout.split() == [str(ROOT / "maelm_jax" / "__init__.py"), str(ROOT / "configs")], done.stderr
    done = run_in(tmp_path / "elsewhere", installed / "maelm-train", "--gin_file=missing.gin")
    assert done.returncode == 2, done.stderr
