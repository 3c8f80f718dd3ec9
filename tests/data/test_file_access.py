"""Files here and in buckets: which a glob matches, and when a file counts as changed."""

import os

import pytest

from maelm_jax import config
from maelm_jax.data import documents, file_access, record_files


def test_a_glob_gives_files_and_folders_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert file_access.expand(f"{tmp_path}/*") == [f"{tmp_path}/a", f"{tmp_path}/b.txt"]
    assert f"{tmp_path}/a/c.txt" in file_access.expand(f"{tmp_path}/**")
    assert [file_access.is_folder(path) for path in file_access.expand(f"{tmp_path}/*")] == [True, False]


def test_a_file_of_another_size_or_time_is_another_version(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    versions = [file_access.version(str(path))]
    path.write_text("three")
    versions.append(file_access.version(str(path)))
    os.utime(path, ns=(0, 0))
    versions.append(file_access.version(str(path)))
    assert len({version.key for version in versions}) == 3
    assert all(version.content_hash is None for version in versions), "the content of a local file is read"


@pytest.mark.parametrize(
    "path,error,kind",
    [
        ("s3://b/a.txt", PermissionError("The provided token has expired."), config.RunError),
        ("gs://b/a.txt", OSError("Forbidden: https://storage.googleapis.com"), config.RunError),
        ("gs://b/a.txt", FileNotFoundError("b/a.txt"), documents.BadFile),
        ("a.txt", PermissionError(13, "Permission denied"), documents.BadFile),
        ("a.txt", OSError(5, "Input/output error"), config.RunError),
    ],
)
def test_a_file_that_a_bucket_refuses_is_not_left_out(path, error, kind):
    """Its libraries raise the same error for a token that has expired as for a file that must not be read."""
    assert type(file_access.unreadable(path, error)) is kind


@pytest.mark.parametrize("name", ["a.tfrecord", "a.array_record"])
def test_records_that_a_bucket_refuses_are_one_line(name, monkeypatch):
    pytest.importorskip("tensorflow")
    pytest.importorskip("array_record")

    def refuse(path):
        raise PermissionError("The provided token has expired.")

    monkeypatch.setattr(file_access, "opened", refuse)
    monkeypatch.setattr(record_files.file_access, "opened", refuse)
    read = record_files.tfrecord_documents if name == "a.tfrecord" else record_files.array_record_documents
    with pytest.raises(config.RunError, match=f"s3://b/{name}: could not be read now .*token has expired"):
        list(read(f"s3://b/{name}", "text"))
