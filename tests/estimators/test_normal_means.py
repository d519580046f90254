"""Empirical Bayes normal means: fits and posteriors beside quadrature and SciPy's optimisers, and their edges."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import normal_means_reference as reference
import numpy as np
import pytest
from scipy import optimize, stats

from jaxpfl.estimators.empirical_bayes import FAMILIES, NormalMixture, ebnm, grid, homogeneity, james_stein, posterior
from jaxpfl.estimators.empirical_bayes.grid import MANY, binned
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

GRID = {"npmle": 80}
"""A coarser grid than by default: half the least error of the data, apart."""
POINTS = [(0.0, 1.0), (0.3, 1.0), (-4.0, 0.5), (6.0, 2.0), (-1.0, 3.0), (9.0, 1.0), (2.0, 0.05)]
PRIORS = {
    "normal": ([1.0, 0.0, 0.0], [0.7, 0.7, 0.7], [1.5, 1.0, 1.0]),
    "spike": ([0.8, 0.2, 0.0], [0.0, 0.0, 0.0], [0.0, 3.0, 1.0]),
    "scales": ([0.5, 0.2, 0.3], [0.0, 0.0, 0.0], [0.0, 0.4, 2.0]),
    "atoms": ([0.2, 0.5, 0.3], [-2.0, 0.0, 3.0], [0.0, 0.0, 0.0]),
}


pytestmark = pytest.mark.usefixtures("x64")


def data(m: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    theta = np.where(rng.random(m) < 0.3, 3 * rng.normal(size=m), 0.0)
    s = rng.uniform(0.4, 2, m)
    return theta + s * rng.normal(size=m), s


@functools.cache
def fitted(prior: Any) -> Any:
    return ebnm(*data(), prior=prior, components=GRID.get(prior))


posteriors = jax.jit(posterior)
log_marginals = jax.jit(NormalMixture.log_marginal)


def check_posterior(prior, oracle: reference.Prior) -> None:
    x, s = (jnp.array(of) for of in zip(*POINTS, strict=True))
    found, marginal = posteriors(prior, x, s), log_marginals(prior, x, s)
    for i, (own, error) in enumerate(POINTS):
        true = reference.posterior(oracle, own, error)
        np.testing.assert_allclose(marginal[i], np.log(true.marginal), rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(found.mean[i], true.mean, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found.sd[i], true.sd, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(found.lfsr[i], min(true.not_above, true.not_below), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(found.shrinkage, 1 - found.sd**2 / s**2)
    np.testing.assert_allclose(found.log_marginal, marginal.sum())


@pytest.mark.parametrize("name", PRIORS)
def test_posteriors_under_mixtures_of_normals(name):
    check_posterior(NormalMixture(*map(jnp.array, PRIORS[name])), reference.normals(*PRIORS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spike", "scales", "atoms"])
def test_quantiles_turn_the_posterior_round(name):
    x, s = (jnp.array(of) for of in zip(*POINTS, strict=True))
    found = posterior(NormalMixture(*map(jnp.array, PRIORS[name])), x, s)
    for p in (0.025, 0.5, 0.9):
        t = found.quantile(p)
        assert (found.prior.below(t, x, s) >= p - 1e-9).all()
        assert (found.prior.below(t - 1e-7, x, s) <= p + 1e-6).all()


@pytest.mark.slow
def test_an_interval_contains_its_atom():
    prior = NormalMixture(jnp.array([0.9, 0.1]), jnp.array([0.3, 0.3]), jnp.array([0.0, 4.0]))
    low, high = posterior(prior, jnp.array([0.1, 0.6]), jnp.ones(2)).interval(0.5)
    np.testing.assert_array_equal(low, 0.3)
    np.testing.assert_array_equal(high, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [PRIORS["scales"], PRIORS["atoms"]])
def test_draws_have_the_posterior_moments(prior):
    """6 standard errors of 20000 draws: a false alarm once in 1e8 runs of another seed."""
    prior = NormalMixture(*map(jnp.array, prior))
    x, s = (jnp.array(of) for of in zip(*POINTS[:4], strict=True))
    found = posterior(prior, x, s)
    draws = jax.vmap(found.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_array_less(jnp.abs(draws.mean(axis=0) - found.mean), 6 * found.sd / 20_000**0.5 + 1e-12)
    fourth = ((draws - found.mean) ** 4).mean(axis=0)
    spread = jnp.sqrt(jnp.maximum(fourth - found.sd**4, 0) / 20_000)  # of an atom zero but for rounding
    np.testing.assert_array_less(jnp.abs(((draws - found.mean) ** 2).mean(axis=0) - found.sd**2), 6 * spread + 1e-9)


def test_the_normal_fit_is_that_of_a_scalar_optimiser():
    x, s = data()

    def minus(log_t: float) -> float:
        w = 1 / (s**2 + np.exp(2 * log_t))
        return -stats.norm.logpdf(x, w @ x / w.sum(), w**-0.5).sum()

    best: Any = optimize.minimize_scalar(minus, bounds=(-6, 4), method="bounded", options={"xatol": 1e-10})
    found = fitted("normal")
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-12)
    np.testing.assert_allclose(found.prior.sds[0], np.exp(best.x), rtol=1e-5)
    t2 = found.prior.sds[0] ** 2
    np.testing.assert_allclose(found.shrinkage, s**2 / (s**2 + t2), rtol=1e-9)
    np.testing.assert_allclose(found.mean, x - found.shrinkage * (x - found.prior.means[0]), rtol=1e-9)


def test_spike_and_slab_fits_are_those_of_nelder_and_mead():
    x, s = data()

    def minus(at: np.ndarray) -> float:
        null, scale = 1 / (1 + np.exp(-at[0])), np.exp(at[1])
        slab = stats.norm.pdf(x, 0, np.hypot(s, scale))
        return -np.log(null * stats.norm.pdf(x, 0, s) + (1 - null) * slab).sum()

    best: Any = optimize.minimize(minus, [0.0, 0.5], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10})
    found = fitted("point-normal")
    np.testing.assert_allclose(found.log_marginal, -best.fun, rtol=1e-8)
    np.testing.assert_allclose(found.prior.weights[0], 1 / (1 + np.exp(-best.x[0])), rtol=1e-4)


def test_weights_of_a_few_components_are_those_of_slsqp():
    x, s = data(80, 3)
    nodes = np.linspace(x.min(), x.max(), 7)
    density = stats.norm.logpdf(x[:, None], nodes, s[:, None])
    weights, slack = grid.weights(jnp.asarray(density))
    np.testing.assert_allclose(weights.sum(), 1.0)
    assert slack < 1e-8
    np.testing.assert_allclose(np.log(np.exp(density) @ weights).mean(), reference.likeliest(density), atol=1e-9)


def test_the_npmle_satisfies_kiefer_and_wolfowitz():
    """No atom anywhere raises the likelihood: also between the grid's points and beyond them, but for their spacing."""
    x, s = data()
    found = fitted("npmle")
    assert found.slack < 1e-8
    fine = np.linspace(x.min() - 3, x.max() + 3, 4001)
    fit = np.exp(np.asarray(found.prior.log_marginal(jnp.asarray(x), jnp.asarray(s))))
    ratio = (stats.norm.pdf(x[:, None], fine, s[:, None]) / fit[:, None]).mean(axis=0)
    on_grid = (stats.norm.pdf(x[:, None], np.asarray(found.prior.means), s[:, None]) / fit[:, None]).mean(axis=0)
    assert on_grid.max() < 1 + 1e-8
    assert ratio.max() < 1 + 1e-2
    np.testing.assert_allclose(on_grid[np.asarray(found.prior.weights) > 1e-3], 1.0, atol=1e-4)


