"""Bootstrapped posteriors of normal means: beside oracles of a single refit and of the mixture, and their coverage."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import normal_means_reference as reference
import numpy as np
import pytest
from scipy import stats

from jaxpfl.estimators import ebnm
from jaxpfl.estimators.normal_means import NormalMixture, PointLaplace, bootstrap, posterior
from jaxpfl.estimators.normal_means.refits import GridRefits, Refits
from jaxpfl.estimators.normal_means.smooth import smoothest
from jaxpfl.support.errors import JaxpflError


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


@pytest.mark.slow
def test_mixed_posteriors_of_normals():
    weights, means, sds = [[0.7, 0.3], [0.2, 0.8]], [[0.0, 1.0], [2.0, -1.0]], [[0.0, 1.5], [0.0, 0.5]]
    priors = [reference.normals(*of) for of in zip(weights, means, sds, strict=True)]
    checked(Refits(NormalMixture(*map(jnp.array, (weights, means, sds)))), priors)


@pytest.mark.slow
def test_mixed_posteriors_on_a_grid():
    weights, means, sds = [[0.7, 0.3, 0.0], [0.2, 0.3, 0.5]], [0.0, 1.0, -0.5], [0.0, 1.5, 0.0]
    priors = [reference.normals(own, means, sds) for own in weights]
    checked(GridRefits(*map(jnp.array, (weights, means, sds))), priors)


@pytest.mark.slow
def test_mixed_posteriors_of_laplace():
    null, center, scale = [0.7, 0.1], [0.0, 1.0], [1.0, 0.6]
    priors = [reference.laplace(*of) for of in zip(null, center, scale, strict=True)]
    checked(Refits(PointLaplace(*map(jnp.array, (null, center, scale)))), priors)


@pytest.mark.slow
def test_a_refit_is_a_fit_to_drawn_clients():
    """Bootstraps of clients drawn with replacement with their numbers, and of estimates drawn from the fitted prior."""
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


def likelihood(x: np.ndarray, s: np.ndarray, places: np.ndarray, h: float) -> float:
    """Greatest log likelihood over the weights of normals of spread h at the places, by 5000 steps of EM."""
    L = stats.norm.pdf(x[:, None], places, np.sqrt(s[:, None] ** 2 + h**2))
    weights = np.full(len(places), 1 / len(places))
    for _ in range(5_000):
        weights = weights * (L / (L @ weights)[:, None]).mean(axis=0)
    return float(np.log(L @ weights).sum())


def test_the_smoothest_population_is_the_widest_that_is_not_refused():
    rng = np.random.default_rng(5)
    x, s = 2 * rng.normal(size=40), rng.uniform(0.5, 1.0, 40)
    x += s * rng.normal(size=40)
    prior = ebnm(x, s, "npmle", components=60).prior
    assert isinstance(prior, NormalMixture)
    found = smoothest(jnp.array(x), jnp.array(s), jnp.full(40, 1 / 40), prior)
    h, places = float(found.sds[0]), np.asarray(prior.means)
    np.testing.assert_array_equal(found.sds, h)
    np.testing.assert_array_equal(found.means, places)
    np.testing.assert_allclose(found.weights.sum(), 1.0)
    best = likelihood(x, s, places, 0.0)
    allowed = stats.chi2.ppf(0.95, 1) / 2
    # 1.03: h is found to a 256th of the logarithm of its range, 2.2 %.
    assert best - likelihood(x, s, places, h) < allowed < best - likelihood(x, s, places, 1.03 * h)
    # Atoms far apart are no smooth population: h is then far below their distance.
    far = np.repeat([-3.0, 3.0], 20) + 0.25 * rng.normal(size=40)
    prior = ebnm(far, 0.25, "npmle", components=60).prior
    assert isinstance(prior, NormalMixture)
    assert smoothest(jnp.array(far), jnp.full(40, 0.25), jnp.full(40, 1 / 40), prior).sds[0] < 0.5


@pytest.mark.slow
def test_an_npmle_is_refitted_to_clients_of_the_smoothest_population():
    """One refit, beside the same draws by hand."""
    rng = np.random.default_rng(6)
    x, key = jnp.array(2 * rng.normal(size=25)), jax.random.key(3)
    found = bootstrap(key, x, 1.0, "npmle", components=30, refits=1)
    prior = ebnm(x, 1.0, "npmle", components=30).prior
    assert isinstance(prior, NormalMixture)
    population = smoothest(x, jnp.ones(25), jnp.full(25, 1 / 25), prior)
    of_theta, of_x = jax.random.split(jax.random.split(key, 1)[0])
    drawn = np.asarray(population.draw(of_theta, x.shape) + jax.random.normal(of_x, x.shape))
    refit = cast(GridRefits, found.prior)
    places, weights = np.asarray(refit.means), np.asarray(refit.weights[0])
    np.testing.assert_allclose([places[0], places[-1]], [min(drawn.min(), x.min()), max(drawn.max(), x.max())])
    own = np.log(stats.norm.pdf(drawn[:, None], places) @ weights).sum()
    assert abs(own - likelihood(drawn, np.ones(25), places, 0.0)) < 1e-3
