"""Tables keep every cell as it is, and their columns line up."""

from maelm_jax import tables

HEADER, ROWS = ("run", "rank", "loss"), [("mae-lm", 5, "1.50"), ("x", "1,000 (5 ± 0.0)", "-")]


def test_markdown_keeps_every_cell_and_aligns_all_columns_but_the_first_to_the_right():
    head, rule, *lines = tables.markdown(HEADER, ROWS).splitlines()
    assert len({len(line) for line in (head, rule, *lines)}) == 1
    assert [cell.strip() for cell in lines[1].strip("|").split("|")] == ["x", "1,000 (5 ± 0.0)", "-"]
    assert [cell.strip("-") for cell in rule.strip("|").split("|")] == [":", ":", ":"]
    assert rule.startswith("|:-") and rule.endswith("-:|")


def test_plain_aligns_the_columns_named_left():
    assert tables.plain(HEADER, ROWS, left=2).splitlines() == [
        "run     rank             loss",
        "mae-lm  5                1.50",
        "x       1,000 (5 ± 0.0)     -",
    ]


def test_a_table_without_rows_is_its_header():
    assert tables.markdown(HEADER, []).splitlines()[0].split() == ["|", "run", "|", "rank", "|", "loss", "|"]
