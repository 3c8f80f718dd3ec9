"""A source is a name: what a Mixture holds is recorded for machines without seqio."""

import pytest
from testing import DAMAGED_JSON, one_line

from maelm_jax import config
from maelm_jax.data import sources
from maelm_jax.data.documents import Unavailable


@pytest.mark.parametrize("name", DAMAGED_JSON)
def test_a_damaged_mixture_is_one_line(tmp_path, monkeypatch, name):
    def unavailable(*_):
        raise Unavailable("no seqio here")

    monkeypatch.setattr(sources.seqio_tasks, "members", unavailable)
    corpus = config.Corpus(sources={"seqio:both": 1.0}, rows_dir=str(tmp_path))
    with pytest.raises(Unavailable):
        sources.rates(corpus)
    import hashlib

    (tmp_path / f"mixture-{hashlib.sha256(b'seqio:both').hexdigest()[:12]}.json").write_bytes(DAMAGED_JSON[name])
    with pytest.raises(config.ConfigError, match=r"mixture-\w+\.json: damaged") as caught:
        sources.rates(corpus)
    one_line(caught)
