"""Plots of a sweep: the files of each kind of grid, and what is drawn in them."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxpfl.runs.records import DIVERGED, FAILED, STOPPED, Record
from jaxpfl.runs.sweep import plots
from jaxpfl.runs.sweep.plots import along, axes_of, is_drawn, points_of
from jaxpfl.runs.sweep.results import select, summarize
from jaxpfl.support.console import save, signature, signed

SEEDS = (0, 1)
RATES = (0.01, 0.1, 1.0)


def score(settings: dict[str, Any]) -> float:
    """An accuracy that is best at a rate of 0.1 and grows with the other settings' place in the alphabet."""
    rate = settings.get("lr", 0.1)
    return 0.7 - 0.05 * math.log10(rate / 0.1) ** 2 + 0.01 * len(str(sorted(settings.items()))) / 100


def records(axes: dict[str, Any], methods: tuple[str, ...] = ("local", "adaped"), seeds: Any = SEEDS) -> list[Record]:
    found = []
    for method in methods:
        own = {name: values for name, values in axes.items() if "." not in name or name.startswith(f"{method}.")}
        for values, seed in itertools.product(itertools.product(*own.values()), seeds):
            settings = dict(zip(own, values, strict=True))
            accuracy = score(settings) + 0.01 * seed
            metrics = {"validation_accuracy": accuracy, "personalized_accuracy": accuracy - 0.1, "bytes_up": 1e5}
            if method == "local":
                metrics["bytes_up"] = 0.0
            found.append(Record(method, settings, seed, metrics=metrics, seconds=0.1, rounds=5))
    return found


def summary(found: list[Record], best: Any = None) -> dict[str, Any]:
    seeds = sorted({record.seed for record in found})
    return summarize(found, select(found, seeds) if best is None else best, seeds=seeds, programs=1, seconds=1.0)


def without(name: str, found: list[Record]) -> list[Record]:
    return [dataclasses.replace(r, metrics={k: v for k, v in r.metrics.items() if k != name}) for r in found]


def written(folder: Path, found: list[Record], best: Any = None) -> set[str]:
    return {save(figure, folder, name).name for name, figure in plots.figures(summary(found, best)).items()}


def names(found: list[Record], best: Any = None) -> set[str]:
    """Names of the pictures, none of which is written."""
    return set(plots.figures(summary(found, best)))


def drawn_by(found: list[Record], name: str, best: Any = None) -> Any:
    """The figure over one axis."""
    points = points_of(summary(found, best))
    axes = axes_of(itertools.chain(*points.values()))
    styles = {method: {"color": "C0", "marker": "o"} for method in points}
    return plots._axis_plot(points, axes[name], axes, styles)


def test_one_axis_gives_lines_and_the_chosen_settings(tmp_path: Path):
    with signed("jaxpfl sweep"):
        assert written(tmp_path, records({"lr": RATES})) == {"by-lr.png"}
    with Image.open(tmp_path / "by-lr.png") as picture:
        assert picture.info["dpi"][0] == pytest.approx(150, abs=1)
    assert signature(tmp_path / "by-lr.png") == "jaxpfl sweep"


def test_pictures_of_each_kind_of_grid():
    """Two axes, nothing that varies, and a sweep in which everything failed."""
    two = records({"clients": (10, 100), "adaped.psi_init": (1.0, 3.5)})
    assert names(two) == {"by-clients", "by-adaped.psi_init", "pairs-adaped"}
    assert names(records({"lr": (0.1,)})) == set()
    bad = [dataclasses.replace(r, status=FAILED, reason="out of memory", metrics={}) for r in records({"lr": RATES})]
    assert names(bad) == {"by-lr"}
    assert names(bad, {}) == set()


def test_lines_show_both_scores_with_the_chosen_setting_ringed():
    found = records({"lr": (*RATES, 10.0, 100.0)})
    bad = {10.0: DIVERGED, 100.0: STOPPED}
    found = [dataclasses.replace(r, status=bad.get(r.settings["lr"], r.status)) for r in found]
    figure = drawn_by(found, "lr")
    validation, test = figure.axes
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["validation, chosen by", "test"]
    for panel, aside in ((validation, 0.0), (test, 10.0)):
        assert panel.get_xscale() == "log"
        line, ring, *_ = panel.lines
        assert line.get_xdata().tolist() == list(RATES)
        expected = [100 * (score({"lr": rate}) + 0.005) - aside for rate in RATES]
        np.testing.assert_allclose(line.get_ydata(), expected)
        assert (ring.get_xdata()[0], ring.get_ydata()[0]) == pytest.approx((0.1, expected[1]))
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"local", "adaped", "chosen"}


