"""Bootstrapped posteriors of normal means: beside oracles of a single refit and of the mixture, and their coverage."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import normal_means_reference as reference
import numpy as np
import pytest

from jaxpfl.errors import JaxpflError
from jaxpfl.estimators import ebnm
from jaxpfl.estimators.normal_means import NormalMixture, PointLaplace, bootstrap, posterior
from jaxpfl.estimators.normal_means.refits import GridRefits, Refits


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def mixed(priors: list[reference.Prior], x: float, s: float) -> tuple[float, float, float]:
    """Mean, deviation and P(theta <= 0) of the even mixture of posteriors."""
    each = [reference.posterior(prior, x, s) for prior in priors]
    mean = np.mean([of.mean for of in each])
    variance = np.mean([of.sd**2 + (of.mean - mean) ** 2 for of in each])
    return float(mean), float(variance**0.5), float(np.mean([of.not_above for of in each]))


def checked(refits: Any, priors: list[reference.Prior]) -> None:
    x, s = np.array([-1.0, 0.3, 4.0]), np.array([1.0, 0.5, 2.0])
    found = posterior(refits, jnp.array(x), jnp.array(s))
    for i in range(3):
        mean, sd, below = mixed(priors, x[i], s[i])
        np.testing.assert_allclose([found.mean[i], found.sd[i], found.below(0.0)[i]], [mean, sd, below], rtol=1e-6)
        each = [reference.posterior(prior, x[i], s[i]).marginal for prior in priors]
        np.testing.assert_allclose(refits.log_marginal(jnp.array(x), jnp.array(s))[i], np.log(np.mean(each)), rtol=1e-6)
    low, high = found.interval(0.9)
    np.testing.assert_allclose(found.below(low - 1e-7) <= 0.05, True)
    np.testing.assert_allclose(found.below(high + 1e-7) >= 0.95, True)
    np.testing.assert_allclose(found.below(high - 1e-7) <= 0.95, True)
    drawn = jax.vmap(found.sample)(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(drawn.mean(axis=0), found.mean, atol=5 * float(found.sd.max()) / 4000**0.5)
    mirrored = posterior(refits.mirrored(), -jnp.array(x), jnp.array(s))
    np.testing.assert_allclose(mirrored.mean, -found.mean, rtol=1e-9)


def test_mixed_posteriors_of_normals():
    weights, means, sds = [[0.7, 0.3], [0.2, 0.8]], [[0.0, 1.0], [2.0, -1.0]], [[0.0, 1.5], [0.0, 0.5]]
    priors = [reference.normals(*of) for of in zip(weights, means, sds, strict=True)]
    checked(Refits(NormalMixture(*map(jnp.array, (weights, means, sds)))), priors)


def test_mixed_posteriors_on_a_grid():
    weights, means, sds = [[0.7, 0.3, 0.0], [0.2, 0.3, 0.5]], [0.0, 1.0, -0.5], [0.0, 1.5, 0.0]
    priors = [reference.normals(own, means, sds) for own in weights]
    checked(GridRefits(*map(jnp.array, (weights, means, sds))), priors)


@pytest.mark.slow
def test_mixed_posteriors_of_laplace():
    null, center, scale = [0.7, 0.1], [0.0, 1.0], [1.0, 0.6]
    priors = [reference.laplace(*of) for of in zip(null, center, scale, strict=True)]
    checked(Refits(PointLaplace(*map(jnp.array, (null, center, scale)))), priors)


def test_a_refit_is_a_fit_to_drawn_clients():
    """Of clients drawn with replacement with their numbers, and of estimates drawn from the fitted prior."""
    x, s = np.array([1.0, -2.0, 0.5, 4.0, 7.0, -3.0]), np.array([1.0, 0.5, 1.5, 1.0, 0.7, 1.2])
    key = jax.random.key(3)
    (one,) = jax.random.split(key, 1)
    of_theta, of_x = jax.random.split(one)
    found = bootstrap(key, x, s, refits=1, resampling="clients")
    counts = np.bincount(np.asarray(jax.random.randint(of_theta, (6,), 0, 6)), minlength=6)
    direct = ebnm(x, s, weights=counts).prior
    np.testing.assert_allclose([found.prior.mean, found.prior.sd], [direct.mean, direct.sd], rtol=1e-6)

    prior = ebnm(x, s).prior
    theta = prior.mean + prior.sd * jax.random.normal(jax.random.split(of_theta)[1], (6,))
    direct = ebnm(theta + s * jax.random.normal(of_x, (6,)), s).prior
    found = bootstrap(key, x, s, refits=1)
    np.testing.assert_allclose([found.prior.mean, found.prior.sd], [direct.mean, direct.sd], rtol=1e-6)
    np.testing.assert_allclose(found.mean, posterior(direct, jnp.array(x), jnp.array(s)).mean, rtol=1e-6)


@pytest.mark.slow
def test_it_maps_over_problems():
    rng = np.random.default_rng(0)
    x, keys = jnp.array(rng.normal(size=(3, 20))), jax.random.split(jax.random.key(0), 3)
    for prior in ("normal", "npmle"):
        call = jax.jit(lambda key, x, prior=prior: bootstrap(key, x, 0.5, cast(Any, prior), refits=4).interval())
        together = jax.vmap(call)(keys, x)
        alone = call(keys[1], x[1])
        np.testing.assert_allclose([end[1] for end in together], alone, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["point-normal", "npmle", "point-laplace"])
def test_intervals_cover(prior):
    """30 clients of spread .3 and errors of 1: mean coverage over files of at least 95 % less four standard errors, a
    false alarm in about 3e-5 of the seeds if it is 95 %, where plug-in intervals have 40 to 70 %."""
    rng, files = np.random.default_rng(0), 24
    more: Any = {"components": 40} if prior == "npmle" else {"center": "learned"}
    theta = 0.3 * rng.normal(size=(files, 30))
    x = theta + rng.normal(size=theta.shape)

    @jax.jit
    def ends(key: Any, x: Any) -> Any:
        found = bootstrap(key, x, 1.0, prior, refits=50, **more)
        return *found.interval(), *ebnm(x, 1.0, prior, **more).interval()

    made = [ends(jax.random.key(i), jnp.array(own)) for i, own in enumerate(x)]
    low, high, plug_low, plug_high = (np.stack(of) for of in zip(*made, strict=True))
    covered = ((low <= theta) & (theta <= high)).mean(axis=1)
    assert covered.mean() > 0.95 - 4 * covered.std(ddof=1) / files**0.5
    assert ((plug_low <= theta) & (theta <= plug_high)).mean() < 0.85


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"refits": 0}, "refits must be a whole number of at least 1, got 0"),
        ({"resampling": "rows"}, "unknown resampling 'rows'"),
        ({"prior": "beta"}, "unknown prior 'beta'"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(more, said):
    with pytest.raises(JaxpflError, match=said):
        bootstrap(jax.random.key(0), [1.0, 2.0], 1.0, **more)
