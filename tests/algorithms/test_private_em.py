"""AdaMix's private server: EM without noise, one client's part in it, the noise's scale, what is left under noise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from jaxpfl import JaxpflError, fit, stack_clients
from jaxpfl.algorithms.parts import private_em
from jaxpfl.priors import gaussian_mixture
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.privacy import Mechanism, record
from jaxpfl.privacy.noise import clip

D, K = 5, 2


def mixture(spread: float = 1.0) -> Mixture:
    centers = spread * np.random.default_rng(1).normal(size=(K, D))
    return Mixture(jnp.array([0.4, 0.6]), {"w": jnp.asarray(centers, jnp.float32)}, jnp.array([0.5, 0.8]))


@jax.jit
def _contribution(gamma, upload, limit):
    return private_em.contribution(gamma, clip(upload, limit)[0], limit)


def test_without_noise_it_is_em():
    rng = np.random.default_rng(0)
    thetas = {"w": jnp.asarray(rng.normal(size=(40, D)) * 1.5, jnp.float32)}
    valid = jnp.arange(40) % 5 != 0
    noise = {"clipping_norm": 1e3, "noise_multiplier": 0.0}
    got = jax.jit(partial(private_em.em, **noise, floor=1e-4, steps=3))(jax.random.key(0), mixture(), thetas, valid)
    want = jax.jit(gaussian_mixture.em, static_argnums=(3, 4))(mixture(), thetas, valid, 1e-4, 3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)  # float32, and squares scaled by 1 / (2 C)


@given(hnp.arrays(np.float32, D, elements=st.floats(width=32)), st.sampled_from([0.1, 1.0, 30.0]))
@settings(max_examples=100, deadline=None)
def test_one_client_moves_the_sums_by_at_most_the_sensitivity(upload, limit):
    parts = _contribution(mixture(limit), {"w": upload}, limit)
    vector = np.concatenate([np.ravel(a) for a in jax.tree.leaves(parts)]).astype(np.float64)
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) <= private_em.SENSITIVITY * limit * (1 + 1e-5)


def test_the_noise_has_the_scale_that_is_accounted():
    """One component, all uploads zero: the new center is noise over the count. Level 1e-4; 3000 entries."""
    n, d, z, limit = 2000, 3000, 0.8, 0.5
    gamma = Mixture(jnp.ones(1), jnp.zeros((1, d)), jnp.ones(1))
    noise = {"clipping_norm": limit, "noise_multiplier": z}
    em = jax.jit(partial(private_em.em, **noise, floor=1e-6, steps=1))
    end = em(jax.random.key(3), gamma, jnp.zeros((n, d)), jnp.ones(n, bool))
    scale = z * private_em.SENSITIVITY * limit
    entries = np.asarray(end.mu[0], np.float64) * n / scale
    assert stats.kstest(entries, "norm").pvalue > 1e-4
    assert all(stats.kstest(entries / off, "norm").pvalue < 1e-4 for off in (2 / 3, 3 / 2))


def test_each_step_draws_anew():
    noise = {"clipping_norm": 0.5, "noise_multiplier": 0.8}
    em = jax.jit(partial(private_em.em, **noise, floor=1e-6, steps=3))
    with record() as draws:
        em(jax.random.key(3), mixture(), {"w": jnp.zeros((4, D))}, jnp.ones(4, bool))
    assert len({draw.key for draw in draws}) == len(draws) == 3
    assert [draw.stddev for draw in draws] == pytest.approx(3 * [0.8 * private_em.SENSITIVITY * 0.5])


@pytest.mark.slow
def test_a_planted_mixture_is_found_under_noise():
    """Two groups of 2000 about +-c, |c| = 1: the noise of a center is some 0.01 of that, far below what is asked."""
    rng = np.random.default_rng(5)
    c = np.ones(D) / np.sqrt(D)
    signs = rng.choice([-1.0, 1.0], size=4000)
    thetas = jnp.asarray(signs[:, None] * c + 0.1 * rng.normal(size=(4000, D)), jnp.float32)
    gamma = Mixture(jnp.full(K, 0.5), jnp.zeros((K, D)), jnp.full(K, 0.1))
    noise = {"clipping_norm": 1.5, "noise_multiplier": 5.0}
    here = (jnp.zeros(D), thetas, jnp.ones(4000, bool), jnp.array(True))
    end = private_em.server_step(jax.random.key(0), gamma, *here, **noise, floor=1e-4, steps=10)
    centers = np.asarray(end.mu)[np.argsort(np.asarray(end.mu) @ c)]
    np.testing.assert_allclose(centers, [-c, c], atol=0.1)
    np.testing.assert_allclose(end.p, 0.5, atol=0.05)


@pytest.mark.slow
def test_components_that_nobody_belongs_to_stay_where_they_are():
    gamma = mixture()._replace(mu={"w": jnp.stack([jnp.zeros(D), jnp.full(D, 100.0)])})
    changes = {"w": jnp.zeros((50, D))}
    noise = {"clipping_norm": 1.0, "noise_multiplier": 0.1}
    em = jax.jit(partial(private_em.em, jax.random.key(0), gamma, changes, **noise, floor=1e-4, steps=2))
    end = em(valid=jnp.ones(50, bool))
    np.testing.assert_array_equal(end.mu["w"][1], 100.0)
    assert end.s2[1] == gamma.s2[1]
    assert 0 < end.p[1] < 0.05
    nobody = em(valid=jnp.zeros(50, bool))
    chosen = jax.tree.leaves(nobody.mu)[0]
    np.testing.assert_array_equal(chosen, gamma.mu["w"])


@pytest.mark.slow
def test_the_whole_method_runs_private_and_refuses_other_mechanisms():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 3)), rng.integers(2, size=6)) for _ in range(8)]
    federation = stack_clients(clients, test=clients)
    options = {"components": 2, "em_steps": 3}
    done = fit("adamix", federation, model="linear", rounds=3, options=options, privacy=Mechanism(1.0, 0.5))
    assert np.isfinite(done.personalized_accuracy).all()
    assert done.statement(1e-3).noise_multiplier == pytest.approx(3**-0.5)
    for other in (Mechanism(1.0, 0.5, "distributed", 3), Mechanism(1.0, 0.5, quantile=0.5, count_stddev=1.0)):
        with pytest.raises(JaxpflError, match="supports only noise='central' and quantile=None"):
            fit("adamix", federation, rounds=1, privacy=other)
