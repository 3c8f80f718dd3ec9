"""One file of a sentence task: what is read, and what is wrong in it."""

import pathlib

import pytest
from testing import write_text

from maelm_jax import config
from maelm_jax.finetuning import glue, sentence_data, sentence_files

RTE = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    "text,message",
    [
        ("index\tsentence1\tlabel\n0\tA.\tentailment\n", "train.tsv:1: no column 'sentence2'; rte needs sentence1, sentence2, label"),
        (
            RTE + "0\tA.\tB.\tentailment\n1\tA.\tB.\tperhaps\n",
            "train.tsv:3: unknown label 'perhaps' in column label; rte has entailment, not_entailment",
        ),
        (RTE + "0\tA.\tB.\tentailment\n1\tA. B.\tentailment\n", "train.tsv:3: 3 columns, expected 4 (index, sentence1, sentence2, label)"),
        (RTE, "train.tsv: holds no example"),
        ("", "train.tsv: the file is empty"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    write_text(tmp_path / "RTE" / "train.tsv", text)
    with pytest.raises(config.ConfigError) as error:
        sentence_files.read(glue.TASKS["rte"], tmp_path / "RTE" / "train.tsv", labelled=True)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_score_out_of_range(tmp_path):
    write_text(tmp_path / "dev.tsv", "sentence1\tsentence2\tscore\nA.\tB.\t5.5\n")
    with pytest.raises(config.ConfigError, match="dev.tsv:2: unknown label '5.5'.*numbers from 0 to 5"):
        sentence_files.read(glue.TASKS["stsb"], tmp_path / "dev.tsv", labelled=True)


def test_empty_sentences_and_broken_rows_are_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    first, last = "1\t1\t2\tWhy?\t\t0\n", "4\t5\t6\tHow?\tHow so?\t1\n"
    write_text(tmp_path / "QQP" / "train.tsv", header + first + "2\t3\n" + last)
    write_text(tmp_path / "QQP" / "dev.tsv", header + last)
    found = sentence_data.load(glue.TASKS["qqp"], config.Finetune(data_dir=str(tmp_path)), config.Corpus()).train
    assert found.sentences == [("Why?", ""), ("How?", "How so?")] and found.labels.tolist() == [0, 1]
    assert any("1 lines with missing columns left out" in note for note in found.notes)
    assert any("1 examples with an empty sentence, kept" in note for note in found.notes)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_broken_row_of_a_file_to_predict_is_not_left_out(tmp_path, labelled):
    """The lines of the predictions would no longer be those of the file."""
    write_text(tmp_path / "test.tsv", "id\tquestion1\tquestion2\tis_duplicate\n0\tA?\tB?\t1\n1\tC?\n")
    with pytest.raises(config.ConfigError, match="test.tsv:3: 2 columns"):
        sentence_files.read(glue.TASKS["qqp"], tmp_path / "test.tsv", labelled)


MNLI_TEST = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2"


TEST_HEADERS = {
    "sst2": "index sentence",
    "mrpc": "index;#1 ID;#2 ID;#1 String;#2 String",
    "qqp": "id question1 question2",
    "mnli": MNLI_TEST,
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2",
    "qnli": "index question sentence",
    "rte": "index sentence1 sentence2",
    "wnli": "index sentence1 sentence2",
    "cola": "index sentence",
}


# Whose published test files look alike: columns cannot tell them apart.
ALIKE = [{"cola", "sst2"}, {"rte", "wnli"}]


def published_test_file(task: str, folder: pathlib.Path) -> pathlib.Path:
    header = TEST_HEADERS[task].split(";" if ";" in TEST_HEADERS[task] else None)
    path = folder / f"{task}.tsv"
    path.write_text("\t".join(header) + "\n" + "\t".join("The cat." for _ in header) + "\n")
    return path


@pytest.mark.parametrize("task", glue.TASKS)
@pytest.mark.parametrize("other", glue.TASKS)
def test_the_published_test_file_of_another_task_is_refused(task, other, tmp_path):
    path = published_test_file(other, tmp_path)
    if other == task or {task, other} in ALIKE or (task, other) in {("mnli", "rte"), ("mnli", "wnli"), ("stsb", "rte"), ("stsb", "wnli")}:
        found = sentence_files.read(glue.TASKS[task], path, labelled=False)
        assert len(found.sentences) == 1, "the header is no example"
        return
    with pytest.raises(config.ConfigError, match=rf"{other}.tsv:1: .*{task}.*") as error:
        sentence_files.read(glue.TASKS[task], path, labelled=False)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "task,text,message",
    [
        ("rte", "0\tA.\tB.\n", "x.tsv:1: no column 'sentence1', 'sentence2'; rte needs sentence1, sentence2, the header has 0, A., B."),
        ("sst2", "gj04\t1\t\tNight.\n", "x.tsv:1: no column 'sentence'"),
        ("cola", "Quality\t#1 ID\t#2 ID\t#1 String\n1\t2\t3\tA.\n", "x.tsv:1: unknown label '#1 ID' in column label; cola has 0, 1"),
        ("cola", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", "x.tsv:1: unknown label 'sentence1' in column label; cola has 0, 1"),
        ("cola", "A sentence.\nAnother.\n", r"x.tsv:1: 1 columns, expected 4 \(source, label, mark, sentence\)"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", "x.tsv: the column label holds 1: labels of .*wnli, not of rte"),
        ("wnli", "sentence1\tsentence2\tlabel\nA.\tB.\tnot_entailment\n", "holds not_entailment: labels of qnli, rte, not of wnli"),
        ("rte", "sentence1\tsentence1\tsentence2\nA.\tB.\tC.\n", "x.tsv:1: more than one column 'sentence1'"),
    ],
)
def test_a_file_of_another_form_is_refused(task, text, message, tmp_path):
    (tmp_path / "x.tsv").write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        sentence_files.read(glue.TASKS[task], tmp_path / "x.tsv", labelled=False)


def test_unknown_labels_beside_the_text_do_not_matter(tmp_path):
    for placeholder in ("-1", "", "?", "hidden", "entailment"):
        (tmp_path / "x.tsv").write_text(f"sentence1\tsentence2\tlabel\nA.\tB.\t{placeholder}\n")
        assert sentence_files.read(glue.TASKS["rte"], tmp_path / "x.tsv", labelled=False).sentences == [("A.", "B.")]


def test_a_row_of_ones_own_file_with_a_tab_too_many_is_named(tmp_path):
    task = glue.task_of("own", config.CustomTask(train_file="a", dev_file="b", labels=("no", "yes")))
    (tmp_path / "x.tsv").write_text("sentence\tlabel\nA.\tyes\nB.\tC.\tno\n")
    for labelled in (True, False):
        with pytest.raises(config.ConfigError, match=r"x.tsv:3: 3 columns, expected 2 \(sentence, label\)"):
            sentence_files.read(task, tmp_path / "x.tsv", labelled)
