"""Gaussian estimators against exact errors: the estimators are linear in what clients hold and send, so that their mean
squared errors follow from covariances, without simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.estimators import base, gaussian, gaussian_closed_form, release
from jaxpfl.estimators.base import Samples
from jaxpfl.estimators.release import Release

pytestmark = pytest.mark.usefixtures("x64")


def exact_error(estimate_of, m: int, s2: np.ndarray, st2: float, sq2: float) -> np.ndarray:
    """E (estimate_i - theta_i)^2, [m], of an estimator that is linear in the clients' means and in what sending adds.

    By the law of total covariance, of the vector (theta, means, noise): nothing of the package's formulas is used.
    """
    zero = jnp.zeros(m)
    jacobian = jax.jit(jax.jacobian(estimate_of, argnums=(0, 1)))
    of_means, of_noise = (np.asarray(j) for j in jacobian(zero, zero))
    from_theta = of_means - np.eye(m)
    assert np.allclose(from_theta.sum(axis=1), 0), "a shift of all clients must shift all estimates"
    return st2 * (from_theta**2).sum(1) + of_means**2 @ s2 + sq2 * (of_noise**2).sum(1)


def linear(sizes: np.ndarray, st2: float, sx2: float, sq2: float, sent: np.ndarray):
    """(means, noise) -> estimates of clients whose samples all equal their means (sizes differ by their masks)."""
    mask = jnp.arange(sizes.max()) < jnp.asarray(sizes)[:, None]

    def estimates(means, noise):
        # What sending adds reaches the message through the client's key: here it is the noise of the client's own row.
        rows = jnp.arange(len(sizes))
        keys = jax.vmap(lambda i: base.stream(jax.random.key(0), base.Purpose.LOCAL_WORK, 0, i))(rows)

        def send(key, mean):
            own = (jax.random.key_data(keys) == jax.random.key_data(key)).all(axis=-1)
            return mean + (own * noise).sum()

        x = jnp.broadcast_to(means[:, None, None], (*mask.shape, 1))
        estimator = gaussian.personalized(st2=st2, sx2=sx2, release=Release(send, sq2, 32))
        made = base.estimate(estimator, jax.random.key(0), Samples(x, mask), sent=jnp.asarray(sent))
        return made.estimates[:, 0]

    return estimates


CASES = {
    "equal sizes": (np.full(6, 4), 0.3, 1.1, 0.0, np.ones(6, bool)),
    "some sent": (np.array([1, 2, 3, 9, 30, 4]), 0.3, 1.1, 0.4, np.array([True, False, True, True, False, True])),
    "two clients": (np.full(2, 1), 0.2, 0.9, 0.1, np.ones(2, bool)),
}


@pytest.mark.parametrize("case", CASES)
def test_error_terms_are_exact_and_the_weight_is_the_best(case: str):
    sizes, st2, sx2, sq2, sent = CASES[case]
    m, s2 = len(sizes), sx2 / sizes
    exact = exact_error(linear(sizes, st2, sx2, sq2, sent), m, s2, st2, sq2)
    w = sent / (st2 + s2 + sq2)
    told = gaussian.Broadcast(jnp.zeros(1), jnp.asarray(w.sum()), jnp.asarray(st2), jnp.asarray(sx2))

    @jax.jit
    def terms(size, sent):
        """Variance, and the errors at the best weight and at others beside it."""
        s2_i, c, v = gaussian.error_terms(told, size, sent, sq2)
        a = gaussian_closed_form.best_weight(s2_i, c, v)
        return v, *(gaussian_closed_form.error(a + by, s2_i, c, v) for by in (0, -0.01, 0.01))

    for i in range(m):
        v, least, *others = terms(sizes[i], sent[i])
        assert float(least) == pytest.approx(exact[i], rel=1e-10)
        # The variance of M - theta_i, by hand.
        share = w / w.sum()
        by_hand = (share**2 * (s2 + st2 + sq2)).sum() + st2 * (1 - 2 * share[i])
        assert float(v) == pytest.approx(by_hand, rel=1e-10)
        assert min(map(float, others)) > exact[i]


@pytest.mark.parametrize(("m", "s2", "st2", "sq2"), [(2, 0.5, 0.1, 0.0), (9, 0.02, 0.01, 3.0), (1000, 1.0, 0.0, 7.0)])
def test_theorems_1_and_2(m: int, s2: float, st2: float, sq2: float):
    a = float(gaussian_closed_form.weight(m, s2, st2, sq2))
    between = st2 + sq2 / (m - 1)
    assert a == pytest.approx(between / (between + s2), rel=1e-12)
    assert float(gaussian_closed_form.personalized(m, s2, st2, sq2)) == pytest.approx(s2 * (a + (1 - a) / m), rel=1e-12)
    for other in (0.0, 0.3, 1.0):  # the spec's formula for any weight
        formula = other**2 * s2 + 2 * other * (1 - other) * s2 / m
        formula += (1 - other) ** 2 * (s2 / m + st2 * (m - 1) / m + sq2 / m)
        got = float(gaussian_closed_form.personalized(m, s2, st2, sq2, other))
        assert got == pytest.approx(formula, rel=1e-12)


def test_limits_and_bounds():
    assert float(gaussian_closed_form.weight(50, 0.3, 0.1, 1e12)) == pytest.approx(1, abs=1e-9)
    assert float(gaussian_closed_form.weight(50, 0.3, 0.0)) == 0
    assert float(gaussian_closed_form.weight(50, 0.0, 0.0)) == 1
    m, s2, st2 = 40, 0.3, 0.1
    own = float(gaussian_closed_form.personalized(m, s2, st2))
    assert float(gaussian_closed_form.bound_unknown_mean(m, s2, st2)) == pytest.approx(own, rel=1e-12)
    assert float(gaussian_closed_form.bound_known_mean(s2, st2)) < float(
        gaussian_closed_form.van_trees_bound(m, s2, st2)
    )
    assert float(gaussian_closed_form.van_trees_bound(m, s2, st2)) < own


def test_the_papers_figures():
    """F1a, F3a and F3b: local 1.667e-2, 5e-2, 5e-2; personalised .6251e-2, .8375e-2, .8417e-2."""
    for m, n, local, personal in (
        (10_000, 15, 1.667e-2, 0.6251e-2),
        (1000, 5, 5e-2, 0.8375e-2),
        (500, 5, 5e-2, 0.8417e-2),
    ):
        s2 = 0.25 / n
        assert s2 == pytest.approx(local, rel=3e-4)
        assert float(gaussian_closed_form.personalized(m, s2, 0.01)) == pytest.approx(personal, rel=1e-4)


def test_variances_are_learned_from_unequal_clients():
    """m = 40000: the moment estimates' standard errors are about .7 % and .5 % (st2, sx2); the bounds are 5 of them."""
    rng = np.random.default_rng(0)
    m, st2, sx2 = 40_000, 0.5, 2.0
    sizes = rng.integers(1, 6, size=m)
    theta = 3 + np.sqrt(st2) * rng.normal(size=(m, 1))
    x = theta + np.sqrt(sx2) * rng.normal(size=(m, 5))
    clients = Samples(jnp.asarray(x)[:, :, None], jnp.arange(5) < jnp.asarray(sizes)[:, None])
    told = jax.jit(lambda clients: base.estimate(gaussian.personalized(), jax.random.key(0), clients).shared)(clients)
    assert float(told.st2) == pytest.approx(st2, rel=0.06)
    assert float(told.sx2) == pytest.approx(sx2, rel=0.025)
    assert float(told.mean[0]) == pytest.approx(3, abs=0.03)


