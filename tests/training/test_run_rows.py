"""What a run records of its data: it goes on only with the rows that it began with, unless told to."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from maelm_jax import config, train
from maelm_jax.analysis import runs
from maelm_jax.data import rows, sources, store, store_manifest, vocabulary_training
from maelm_jax.training import distributed, row_record, run_rows


@pytest.fixture(scope="module")
def texts():
    from pydoc_data import topics

    return [" ".join(topic.split()) for topic in topics.topics.values()]


@pytest.fixture(scope="module")
def vocabulary(texts):
    return vocabulary_training.train(texts, config.Vocabulary(size=400))


@pytest.fixture
def corpus(texts, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:40]))
    (tmp_path / "b.txt").write_text("\n\n".join(texts[40:60]))
    return config.Corpus(text_files=f"{tmp_path}/*.txt", sequence_length=32, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)


@pytest.fixture
def workdir(tmp_path, corpus, vocabulary):
    """The folder of a run that stands at step 10."""
    folder = tmp_path / "run"
    folder.mkdir()
    row_record.write(str(folder), run_rows.choose_rows(str(folder), corpus, vocabulary), 0)
    (folder / "config.gin").write_text("")
    return str(folder)


def table(chosen):
    (splits,) = chosen.stores.values()
    return splits["train"][np.arange(len(splits["train"]))]


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_record_names_the_store(workdir, corpus, vocabulary):
    record = row_record.read(workdir)
    ((source, entry),) = record["sources"].items()
    opened = rows.prepare(corpus, vocabulary)[source]
    assert source == f"files:{corpus.text_files}" and entry["rate"] == 1.0
    assert entry["store"] == opened["train"].folder.name
    assert entry["fingerprint"] == store_manifest.fingerprint(opened["train"].folder)
    assert entry["rows"] == {split: len(found) for split, found in opened.items()}
    assert record["vocabulary"] == vocabulary.fingerprint and record["length"] == 32
    assert sorted(name.rpartition("/")[2] for name in entry["text"]) == ["a.txt", "b.txt"]


def test_a_run_goes_on_with_its_rows_where_the_text_has_changed(workdir, corpus, vocabulary, tmp_path, caplog):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    assert messages(caplog) == []
    (tmp_path / "b.txt").write_text("Another text, and a short one.")
    rows.prepare(corpus, vocabulary)  # as a second run on the changed text does
    caplog.clear()
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)
    (said,) = messages(caplog)
    assert "although its text has changed" in said and "b.txt" in said and "a.txt" not in said


def test_a_run_without_its_text_goes_on_with_its_rows(workdir, corpus, vocabulary, tmp_path):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.txt").unlink()
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)


def test_rows_that_are_gone_are_made_again_of_the_same_text(workdir, corpus, vocabulary, tmp_path):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    shutil.rmtree(tmp_path / "rows")
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)


def test_other_rows_are_refused_and_the_difference_is_named(workdir, corpus, vocabulary, tmp_path):
    shutil.rmtree(tmp_path / "rows")
    (tmp_path / "b.txt").write_text("Another text, and a short one.")
    recorded = row_record.read(workdir)
    with pytest.raises(config.ConfigError, match="go on with the present text by --accept_new_data") as caught:
        run_rows.choose_rows(workdir, corpus, vocabulary)
    said = str(caught.value)
    assert workdir in said and "b.txt" in said and "a.txt" not in said and "\n" not in said
    assert row_record.read(workdir) == recorded
    assert not list((tmp_path / "rows").glob("*/store.json")), "refused before anything is made"


def test_rows_of_the_same_name_that_hold_something_else_are_refused(workdir, corpus, vocabulary, tmp_path, monkeypatch):
    """As where another version of the tokeniser cut the same text otherwise."""
    shutil.rmtree(tmp_path / "rows")
    original = vocabulary.encode_batch
    monkeypatch.setattr(vocabulary, "encode_batch", lambda texts: [ids[1:] for ids in original(texts)])
    with pytest.raises(config.ConfigError, match=r"fingerprint of files:\S+ [0-9a-f]{12} -> [0-9a-f]{12}"):
        run_rows.choose_rows(workdir, corpus, vocabulary)


def test_new_data_is_accepted_when_told_to_and_recorded(workdir, corpus, vocabulary, tmp_path, capsys):
    before = row_record.read(workdir)
    (tmp_path / "b.txt").write_text("Another text, and a short one.")
    chosen = run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=True)
    assert len(table(chosen)) < next(iter(before["sources"].values()))["rows"]["train"]
    row_record.write(workdir, chosen, 10)
    assert "new data after step 10" in capsys.readouterr().out
    after = row_record.read(workdir)
    assert after["replaced"] == [{"step": 10, **before}]
    assert after["sources"] == chosen.record["sources"] != before["sources"]
    again = run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=True)
    row_record.write(workdir, again, 20)
    assert row_record.read(workdir) == after, "nothing new, nothing recorded"
    plain = run_rows.choose_rows(workdir, corpus, vocabulary)
    row_record.write(workdir, plain, 30)
    assert row_record.read(workdir) == after, "history is kept"


def test_a_run_of_before_the_record_goes_on_with_the_rows_of_then(workdir, corpus, vocabulary, tmp_path, caplog):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    recorded = row_record.read(workdir)
    (tmp_path / "run" / "rows.json").unlink()
    (tmp_path / "b.txt").write_text("Another text, and a short one.")
    chosen = run_rows.choose_rows(workdir, corpus, vocabulary)
    np.testing.assert_array_equal(table(chosen), before)
    assert any("although the text has changed since" in said for said in messages(caplog))
    row_record.write(workdir, chosen, 10)
    assert row_record.read(workdir) == recorded


def test_a_new_run_takes_the_present_text(workdir, corpus, vocabulary, tmp_path, caplog):
    (tmp_path / "b.txt").write_text("Another text, and a short one.")
    chosen = run_rows.choose_rows(str(tmp_path / "other"), corpus, vocabulary)
    assert len(table(chosen)) < len(table(run_rows.choose_rows(workdir, corpus, vocabulary)))
    (said,) = [said for said in messages(caplog) if "the text has changed since" in said]
    assert "b.txt" in said


def test_stores_without_checksums_can_be_recorded_and_made_again(corpus, vocabulary, tmp_path):
    (splits,) = rows.prepare(corpus, vocabulary).values()
    manifest = splits["train"].folder / "store.json"
    content = json.loads(manifest.read_text())
    del content["files"]
    manifest.write_text(json.dumps(content))
    (splits["train"].folder / "text.json").unlink()
    workdir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    row_record.write(workdir, run_rows.choose_rows(workdir, corpus, vocabulary), 0)
    ((entry),) = row_record.read(workdir)["sources"].values()
    assert entry["fingerprint"] is None and len(entry["text"]) == 2
    shutil.rmtree(tmp_path / "rows")
    row_record.write(workdir, run_rows.choose_rows(workdir, corpus, vocabulary), 10)
    ((entry),) = row_record.read(workdir)["sources"].values()
    assert len(entry["fingerprint"]) == 64


def test_another_version_of_python_is_named(tmp_path, vocabulary, monkeypatch, caplog):
    """The standard library is a part of installed_docs."""
    from maelm_jax.data import installed_docs

    monkeypatch.setattr(installed_docs, "modules", lambda: [json.__file__, shutil.__file__, dataclasses.__file__])
    versions = {"python": "3.11.2"} | dict.fromkeys(installed_docs.DISTRIBUTIONS, "1")
    monkeypatch.setattr(installed_docs, "versions", lambda: dict(versions))
    corpus = config.Corpus(sequence_length=32, heldout_fraction=0.3, rows_dir=str(tmp_path / "rows"), processes=1)
    workdir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    row_record.write(workdir, run_rows.choose_rows(workdir, corpus, vocabulary), 0)
    versions["python"] = "3.13.1"
    run_rows.choose_rows(workdir, corpus, vocabulary)
    assert "python 3.11.2 -> 3.13.1" in messages(caplog)[-1]
    run_rows.choose_rows(str(tmp_path / "twin"), corpus, vocabulary)
    assert any("making" in said and "python 3.11.2 -> 3.13.1" in said for said in messages(caplog))
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(config.ConfigError, match=r"the text of installed_docs has changed: python 3\.11\.2 -> 3\.13\.1"):
        run_rows.choose_rows(workdir, corpus, vocabulary)


@pytest.fixture
def mixture(corpus, vocabulary, tmp_path, monkeypatch):
    """(workdir, rates of its two sources) of a run on a mixture. What is put into the rates is the present mixture."""
    rates = {f"files:{tmp_path}/a.txt": 0.75, f"files:{tmp_path}/b.txt": 0.25}
    monkeypatch.setattr(sources, "rates", lambda corpus: dict(rates))
    workdir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    row_record.write(workdir, run_rows.choose_rows(workdir, corpus, vocabulary), 0)
    return workdir, rates


def test_a_mixture_that_has_changed_is_mixed_as_recorded(mixture, corpus, vocabulary):
    workdir, rates = mixture
    (one, other) = rates
    rates.update({one: 0.5, other: 0.5})
    assert run_rows.choose_rows(workdir, corpus, vocabulary).rates == {one: 0.75, other: 0.25}
    assert run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=True).former is not None


def test_the_order_of_sources_is_the_recorded_one(mixture, corpus, vocabulary, tmp_path):
    """Settings whose sources have another order count as equal, but batches depend on the order."""
    workdir, rates = mixture
    (one, other) = rates
    rates[one] = rates.pop(one)  # now the last
    for gone in (False, True):
        if gone:
            shutil.rmtree(tmp_path / "rows")
        for accept in (False, True):
            chosen = run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=accept)
            assert list(chosen.stores) == list(chosen.rates) == list(chosen.record["sources"]) == [one, other]
            assert chosen.former is None


def test_another_vocabulary_is_refused(workdir, corpus, texts):
    other = vocabulary_training.train(texts[:80], config.Vocabulary(size=380))
    for accept in (False, True):
        with pytest.raises(config.ConfigError, match="is not the vocabulary that the run began with"):
            run_rows.choose_rows(workdir, corpus, other, accept)


def test_one_process_that_has_other_rows_stops_all(workdir, corpus, vocabulary, monkeypatch):
    monkeypatch.setattr(distributed, "all_true", lambda flag: False)
    with pytest.raises(config.ConfigError, match="another process of this run sees other data"):
        run_rows.choose_rows(workdir, corpus, vocabulary)


def test_processes_compare_rows_and_not_what_they_know_of_the_text(workdir, corpus, vocabulary, tmp_path, monkeypatch):
    """A host that has a copy of the rows may have no text."""
    said = []
    monkeypatch.setattr(distributed, "check_equal", lambda what, values: said.append((what, values)))
    run_rows.choose_rows(str(tmp_path / "one"), corpus, vocabulary)
    for path in (tmp_path / "a.txt", tmp_path / "b.txt", *(tmp_path / "rows").glob("*/text.json")):
        path.unlink()
    run_rows.choose_rows(str(tmp_path / "two"), corpus, vocabulary)
    ((what, one), (_, two)) = said
    assert what == "row store" and one == two
    assert all("fingerprint" in entry for entry in one.values())


@pytest.mark.usefixtures("one_device")
def test_a_run_resumes_on_the_rows_it_began_with(texts, tmp_path, capsys):
    """The command itself: changed text, no rows any more, new data accepted."""
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    settings = {
        "BATCH_SIZE": 8,
        "SEQUENCE_LENGTH": 32,
        "TEXT_FILES": tmp_path / "*.txt",
        "Vocabulary.size": 400,
        "Corpus.rows_dir": tmp_path / "rows",
        "Corpus.processes": 1,
        "Corpus.heldout_fraction": 0.1,
        "Model.layers": 1,
        "Model.width": 32,
        "Model.heads": 2,
        "Model.feed_forward": 64,
        "Run.log_every": 1,
        "Run.eval_every": 100,
        "Run.eval_rows": 16,
        "Run.checkpoint_every": 2,
        "Run.rank_every": 0,
        "TRAIN_STEPS": 4,
    }

    def run(name, *more):
        argv = ["--gin_file=tiny.gin", f"--workdir={tmp_path / name}", *more]
        return train.main([*argv, *(f"--gin.{key}={value}" for key, value in settings.items())])

    def losses(name):
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    def forget_last_step(name):
        shutil.rmtree(tmp_path / name / "checkpoints" / "4")

    assert run("run") == 0
    began = losses("run")
    forget_last_step("run")
    (tmp_path / "a.txt").write_text("\n\n".join(texts[::2]))
    assert run("run") == 0
    assert losses("run") == began
    found = runs.read_heldout_rows(runs.open_runs([str(tmp_path / "run")], [], [])[0], 10**9)
    (name,) = (entry["store"] for entry in row_record.read(str(tmp_path / "run"))["sources"].values())
    assert len(found) == len(store.Rows.open(tmp_path / "rows" / name, "heldout")), "analysed on the text of the run"

    forget_last_step("run")
    shutil.rmtree(tmp_path / "rows")

    def files():
        found = (path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "run.lock")
        return sorted((path, path.stat().st_mtime_ns) for path in found)

    before = files()
    with pytest.raises(config.ConfigError, match=r"the text of files:\S+ has changed: \S+a\.txt"):
        run("run")
    assert files() == before
    assert run("run", "--accept_new_data") == 0
    assert "new data after step 2" in capsys.readouterr().out
    assert losses("run")[:2] == began[:2] and losses("run")[2:] != began[2:]
    assert [entry["step"] for entry in row_record.read(str(tmp_path / "run"))["replaced"]] == [2]


def test_the_folder_that_processes_must_share_is_that_of_the_rows(corpus, vocabulary, tmp_path, monkeypatch):
    """`~` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    checked = []
    monkeypatch.setattr(distributed, "check_shared_folder", lambda path, what: checked.append(path))
    run_rows._prepare(dataclasses.replace(corpus, rows_dir="~/elsewhere"), vocabulary)
    assert checked == [str(tmp_path / "elsewhere")]
