"""Pages: what is escaped, what sorts as a number, and figures in the page's colours."""

import re
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from jaxpfl.runs.reports import folders
from jaxpfl.runs.reports.page import Section, code, facts, page, paragraph, svg, table
from jaxpfl.support.console import new_axes


@pytest.mark.parametrize("part", [paragraph, code, lambda words: facts({words: words}), lambda w: table((w,), [(w,)])])
def test_text_is_no_markup(part):
    made = part('<b onclick="x">&\x1b[31m')
    assert "<b onclick" not in made
    assert '"x"' not in made
    assert "&lt;b onclick=&quot;x&quot;&gt;&amp;" in made


@pytest.mark.parametrize(
    ("cell", "key"),
    [
        ("98.9 ±0.1", "98.9"),
        ("1.2e-3", "0.0012"),
        ("-", None),
        ("5.77MB", "5770000.0"),
        ("156.0kB", "156000.0"),
        ("12B", "12.0"),
        ("1e999", None),
        ("-3", "-3.0"),
    ],
)
def test_numbers_sort_by_their_value(cell: str, key: str | None):
    found = re.search(r'data-key="([^"]*)"', table(("name", "value"), [("a", cell)]))
    assert (found and found[1]) == key


def test_sections_without_content_are_left_out():
    made = page("title", [], [Section("first", [paragraph("here")]), Section("second", [])])
    assert made.count("<h2") == 1
    assert 'href="#s0">first' in made


def test_a_figure_takes_the_pages_colours():
    figure, axes = new_axes("x", "y", "a < b")
    axes.plot([0, 1], [0, 1], color="#2a78d6")
    made = svg(figure, "runs/a.b-scores")
    assert 'aria-label="a &lt; b"' in made
    assert "var(--ink)" in made
    assert "var(--grid)" in made
    assert "#2a78d6" in made
    assert not re.search(r"#000000|#ffffff", made)
    assert "<figcaption>a &lt; b</figcaption>" in made  # outside the picture, so that it wraps
    assert made.count("a &lt; b") == 2
    assert all(name.startswith("runs-a-b-scores-") for name in re.findall(r'\bid="([^"]+)"', made))


def test_the_same_figure_is_the_same_text():
    def drawn() -> str:
        figure = matplotlib.figure.Figure()
        figure.subplots().fill_between([0, 1], [0, 1], [1, 2])
        return svg(figure, "name")

    assert drawn() == drawn()


def test_many_dots_are_a_picture():
    figure, axes = new_axes("x", "y", "title")
    at = np.arange(4_000) / 4e3
    axes.scatter(at, at, color="#2a78d6")
    axes.plot(at, at)
    axes.stairs(at[1:], at, fill=True)
    made = svg(figure, "name")
    assert len(made) < 200_000
    assert "data:image/png;base64," in made
    assert "<image" in made


def test_the_config_of_another_program_makes_no_run(tmp_path: Path):
    inner = tmp_path / "project"
    inner.mkdir()
    (inner / "config.json").write_text('{"name": "mine"}')
    assert folders.kind_of(inner) is None
    (inner / "config.json").write_text('{"methods": ["lo')  # as a kill, or a full disk, may leave ours
    assert folders.kind_of(inner) == folders.RUN
