"""Files of blocks: those of an earlier start are used again, damaged ones made again."""

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import blocks, rows, store


def test_damaged_blocks_of_an_earlier_start_are_made_again(topics_corpus, small_vocabulary, whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    elsewhere = config.dataclasses.replace(topics_corpus, rows_dir=str(tmp_path))

    def refuse(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", refuse)
        with pytest.raises(KeyboardInterrupt):
            rows.prepare(elsewhere, small_vocabulary)
    (parts,) = tmp_path.glob("*.parts")
    found = sorted(parts.glob("*.npz"))
    assert len(found) >= 3
    found[0].write_bytes(b"")
    found[1].write_bytes(found[1].read_bytes()[:-40])
    content = bytearray(found[2].read_bytes())
    content[len(content) // 2] ^= 1
    found[2].write_bytes(content)
    (parts / "000000.json").write_text('{"blocks": "many"}')
    (splits,) = rows.prepare(elsewhere, small_vocabulary).values()
    again = [record.getMessage() for record in caplog.records if "made again" in record.getMessage()]
    assert len(again) == 4
    before = store.Rows.open(whole)
    np.testing.assert_array_equal(splits["train"][np.arange(len(splits["train"]))], before[np.arange(len(before))])


def test_a_block_that_is_damaged_while_it_is_joined_is_named(tmp_path):
    (tmp_path / "000000-000000.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(config.ConfigError, match=r"000000-000000\.npz: damaged"):
        store.write(tmp_path / "store", [tmp_path / "000000-000000.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
