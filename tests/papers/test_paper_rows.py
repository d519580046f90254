"""Our value beside the printed one: difference, spread, tables, and the page of all results."""

import math
import re
from pathlib import Path

import pytest

from jaxpfl.benchmarks.papers import results, show
from jaxpfl.benchmarks.papers.compare import difference, remark, row, spread
from jaxpfl.benchmarks.papers.declared import UNPRINTED, Printed
from jaxpfl.benchmarks.papers.registry import EXPERIMENTS
from jaxpfl.benchmarks.papers.results import Result


def test_difference_in_joint_standard_deviations():
    assert difference(12.0, 3.0, Printed(2.0, 4.0)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ours", "std", "printed"),
    [
        (None, None, Printed(2.0, 1.0)),
        (1.0, None, Printed(2.0, 1.0)),
        (1.0, 1.0, Printed(2.0)),
        (1.0, 1.0, UNPRINTED),
        (1.0, 0.0, Printed(2.0, 0.0)),
    ],
)
def test_no_difference_without_both_spreads(ours, std, printed):
    assert difference(ours, std, printed) is None


def test_what_is_not_comparable_has_no_difference():
    assert row("a", "b", 1.0, 0.5, Printed(2.0, 0.5), comparable=False).difference is None
    assert row("a", "b", 1.0, 0.5, Printed(2.0, 0.5)).difference == pytest.approx(-math.sqrt(2))


def test_spread():
    assert spread([]) == (None, None)
    assert spread([3.0]) == (3.0, None)
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert spread([1.0, math.nan]) == (None, None)
    assert spread([15.902] * 5)[1] == 0  # exactly, though the mean is off by its last digit


def test_a_remark_stays_one():
    found = row("A", "eps 1", None, None, UNPRINTED, [remark("no setting: diverged; failed"), "of a"])
    assert found.note.split("; ") == ["no setting: diverged, failed", "of a"]


def a_result(*, quick=False):
    rows = tuple(
        row(method, "eps 1", 90.0, 0.5, Printed(91.0, 0.5), [note, "of both"])
        for method, note in (("A", "of a"), ("B", ""))
    )
    return Result("adaped-table2", "a paper, Table 2", "a table", quick, "jaxpfl papers run x", 1.5, {"jax": "0"}, rows)


def test_markdown_has_every_row_its_notes_and_its_origin():
    text = show.markdown([a_result()])
    assert "| eps 1 | A | 90 ±0.5 | 91 ±0.5 | -1.4 |" in text
    assert "- A: of a\n" in text
    assert "- all rows: of both\n" in text
    assert "jaxpfl papers run x: 1.5 minutes; jax 0" in text
    assert show.QUICK not in text


def test_tidy_table_of_all_results(tmp_path):
    results.write_tidy(tmp_path, [a_result(), a_result(quick=True)])
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0].startswith("name,paper,method,setting,ours,std,printed,printed_std,difference,note,quick")
    assert len(lines) == 5


def test_results_that_come_with_the_package_can_be_read():
    found = results.committed()
    assert found
    for one in found:
        assert not one.quick
        assert one.minutes > 0
        assert one.versions["jax"]
        for own in one.rows:
            expected = difference(own.ours, own.std, Printed(own.printed, own.printed_std))
            if one.command != f"jaxpfl papers run {one.name}":
                expected = None
                assert own.note.startswith("not the declared run: ")
                assert re.search(r"clipping norm 0\.\d+ chosen on validation at eps [\d.]+", own.note)
            assert own.difference == (None if expected is None else pytest.approx(expected))


PAGE = Path(__file__).parents[2] / "docs" / "records" / "results.md"
BEGIN, END = "<!-- jaxpfl papers show --markdown -->\n\n", "<!-- end of results -->"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not beside the tests")
def test_the_page_has_what_the_command_prints():
    order = list(EXPERIMENTS)
    found = sorted(results.committed(), key=lambda one: order.index(one.name))
    _, _, rest = PAGE.read_text().partition(BEGIN)
    got, _, _ = rest.partition(END)
    assert got == show.markdown(found)
