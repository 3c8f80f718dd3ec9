"""The layers that docs/architecture.md draws, checked on the imports of the source."""

import ast
import functools
import graphlib
import pathlib

import pytest
from testing import ROOT

PACKAGE = ROOT / "maelm_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES if path.name != "__init__.py"}

# Top to bottom. A module imports from its own layer and from those below it.
LAYERS = (
    {"train", "prepare", "finetune", "analyze", "evaluate", "export", "embed", "plan", "merge"},
    {"cli", "measuring", "planning"},
    {"pretraining", "finetuning"},
    {"analysis", "encoders"},
    {"training"},
    {"data"},
    {"model"},
    {"huge_pages"},
    {"gin_files"},
    {"storage"},
    {"config"},
    {"tables", "plotting"},
)


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports when it runs, at its top or inside a function."""
    names, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & MODULES.keys()


def layer(module: str) -> int:
    part = module.split(".")[1]
    numbers = [number for number, names in enumerate(LAYERS) if part in names]
    assert numbers, f"maelm_jax/{part} belongs to no layer: add it to LAYERS and to docs/architecture.md"
    return numbers[0]


def test_no_import_runs_upwards():
    upwards = [(module, name) for module, path in MODULES.items() for name in imports(path) if layer(name) < layer(module)]
    assert not upwards


# Names of files in a run's folder. "vocabulary" is also a key of JSON files.
RECORDS = {"config.gin", "environment.txt", "rows.json", "parent.json", "origin.json", "metrics.jsonl", "tensorboard", "loss_curve.png"}
RECORDS |= {"run.lock", "inputs.json", "results.json", "checkpoints", "unfinished"}


def test_names_of_records_stand_in_one_module():
    named = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in RECORDS:
                named.setdefault(node.value, set()).add(module)
    assert named.pop("config.gin") == {"maelm_jax.gin_files"}  # which tells a record from a file that a person writes
    assert named == {name: {"maelm_jax.training.workdir"} for name in RECORDS - {"config.gin"}}


def test_no_import_circle():
    try:
        graphlib.TopologicalSorter({module: imports(path) - {module} for module, path in MODULES.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
