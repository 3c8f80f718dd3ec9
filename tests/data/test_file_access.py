"""Files here and in buckets: which a glob matches, and when a file counts as changed."""

import os

from maelm_jax.data import file_access


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
