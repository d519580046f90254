"""Histogram estimators without privacy, against float64 NumPy and their own promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histogram_reference import FLOOR, algorithm_2, apart, dirichlet_likelihood, floored, kl, small, users_of

from jaxpfl.benchmarks.studies.histogram import dirichlet as histogram_dirichlet
from jaxpfl.benchmarks.studies.histogram import starts
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import tuning as histogram_tuning
from jaxpfl.estimators.histograms.clusters import cluster
from jaxpfl.support.errors import JaxpflError

COUNTS, TRUTH, CLUSTERS, POPULATION = small()
Q = COUNTS / COUNTS.sum(1, keepdims=True)
USERS = users_of(COUNTS)
START = floored(Q[[3, 11, 40]])


def dense(users: histogram.Users) -> np.ndarray:
    made = jax.jit(lambda users: jax.lax.map(histogram.histograms, users))(users)
    return np.asarray(made).reshape(-1, users.tokens)[np.asarray(users.valid).ravel()]


def test_sparse_blocks_hold_what_was_put_in_whatever_the_block():
    for block in (1, 7, 100):
        users = users_of(COUNTS, block)
        np.testing.assert_allclose(dense(users), Q, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(histogram.mean)(users), Q.mean(0), rtol=1e-5)
        np.testing.assert_array_equal(histogram.each(users.size, users), COUNTS.sum(1))


clustered = jax.jit(lambda start, rate: cluster(USERS, start, 6, floor=FLOOR, rate=rate))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_algorithm_2_and_ifca(rate):
    centers, objective = algorithm_2(Q, START, 6, rate)
    made = clustered(jnp.asarray(START, jnp.float32), rate)
    np.testing.assert_allclose(made.centers, centers, rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(made.objective, objective, rtol=1e-4)


def test_a_center_without_users_becomes_uniform_and_under_ifca_stays():
    far = np.full((1, 30), FLOOR)
    far[0, 29] = 1  # nobody is near a center on the rarest token alone
    start = jnp.asarray(floored(np.concatenate([START, far])), jnp.float32)
    once = jax.jit(lambda rate: cluster(USERS, start, 1, floor=FLOOR, rate=rate).centers)
    np.testing.assert_allclose(once(1.0)[3], 1 / 30, rtol=1e-5)
    np.testing.assert_allclose(once(0.5)[3], start[3], rtol=1e-3)


def test_the_objective_never_rises_as_the_floor_vanishes():
    @jax.jit
    def objective(key):
        start = starts.far_apart(key, USERS, 4, temperature=0.5, floor=1e-12)
        return cluster(USERS, start, 12, floor=1e-12).objective

    for seed in range(3):
        values = np.asarray(objective(jax.random.key(seed)))
        assert (np.diff(values) <= 1e-5 * values[:-1]).all()
        assert values[-1] < values[0]


@pytest.mark.parametrize("direction", ["printed", "objective"])
def test_algorithm_1_takes_the_worst_fitted_user_at_a_large_temperature(direction):
    """With t = 1e6 the draws after the first are the farthest user's, in the divergence of that direction."""
    start = np.asarray(
        starts.far_apart(jax.random.key(1), USERS, 4, temperature=1e6, floor=FLOOR, direction=direction), np.float64
    )
    own = floored(Q)
    chosen = [int(np.abs(own - c).sum(1).argmin()) for c in start]
    np.testing.assert_allclose(start, own[chosen], rtol=1e-4)
    for i in range(1, 4):
        if direction == "printed":
            gaps = np.stack([kl(own[c], own) for c in chosen[:i]]).min(0)
        else:
            gaps = np.stack([kl(own, own[c]) for c in chosen[:i]]).min(0)
        assert chosen[i] == gaps.argmax()


def test_algorithm_1_draws_with_the_stated_probabilities():
    """Two centers, 4000 draws of the second given the first; chi-square at a false-alarm rate of 1e-4."""
    from scipy.stats import chisquare

    counts = np.array([[8, 1, 1], [1, 8, 1], [1, 1, 8], [5, 4, 1]])
    own, users = floored(counts / 10), users_of(counts)
    draw = jax.jit(jax.vmap(lambda key: starts.far_apart(key, users, 2, temperature=1.5, floor=FLOOR)))
    centers = np.asarray(draw(jax.random.split(jax.random.key(7), 4000)), np.float64)
    places = np.abs(centers[:, :, None] - own).sum(-1).argmin(-1)
    seen = np.zeros((4, 4))
    np.add.at(seen, (places[:, 0], places[:, 1]), 1)
    weight = np.exp(1.5 * np.stack([kl(own[i], own) for i in range(4)]))
    expected = 1000 * weight / weight.sum(1, keepdims=True)
    assert chisquare(seen.ravel(), expected.ravel()).pvalue > 1e-4


def test_losses_and_the_best_lambda():
    truth = histogram.arrange(TRUTH.astype(np.float32), USERS)
    centers = POPULATION.centers

    @jax.jit
    def losses(lam):
        personal = histogram_tuning.finetuned(jnp.asarray(centers, jnp.float32), histogram_tuning.fixed(lam), FLOOR)
        return histogram_tuning.losses(USERS, truth, personal)

    for lam in (0.0, 0.4, 1.0):
        nearest = apart(Q, centers).argmin(1)
        expected = kl(TRUTH, floored(lam * centers[nearest] + (1 - lam) * Q))
        made = histogram.each(losses(lam), USERS)
        np.testing.assert_allclose(made, expected, rtol=1e-3, atol=1e-5)


