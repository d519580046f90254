"""The choice of a prior by scores on held-out clients, weights of clients, and normal scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl.estimators import compare_priors, ebnm
from jaxpfl.estimators.normal_means import NormalMixture, PriorScores, best, leads, posterior
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data(m: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    s = rng.uniform(0.5, 2, m)
    return np.where(rng.random(m) < 0.2, 4.0, 0.0) + s * rng.normal(size=m), s


@pytest.mark.slow
def test_scores_are_those_of_priors_fitted_to_the_other_folds():
    x, s = data(12)
    found = compare_priors(x, s, ["normal"], folds=3)["normal"]
    whole: Any = ebnm(x, s)
    np.testing.assert_allclose([found.log_marginal, found.risk], [whole.log_marginal, whole.risk], rtol=1e-8)
    for fold in range(3):
        out = np.arange(12) % 3 == fold
        prior: Any = ebnm(x[~out], s[~out]).prior
        spread, t2 = np.hypot(s[out], prior.sds[0]), prior.sds[0] ** 2
        np.testing.assert_allclose(
            found.log_densities[out], stats.norm.logpdf(x[out], prior.means[0], spread), rtol=1e-6
        )
        kept = t2 / spread**2
        risk = ((1 - kept) * (x[out] - prior.means[0])) ** 2 + 2 * kept * s[out] ** 2 - s[out] ** 2
        np.testing.assert_allclose(found.risks[out], risk, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_comparisons_jit_and_vmap():
    problems = [data(10, seed) for seed in range(2)]
    x, s = (jnp.stack([jnp.asarray(of) for of in each]) for each in zip(*problems, strict=True))
    together = jax.jit(jax.vmap(lambda x, s: compare_priors(x, s, ("normal",), folds=2)))(x, s)["normal"]
    for i, problem in enumerate(problems):
        alone = compare_priors(*problem, ("normal",), folds=2)["normal"]
        np.testing.assert_allclose(together.risks[i], alone.risks, rtol=1e-5, atol=1e-7)


def scores_of(*densities: float) -> dict[Any, PriorScores]:
    zero = jnp.zeros(())
    return {
        name: PriorScores(zero, zero, jnp.array([value, value + 2 * i]), jnp.array([value, value]))
        for i, (name, value) in enumerate(zip(("normal", "npmle"), densities, strict=False))
    }


def test_the_best_and_how_far_the_others_are_behind():
    scores = scores_of(1.0, 3.0)
    assert (best(scores), best(scores, "risk")) == ("npmle", "normal")
    gap = leads(scores)["normal"]
    np.testing.assert_allclose([gap.difference, gap.stderr], [3.0, 2**0.5 / 2**0.5])
    assert best(scores_of(float("nan"), 3.0)) == "npmle"
    with pytest.raises(JaxpflError, match="no prior has a finite score"):
        best(scores_of(float("nan"), float("inf")))
    with pytest.raises(JaxpflError, match="unknown by 'rsk': did you mean 'risk'"):
        best(scores, "rsk")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("m", "more", "said"),
    [
        (6, {"priors": ()}, "priors must be at least one family, got none"),
        (6, {"priors": ("normal", "normal")}, "priors must differ, got normal 2 times"),
        (6, {"priors": ("nomal",)}, "unknown prior 'nomal'"),
        (6, {"folds": 7}, "folds must be from 2 to the number of clients, 6, got 7"),
        (6, {"folds": 1}, "folds must be from 2 to the number of clients, 6, got 1"),
        (2, {"folds": 2}, "2 folds of 2 clients leave a single client to fit a prior to"),
    ],
)
def test_bad_comparisons_are_refused_in_a_line(m, more, said):
    with pytest.raises(JaxpflError, match=said):
        compare_priors(*data(m), **more)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["normal", "npmle"])
def test_whole_weights_are_repeated_clients(prior):
    x, s = data(20)
    w = np.arange(20) % 4
    found = ebnm(x, s, prior=prior, weights=w / 7)
    more = ebnm(np.repeat(x, w), np.repeat(s, w), prior=prior)
    alone = posterior(more.prior, jnp.asarray(x), jnp.asarray(s))
    # The grid of atoms is over the range of all clients, of those without weight too.
    digits, gap = (1e-8, 1e-5) if prior != "npmle" else (1e-3, 0.1)
    np.testing.assert_allclose(found.mean, alone.mean, rtol=0, atol=gap)
    np.testing.assert_allclose(found.log_marginal * w.sum() / 20, more.log_marginal, rtol=digits)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, 2.0], r"weights must be one number for each of 3 clients, got shape \(2,\)"),
        ([1.0, -2.0, 1], "weights must be finite and at least 0, got -2.0 for client 1"),
        ([1.0, 0, 0], "weights must be > 0 for at least 2 clients, got 1"),
        (["a", "b", "c"], "weights must be numbers"),
    ],
)
def test_bad_weights_are_refused_in_a_line(weights, said):
    with pytest.raises(JaxpflError, match=said):
        ebnm([1.0, 2.0, 3.0], 1.0, weights=weights)


@pytest.mark.slow
def test_normal_scores_also_far_out():
    prior = NormalMixture(jnp.array([1.0]), jnp.array([2.0]), jnp.array([1.5]))
    x, s = jnp.array([2.0, 4.5, -60.0, 64.0, 1e6]), jnp.full(5, 2.0)
    scores = posterior(prior, x, s).scores
    np.testing.assert_allclose(scores[:4], (x[:4] - 2) / 2.5, rtol=1e-9, atol=1e-12)
    assert np.isfinite(scores[4])  # where both tails round to zero
    assert scores[4] > 35