def test_james_stein_is_the_textbooks():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(7, 3, 2))
    means, s2 = x.mean(axis=1), 0.8 / 3
    mean = means.mean(axis=0)
    factor = 1 - ((7 - 1) * 2 - 2) * s2 / ((means - mean) ** 2).sum()

    def estimate(estimator):
        return jax.jit(lambda data: base.estimate(estimator, jax.random.key(0), data))(base.every(jnp.asarray(x)))

    made = estimate(gaussian.james_stein(0.8, positive=False))
    np.testing.assert_allclose(made.estimates, mean + factor * (means - mean), rtol=1e-10)
    wide = estimate(gaussian.james_stein(800.0))
    np.testing.assert_allclose(wide.estimates, np.broadcast_to(mean, (7, 2)), rtol=1e-10)


def test_radii_hold_what_they_promise():
    """The largest |mean| of m clients stays within b more often than promised (1 - 2/(mn)), and is not far below it."""
    rng = np.random.default_rng(2)
    m, n, variance = 50, 2, 0.6
    b = float(release.gaussian_radius(0.4, variance, m, n))
    largest = np.abs(0.4 + np.sqrt(variance) * rng.normal(size=(20_000, m))).max(axis=1)
    assert (largest > b).mean() < 2 / (m * n)
    assert b < 1.5 * np.quantile(largest, 0.99)
    reach = float(release.norm_radius(0.4, variance, 3, m, n))
    norms = np.linalg.norm(np.array([0.4, 0, 0]) + np.sqrt(variance) * rng.normal(size=(20_000, m, 3)), axis=2)
    assert (norms.max(axis=1) > reach).mean() < 1 / (m * n)
    assert reach < float(release.lemma_3(0.4, variance, 3, m, n))
    assert b < float(release.printed_radius(0.4, np.sqrt(0.2), np.sqrt(0.4), m, n)) * 1.5


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(bad, marks=pytest.mark.slow) for bad in (np.inf, 1e30))])
def test_private_messages_of_any_data_are_bounded(bad: float):
    """Whatever a client holds, what it sends before the noise is within the clipping radius."""
    send = jax.jit(release.gaussian_vector(2.0, 0.0).send)
    sent = send(jax.random.key(0), jnp.array([bad, 1.0, -bad]))
    assert float(jnp.linalg.norm(sent)) <= 2 * (1 + 1e-6)
    assert np.isfinite(np.asarray(sent)).all()
    inside = jnp.array([0.3, -1.2, 0.5])
    np.testing.assert_allclose(send(jax.random.key(0), inside), inside, rtol=1e-12)
    outside = send(jax.random.key(0), jnp.array([3.0, 4.0, 0.0]))
    np.testing.assert_allclose(outside, [1.2, 1.6, 0.0], rtol=1e-12)
