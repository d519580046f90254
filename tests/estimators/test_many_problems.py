"""A thousand problems at once under vmap and jit, beside fits one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.estimators import ebbinomial, ebnm, ebpoisson

PROBLEMS, CLIENTS = 1000, 50


def problems(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (PROBLEMS, CLIENTS)
    if kind == "ebbinomial":
        n = rng.integers(5, 40, shape)
        return rng.binomial(n, rng.beta(2, 6, shape)).astype(float), n.astype(float)
    if kind == "ebpoisson":
        e = rng.uniform(1, 5, shape)
        return rng.poisson(e * rng.gamma(2, 0.5, shape)).astype(float), e
    s = rng.uniform(0.5, 1.5, shape)
    return rng.normal(0, 1, shape) * (rng.random(shape) < 0.5) + s * rng.normal(size=shape), s


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "point-normal", "ebbinomial", "ebpoisson"])
def test_each_of_a_thousand_problems_is_fitted_as_alone(kind):
    fit = {"ebbinomial": ebbinomial, "ebpoisson": ebpoisson}.get(kind) or functools.partial(ebnm, prior=kind)
    with jax.enable_x64(True):
        first, second = (jnp.asarray(of) for of in problems(kind))
        found = jax.jit(jax.vmap(fit))(first, second)
        for i in range(0, PROBLEMS, 50):
            alone = fit(first[i], second[i])
            np.testing.assert_allclose(found.log_marginal[i], alone.log_marginal, rtol=1e-9)
            np.testing.assert_allclose(found.mean[i], alone.mean, rtol=1e-4, atol=1e-5)
        assert np.isfinite(found.mean).all()
