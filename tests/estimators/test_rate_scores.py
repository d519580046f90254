"""Scores of counts: their probabilities beside SciPy's, their distribution, and a client far out."""

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
def test_a_score_lies_within_the_step_of_its_count(kind):
    """And over all clients scores are N(0, 1): Kolmogorov and Smirnov's test, a false alarm in 1e-3 of the seeds."""
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
    u = special.ndtr(found)
    assert (u >= law.cdf(z - 1) - 1e-9).all()
    assert (u <= law.cdf(z) + 1e-9).all()
    assert stats.kstest(found, "norm").pvalue > 1e-3
    assert np.abs(found - np.asarray(rate_scores.scores(fit, seed=1))).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["mixture", "npmle"])
@pytest.mark.parametrize("kind", ["successes", "count"])
def test_scores_under_a_mixture_are_of_its_components_in_their_shares(kind, prior):
    """Probabilities by SciPy's laws; the false alarm of the test of all scores is below that of a fixed prior's."""
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
    u, laws = special.ndtr(found), [law(k) for k in range(len(weights))]
    below, up_to = (sum(w * of.cdf(at) for w, of in zip(weights, laws, strict=True)) for at in (z - 1, z))
    assert (u >= below - 1e-6).all()
    assert (u <= up_to + 1e-6).all()
    assert stats.kstest(found, "norm").pvalue > 1e-3


def test_a_client_far_out_is_far_out():
    """Also where one less the probability up to it rounds to zero, and where the prior has no spread."""
    counts = np.array([2, 3, 1, 2, 4, 3, 2, 3, 1, 2] * 20 + [60])
    found = rate_scores.scores(ebpoisson(counts, 1.0))
    assert found is not None
    assert found[-1] > 5
    assert np.abs(found[:-1]).max() < 4
    alike = rate_scores.scores(ebbinomial([5, 5, 5, 5], 10))
    assert alike is not None
    step = stats.norm.ppf(stats.binom(10, 0.5).cdf([4, 5]))
    assert ((alike > step[0]) & (alike < step[1])).all()


@pytest.mark.slow
def test_too_many_terms_have_no_scores(monkeypatch):
    monkeypatch.setattr(rate_scores, "MOST_TERMS", 10)
    assert rate_scores.scores(ebbinomial([1, 9, 4], [10, 11, 12])) is None


@pytest.mark.slow
def test_too_many_terms_of_a_mixture_have_no_scores(monkeypatch):
    monkeypatch.setattr(rate_scores, "MOST_TERMS", 10)
    assert rate_scores.scores(ebbinomial([1, 9, 4], [10, 11, 12], prior="beta-mixture")) is None
