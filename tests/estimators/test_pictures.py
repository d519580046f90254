"""Pictures of answers: what is drawn is in the answer, on the axes that were given."""

from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from jaxpfl.estimators import ebbinomial, ebnm, ebpoisson, fay_herriot, pictures, rate_scores
from jaxpfl.support.errors import JaxpflError

X, S = np.array([1.0, -2.0, 0.5, 3.0, 1.5, 0.2]), np.full(6, 1.0)
Z, N = np.array([1, 5, 0, 9, 4, 30]), np.array([10, 12, 4, 20, 11, 34])


def points(axes: Axes) -> np.ndarray:
    """Places of the scatter's points, [m, 2]."""
    return max((np.asarray(of.get_offsets()) for of in axes.collections), key=len)


def bars(axes: Axes) -> np.ndarray:
    """Ends of the vertical lines, [m, 2]."""
    found: Any = next(of for of in axes.collections if hasattr(of, "get_segments"))
    return np.array([[low[1], high[1]] for low, high in found.get_segments()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["estimates", "covariates", "successes", "counts"])
def test_shrinkage_has_estimates_intervals_and_the_mean(kind):
    found: Any = {
        "estimates": lambda: ebnm(X, S),
        "covariates": lambda: fay_herriot(X, S, np.arange(6.0) ** 2),
        "successes": lambda: ebbinomial(Z, N),
        "counts": lambda: ebpoisson(Z, N),
    }[kind]()
    first, second = Figure().subplots(1, 2)
    assert pictures.shrinkage(found, first, level=0.8) is first
    local = X if kind in ("estimates", "covariates") else Z / N
    np.testing.assert_allclose(points(first), np.stack([local, found.mean], axis=1), rtol=1e-6)
    np.testing.assert_allclose(bars(first), np.stack(found.interval(0.8), axis=1), rtol=1e-6)
    means = {"estimates": lambda: found.prior.mean, "covariates": lambda: found.regression.mean()}
    dashed = next(line for line in first.lines if line.get_linestyle() == "--")
    mean = np.ravel(dashed.get_ydata())[0]
    np.testing.assert_allclose(mean, means.get(kind, lambda: found.prior_mean)(), rtol=1e-6)
    legend: Any = first.get_legend()
    assert "80 % interval" in [text.get_text() for text in legend.get_texts()]
    assert not second.lines
    new = pictures.shrinkage(found)
    assert isinstance(new, Axes)
    np.testing.assert_allclose(points(new), points(first))


@pytest.mark.parametrize("kind", ["estimates", "successes"])
def test_quantiles_has_the_ordered_scores(kind):
    found: Any = ebnm(X, S) if kind == "estimates" else ebbinomial(Z, N)
    scores = np.asarray(found.scores if kind == "estimates" else rate_scores.scores(found))
    axes = Figure().subplots()
    assert pictures.quantiles(found, axes) is axes
    dots: Any = next(line for line in axes.lines if line.get_marker() == ".")
    expected = stats.norm.ppf((np.arange(6) + 0.5) / 6)
    np.testing.assert_allclose(dots.get_xydata(), np.stack([expected, np.sort(scores)], axis=1), rtol=1e-6)


def test_outlying_clients_are_named_by_their_labels():
    x = pd.Series([0.0] * 12 + [25.0], index=[f"ward {i}" for i in range(13)])
    found: Any = ebnm(x, 1.0, prior="normal", center=0.0)
    found = found._replace(prior=found.prior._replace(sds=found.prior.sds * 0 + 1.0))  # too narrow for the last one
    axes = pictures.quantiles(found)
    assert [text.get_text() for text in axes.texts] == ["ward 12"]
    assert pictures.far_out(np.asarray(found.scores)).tolist() == [False] * 12 + [True]


def test_what_cannot_be_drawn_is_refused_in_a_line():
    found = ebnm(X, S)
    with pytest.raises(JaxpflError, match="answer must be that of ebnm, ebbinomial or their like, got"):
        pictures.shrinkage(X)
    with pytest.raises(JaxpflError, match="axes must be one Axes of matplotlib, got ndarray"):
        pictures.quantiles(found, Figure().subplots(1, 2))
    with pytest.raises(JaxpflError, match="level must be > 0 and < 1, got 95"):
        pictures.shrinkage(found, level=95)
    several = jax.tree.map(lambda of: np.stack([of, of]), found)
    with pytest.raises(JaxpflError, match=r"answer must be of one problem, got means of shape \(2, 6\)"):
        pictures.quantiles(several)


@pytest.mark.slow
def test_mixtures_are_drawn_too():
    found = ebbinomial(Z, N, prior="npmle")
    assert pictures.quantiles(found).lines
    axes = pictures.shrinkage(found)
    np.testing.assert_allclose(points(axes)[:, 1], found.mean, rtol=1e-6)
