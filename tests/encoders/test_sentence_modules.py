"""Modules of sentence-transformers: copied with their encoder, or refused in one line."""

import json

import pytest
from testing import one_line

import maelm_jax
from maelm_jax import config
from maelm_jax.encoders import sentence_modules

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture
def folder(workdirs, tmp_path):
    """An exported folder, with the modules of sentence-transformers added."""
    path = tmp_path / "in"
    maelm_jax.load_encoder(workdirs["mpnet"]).save_pretrained(path)
    (path / "modules.json").write_text(json.dumps(MODULES))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    return path


def test_the_modules_go_out_as_they_came_in(folder, tmp_path):
    maelm_jax.load_encoder(folder).save_pretrained(tmp_path / "out")
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "out" / "2_Normalize").exists(), "a module without settings has no folder"


def test_an_encoder_without_modules_has_none(workdirs):
    assert sentence_modules.read(workdirs["mpnet"]) == {}


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "not JSON"),
        ("{}", "damaged"),
        ("[3]", "damaged"),
        ('[{"path": 3}]', "damaged"),
        ('[{"path": "../other"}]', "names '../other', which is no folder beside it"),
        ('[{"path": "/etc"}]', "names '/etc'"),
        ('[{"path": ".."}]', "names '..'"),
        ('[{"path": "a\\u0000"}]', "names 'a"),
    ],
)
def test_a_damaged_list_of_modules_is_one_line(tmp_path, content, message):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(config.ConfigError) as error:
        sentence_modules.read(tmp_path)
    assert message in one_line(error)
