"""What a path is: one decision, which every command follows."""

import checkpoint_folders
import pytest
from testing import call

from maelm_jax import gin_files
from maelm_jax.training import workdir
from maelm_jax.training.workdir import Kind

PRETRAINED = gin_files.render(gin_files.load(["tiny.gin"]))
FINETUNED = gin_files.render(gin_files.load(["finetune/rte.gin"]))
# Files by which a folder is known.
FOLDERS = {
    "run": ({"config.gin": PRETRAINED, "config.json": "{}"}, Kind.RUN),
    "tuned": ({"config.gin": FINETUNED, "results.json": "{}"}, Kind.FINETUNED),
    "table": ({"table.json": "{}"}, Kind.TABLE),
    "export": ({"config.json": "{}", "vocabulary.sha256": ""}, Kind.EXPORT),
    "stock": ({"config.json": "{}", "model.safetensors": ""}, Kind.STOCK),
    "published": ({"model.pt": ""}, Kind.PUBLISHED),
    "rows": ({"pile/store.json": "{}"}, Kind.ROWS),
    "store": ({"store.json": "{}"}, Kind.ROWS),
    "empty": ({}, Kind.OTHER),
    "notes": ({"notes.txt": ""}, Kind.OTHER),
}


@pytest.fixture
def folders(tmp_path):
    for name, (files, _) in FOLDERS.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(content)
    return tmp_path


def test_every_kind_of_folder_is_known(folders):
    assert {name: workdir.kind_of(folders / name) for name in FOLDERS} == {name: kind for name, (_, kind) in FOLDERS.items()}
    assert workdir.kind_of(folders / "published" / "model.pt") == Kind.PUBLISHED
    assert workdir.kind_of(folders / "nowhere") == Kind.ABSENT


@pytest.mark.parametrize(
    ("command", "argv", "refused"),
    [
        ("train", ["--gin_file=tiny.gin"], ("tuned", "table", "export", "stock", "published", "rows", "store")),
        ("finetune", ["--gin_file=finetune/rte.gin", "--init_from=nowhere"], ("run", "export", "stock", "published", "rows", "store")),
        ("analyze", ["--runs=nowhere"], ("export", "stock", "published", "rows", "store")),
    ],
)
def test_no_run_is_written_into_a_folder_of_another_kind(folders, command, argv, refused):
    before = checkpoint_folders.content(folders)
    for name in refused:
        done = call(command, *argv, f"--workdir={folders / name}")
        assert done.status == 2 and f"{folders / name} is a " in done.stderr.replace(" an ", " a "), done.stderr
    assert checkpoint_folders.content(folders) == before
    for name in ("gs:/bucket/run", "https://host/run", "file:///run"):
        done = call(command, *argv, f"--workdir={name}")
        assert done.status == 2 and name in done.stderr
