"""The proximal step of every prior that has one: against a fine grid, and that it lowers the objective at any step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.priors import distillation, gaussian, gaussian_mixture, laplace

D = 4
MU = np.array([0.4, -1.0, 0.0, 2.0])
STEPS = (1e-3, 0.3, 5.0, 1e4)
NAMES = ("gaussian", "laplace", "mixture")


pytestmark = pytest.mark.usefixtures("x64")


def made(name: str) -> tuple:
    """A prior and its parameters."""
    if name == "gaussian":
        return gaussian.prior(), gaussian.Gaussian(jnp.asarray(MU), jnp.asarray(0.3))
    if name == "laplace":
        return laplace.prior(), laplace.Laplace(jnp.asarray(MU), jnp.asarray(0.4))
    mu = jnp.stack([jnp.asarray(MU), -jnp.asarray(MU), jnp.ones(D)])
    return gaussian_mixture.prior(3), gaussian_mixture.Mixture(
        jnp.array([0.2, 0.5, 0.3]), mu, jnp.array([0.3, 0.05, 1])
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("name", "penalty"),
    [("gaussian", lambda apart: apart**2 / (2 * 0.3)), ("laplace", lambda apart: np.abs(apart) / 0.4)],
)
def test_it_is_the_minimum(name, penalty, step):
    """Both penalties are sums over the entries: each entry's minimum on a grid of 1e-4."""
    prior, gamma = made(name)
    theta, grid = np.array([0.5, 3.0, -0.2, 2.0]), np.linspace(-4, 4, 80_001)[:, None]
    best = grid[(step * penalty(grid - MU) + (grid - theta) ** 2 / 2).argmin(axis=0), 0]
    np.testing.assert_allclose(jax.jit(prior.prox)(step, gamma, theta), best, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_it_lowers_the_objective_whatever_the_step(name):
    """Also where a step of that size along the gradient raises it."""
    prior, gamma = made(name)

    @jax.jit
    @jax.vmap
    def values(step, theta):
        """Before, after the proximal step, and after the gradient's."""

        def value(t):
            return step * prior.penalty(gamma, t) + ((t - theta) ** 2).sum() / 2

        ends = theta, prior.prox(step, gamma, theta), theta - step * jax.grad(prior.penalty, argnums=1)(gamma, theta)
        return [value(end) for end in ends]

    thetas = 2 * np.random.default_rng(0).normal(size=(200, D))
    before, proximal, gradient = map(np.asarray, values(jnp.resize(jnp.array(STEPS), (200,)), jnp.asarray(thetas)))
    assert (proximal < before).all()
    assert (gradient > before).any()


@pytest.mark.parametrize("name", NAMES)
def test_repeated_it_ends_at_a_minimum_of_the_penalty(name):
    prior, gamma = made(name)
    ends = jnp.asarray(np.random.default_rng(1).normal(size=(20, D)))

    @jax.jit
    def last_slopes(ends):
        ends = jax.lax.fori_loop(0, 300, lambda _, at: jax.vmap(lambda t: prior.prox(0.5, gamma, t))(at), ends)
        return jax.vmap(lambda t: jax.grad(prior.penalty, argnums=1)(gamma, t))(ends)

    slopes = last_slopes(ends)
    assert float(jnp.abs(slopes).max()) < 1e-6


def test_laplaces_reaches_the_common_entries_exactly():
    gamma = laplace.Laplace(jnp.asarray(MU), jnp.asarray(0.5))
    got = np.asarray(laplace.prox(0.1, gamma, jnp.asarray(MU + np.array([0.19, -0.2, 0.3, -0.5]))))
    np.testing.assert_array_equal(got[:2], MU[:2])
    np.testing.assert_allclose(got[2:] - MU[2:], [0.1, -0.3], rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_of_a_tree_it_is_that_of_the_vector(name):
    prior, gamma = made(name)
    tree = gamma._replace(mu={"a": gamma.mu[..., :3], "b": gamma.mu[..., 3]})
    theta = jnp.array([0.5, 3.0, -0.2, 2.0])
    prox = jax.jit(prior.prox)
    want, got = prox(0.3, gamma, theta), prox(0.3, tree, {"a": theta[:3], "b": theta[3]})
    np.testing.assert_allclose(jnp.append(got["a"], got["b"]), want, rtol=1e-12)


def test_the_prior_on_predictions_has_none():
    assert distillation.prior().prox is None
