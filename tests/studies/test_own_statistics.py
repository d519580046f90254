"""The user's own clients: columns in units of their own, gains without the samples' noise, levels, tests."""

from pathlib import Path

import numpy as np
import pytest

from jaxpfl.estimators import gaussian_closed_form
from jaxpfl.studies import bernoulli as own_bernoulli
from jaxpfl.studies import gaussian as own_gaussian
from jaxpfl.studies import own_clients
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_clients import CsvLayout
from jaxpfl.support.errors import JaxpflError


def columns(d: int) -> CsvLayout:
    return CsvLayout(value=",".join("uvw"[:d]))


def long(path: Path, x: np.ndarray) -> Path:
    """Samples [m, n, d]."""
    rows = [f"c{i}," + ",".join(map(repr, map(float, row))) for i, own in enumerate(x) for row in own]
    path.write_text("\n".join(["client," + ",".join("uvw"[: x.shape[2]]), *rows]))
    return path


@pytest.mark.slow
def test_a_column_in_other_units_changes_nothing_of_the_others(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = 0.4 * rng.normal(size=(14, 1, 2)) + rng.normal(size=(14, 5, 2))
    plain, moved = (
        own_gaussian.estimate_file(long(tmp_path / f"{k}.csv", each), GaussianSettings(), columns(x.shape[2]))
        for k, each in enumerate((x, x * [1, 1000] + [0, 7000]))
    )
    for name in ("local", "personalized", "low", "high"):
        np.testing.assert_allclose(moved.columns[f"{name}_u"], plain.columns[f"{name}_u"], rtol=1e-9)
        expected = 7000 + 1000 * np.array(plain.columns[f"{name}_v"])
        np.testing.assert_allclose(moved.columns[f"{name}_v"], expected, rtol=1e-9)
    for column in "uv":
        a, b = plain.result["columns"][column], moved.result["columns"][column]
        assert b["gain_over_local"] == pytest.approx(a["gain_over_local"], rel=1e-6)
        assert b["clients_differ"]["p_value"] == pytest.approx(a["clients_differ"]["p_value"], rel=1e-6)
    alone = own_gaussian.estimate_file(long(tmp_path / "alone.csv", x[:, :, :1]), GaussianSettings(), columns(1))
    np.testing.assert_allclose(alone.columns["personalized"], plain.columns["personalized_u"], rtol=1e-12)
    assert alone.result["gain_over_local"] == pytest.approx(plain.result["columns"]["u"]["gain_over_local"])


@pytest.mark.slow
def test_the_gain_is_of_the_error_about_the_true_mean(tmp_path: Path):
    """Leave-one-out of six samples: the gain of five, 69 %, which noise of variance 1 had made 13 %."""
    m, n, st = 1500, 6, 0.3
    rng = np.random.default_rng(0)
    x = st * rng.normal(size=(m, 1, 1)) + rng.normal(size=(m, n, 1))
    result = own_gaussian.estimate_file(long(tmp_path / "own.csv", x), GaussianSettings(), columns(x.shape[2])).result
    s2 = 1 / (n - 1)
    exact = 1 - float(gaussian_closed_form.personalized(m, s2, st**2)) / s2
    gained = result["gains"]["personalized"]
    assert abs(gained["mean"] - exact) < 4 * gained["stderr"]
    assert gained["stderr"] < 0.03
    assert result["mse"]["local"]["mean"] == pytest.approx(s2, rel=0.06)
    raw = result["held_out_errors"]
    assert raw["local"]["mean"] == pytest.approx(1 + s2, rel=0.06)
    assert 1 - raw["personalized"]["mean"] / raw["local"]["mean"] < 0.2
    low, high = result["estimated"]["sigma_theta_interval"]
    assert low < st < high
    assert result["clients_differ"]["p_value"] < 1e-6


@pytest.mark.slow
def test_levels_and_what_is_said(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = np.array([1.0] * 10 + [9.0] * 2)[:, None, None] * rng.normal(size=(12, 6, 1))
    path = long(tmp_path / "own.csv", x)
    wide, narrow = (
        own_gaussian.estimate_file(path, GaussianSettings(), columns(x.shape[2]), level=level) for level in (0.99, 0.5)
    )
    width = [np.subtract(own.columns["high"], own.columns["low"]) for own in (wide, narrow)]
    assert (width[0] > 2 * width[1]).all()
    assert (wide.result["level"], narrow.result["level"]) == (0.99, 0.5)
    said = own_clients.said(wide.result, 0.99)
    assert "(99 %: 0 to " in said[0]
    assert said[1].startswith("no sign that clients differ: Welch")
    assert "the noise differs between clients: Bartlett's test, p = " in said[2]
    assert wide.columns["sigma_x"][11] > 2 * wide.columns["sigma_x"][0]
    assert wide.columns["local_stderr"][11] > 2 * wide.columns["local_stderr"][0]
    with pytest.raises(JaxpflError, match="level must be > 0 and < 1, got 1"):
        own_gaussian.estimate_file(path, GaussianSettings(), columns(x.shape[2]), level=1)


@pytest.mark.slow
def test_rare_events_of_own_clients(tmp_path: Path):
    x = np.zeros((20, 200, 1), int)
    x[3, :2] = 1
    own = own_bernoulli.estimate_file(long(tmp_path / "own.csv", x), BernoulliSettings(), columns(x.shape[2]))
    assert own.result["clients_differ"]["name"] == "chi-square, simulated"
    high = np.array(own.columns["high"])
    assert (high > 1e-4).all()
    assert own.columns["local_stderr"][0] > 0
    drawn = own_clients.write_estimates(tmp_path / "plots", own)
    assert [path.name for path in drawn] == ["shrinkage.png"]