@pytest.mark.parametrize(
    "prior", [pytest.param(name, marks=[pytest.mark.slow] * (name != "normal")) for name in FAMILIES]
)
def test_scales_and_clients_order(prior):
    """Units, and the order of clients, change nothing but the unit and the order; ties and huge scales too."""
    x, s = data()
    x[:5] = x[0]  # ties
    fit = functools.partial(ebnm, prior=prior, components=GRID.get(prior))
    first = fit(x, s)
    for unit in (1e100, 1e-100):
        other = fit(unit * x, unit * s)
        np.testing.assert_allclose(other.mean / unit, first.mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(other.sd / unit, first.sd, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(other.lfsr, first.lfsr, rtol=1e-5, atol=1e-9)
    order = np.random.default_rng(0).permutation(len(x))
    other = fit(x[order], s[order])
    np.testing.assert_allclose(other.mean, first.mean[order], rtol=1e-6, atol=1e-7)
    if prior in ("normal", "npmle"):
        np.testing.assert_allclose(fit(x + 1000, s).mean - 1000, first.mean, atol=1e-6)


@pytest.mark.slow
def test_jit_and_vmap_over_problems():
    problems = [data(40, seed) for seed in range(3)]
    x, s = (jnp.stack([jnp.asarray(of) for of in each]) for each in zip(*problems, strict=True))
    for prior in ("normal", "scale-mixture"):
        together = jax.jit(jax.vmap(functools.partial(ebnm, prior=prior)))(x, s)
        for i, (own, error) in enumerate(problems):
            alone = ebnm(own, error, prior=prior)
            np.testing.assert_allclose(together.mean[i], alone.mean, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(together.log_marginal[i], alone.log_marginal, rtol=1e-8)


@pytest.mark.slow
def test_one_error_for_all_and_more_clients_than_are_at_once():
    x = 3 * np.random.default_rng(0).normal(size=5000)
    found = ebnm(x, 1.0)
    np.testing.assert_array_equal(found.s, 1.0)
    low, high = found.interval(0.9)
    assert low.shape == high.shape == (5000,)
    assert ((low < found.mean) & (found.mean < high)).all()
    np.testing.assert_allclose(found.prior.below(found.quantile(0.3), found.x, found.s), 0.3)


@pytest.mark.slow
def test_without_spread_all_clients_are_alike():
    for prior in ("normal", "npmle"):
        found = ebnm(np.full(6, 3.0), np.arange(1.0, 7), prior=prior, components=GRID.get(prior))
        np.testing.assert_allclose(found.mean, 3.0)
        np.testing.assert_allclose(found.sd, 0.0, atol=1e-12)
        np.testing.assert_allclose(found.shrinkage, 1.0)
    x = np.array([0.1, -0.2, 0.05, -0.1])
    null: Any = ebnm(x, 1.0, prior="point-normal")
    np.testing.assert_array_equal(null.prior.weights, [1.0, 0.0])
    np.testing.assert_array_equal(null.mean, 0.0)
    np.testing.assert_array_equal(null.lfsr, 1.0)


@pytest.mark.parametrize("prior", ["normal", pytest.param("point-normal", marks=pytest.mark.slow)])
def test_clients_alike_have_the_mean_weighted_by_precision(prior: Any):
    """Effects that spread less than their unequal errors: the null's mean, and its log likelihood in closed form."""
    s = data()[1]
    x = 3 + 0.1 * s * np.tile([1.0, -1.0, 0.5, 1.0], 30)
    found: Any = ebnm(x, s, prior=prior, center="learned")
    mean = (x / s**2).sum() / (1 / s**2).sum()
    assert float(found.prior.weights[0]) == 1
    np.testing.assert_allclose(found.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(found.log_marginal, stats.norm(mean, s).logpdf(x).sum(), rtol=1e-9)


def test_one_client_with_a_given_center():
    found: Any = ebnm([3.0], [1.0], center=0.0)
    np.testing.assert_allclose(found.prior.sds, 8**0.5, rtol=1e-5)  # x^2 - s^2
    np.testing.assert_allclose(found.mean, 3 * 8 / 9, rtol=1e-5)


@pytest.mark.slow
def test_stein_s_estimate_of_the_risk():
    """Unbiased under a known prior: 5 standard errors over 4000 clients."""
    rng = np.random.default_rng(0)
    prior = NormalMixture(*map(jnp.array, PRIORS["atoms"]))
    s = rng.uniform(0.5, 2, 4000)
    theta = rng.choice(PRIORS["atoms"][1], 4000, p=PRIORS["atoms"][0])
    found = posterior(prior, jnp.asarray(theta + s * rng.normal(size=4000)), jnp.asarray(s))
    off = ((found.mean - found.x) ** 2 + 2 * found.sd**2 - found.s**2) - (found.mean - theta) ** 2
    assert abs(off.mean()) < 5 * off.std() / 4000**0.5
    np.testing.assert_allclose(found.risk, ((found.mean - theta) ** 2).mean() + off.mean())


@pytest.mark.parametrize(
    ("x", "s", "more", "said"),
    [
        ([1.0, 2.0], [1.0, 0.0], {}, "s must be finite and > 0, got 0.0 for client 1"),
        ([1.0, np.nan], [1.0, 1.0], {}, "x must be finite, got nan for client 1"),
        ([1.0, 2.0, 3.0], [1.0, 1.0], {}, "x and s must have the same length, got lengths 3 and 2"),
        (["a", "b"], 1.0, {}, r"x must be numbers, one for each client, got \['a', 'b'\]"),
        ([1.0], [1.0], {}, "at least 2 clients are required to estimate a prior \\(1 if center is given\\), got 1"),
        ([], [], {"prior": "point-normal"}, "at least 1 client is required, got 0"),
        ([1.0, 2.0], 1.0, {"prior": "nomal"}, "unknown prior 'nomal': did you mean 'normal'"),
        ([1.0, 2.0], 1.0, {"center": "zero"}, "center must be a number or 'learned', got 'zero'"),
        ([1.0, 2.0], 1.0, {"prior": "npmle", "center": 0.0}, "center must be left out for prior 'npmle', got 0.0"),
        ([1.0, 2.0], 1.0, {"prior": "scale-mixture", "center": "learned"}, "center must be a number for prior 'scale"),
        ([1.0, 2.0], 1.0, {"components": 10}, "components must be left out for prior 'normal', got 10"),
        (
            [1.0, 2.0],
            1.0,
            {"prior": "npmle", "components": 2},
            "components must be a whole number of at least 3, got 2",
        ),
    ],
)
def test_bad_arguments_are_refused_in_a_line(x, s, more, said):
    with pytest.raises(JaxpflError, match=said) as error:
        ebnm(x, s, **more)
    assert "\n" not in str(error.value)


def test_values_without_digits_are_refused_in_single_precision():
    with jax.enable_x64(False), pytest.raises(JaxpflError, match="lose their digits in float32"):
        ebnm([1e8, 1e8 + 1], 1.0)


def test_values_beyond_single_precision_are_refused():
    with jax.enable_x64(False):
        for x, s, said in (([1e60, 2e60], 1e60, "x must be within"), ([0.0, 1.0], 1e-60, "s must be within")):
            with pytest.raises(JaxpflError, match=f"{said} the range of float32"):
                ebnm(x, s)


def test_a_coarse_grid_is_said():
    with pytest.raises(JaxpflWarning, match=r"npmle atoms are 5 apart, but the smallest s is 1: add components"):
        ebnm([0.0, 50.0, 20.0], 1.0, prior="npmle", components=11)


@pytest.mark.slow
def test_single_precision_is_near_double():
    x, s = data()
    with jax.enable_x64(False):
        for prior in ("normal", "point-normal", "scale-mixture"):
            found = ebnm(x, s, prior=prior)
            assert found.mean.dtype == jnp.float32
            np.testing.assert_allclose(found.mean, fitted(prior).mean, atol=0.02)
            np.testing.assert_allclose(found.log_marginal, fitted(prior).log_marginal, rtol=1e-4)


def test_cochran_s_test():
    x, s = data(30, 1)
    test = jax.jit(homogeneity)
    found = test(x, s)
    w = s**-2.0
    np.testing.assert_allclose([found.mean, found.stderr], [w @ x / w.sum(), w.sum() ** -0.5])
    Q = w @ (x - w @ x / w.sum()) ** 2
    np.testing.assert_allclose(found.statistic, Q)
    np.testing.assert_allclose(found.p_value, stats.chi2.sf(Q, 29), rtol=1e-8)
    np.testing.assert_allclose(found.excess, max(0, 1 - 29 / Q))
    alike = homogeneity(np.ones(5), 1.0)
    np.testing.assert_allclose([alike.statistic, alike.p_value, alike.excess], [0, 1, 0])
    tiny = test(1e-200 * x, 1e-200 * s)
    np.testing.assert_allclose(tiny.p_value, found.p_value)


def test_james_and_stein():
    x = np.array([3.0, 1.0, -2.0, 5.0, 0.0, 1.0])
    found = james_stein(x, 2.0)
    c = 1 - 3 * 4 / ((x - x.mean()) ** 2).sum()
    np.testing.assert_allclose(found.mean, x.mean() + c * (x - x.mean()))
    np.testing.assert_array_equal(james_stein(x, 9.0).weight, 0.0)
    for given, said in (
        ((x[:3], 1.0), "at least 4 clients, got 3"),
        ((x, np.ones(6)), r"James-Stein estimator, got shape \(6,\)"),
    ):
        with pytest.raises(JaxpflError, match=said):
            james_stein(*given)


def many(rare: float = 0.2, far: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    m = MANY + 100
    s = rng.uniform(0.5, 1.5, m)
    return np.where(rng.random(m) < rare, far * rng.normal(size=m), 0.0) + s * rng.normal(size=m), s


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["scale-mixture", "npmle"])
def test_weights_from_bins_are_nearly_the_likeliest_of_all_clients(prior):
    """Kiefer and Wolfowitz's condition on all clients in NumPy, and the weights that are found without bins."""
    x, s = many()
    found: Any = ebnm(x, s, prior=prior, components=40)
    L = stats.norm.pdf(x[:, None], found.prior.means, np.hypot(s[:, None], found.prior.sds))
    slack = (L / (L @ np.asarray(found.prior.weights))[:, None]).mean(axis=0).max() - 1
    assert slack < 1e-3  # of the bins it is none
    alone, _ = grid.weights(jnp.log(jnp.asarray(L)))
    np.testing.assert_allclose(found.log_marginal, np.log(L @ np.asarray(alone)).sum(), rtol=1e-6)


def test_bins_keep_weights_and_means():
    x, s = (jnp.asarray(of) for of in many())
    w = jnp.arange(len(x)) / jnp.arange(len(x)).sum()
    own, errors, weights = jax.jit(binned)(x, s, w)
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ own, w @ x, rtol=1e-9)
    np.testing.assert_allclose(weights @ errors, w @ s, rtol=1e-9)
    alike = jax.jit(binned)(jnp.ones(5), jnp.ones(5), jnp.full(5, 0.2))
    np.testing.assert_allclose(alike[2].max(), 1.0)
