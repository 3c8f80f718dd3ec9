"""The decoder in an export: what config.json says of it, and that the code of a folder is neither run nor copied. No PyTorch needed."""

import json
import pathlib

import pytest
from testing import ROOT

import maelm_jax
from maelm_jax import config
from maelm_jax.encoders import decoder_file, opened
from maelm_jax.encoders.opened import load_model


def test_the_code_of_a_folder_is_neither_run_nor_copied(copy_export, tmp_path):
    folder, ran = copy_export("mpnet", tmp_path / "folder"), tmp_path / "ran"
    ours = (folder / decoder_file.CODE).read_bytes()
    for name in (decoder_file.CODE, "other.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')\n")
    # Modules of sentence-transformers are copied, but no code among them.
    (folder / "modules.json").write_text(json.dumps([{"path": "."}]))
    encoder = maelm_jax.load_encoder(folder)
    encoder.fill_mask(["A [MASK]."])
    encoder.save_pretrained(tmp_path / "saved")
    assert not ran.exists() and not (tmp_path / "saved" / "other.py").exists()
    assert (tmp_path / "saved" / decoder_file.CODE).read_bytes() == ours


def test_the_pretrained_encoder_has_the_code_of_the_package():
    code = pathlib.Path(decoder_file.__file__).with_name(decoder_file.CODE).read_bytes()
    assert (ROOT / "pretrained" / decoder_file.CODE).read_bytes() == code
    assert opened.find_model(ROOT / "pretrained").model.decoder.attention == "cross"


def test_settings_that_are_not_computed_here_are_refused(copy_export, tmp_path):
    folder = copy_export("mpnet", tmp_path / "folder")
    content = json.loads((folder / "config.json").read_text())

    def refuse(**decoder) -> str:
        entry = content["mae_lm"] | {"decoder": content["mae_lm"]["decoder"] | decoder}
        (folder / "config.json").write_text(json.dumps(content | {"mae_lm": entry}))
        with pytest.raises(config.ConfigError) as error:
            load_model(folder)
        return str(error.value)

    assert "mae_lm.decoder.normalization is 'pre', expected 'post'" in refuse(normalization="pre")
    assert "Decoder.layers" in refuse(layers=0)
    assert "decoder/blocks" in refuse(layers=5)
    del content["mae_lm"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(config.ConfigError, match="mae_lm"):
        opened.find_model(folder)
