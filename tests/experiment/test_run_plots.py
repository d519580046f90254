"""The plots of runs that are short, or whose global models lie far below."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxpfl import JaxpflError
from jaxpfl.runs import plots
from jaxpfl.support import console
from jaxpfl.support.console import shades

COLORS = {"local": "#111111", "adaped": "#222222"}


def evaluations(rounds: list[int], global_accuracy: float) -> list[dict]:
    """Evaluations of two seeds, 80 and 90 % each time; only adaped has a global model."""
    shared = {"kind": "evaluation", "personalized_accuracy": [0.8, 0.9]}
    return [
        {"method": method, "round": r, **shared, **more}
        for method, more in (("local", {}), ("adaped", {"global_accuracy": [global_accuracy] * 2}))
        for r in rounds
    ]


def explained(figure) -> list[str]:
    """The texts of the legends, in the axes or beside them."""
    legends = [*figure.legends, *[axes.get_legend() for axes in figure.axes if axes.get_legend()]]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def test_what_the_axis_cuts_is_marked_and_all_that_is_drawn_explained():
    records = evaluations([10, 20, 30], 0.86)
    records[3]["global_accuracy"] = [0.2, 0.2]
    figure = plots._scores(records, COLORS)
    axes = figure.axes[0]
    (mark,) = [line for line in axes.get_lines() if line.get_marker() == "v" and len(line.get_xdata())]
    assert mark.get_xdata().tolist() == [10]
    assert mark.get_ydata().tolist() == [axes.get_ylim()[0]]
    assert explained(figure) == ["local", "adaped", "± 1 standard deviation over seeds", "beyond the axis"]
    inside = plots._scores(evaluations([10, 20], 0.86), COLORS)
    assert "beyond the axis" not in explained(inside)


def test_twelve_methods_have_colours_and_names_of_their_own():
    names = [f"a-long-method-{i}" for i in range(12)]
    scores = {name: {"after_accuracy": np.linspace(0.5, 0.9, 20).reshape(2, 10)} for name in names}
    records = [
        {"kind": "evaluation", "method": name, "round": r, "personalized_accuracy": [0.8, 0.9 - 0.01 * i]}
        for i, name in enumerate(names)
        for r in (1, 2)
    ]
    assert list(plots.figures(records, scores)) == ["accuracy", "clients"]
    colors = dict(zip(names, shades(12), strict=True))
    figure = plots._clients({name: own["after_accuracy"] for name, own in scores.items()}, colors, "Clients")
    figure.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x1 - 20 for left, right in itertools.pairwise(boxes))
    assert len(set(colors.values())) == 12
    assert "(bars: mean and quartiles)" in figure.axes[0].get_title(loc="left")


def test_pictures_do_not_make_a_folder_anew_that_was_taken_away(tmp_path):
    """A run whose folder vanished before its pictures ended with success, and a folder of a summary and pictures."""
    folder = tmp_path / "run"
    with pytest.raises(JaxpflError, match=r"cannot write to .*a\.png"):
        console.save(Figure(), folder / "plots", "a")
    assert not folder.exists()
    folder.mkdir()
    assert console.save(Figure(), folder / "plots", "a").is_file()
