""".txt and .jsonl files: read from every packing; what is wrong in one is a line with its place."""

import gzip
import json
import lzma
import random

import pytest
from testing import PACK, one_line, open_zstd

from maelm_jax import config
from maelm_jax.data import sources

TEXTS = ["One paragraph.\nAnother, naïve one.", "A second document.", "Third: a < b."]


def read(pattern, **settings):
    return list(sources.documents_of(f"files:{pattern}", config.Corpus(**settings)))


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_text_files_of_every_packing(tmp_path, packing, ending):
    content = "\ufeff" + "\n \n\n".join(TEXTS) + "\n\n"
    with PACK[packing](tmp_path / f"a.txt{packing}", "wb") as file:
        file.write(content.replace("\n", ending).encode())
    assert read(tmp_path / "*") == TEXTS


@pytest.mark.parametrize("packing", PACK)
def test_json_files_of_every_packing(tmp_path, packing):
    with PACK[packing](tmp_path / f"a.jsonl{packing}", "wb") as file:
        file.write("\n".join(json.dumps({"body": text, "id": 1}) for text in [*TEXTS, "", "  \n"]).encode())
    assert read(tmp_path / "*.jsonl*", json_field="body") == TEXTS


BAD = {
    "latin.txt": (b"one\n\nna\xefve", r"latin\.txt: not UTF-8 at byte 7 "),
    "empty.txt": (b"", r"empty\.txt: the file is empty; remove it, or give one with text"),
    "empty.txt.gz": (gzip.compress(b""), r"the file is empty"),
    "cut.txt.gz": (gzip.compress(bytes(range(256)) * 50)[:60], r"cut\.txt\.gz: corrupt gzip data"),
    "no.txt.gz": (b"plain text", r"corrupt gzip data"),
    "cut.txt.xz": (lzma.compress(b"x y" * 5000)[:-20], r"cut\.txt\.xz: corrupt xz data"),
    "no.jsonl.xz": (b"plain text", r"corrupt xz data"),
    "field.jsonl": (b'{"text": "a"}\n{"txt": "b"}', r"field\.jsonl:2: no text field 'text' in the record \(txt\)"),
    "number.jsonl": (b'{"text": 3}', r"number\.jsonl:1: no text field"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text"', r"broken\.jsonl:3: not JSON"),
    "no.jsonl.zst": (b"plain text", r"corrupt zstd data after 0 bytes"),
    "table.csv": (b"a,b", r"table\.csv: not a \.txt, \.jsonl"),
    "packed_twice.txt.gz.xz": (b"", r"packed_twice\.txt\.gz\.xz: not a \.txt, \.jsonl"),
    "array.json": (b'[{"text": "a"},\n', r"array\.json:1: not JSON .*one record a line"),
}


def test_zstd_data_that_is_cut_off_is_named(tmp_path):
    with open_zstd(tmp_path / "a.txt.zst", "wb") as file:
        file.write(random.Random(0).randbytes(300_000).hex().encode())
    whole = (tmp_path / "a.txt.zst").read_bytes()
    (tmp_path / "a.txt.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(config.ConfigError, match=r"a\.txt\.zst: corrupt zstd data"):
        read(tmp_path / "*")


def test_zstd_data_of_several_frames_is_read_to_the_end(tmp_path):
    for text in TEXTS:
        with open_zstd(tmp_path / "part", "wb") as file:
            file.write(f"{text}\n\n".encode())
        with open(tmp_path / "a.txt.zst", "ab") as file:
            file.write((tmp_path / "part").read_bytes())
    assert read(tmp_path / "*.zst") == TEXTS


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_with_its_place(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(config.ConfigError, match=message) as caught:
        read(tmp_path / "*")
    assert "\n" not in str(caught.value)


RECORDS = {
    "deep": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "digits": b'{"text": "a", "id": ' + b"7" * 5000 + b"}",
    "surrogate in a name": b'{"\\ud800": "a"}',
    "line in a name": b'{"a\\nb": "c"}',
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_record_is_one_line_with_its_place(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + RECORDS[name])
    with pytest.raises(config.ConfigError, match=r"a\.jsonl:2: ") as caught:
        list(sources.documents_of(f"files:{tmp_path}/a.jsonl", config.Corpus()))
    one_line(caught)


def test_a_lone_surrogate_in_the_text_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a \ud800 b"}))
    assert list(sources.documents_of(f"files:{tmp_path}/a.jsonl", config.Corpus())) == ["a ? b"]


@pytest.mark.parametrize("padding", [0, 4, 8])
def test_xz_data_of_several_streams_is_read_to_the_end(tmp_path, padding):
    packed = [lzma.compress(f"{text}\n\n".encode()) + bytes(padding) for text in TEXTS]
    (tmp_path / "a.txt.xz").write_bytes(b"".join(packed))
    assert read(tmp_path / "*.xz") == TEXTS


@pytest.mark.parametrize(
    "damage",
    [
        lambda first, second: first + b"\x00\x01" + second[2:],
        lambda first, second: first + b"x" + second[1:],
        lambda first, second: first + second[:20],
        lambda first, second: first + second[:40] + bytes([second[40] ^ 1]) + second[41:],
        lambda first, second: first[:-1],
    ],
    ids=["start", "first byte", "cut", "inside", "end"],
)
def test_a_damaged_stream_of_xz_data_is_named(tmp_path, damage):
    """lzma.open ends there without an error."""
    streams = [lzma.compress((f"{text}\n\n" * 50).encode()) for text in TEXTS[:2]]
    (tmp_path / "a.txt.xz").write_bytes(damage(*streams))
    with pytest.raises(config.ConfigError, match=r"a\.txt\.xz: corrupt xz data"):
        read(tmp_path / "*.xz")