def test_the_best_over_other_axes_does_not_look_at_test():
    found = records({"lr": RATES, "local_steps": (1, 5)})
    at_test = np.random.default_rng(0)
    poisoned = [
        dataclasses.replace(r, metrics={**r.metrics, "personalized_accuracy": float(at_test.random())}) for r in found
    ]
    for method in ("local", "adaped"):
        picked = []
        for those in (found, poisoned):
            points = points_of(summary(those))[method]
            axes = axes_of(points)
            series = along(points, axes["lr"], axes)
            assert series.joined
            picked.append([point.settings for _, point in series.picked])
        assert picked[0] == picked[1]
        assert len(picked[0]) == len(RATES)
    assert "the best over local_steps on validation" in drawn_by(found, "lr")._suptitle.get_text()


def test_without_validation_every_setting_is_shown():
    found = without("validation_accuracy", records({"lr": RATES, "local_steps": (1, 5)}))
    figure = drawn_by(found, "lr", {})
    (panel,) = figure.axes
    assert panel.get_title(loc="left") == "test"
    assert len(panel.lines[0].get_xdata()) == 6
    assert panel.lines[0].get_linestyle() == "None"
    assert "every setting" in figure._suptitle.get_text()


def test_scales_follow_the_values():
    def scale(*values: Any) -> str:
        found = [Record("local", {"axis": value}, 0) for value in values]
        return axes_of(points_of(summarize(found, {}, seeds=[0], programs=0, seconds=0.0))["local"])["axis"].scale

    assert scale(1, 5, 9) == "linear"
    assert scale(1, 5, 11) == "log"
    assert scale(0.0, 0.001, 0.5) == "even"
    assert scale(-1, 0, 1) == "linear"
    assert scale("0.1m", 10, 100) == "even"
    assert scale(True, False) == "even"


def test_a_heat_map_writes_its_values_and_frames_the_chosen_one():
    found = records({"lr": RATES, "local_steps": (1, 5), "clients": (10, 100)}, ("fedavg",))
    bad = [r.settings["lr"] == 1.0 for r in found]
    found = [dataclasses.replace(r, status=DIVERGED) if b else r for r, b in zip(found, bad, strict=True)]
    points = points_of(summary(found))["fedavg"]
    figure = plots.draw_pairs("fedavg", points, axes_of(points))
    panels = [panel for panel in figure.axes if panel.get_xlabel()]
    assert len(panels) == 6  # three pairs, on validation and on test
    chosen = next(point for point in points if point.chosen)
    for panel, (of, name) in zip(panels[:2], ((chosen.validation, "validation"), (chosen.test, "test")), strict=True):
        texts = {(text.get_position()): text.get_text() for text in panel.texts}
        assert f"{100 * of.mean:.1f}" in texts.values(), name
        frames = [patch for patch in panel.patches if not patch.get_fill()]
        assert len(frames) == 1
        assert frames[0].get_x() + 0.5 == 1.0  # the second rate
    assert "a cell is the best over the other axes" in figure._suptitle.get_text().replace("\n", " ")


def test_settings_drawn_from_ranges_have_no_heat_map():
    draw = np.random.default_rng(0)
    points = [{"lr": float(10 ** draw.uniform(-3, 0)), "adaped.psi_init": float(draw.uniform(1, 4))} for _ in range(8)]
    found = []
    for settings, seed in itertools.product(points, SEEDS):
        metrics = {"validation_accuracy": score(settings), "personalized_accuracy": score(settings)}
        found.append(Record("adaped", settings, seed, metrics=metrics))
    own = points_of(summary(found))["adaped"]
    assert is_drawn(own, axes_of(own))
    assert not is_drawn(own[:1], axes_of(own))
    assert names(found) == {"by-lr", "by-adaped.psi_init"}


def test_names_are_no_formulas_and_no_folders(tmp_path: Path):
    found = records({"data": ("npz:a/$x_{1}", "npz:b/$x$" + "long" * 30), "lr": RATES}, ("fed",))
    assert written(tmp_path, found) >= {"by-data.png", "pairs-fed.png"}
