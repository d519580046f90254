"""Scores of counts: the middle of their steps beside SciPy's probabilities, and a client far out."""

from typing import Any

import jax
import numpy as np
import pytest
from scipy import special, stats

from jaxpfl.estimators import ebbinomial, ebpoisson, rate_scores


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("kind", ["successes", "count"])
def test_a_score_is_the_middle_of_the_step_of_its_count(kind):
    rng = np.random.default_rng(0)
    if kind == "count":
        e = rng.uniform(0.5, 3, 400)
        z = rng.poisson(rng.gamma(2, 2, 400) * e)
        fit = ebpoisson(z, e)
        size = float(fit.prior_size)
        law = stats.nbinom(float(fit.prior_mean) * size, size / (size + e))
    else:
        n = rng.integers(1, 30, 400)
        z = rng.binomial(n, rng.beta(2, 3, 400))
        fit = ebbinomial(z, n)
        size, mean = float(fit.prior_size), float(fit.prior_mean)
        law = stats.betabinom(n, mean * size, (1 - mean) * size)
    found = rate_scores.scores(fit)
    assert found is not None
    np.testing.assert_allclose(special.ndtr(found), law.cdf(z - 1) + law.pmf(z) / 2, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["mixture", "npmle"])
@pytest.mark.parametrize("kind", ["successes", "count"])
def test_scores_under_a_mixture_are_of_its_components_in_their_shares(kind, prior):
    rng = np.random.default_rng(1)
    apart = rng.random(300) < 0.3
    if kind == "count":
        size = rng.uniform(0.5, 3, 300)
        z = rng.poisson(np.where(apart, 8.0, rng.gamma(4, 0.5, 300)) * size)
        fit: Any = ebpoisson(z, size, prior="npmle" if prior == "npmle" else "gamma-mixture")
    else:
        size = rng.integers(5, 30, 300)
        z = rng.binomial(size, np.where(apart, 0.9, rng.beta(2, 8, 300)))
        fit = ebbinomial(z, size, prior="npmle" if prior == "npmle" else "beta-mixture")
    weights, means = np.asarray(fit.prior.weights), np.asarray(fit.prior.means)

    def law(k: int) -> Any:
        if kind == "count" and prior == "npmle":
            return stats.poisson(means[k] * size)
        if prior == "npmle":
            return stats.binom(size, means[k])
        own = float(fit.prior.sizes[k])
        if kind == "count":
            return stats.nbinom(means[k] * own, own / (own + size))
        return stats.betabinom(size, means[k] * own, (1 - means[k]) * own)

    found = rate_scores.scores(fit)
    assert found is not None
    laws = [law(k) for k in range(len(weights))]
    middle = sum(w * (of.cdf(z - 1) + of.pmf(z) / 2) for w, of in zip(weights, laws, strict=True))
    np.testing.assert_allclose(special.ndtr(found), middle, atol=1e-6)


def test_a_client_far_out_is_far_out():
    """Also where one less the probability up to it rounds to zero, and where the prior has no spread."""
    counts = np.array([2, 3, 1, 2, 4, 3, 2, 3, 1, 2] * 20 + [60])
    found = rate_scores.scores(ebpoisson(counts, 1.0))
    assert found is not None
    assert found[-1] > 5
    assert np.abs(found[:-1]).max() < 4
    alike = rate_scores.scores(ebbinomial([5, 5, 5, 5], 10))
    assert alike is not None
    np.testing.assert_allclose(alike, 0, atol=1e-9)  # the prior is an atom at 1/2


@pytest.mark.slow
def test_too_many_terms_have_no_scores(monkeypatch):
    monkeypatch.setattr(rate_scores, "MOST_TERMS", 10)
    assert rate_scores.scores(ebbinomial([1, 9, 4], [10, 11, 12])) is None


@pytest.mark.slow
def test_too_many_terms_of_a_mixture_have_no_scores(monkeypatch):
    monkeypatch.setattr(rate_scores, "MOST_TERMS", 10)
    assert rate_scores.scores(ebbinomial([1, 9, 4], [10, 11, 12], prior="beta-mixture")) is None
