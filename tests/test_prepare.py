"""The prepare command: flags that fit together, bad files, an array job."""

import pathlib

import pytest
from testing import call

from maelm_jax import config, gin_files, prepare
from maelm_jax.data import vocabularies

PRETRAINED = pathlib.Path(__file__).parent.parent / "pretrained"


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--host=2", "--hosts=2"], "host must lie between 0 and hosts - 1"),
        (["--shard=1"], "give both, or neither"),
        (["--shards=4"], "give both, or neither"),
        (["--shard=4", "--shards=4"], "shard must lie between"),
        (["--shard=0", "--shards=4", "--join"], "give one of them"),
        (["--hosts=2", "--join"], "give one of them"),
        (["--shard=²", "--shards=4"], "--shard: must be an integer from 0"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line(flags, message):
    with pytest.raises(config.ConfigError, match=message) as caught:
        prepare.main(["--gin_file=tiny.gin", *flags])
    assert "\n" not in str(caught.value)


def test_an_array_job_leaves_out_a_bad_file_and_says_so(text, tmp_path):
    (tmp_path / "text").mkdir()
    for name, content in (("a.txt", "One document of a few words.\n\n" * 3), ("b.txt", "Another one.\n\nAnd one more, somewhat longer.")):
        (tmp_path / "text" / name).write_text(content)
    (tmp_path / "text" / "c.jsonl").write_text("{")
    argv = [
        "--gin_file=tiny.gin",
        f"--gin.TEXT_FILES={tmp_path}/text/*",
        f"--gin.Corpus.rows_dir={tmp_path}/rows",
        "--gin.Corpus.processes=1",
        f"--gin.Vocabulary.file={next(text.glob('**/vocabulary-*/sentencepiece.model'))}",
    ]
    assert "c.jsonl:1: not JSON" in call("prepare", *argv).stderr
    for shard in (0, 1):
        done = call("prepare", *argv, f"--shard={shard}", "--shards=2", "--skip_bad_files")
        assert f"shard {shard} of 2 is done" in done.stdout, done.stderr
    done = call("prepare", *argv, "--join", "--skip_bad_files")
    assert done.status == 0, done.stderr
    assert f"documents: 0 short, 0 refused, 0 duplicate; files: 1 ({tmp_path}/text/c.jsonl)" in done.stdout


def test_rows_of_a_continued_run_have_the_ids_of_its_encoder(text, tmp_path, capsys):
    argv = ["--gin_file=continue.gin", f"--gin.TEXT_FILES={text}/*.txt", f"--gin.Corpus.rows_dir={tmp_path}", "--gin.Corpus.processes=1"]
    assert prepare.main([*argv, f"--gin.Run.init_from={PRETRAINED}"]) == 0
    assert vocabularies.load(PRETRAINED).fingerprint[:12] in capsys.readouterr().out


def test_rows_for_a_run_have_the_ids_of_its_vocabulary(text, tmp_path, capsys):
    """Also if the text has changed, so that a new vocabulary would be another one."""
    run = tmp_path / "run"
    (run / "vocabulary").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("\n\n".join(sorted(text.glob("*.txt"))[0].read_text().split("\n\n")[:40]))
    experiment = gin_files.load(["tiny.gin"], [f"TEXT_FILES='{tmp_path}/*.txt'", f"Corpus.rows_dir='{tmp_path}/rows'", "Corpus.processes=1"])
    (run / "config.gin").write_text(gin_files.render(experiment))
    trained = vocabularies.load(next(text.glob("**/vocabulary-*/sentencepiece.model")))
    trained.save(run / "vocabulary")
    assert prepare.main([f"--workdir={run}"]) == 0
    assert trained.fingerprint[:12] in capsys.readouterr().out
