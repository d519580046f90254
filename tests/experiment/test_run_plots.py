"""The plots of runs that are short, or whose global models lie far below."""

import numpy as np
import pytest

from jaxpfl.experiment import plots

COLORS = {"local": "#111111", "adaped": "#222222"}


def evaluations(rounds: list[int], global_accuracy: float) -> list[dict]:
    """Of two seeds, 80 and 90 % each time; only adaped has a global model."""
    shared = {"kind": "evaluation", "personalized_accuracy": [0.8, 0.9]}
    return [
        {"method": method, "round": r, **shared, **more}
        for method, more in (("local", {}), ("adaped", {"global_accuracy": [global_accuracy] * 2}))
        for r in rounds
    ]


def test_one_evaluation_has_room_and_bars():
    axes = plots._accuracy(evaluations([10], 0.85), COLORS).axes[0]
    assert axes.get_xlim() == (9, 11)
    assert set(axes.get_xticks()) <= {9, 10, 11}
    low, high = axes.get_ylim()
    places = [bar.get_segments()[0] for bar in axes.collections]
    assert len({place[0, 0] for place in places}) == 2  # side by side
    for place in places:
        np.testing.assert_allclose(place[:, 1], 85 + np.array([-1, 1]) * 10 / 2**0.5)
        assert low < place[0, 1] < place[1, 1] < high


@pytest.mark.parametrize(
    ("global_accuracy", "title"),
    [
        (0.85, "Personalised models (dashed: global model)"),
        (0.31, "Personalised models (global model off the scale: adaped 31.0 %)"),
    ],
)
@pytest.mark.parametrize("rounds", [[10], [10, 20]])
def test_the_title_promises_what_is_there(rounds, global_accuracy, title):
    assert plots._accuracy(evaluations(rounds, global_accuracy), COLORS).axes[0].get_title(loc="left") == title


def test_the_legend_of_psi_leaves_the_curve_alone():
    records = [{"method": "adaped", "kind": "round", "round": r, "psi": [float(r)]} for r in range(1, 21)]
    figure = plots._metric(records, COLORS, "psi", "psi", "psi")
    figure.draw_without_rendering()
    legend, axes = figure.axes[0].get_legend().get_window_extent(), figure.axes[0].get_window_extent()
    assert legend.x1 < (axes.x0 + axes.x1) / 2  # the curve rises to the right
