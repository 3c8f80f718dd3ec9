"""What is left out of a corpus: short, refused and repeated documents, and bad files; all of it is counted."""

import collections
import dataclasses
import json

import numpy as np
import pytest
from testing import prepared_rows

from maelm_jax import config, prepare
from maelm_jax.data import blocks, cleaning, rows, sources, store_manifest, vocabulary_training, waiting

FILTER = """
def keep(text):
    return "secret" not in text

def fail(text):
    raise KeyError("no such\\nword")
"""


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two files of documents, of which some are short, refused by keep() or repeated in either file."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 2_000)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    (tmp_path / "my_filters.py").write_text(FILTER)
    monkeypatch.syspath_prepend(tmp_path)
    cleaning.load_filter.cache_clear()
    plain = [f"Document {number} is long enough, and no other is like it." for number in range(200)]
    first = [*plain[:100], "short", plain[3], plain[4], *[f"A secret that is number {number} of several." for number in range(7)]]
    second = [*plain[100:], plain[5], plain[150], "brief", "tiny"]
    (tmp_path / "a.txt").write_text("\n\n".join(first))
    (tmp_path / "b.txt").write_text("\n\n".join(second))
    return config.Corpus(
        text_files=f"{tmp_path}/*.txt",
        sequence_length=32,
        heldout_fraction=0.1,
        rows_dir=str(tmp_path / "rows"),
        processes=1,
        minimum_characters=20,
        document_filter="my_filters:keep",
        deduplicate=True,
    )


def folder_of(corpus, small_vocabulary):
    (folder,) = rows.folders(corpus, small_vocabulary).values()
    return folder


def test_what_is_left_out_is_counted_and_the_rest_kept(corpus, small_vocabulary, tmp_path):
    cleaned = prepared_rows(corpus, small_vocabulary)
    plain = dataclasses.replace(corpus, minimum_characters=0, document_filter=None, deduplicate=False, rows_dir=str(tmp_path / "plain"))
    everything = sources.documents_of(f"files:{corpus.text_files}", plain)
    texts = list(dict.fromkeys(text for text in everything if len(text) >= 20 and "secret" not in text))
    assert len(texts) == 200
    (tmp_path / "clean").mkdir()
    for name, part in (("a", texts[:100]), ("b", texts[100:])):
        (tmp_path / "clean" / f"{name}.txt").write_text("\n\n".join(part))
    expected = prepared_rows(dataclasses.replace(plain, text_files=f"{tmp_path}/clean/*.txt"), small_vocabulary)
    for split, table in expected.items():
        np.testing.assert_array_equal(cleaned[split], table)
    left_out = store_manifest.left_out(folder_of(corpus, small_vocabulary))
    assert left_out.documents == {"short": 3, "refused": 7, "duplicate": 4} and left_out.files == {}
    assert prepare.left_out_line("here", left_out) == "left out of here: documents: 3 short, 7 refused, 4 duplicate; files: 0"


def test_any_number_of_processes_makes_the_same_store(corpus, small_vocabulary, tmp_path):
    """Also where one of them finds a bad file."""
    manifests = []
    (tmp_path / "c.txt").write_bytes(b"A document that is long enough.\n\n\xff")
    for processes in (1, 2):
        other = dataclasses.replace(corpus, processes=processes, skip_bad_files=True, rows_dir=str(tmp_path / str(processes)))
        rows.prepare(other, small_vocabulary)
        manifests.append((folder_of(other, small_vocabulary) / "store.json").read_bytes())
    assert manifests[0] == manifests[1]
    assert list(json.loads(manifests[0])["left_out"]["files"]) == [str(tmp_path / "c.txt")]


def test_settings_that_leave_nothing_out_change_no_name(corpus, small_vocabulary):
    plain = config.Corpus(text_files=corpus.text_files, rows_dir=corpus.rows_dir)
    assert cleaning.request(plain) == [] and cleaning.identity(plain) == ""
    names = {rows.prefix("files:x", plain, small_vocabulary)}
    for name, value in (("minimum_characters", 5), ("deduplicate", True), ("document_filter", "a:b"), ("skip_bad_files", True)):
        names.add(rows.prefix("files:x", dataclasses.replace(plain, **{name: value}), small_vocabulary))
    assert len(names) == 5


def test_another_filter_of_the_same_name_is_another_text(corpus, small_vocabulary, tmp_path, monkeypatch, caplog):
    rows.prepare(corpus, small_vocabulary)
    before = folder_of(corpus, small_vocabulary)
    (tmp_path / "my_filters.py").write_text(FILTER.replace("secret", "Document"))
    cleaning.load_filter.cache_clear()
    monkeypatch.delitem(__import__("sys").modules, "my_filters")
    __import__("linecache").checkcache()
    assert folder_of(corpus, small_vocabulary) != before
    with caplog.at_level("WARNING"):
        rows.prepare(corpus, small_vocabulary)
    assert "the text has changed since" in caplog.text and "nothing but the module of my_filters:keep" in caplog.text


