"""JSON of every origin: what is wrong with it is one line that names the file."""

import pytest

from maelm_jax import config, json_files


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"\xed\xa0\x80", b"[" * 200_000, b"1" * 5000])
def test_content_that_is_no_json_is_one_line(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for read in (json_files.read_object, lambda path: json_files.read(path, bool, "remove it")):
        with pytest.raises(config.ConfigError, match=r"file\.json.*: not JSON \(.+\); \w+") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_other_content_than_expected_is_refused(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("[3]")
    with pytest.raises(config.ConfigError, match=r"file\.json: holds \[3\], not a JSON object; write the file again"):
        json_files.read_object(path)
    with pytest.raises(config.ConfigError, match=r"damaged: not what was written there; remove it"):
        json_files.read(path, json_files.is_text_map, "remove it")
    assert json_files.read(path, lambda value: value == [3], "remove it") == [3]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(config.ConfigError, match=r"none\.json: cannot be read \(No such file.*\); is the path right"):
        json_files.read_object(tmp_path / "none.json")


def test_numbers_are_neither_booleans_nor_infinite():
    assert json_files.is_integer(3, 1) and not json_files.is_integer(True, 0) and not json_files.is_integer(3.0, 0)
    assert json_files.is_number(0.5, 0, 1) and not json_files.is_number(float("nan"), 0, 1)
    assert not json_files.is_number(True, 0, 1) and not json_files.is_number(2, 0, 1)
