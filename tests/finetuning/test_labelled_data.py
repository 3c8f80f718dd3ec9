"""Tables of labelled data as users keep them: tab-separated, .csv and .jsonl, packed or not, give the same examples."""

import csv
import io
import json
import pathlib

import numpy as np
import pytest
from testing import PACK, write_text

from maelm_jax import config
from maelm_jax.finetuning import glue, labelled_data

COLUMNS = ("question", "good", "answer")
ROWS = [("What is\u00a0it?", "no", 'A "word", quoted.'), ("Why, then?", "yes", "It is; so. \u00e9\u4e2d"), ("", "no", "1,000"), ("'", "yes", "\\n")]
OWN = glue.spec_of("own", config.CustomTask(columns=("question", "answer"), label="good", labels=("no", "yes")))
FOUND_HERE = {"cola": (8551, 1043), "sst2": (67349, 872), "mrpc": (3668, 408), "rte": (2490, 277), "qqp": (20105, 3391), "mnli": (9888, 9815)}


def read(path, spec=OWN, labelled=True) -> list[glue.Example]:
    return glue.read_table(spec, path, labelled, [])


def write(path: pathlib.Path, rows=ROWS):
    name = path.name.lower()
    if ".jsonl" in name:
        text = "".join(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
    elif ".csv" in name:
        file = io.StringIO()
        csv.writer(file).writerows([COLUMNS, *rows])
        text = "\ufeff" + file.getvalue()  # as spreadsheets write it
    else:
        text = "".join("\t".join(row) + "\n" for row in [COLUMNS, *rows])
    write_text(path, text)
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a", "a.csv", "a.CSV", "a.jsonl", "a.csv.gz", "a.jsonl.xz", "a.tsv.gz", "a.csv.zst", "a.jsonl.zst"])
def test_every_form_gives_the_same_examples(name, tmp_path):
    examples = read(write(tmp_path / name))
    assert [example.texts for example in examples] == [(question.strip(), answer.strip()) for question, _, answer in ROWS]
    assert [example.label for example in examples] == [0, 1, 0, 1]


def test_a_cell_of_csv_with_several_lines_is_one(tmp_path):
    text = 'question, good, answer\r\n"two\r\nlines", yes, "a ""b"", c"\r\n\r\nlast,no,\r\n'
    (tmp_path / "a.csv").write_text(f'{text}"{"long " * 50_000}",no,x\n')
    examples = read(tmp_path / "a.csv")
    assert [example.texts for example in examples[:2]] == [("two\nlines", 'a "b", c'), ("last", "")]
    assert len(examples[2].texts[0]) == 249_999
    (tmp_path / "b.csv").write_text("question,note,note,good,answer\na,,,no,b\n")
    assert read(tmp_path / "b.csv")[0].texts == ("a", "b"), "nobody reads the columns of one name"


def test_fields_of_jsonl_are_found_by_name_and_those_that_nobody_reads_may_hold_anything(tmp_path):
    lines = [{"question": "a", "meta": {"x": 1}, "good": 1, "answer": 2, "comment": None}, {"answer": "b", "good": 0, "question": "c"}]
    (tmp_path / "a.ndjson").write_text("\n".join([json.dumps(lines[0])[:-1] + ', "more": NaN}', "", json.dumps(lines[1])]))
    numbers = glue.spec_of("own", config.CustomTask(columns=("question", "answer"), label="good", labels=("0", "1")))
    assert [example[:2] for example in read(tmp_path / "a.ndjson", numbers)] == [(("a", "2"), 1), (("c", "b"), 0)]
    (tmp_path / "c.jsonl").write_text(json.dumps(lines[0] | {"question": "a cut \ud83d"}))
    assert read(tmp_path / "c.jsonl", numbers)[0].texts == ("a cut ?", "2"), "no tokenizer takes half a character"
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line | {"good": None}) for line in lines))
    assert len(read(tmp_path / "b.jsonl", labelled=False)) == 2