def test_best_lambda_is_near_the_bayes_weight():
    """alpha / (alpha + m) = 1/3 with the true centers, on a grid of steps of .033 (Lemma 2.2)."""
    counts, truth, _, population = small(seed=4, n=600, d=50, k=2, alpha=50.0, size=100)
    users = users_of(counts, 128)
    candidates = jnp.linspace(0.1, 0.6, 16)
    centers = jnp.asarray(population.centers, jnp.float32)
    truth = histogram.arrange(truth.astype(np.float32), users)
    best, _ = histogram_tuning.tuned(
        users, truth, candidates, histogram_tuning.nearest_center(centers), histogram_tuning.fixed, 1e-7
    )
    assert float(best) == pytest.approx(1 / 3, abs=0.034)
    alphas = jnp.geomspace(10, 250, 16)
    best, found = histogram_tuning.tuned(
        users, truth, alphas, histogram_tuning.nearest_center(centers), histogram_tuning.size_weight, 1e-7
    )
    again = histogram_tuning.finetuned(centers, histogram_tuning.size_weight(alphas[3]), 1e-7)
    assert float(found[3]) == pytest.approx(float(histogram_tuning.loss(users, truth, again)), rel=1e-5)
    assert float(best) == pytest.approx(50, rel=0.25)


def test_a_blended_user_has_the_likeliest_shares():
    """Against SciPy's optimum of the same concave likelihood, one user's shares of three centers."""
    from scipy.optimize import minimize

    centers = POPULATION.centers
    personal = histogram_tuning.blended(
        jnp.asarray(centers, jnp.float32), histogram_tuning.fixed(1.0), 1e-9, steps=2000
    )
    made = np.asarray(histogram_tuning.estimates(USERS, personal)).reshape(-1, 30)
    for u in range(3):
        found = minimize(lambda w, u=u: -Q[u] @ np.log(np.exp(w) @ centers / np.exp(w).sum()), np.zeros(3), tol=1e-12)
        shares = np.exp(found.x) / np.exp(found.x).sum()
        np.testing.assert_allclose(made[u], shares @ centers, atol=2e-3)


def test_em_never_lowers_the_likelihood_and_equals_numpy():
    from scipy.special import digamma, logsumexp

    start = histogram_dirichlet.around(jnp.asarray(START, jnp.float32), 20.0)
    fit = histogram_dirichlet.em(USERS, start, 8)
    assert (np.diff(np.asarray(fit.likelihood)) > -1e-3).all()
    shares, a = np.full(3, 1 / 3), 20.0 * START
    for step in range(8):
        joint = np.log(shares) + dirichlet_likelihood(COUNTS, a)
        np.testing.assert_allclose(fit.likelihood[step], logsumexp(joint, axis=1).mean(), rtol=1e-4)
        r = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
        seen = np.einsum("uk,ukx->kx", r, digamma(COUNTS[:, None] + a) - digamma(a))
        whole = (r * (digamma(COUNTS.sum(1)[:, None] + a.sum(1)) - digamma(a.sum(1)))).sum(0)
        shares, a = r.mean(0), np.maximum(a * seen / whole[:, None], 1e-8)
    np.testing.assert_allclose(fit.mixture.a, a, rtol=2e-2, atol=1e-3)
    made = histogram_tuning.estimates(USERS, histogram_dirichlet.posterior(fit.mixture, 1e-9))
    joint = np.log(shares) + dirichlet_likelihood(COUNTS, a)
    r = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    size = COUNTS.sum(1)[:, None, None]
    expected = (r[..., None] * (COUNTS[:, None] + a) / (size + a.sum(1)[:, None])).sum(1)
    np.testing.assert_allclose(np.asarray(made).reshape(-1, 30)[:60], expected, rtol=2e-2, atol=1e-4)


def test_a_dirichlet_of_each_cluster_never_lowers_its_likelihood():
    centers = jnp.asarray(START, jnp.float32)
    fit = histogram_dirichlet.em(USERS, histogram_dirichlet.around(centers, 20.0), 8, hard=centers)
    assert (np.diff(np.asarray(fit.likelihood)) > -1e-3).all()


def test_second_moment_and_the_tokens_kept():
    mean, chosen = floored(Q.mean(0)), np.arange(20)
    v = ((Q - mean) / np.sqrt(mean))[:, chosen]
    moment = jax.jit(starts.second_moment)(USERS, jnp.asarray(mean, jnp.float32), chosen)
    np.testing.assert_allclose(moment, v.T @ v, rtol=1e-3, atol=1e-4)
    found = jax.jit(starts.directions, static_argnums=2)(moment, chosen, 2)
    values, vectors = np.linalg.eigh(v.T @ v)
    np.testing.assert_allclose(found.values, values[::-1][:2], rtol=1e-4)
    keep = starts.token_mask(found, 30, starts.threshold_of(found, 5))
    largest = np.abs(vectors[:, -2:]).max(1)
    assert set(np.flatnonzero(keep)) == set(chosen[np.argsort(-largest)[:5]])


@pytest.mark.parametrize(
    ("indptr", "counts", "block", "message"),
    [
        ([0], [], 4, "at least one user"),
        ([0, 1, 1], [3], 4, "user 1 has no tokens"),
        ([0, 1], [3], 2**30, "block must be below"),
        ([0, 1], [3], 0, "block must be a whole number"),
    ],
)
def test_refusals(indptr, counts, block, message):
    with pytest.raises(JaxpflError, match=message):
        histogram.from_sparse(np.array(indptr), np.zeros(len(counts), int), np.array(counts), 5, block)
