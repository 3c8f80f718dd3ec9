"""The prepare command: flags that fit together, bad files, an array job, the vocabulary of a run."""

import functools

import pytest
from testing import ROOT, call

from maelm_jax import config, gin_files, prepare
from maelm_jax.data import vocabularies

PRETRAINED = ROOT / "pretrained"


@pytest.mark.parametrize(
    "flags",
    [
        ["--part=1"],
        ["--parts=4"],
        ["--part=4", "--parts=4"],
        ["--part=0", "--parts=4", "--join"],
        ["--part=0", "--parts=4", "--runner=beam"],
        ["--part=²", "--parts=4"],
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags):
    with pytest.raises(config.ConfigError, match="--part"):
        prepare.main(["--gin_file=tiny.gin", *flags])


def test_an_array_job_leaves_out_a_bad_file_and_says_so(text, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("One document of a few words.\n\n" * 3)
    (tmp_path / "text" / "b.txt").write_text("Another one.\n\nAnd one more, somewhat longer.")
    (tmp_path / "text" / "c.jsonl").write_text("{")
    argv = [
        "--gin_file=tiny.gin",
        f"--gin.TEXT_FILES={tmp_path}/text/*",
        f"--gin.Corpus.rows_dir={tmp_path}/rows",
        "--gin.Corpus.processes=1",
        "--gin.Corpus.heldout_fraction=0.4",
        f"--gin.Vocabulary.file={next(text.glob('rows/vocabulary-*.model'))}",
    ]
    done = call("prepare", *argv)
    assert done.status == 2 and "c.jsonl:1: not JSON" in done.stderr
    for part in (0, 1):
        done = call("prepare", *argv, f"--part={part}", "--parts=2", "--gin.Corpus.skip_bad_files=True")
        assert done.status == 0, done.stderr
    done = call("prepare", *argv, "--join")
    assert done.status == 0, done.stderr
    assert f"{tmp_path}/text/c.jsonl:1" in done.stderr


def test_what_is_logged_is_a_plain_line(text, tmp_path):
    """Also after gin has logged, which sets a format unless there is one."""
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "Sentence number {number}."}}\n' for number in range(40)) + '{"text": ""}\n')
    done = call(
        "prepare",
        "--gin_file=tiny.gin",
        f"--gin.TEXT_FILES={tmp_path}/texts.jsonl",
        f"--gin.Corpus.rows_dir={tmp_path}/rows",
        "--gin.Corpus.processes=1",
        "--gin.Corpus.heldout_fraction=0.3",
        f"--gin.Vocabulary.file={next(text.glob('rows/vocabulary-*.model'))}",
    )
    assert done.status == 0, done.stderr
    lines = done.stderr.splitlines()
    source = f"files:{tmp_path}/texts.jsonl: "
    assert [line for line in lines if line.startswith(source) and "without text" in line]
    assert [line for line in lines if line.startswith(source) and f"{tmp_path}/rows" in line], "where the rows are"


def test_rows_of_a_continued_run_have_the_ids_of_its_encoder(text, tmp_path, capsys):
    argv = [
        "--gin_file=continue.gin",
        f"--gin.TEXT_FILES={text}/*.txt",
        f"--gin.Corpus.rows_dir={tmp_path}",
        "--gin.Corpus.processes=1",
        "--gin.Corpus.heldout_fraction=0.1",
    ]
    assert prepare.main([*argv, f"--gin.Run.init_from={PRETRAINED}"]) == 0
    assert vocabularies.load(PRETRAINED).fingerprint[:12] in capsys.readouterr().out


def test_rows_for_a_run_have_the_ids_of_its_vocabulary(text, tmp_path, capsys):
    """Also if the text has changed, so that a new vocabulary would be another one."""
    run = tmp_path / "run"
    (run / "vocabulary").mkdir(parents=True)
    documents = (text / "topics.txt").read_text().split("\n\n")
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:40]))
    settings = {"TEXT_FILES": f"{tmp_path}/*.txt", "Corpus.rows_dir": tmp_path / "rows", "Corpus.heldout_fraction": 0.2}
    experiment = gin_files.load(["tiny.gin"], [f"{name}={value}" for name, value in settings.items()])
    (run / "config.gin").write_text(gin_files.render(experiment))
    trained = vocabularies.load(next(text.glob("rows/vocabulary-*.model")))
    trained.save(run / "vocabulary")
    assert prepare.main([f"--workdir={run}"]) == 0
    assert trained.fingerprint[:12] in capsys.readouterr().out


@pytest.mark.parametrize(("documents", "is_told"), [({}, True), ({"rows.jsonl": 40}, False)])
def test_short_documents_in_long_rows_are_told(text, tmp_path, documents, is_told):
    lines = ['{"text": "One of the sentences."}\n' for _ in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(line.replace("One", f"Number {number}") for number, line in enumerate(lines)))
    documents = {f"files:{tmp_path}/{name}": rule for name, rule in documents.items()}
    done = call(
        "prepare",
        "--gin_file=tiny.gin",
        f"--gin.TEXT_FILES={tmp_path}/rows.jsonl",
        f"--gin.Corpus.rows_dir={tmp_path}/rows",
        f"--gin.Corpus.documents={documents}",
        "--gin.SEQUENCE_LENGTH=256",
        "--gin.Encoder.max_positions=256",
        "--gin.Corpus.processes=1",
        "--gin.Corpus.heldout_fraction=0.3",
        f"--gin.Vocabulary.file={next(text.glob('rows/vocabulary-*.model'))}",
    )
    assert done.status == 0, done.stderr
    assert ("Corpus.documents" in done.stderr) == is_told
    assert "tokens/document" in done.stdout


def test_a_file_of_short_documents_beside_long_ones_is_named(text, tmp_path):
    """A mean over all files would hide it. A file of one short document is none, nor is a small file."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "Number {number} is a sentence."}}\n' for number in range(400)))
    (tmp_path / "b.txt").write_text("\n".join("A line of a long document." for _ in range(2000)))
    (tmp_path / "note.txt").write_text("Read me.")
    (tmp_path / "two.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    prepare_text = functools.partial(
        call,
        "prepare",
        "--gin_file=tiny.gin",
        "--gin.Corpus.processes=1",
        "--gin.Corpus.heldout_fraction=0.3",
        f"--gin.Corpus.rows_dir={tmp_path}/rows",
        f"--gin.Vocabulary.file={next(text.glob('rows/vocabulary-*.model'))}",
    )
    told = prepare_text(f"--gin.TEXT_FILES={tmp_path}/*.*")
    assert told.status == 0, told.stderr
    [line] = [line for line in told.stderr.splitlines() if "Corpus.documents" in line]
    assert f"files:{tmp_path}/a.jsonl" in line
    advised = prepare_text(
        f"--gin.Corpus.sources={{'files:{tmp_path}/a.jsonl': 'all', 'files:{tmp_path}/[bnt]*.*': 'all'}}",
        f"--gin.Corpus.documents={{'files:{tmp_path}/a.jsonl': 40}}",
    )
    assert advised.status == 0, advised.stderr
    assert "Corpus.documents" not in advised.stderr
