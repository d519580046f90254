"""Tests that clients' counts have a Beta or a Gamma prior, also about a regression.

Anderson and Darling's statistic of the clients' normal scores (`rate_scores`) stands beside those of files that are
drawn from the fitted population, of the same trials or exposures and covariates, each with a fit of its own: fitted
coefficients and spread draw scores together, and the p-value counts it. A score is drawn within the step of its count,
also those of drawn files, so that the p-value depends a little on the seed, the more the fewer events there are.

Files to which no population can be fitted, as those without any event, are refused by the fits and drawn anew. The fits
run in JAX, in double precision, all else on the host.

References: Dunn and Smyth 1996, "Randomized quantile residuals"; Stute, Gonzalez Manteiga and Presedo Quindimil 1993,
"Bootstrap based goodness-of-fit tests".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl import checks
from jaxpfl.errors import JaxpflError
from jaxpfl.estimators import inputs, rate_scores
from jaxpfl.estimators.normal_means.area import covariates
from jaxpfl.estimators.normal_means.goodness import DRAWS, Goodness, anderson_darling, beside
from jaxpfl.estimators.rate_answers import Rates
from jaxpfl.estimators.rate_regression import FAR, ebbinomial_regression, ebpoisson_regression, solved
from jaxpfl.estimators.rates import ebbinomial, ebpoisson, fit_beta, fit_gamma

_MOST_TERMS = 4 * rate_scores.MOST_TERMS
_MOST_DRAWN = 10  # files, in parts of those asked for


class _Population(NamedTuple):
    """Means and sizes of the priors, [..., 1] or [..., m] each."""

    mean: np.ndarray
    size: np.ndarray


def binomial_goodness(
    successes: Any, trials: Any, x: Any = None, *, seed: int = 0, draws: int = DRAWS
) -> Goodness | None:
    """Test that clients' probabilities have a Beta prior, or Beta priors about a logistic regression.

    Args:
      successes, trials: as those of `ebbinomial`, [m].
      x: covariates as those of `ebbinomial_regression`; None for a prior of one mean.
      seed: of all draws.
      draws: files that are drawn; the least p-value is 1 / (draws + 1).

    Returns:
      The test in NumPy; None where too many terms would have to be summed, or hardly a drawn file can be fitted.

    Raises:
      JaxpflError: as `ebbinomial` or `ebbinomial_regression`; for draws below one, and values that are not known, under
        a transformation.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> two_kinds = np.where(rng.random(100) < 0.5, 0.3, 0.7)
      >>> float(binomial_goodness(rng.binomial(200, two_kinds), 200, draws=19).p_value)
      0.05
    """
    successes, trials, x = inputs.aligned(successes=successes, trials=trials, x=x)
    with jax.enable_x64(True):
        fit = ebbinomial(successes, trials) if x is None else ebbinomial_regression(successes, trials, x).rates
        return _tested(fit, x, seed, draws, bounded=True)


def poisson_goodness(count: Any, exposure: Any, x: Any = None, *, seed: int = 0, draws: int = DRAWS) -> Goodness | None:
    """Test that clients' rates have a Gamma prior, or Gamma priors about a log-linear regression.

    Args:
      count, exposure: as those of `ebpoisson`, [m].
      x, seed, draws: as those of `binomial_goodness`.

    Raises:
      JaxpflError: as `ebpoisson` or `ebpoisson_regression`, else as `binomial_goodness`.
    """
    count, exposure, x = inputs.aligned(count=count, exposure=exposure, x=x)
    with jax.enable_x64(True):
        fit = ebpoisson(count, exposure) if x is None else ebpoisson_regression(count, exposure, x).rates
        return _tested(fit, x, seed, draws, bounded=False)


def _tested(fit: Rates, x: Any, seed: int, draws: int, *, bounded: bool) -> Goodness | None:
    checks.count("draws", draws)
    if isinstance(fit.mean, Tracer):
        raise JaxpflError("a test of counts runs on the host, where their values must be known")
    n, found = np.asarray(fit.size), _Population(np.asarray(fit.prior_mean), np.asarray(fit.prior_size))
    if bounded and draws * rate_scores.terms(n, *found) > _MOST_TERMS:
        return None
    rng = np.random.default_rng([seed, 1])
    own = _statistic(np.asarray(fit.events), n, found, rng, bounded=bounded)
    columns = None if x is None else np.asarray(covariates(x, len(n), "x"))
    drawn = _files(rng, n, found, columns, draws, bounded=bounded)
    others = [_statistic(z, n, of, rng, bounded=bounded) for z, of in drawn]
    if own is None or len(others) < draws:
        return None
    return jax.tree.map(np.asarray, beside(jnp.asarray(own), jnp.asarray(others)))


def _statistic(
    z: np.ndarray, n: np.ndarray, of: _Population, rng: np.random.Generator, *, bounded: bool
) -> float | None:
    scores = rate_scores.scores_at(z, n, *of, rng.random(len(z)), bounded=bounded)
    return None if scores is None else float(anderson_darling(jnp.asarray(scores)))


def _files(
    rng: np.random.Generator, n: np.ndarray, of: _Population, x: np.ndarray | None, draws: int, *, bounded: bool
) -> Iterator[tuple[np.ndarray, _Population]]:
    """Drawn files with their fits, as many as asked for unless most of them cannot be fitted."""
    left = draws
    for _ in range(_MOST_DRAWN * draws):
        z = _drawn(rng, n, of, bounded=bounded)
        refit = _refitted(z, n, x, bounded=bounded)
        if refit is not None:
            left -= 1
            yield z, refit
        if not left:
            return


def _drawn(rng: np.random.Generator, n: np.ndarray, of: _Population, *, bounded: bool) -> np.ndarray:
    """Counts of all clients, [m]."""
    mean, size = of
    p = np.broadcast_to(mean, n.shape)
    if not np.isinf(size).any():
        p = rng.beta(mean * size, (1 - mean) * size, n.shape) if bounded else rng.gamma(mean * size, 1 / size, n.shape)
    return (rng.binomial(n.astype(int), p) if bounded else rng.poisson(n * p)).astype(float)


def _refitted(z: np.ndarray, n: np.ndarray, x: np.ndarray | None, *, bounded: bool) -> _Population | None:
    """The prior fitted to a drawn file by the program of the first fit; None where none can be."""
    if x is None:
        fit = (fit_beta if bounded else fit_gamma)(jnp.asarray(z), jnp.asarray(n), inputs.shares(None, len(n), 2))
    else:
        found, reach = solved(jnp.asarray(z), jnp.asarray(n), jnp.asarray(x), intercept=True, bounded=bounded)
        if not reach < FAR:
            return None
        fit = found.rates
    refit = _Population(np.asarray(fit.prior_mean), np.asarray(fit.prior_size))
    return None if np.isnan(refit.mean).any() else refit