@pytest.mark.parametrize(
    ("name", "text", "location"),
    [
        ("a.csv", 'question,good,answer\nfine,no,x\n"open,no,x\n' + "more,no,x\n" * 9, "a.csv:3"),
        ("a.csv", 'question,good,answer\n"a"b,no,x\n', "a.csv:2"),
        ("a.csv", "question,good,answer\na,no\n", "a.csv:2"),
        ("a.csv", "question\tgood\tanswer\na\tno\tx\n", "a.csv:1: no column 'question'.*commas in a .csv"),
        ("a.json", '[{"question": "a"}]', "a.json: .*name it .jsonl"),
        ("a.tsv", "question,good,answer\na,no,x\n", "a.tsv:1.*tabs in any other"),
        ("a.tsv", "question\tgood\tanswer\na\tno\n", "a.tsv:2"),
        ("a.tsv", "question\tgood\tanswer\na\tno\tb\tc\n", "a.tsv:2"),
        ("a.tsv", b"question\tgood\tanswer\ra\tno\tb\r", "a.tsv"),
        ("a.jsonl", '{"question": "a", "answer": "b"}\n', "a.jsonl:1: the field 'good'"),
        ("a.jsonl", '{"question": "a", "good": "no", "answer": "b"}\n{"question": "a", "good": "no"}\n', "a.jsonl:2: the field 'answer'"),
        ("a.jsonl", '{"question": NaN, "good": "no", "answer": "b"}\n', "a.jsonl:1: the field 'question'"),
        ("a.jsonl", "{\n", "a.jsonl:1"),
        ("a.jsonl", '{"question": "a", "good": "maybe", "answer": "b"}\n', "a.jsonl:1: unknown label 'maybe' in column good; known are no, yes"),
        ("a.tsv", "question\tgood\tanswer\n", "a.tsv: holds no example"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        ("a.tsv", "question\tgood\tanswer\tanswer\na\tno\tb\tc\n", "a.tsv:1: .*'answer'"),
        ("a.csv", "question,good,good,answer\na,no,yes,b\n", "a.csv:1: .*'good'"),
        ("a.jsonl", '{"question": "a", "good": "no", "good": "yes", "answer": "b"}\n', "a.jsonl:1 .*'good'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(name, text, location, tmp_path):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(config.ConfigError, match=location):
        read(tmp_path / name)


def test_an_empty_line_is_no_example_unless_it_is_an_empty_text(tmp_path):
    (tmp_path / "a.tsv").write_text("question\tgood\tanswer\na\tno\tb\n\nc\tyes\td\n\n")
    assert [example.label for example in read(tmp_path / "a.tsv")] == [0, 1]
    one_column = glue.spec_of("own", config.CustomTask(columns=("question",), label="good", labels=("no", "yes")))
    (tmp_path / "b.tsv").write_text("question\na\n\nb\n")
    assert [example.texts for example in read(tmp_path / "b.tsv", one_column, labelled=False)] == [("a",), ("",), ("b",)]


@pytest.mark.parametrize("name", FOUND_HERE)
def test_the_real_files(name, shared_data):
    notes = []
    train, dev = glue.read(glue.SPECS[name], config.Finetune(data_dir=str(shared_data)), notes)
    found = next(iter(dev.values()))
    assert (len(train), len(found)) == FOUND_HERE[name]
    classes = set(range(len(glue.SPECS[name].kind.names)))
    assert {example.label for example in train} == {example.label for example in found} == classes
    if name == "mnli":
        assert list(dev) == ["matched"] and "dev_mismatched" in notes[-1]
    if name == "mrpc":  # quotes are characters
        assert found[0].texts[1].startswith('"The foodservice') and found[0].label == 1


@pytest.mark.parametrize("packing", PACK)
def test_cola_has_no_header_and_its_test_file_has_one(tmp_path, packing):
    write_text(tmp_path / "CoLA" / "train.tsv", 'gj04\t1\t\tThe "sailors\ngj04\t0\t*\tThem sleeps.\n')
    write_text(tmp_path / "CoLA" / f"dev.tsv{packing}", "gj04\t1\t\tNight.\n")
    train, dev = glue.read(glue.SPECS["cola"], config.Finetune(data_dir=str(tmp_path)), [])
    assert train == [(('The "sailors',), 1, 0), (("Them sleeps.",), 0, 1)] and dev[""] == [(("Night.",), 1, 0)]
    write_text(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past.\n")
    assert read(tmp_path / "test.tsv", glue.SPECS["cola"], labelled=False)[0].texts == ("Bill whistled past.",)
    write_text(tmp_path / "own.csv", "id,text,date,place\n1,A cat.,2020,Rome\n")
    with pytest.raises(config.ConfigError, match="no column 'sentence'"):
        read(tmp_path / "own.csv", glue.SPECS["cola"], labelled=False)


def test_stsb_qnli_and_mnli_as_distributed(tmp_path):
    settings = config.Finetune(data_dir=str(tmp_path))
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    rows = '0\tnews\tf\t2012\t0001\tn/a\tn/a\tA plane.\tAn air "plane.\t5.000\n1\tnews\tf\t2012\t0004\tn/a\tn/a\tA man.\tA dog.\t0.600\textra\n'
    write_text(tmp_path / "glue" / "STS-B" / "train.tsv", "\ufeff" + header + rows)
    write_text(tmp_path / "glue" / "STS-B" / "dev.tsv", (header + rows).replace("\n", "\r\n"))
    train, dev = glue.read(glue.SPECS["stsb"], settings, [])
    assert train[0] == (("A plane.", 'An air "plane.'), 5.0, 0) and [example.label for example in dev[""]] == [5.0, 0.6]
    pair = "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tneutral\n"
    for part in ("train", "dev", "dev_matched", "dev_mismatched"):
        write_text(tmp_path / "QNLI" / f"{part}.tsv", "index\tquestion\tsentence\tlabel\n0\tWhen?\tThen.\tentailment\n")
        write_text(tmp_path / "MNLI" / f"{part}.tsv", pair)
    assert glue.read(glue.SPECS["qnli"], settings, []).train == [(("When?", "Then."), 0, 0)]
    assert list(glue.read(glue.SPECS["mnli"], settings, []).dev) == ["matched", "mismatched"]
    write_text(tmp_path / "MNLI" / "test_matched.tsv", pair)
    write_text(tmp_path / "AX" / "AX.tsv", "index\tsentence1\tsentence2\n0\tThe cat.\tA cat.\n")
    tests = glue.read_tests(glue.SPECS["mnli"], settings, [])
    assert {name: examples[0].texts for name, examples in tests.items()} == {"MNLI-m": ("A.", "B."), "AX": ("The cat.", "A cat.")}


def test_empty_texts_and_broken_rows_of_the_published_files_are_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    write_text(tmp_path / "QQP" / "train.tsv", header + "1\t1\t2\tWhy?\t\t0\n2\t3\n4\t5\t6\tHow?\tHow so?\t1\n")
    write_text(tmp_path / "QQP" / "dev.tsv", header + "2\t3\n4\t5\t6\tHow?\tHow so?\t1\n")
    notes = []
    found = glue.read(glue.SPECS["qqp"], config.Finetune(data_dir=str(tmp_path)), notes).train
    assert [example.texts for example in found] == [("Why?", ""), ("How?", "How so?")]
    assert any("1 lines" in note for note in notes) and any("1 examples with an empty text" in note for note in notes)
    with pytest.raises(config.ConfigError, match="train.tsv:3"):  # the lines of the predictions would no longer be those of the file
        read(tmp_path / "QQP" / "train.tsv", glue.SPECS["qqp"])


def test_a_score_beyond_the_range_is_named(tmp_path):
    write_text(tmp_path / "dev.tsv", "sentence1\tsentence2\tscore\nA.\tB.\t5.5\n")
    with pytest.raises(config.ConfigError, match="dev.tsv:2.*'5.5'.*0 to 5"):
        read(tmp_path / "dev.tsv", glue.SPECS["stsb"])


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(config.ConfigError, match=r"train.tsv.*RTE/.*Finetune\.tasks"):
        glue.find_files(glue.SPECS["rte"], config.Finetune(data_dir=str(tmp_path)))
    for data_dir in (__file__, f"{__file__}/under", str(tmp_path / "nowhere")):
        with pytest.raises(config.ConfigError, match="DATA_DIR"):
            labelled_data.find_file(data_dir, "x")


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path, tfds_folder):
    """A dataset of GLUE's name in TFDS format, read by the real reader."""
    tfds = pytest.importorskip("tensorflow_datasets")
    text, label = tfds.features.Text(), tfds.features.ClassLabel(names=["entailment", "not_entailment"])
    features = tfds.features.FeaturesDict({"sentence1": text, "sentence2": text, "label": label, "idx": np.int32})

    def records(split):
        # TFDS stores examples shuffled.
        return [{"sentence1": f"{split} {number} é", "sentence2": "B.", "label": number % 2, "idx": number} for number in (2, 0, 1)]

    tfds_folder("glue/rte/2.0.0", features, records)
    train, dev = glue.read(glue.SPECS["rte"], config.Finetune(), [])
    assert train[1] == (("train 1 é", "B."), 1, 1) and dev[""][2].texts == ("validation 2 é", "B.")
    assert labelled_data.tfds_records("glue/rte", "test") is None


# A file of one's own, with TRAIN_FILE alone.


def test_a_parquet_file_is_a_table(tmp_path):
    """Its numbers are labels as they are in .jsonl, and a missing text is named with its row."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"text": ["a", "b", "c"], "label": [10, 9, 9], "score": [0.5, 1.0, float("nan")], "topics": [["x", "y"], [], ["z"]]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    custom = completed(tmp_path / "a.parquet")
    assert (custom.columns, custom.labels) == (("text",), ("9", "10"))
    assert [example[:2] for example in read(tmp_path / "a.parquet", glue.spec_of("own", custom))] == [(("a",), 1), (("b",), 0), (("c",), 0)]
    assert completed(tmp_path / "a.parquet", label="topics", label_separator=",").labels == ("x", "y", "z")
    scores = glue.spec_of("own", config.CustomTask(columns=("text",), label="score", score_range=(0.0, 1.0)))
    with pytest.raises(config.ConfigError, match=r"a\.parquet:3: .*'score'"):
        read(tmp_path / "a.parquet", scores)
    with pytest.raises(config.ConfigError, match=r"a\.parquet.*'class'.*text, label"):
        completed(tmp_path / "a.parquet", label="class")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-50])
    with pytest.raises(config.ConfigError, match=r"b\.parquet"):
        completed(tmp_path / "b.parquet")


NUMBERS = [str(number) for number in range(12)]


@pytest.mark.parametrize(
    ("found", "labels"),
    [
        (NUMBERS, NUMBERS),
        (["10", "-1", "9", "0"], ["-1", "0", "9", "10"]),
        (["10.0", "0.0", "9.0"], ["0.0", "9.0", "10.0"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["02", "10", "1", "01"], ["01", "1", "02", "10"]),
    ],
)
def test_labels_that_are_whole_numbers_are_classes_in_the_order_of_the_numbers(tmp_path, found, labels):
    """So the argmax of an exported model is the label."""
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"x,{label}\n" for label in found))
    assert completed(tmp_path / "a.csv").labels == tuple(labels)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x", "label": [label, found[0]]}) + "\n" for label in found))
    assert completed(tmp_path / "a.jsonl", label_separator=",").labels == tuple(labels)


def completed(path, **custom) -> config.CustomTask:
    settings = config.Finetune(tasks="own", train_file=str(path), custom=config.CustomTask(**custom))
    return glue.completed(settings).custom


@pytest.mark.parametrize(
    "header,columns",
    [
        ("text,label", ("text",)),
        ("id,label,text,text2", ("text", "text2")),
        ("sentence,label", ("sentence",)),
        ("sentence1,label,sentence2", ("sentence1", "sentence2")),
    ],
)
def test_columns_and_labels_are_those_of_the_training_file(tmp_path, header, columns):
    values = {"label": ("yes", "no", "yes")}
    rows = [",".join(values.get(name, ("a", "b", "c"))[number] for name in header.split(",")) for number in range(3)]
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]))
    custom = completed(tmp_path / "a.csv")
    assert (custom.columns, custom.labels) == (columns, ("no", "yes"))
    assert completed(tmp_path / "a.csv", labels=("yes", "no")).labels == ("yes", "no"), "what is named stays"


def test_labels_of_a_text_with_several_are_found(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": ["war", "art"]}\n{"text": "b", "label": "sport"}\n{"text": "b", "label": []}\n')
    assert completed(tmp_path / "a.jsonl", label_separator=",").labels == ("art", "sport", "war")


@pytest.mark.parametrize(
    "text,message",
    [
        ("body,label\na,yes\nb,no\n", "a.csv.*body, label.*CustomTask.columns"),
        ("text,label\na,yes\nb,yes\n", "a.csv.*'label'"),
        ("text,label\n" + "".join(f"a,{number / 7}\n" for number in range(200)), "a.csv.*'label'.*score_range"),
        ("text,class\na,yes\n", "a.csv:1.*'label'"),
        ("text,label\na,yes\nb,\nc,no\n", "a.csv:3: .*'label' is empty"),
        ('text,label\na,"two\nlines"\nb,no\n', "labels: .*two"),
    ],
)
def test_what_is_not_found_is_named(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        completed(tmp_path / "a.csv")


def test_without_a_dev_file_a_tenth_is_held_out(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(57)))
    settings = glue.completed(config.Finetune(tasks="own", train_file=str(tmp_path / "a.csv")))
    notes = []
    train, dev = glue.read(glue.spec_of("own", settings.custom), settings, notes)
    assert (len(train), len(dev[""])) == (52, 5) and sorted(train + dev[""], key=lambda example: example.number) == read(
        tmp_path / "a.csv", glue.spec_of("own", settings.custom)
    )
    assert "5 of the 57" in notes[-1]


@pytest.mark.parametrize("ending", labelled_data.TABLES)
def test_a_table_is_read_as_it_was_written(ending, tmp_path):
    """Also where rows have other columns, as in .jsonl."""
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    rows = [{"a": 'a "word", é', "b": "1"}, {"a": "x", "late": "y"}]
    labelled_data.write(tmp_path / f"t{ending}", rows)
    found = [row.values for row in labelled_data.read(tmp_path / f"t{ending}", ["a"])]
    assert [{name: value for name, value in row.items() if value} for row in found] == rows


def test_columns_beside_the_predictions_are_of_any_type_in_parquet(tmp_path):
    """pyarrow cannot infer the type of a map. What it cannot write is named."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    maps = pa.array([[("a", 1)], [("b", 2), ("c", 3)]], pa.map_(pa.string(), pa.int64()))
    parquet.write_table(pa.table({"text": ["x", "y"], "more": maps}), tmp_path / "a.parquet")
    rows = [row.values | {"prediction": label} for row, label in zip(labelled_data.read(tmp_path / "a.parquet", ["text"]), "01", strict=True)]
    labelled_data.write(tmp_path / "b.parquet", rows, str(tmp_path / "a.parquet"))
    written = parquet.read_table(tmp_path / "b.parquet")
    assert written["more"].combine_chunks().equals(maps) and written["prediction"].to_pylist() == ["0", "1"]
    assert labelled_data.columns_of(tmp_path / "b.parquet") == ["text", "more", "prediction"]
    with pytest.raises(config.ConfigError, match="'id'"):
        labelled_data.write(tmp_path / "c.parquet", [{"id": 1}, {"id": "b"}])


def test_a_cell_with_a_tab_or_a_line_fits_csv_and_no_tsv(tmp_path):
    rows = [{"a": "one\ttwo\nthree"}]
    labelled_data.write(tmp_path / "t.csv", rows)
    assert labelled_data.read(tmp_path / "t.csv", ["a"])[0].values == rows[0]
    with pytest.raises(config.ConfigError, match="t.tsv.*csv"):
        labelled_data.write(tmp_path / "t.tsv", rows)
    assert not (tmp_path / "t.tsv").exists()