@pytest.mark.parametrize(
    "name,message",
    [
        ("my_filters:fail", r"my_filters:fail raised KeyError: 'no such\\nword' on the document 'Document 0"),
        ("my_broken_filters:keep", r"'my_broken_filters:keep' cannot be imported \(SyntaxError: .*\); correct its module"),
        ("my_filters:none", "'my_filters:none' cannot be imported"),
        ("no_such_module:keep", "'no_such_module:keep' cannot be imported"),
    ],
)
def test_a_filter_that_does_not_work_is_one_line(corpus, name, message, tmp_path):
    (tmp_path / "my_broken_filters.py").write_text("def keep(text)")
    changed = dataclasses.replace(corpus, document_filter=name)
    with pytest.raises(config.ConfigError, match=message):
        list(sources.documents_of(f"files:{corpus.text_files}", changed))


@pytest.mark.parametrize("name", ["keep", "a:", ":keep", "a:b:c", "a b:c"])
def test_a_filter_is_named_by_module_and_function(name):
    with pytest.raises(config.ConfigError, match="must be module:function"):
        config.Corpus(document_filter=name)


def test_bad_files_are_named_and_only_left_out_when_told_to(corpus, small_vocabulary, tmp_path):
    """A file that is cut off after some blocks gives no row at all."""
    good = prepared_rows(corpus, small_vocabulary)
    lines = [json.dumps({"text": f"Record {number} of a file that breaks off, which is long."}) for number in range(200)]
    (tmp_path / "c.jsonl").write_text("\n".join([*lines, '{"text": "Rec']))
    (tmp_path / "d.txt").write_bytes(b"")
    more = dataclasses.replace(corpus, text_files=f"{tmp_path}/*.[tj]*", rows_dir=str(tmp_path / "more"))
    with pytest.raises(config.ConfigError, match=r"c\.jsonl:201: not JSON"):
        rows.prepare(more, small_vocabulary)
    skipping = dataclasses.replace(more, skip_bad_files=True)
    table = prepared_rows(skipping, small_vocabulary)
    for split in good:
        np.testing.assert_array_equal(table[split], good[split])
    left_out = store_manifest.left_out(folder_of(skipping, small_vocabulary))
    assert [path.rpartition("/")[2] for path in left_out.files] == ["c.jsonl", "d.txt"]
    assert left_out.documents == {"short": 3, "refused": 7, "duplicate": 4}


def test_a_file_that_cannot_be_opened_is_left_out_too(corpus, small_vocabulary, tmp_path, monkeypatch):
    (tmp_path / "c.txt").symlink_to(tmp_path / "b.txt")
    original = sources.file_sources.file_access.opened

    def opened(path):
        if path.endswith("c.txt"):
            raise PermissionError(13, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(sources.file_sources.file_access, "opened", opened)
    with pytest.raises(config.ConfigError, match=r"c\.txt: cannot be read \(Permission denied\)"):
        rows.prepare(corpus, small_vocabulary)
    rows.prepare(skipping := dataclasses.replace(corpus, skip_bad_files=True), small_vocabulary)
    assert list(store_manifest.left_out(folder_of(skipping, small_vocabulary)).files) == [str(tmp_path / "c.txt")]


def test_when_every_file_is_left_out_the_reason_is_shown(small_vocabulary, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a text"}\n')
    settings = {"text_files": f"{tmp_path}/*.jsonl", "rows_dir": str(tmp_path / "rows"), "skip_bad_files": True, "processes": 1}
    with pytest.raises(config.ConfigError, match="files left out: 1, the first for this reason: .*a.jsonl:1: no text field 'text'"):
        rows.prepare(config.Corpus(**settings), small_vocabulary)


def test_the_vocabulary_is_trained_on_what_is_kept(corpus, small_vocabulary, monkeypatch):
    texts = []
    monkeypatch.setattr(vocabulary_training, "train", lambda documents, settings: texts.extend(documents) or small_vocabulary)
    vocabulary_training.vocabulary_for(config.Vocabulary(size=400), corpus)
    assert len(texts) == len(set(texts)) > 150 and not any("secret" in text or len(text) < 20 for text in texts)
    dropped = collections.Counter()
    for shard in sources.shards(f"files:{corpus.text_files}", corpus):
        list(shard.documents(dropped))
    assert dropped == {"short": 3, "refused": 7}
