"""Normal means with covariates: beside a dense oracle and published numbers, coverage, and edges."""

import functools

import area_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from jaxpfl.estimators.empirical_bayes import fay_herriot
from jaxpfl.support.errors import JaxpflError

pytestmark = pytest.mark.usefixtures("x64")


def data(m: int = 25, seed: int = 0, spread: float = 0.7) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, s, z without its column of ones, and theta."""
    rng = np.random.default_rng(seed)
    z = np.stack([rng.normal(size=m), 1990 + rng.integers(0, 30, m)], axis=1)
    s = rng.uniform(0.4, 1.5, m)
    theta = -200 + z @ np.array([1.0, 0.1]) + spread * rng.normal(size=m)
    return theta + s * rng.normal(size=m), s, z, theta


def with_ones(z: np.ndarray) -> np.ndarray:
    return np.hstack([np.ones((len(z), 1)), z])


def about_others(x: np.ndarray, s: np.ndarray, z: np.ndarray, A: float) -> np.ndarray:
    """Each client's distance to its prediction from all others, over the root of that distance's variance."""
    found = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        covariance = np.linalg.inv((z[rest].T / (A + s[rest] ** 2)) @ z[rest])
        beta = covariance @ (z[rest].T @ (x[rest] / (A + s[rest] ** 2)))
        found.append((x[i] - z[i] @ beta) / np.sqrt(A + s[i] ** 2 + z[i] @ covariance @ z[i]))
    return np.array(found)


@pytest.mark.parametrize("fit", ["reml", pytest.param("ml", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", [0.7, 0.0])
def test_predictions_are_those_of_dense_matrices(fit, spread):
    x, s, z, _ = data(spread=spread)
    found, true = fay_herriot(x, s, z, fit=fit), reference.area(x, s, with_ones(z), fit)
    assert (true.variance > 0) == (spread > 0)  # both sides of the boundary are met
    np.testing.assert_allclose(found.variance, true.variance, rtol=1e-6)
    np.testing.assert_allclose(found.log_likelihood, true.log_likelihood, rtol=1e-10)
    np.testing.assert_allclose(found.beta, true.beta, rtol=1e-6)  # a maximum is known to half the digits
    np.testing.assert_allclose(found.beta_covariance, true.beta_covariance, rtol=1e-5)
    np.testing.assert_allclose(found.mean, true.mean, rtol=1e-6)
    np.testing.assert_allclose(found.mse, true.mse, rtol=1e-6)
    np.testing.assert_allclose(found.risk, true.risk, rtol=1e-5)
    np.testing.assert_allclose(found.regression, with_ones(z) @ true.beta)
    np.testing.assert_allclose(found.shrinkage, s**2 / (s**2 + true.variance), rtol=1e-6)
    np.testing.assert_allclose(found.residual, about_others(x, s, with_ones(z), true.variance), rtol=1e-4)
    if fit == "reml":
        np.testing.assert_allclose(found.g1 + found.g2 + 2 * found.g3, found.mse)


@pytest.mark.parametrize(
    ("columns", "tau2", "beta", "errors"),
    [
        pytest.param([], 0.3132, [-0.7145], [0.1798], marks=pytest.mark.slow),
        pytest.param([0], 0.0764, [0.2515, -0.0291], [0.2491, 0.0072], marks=pytest.mark.slow),
        pytest.param([0, 1], 0.1108, [-3.5455, -0.0280, 0.0019], [29.0959, 0.0102, 0.0147], marks=pytest.mark.slow),
    ],
)
def test_published_meta_regressions_of_the_bcg_trials(columns, tau2, beta, errors):
    """REML, as Viechtbauer 2010 ("Conducting meta-analyses in R with the metafor package") prints it."""
    x, s, z = reference.bcg()
    found = fay_herriot(x, s, z[:, columns])
    np.testing.assert_allclose(found.variance, tau2, atol=6e-5)
    np.testing.assert_allclose(found.beta, beta, atol=2e-4)
    np.testing.assert_allclose(np.sqrt(np.diag(found.beta_covariance)), errors, atol=6e-4)
    if not columns:
        np.testing.assert_allclose(found.statistic, 152.2330, atol=6e-5)
        np.testing.assert_allclose(fay_herriot(x, s, z[:, columns], fit="ml").variance, 0.2800, atol=6e-5)


@pytest.mark.slow
def test_the_best_of_several_maxima_is_taken():
    """Two clients close to the line, exactly known, and eight far off, badly known: the likelihood has two maxima."""
    s = np.array([0.01, 0.01, *[3.0] * 8])
    x = np.array([0.0, 0.05, 20.0, -18, 15, -20, 19, -17, 16, -19])
    z = np.zeros((10, 0))
    true = reference.area(x, s, with_ones(z), "ml")
    np.testing.assert_allclose(fay_herriot(x, s, z, fit="ml").log_likelihood, true.log_likelihood, rtol=1e-10)


@pytest.mark.slow
def test_jit_vmap_and_single_precision():
    problems = [data(30, seed) for seed in range(3)]
    x, s, z = (jnp.stack([jnp.asarray(of) for of in each]) for each in zip(*(p[:3] for p in problems), strict=True))
    together = jax.jit(jax.vmap(functools.partial(fay_herriot, fit="ml")))(x, s, z)
    for i, (own, error, columns, _) in enumerate(problems):
        alone = fay_herriot(own, error, columns, fit="ml")
        np.testing.assert_allclose(together.mean[i], alone.mean, rtol=1e-9)
        np.testing.assert_allclose(together.mse[i], alone.mse, rtol=1e-7)
    with jax.enable_x64(False):
        own, error, columns, _ = problems[0]
        single = fay_herriot(own, error, columns)
        assert single.mean.dtype == jnp.float32
        np.testing.assert_allclose(single.mean, fay_herriot(*problems[0][:3]).mean, rtol=1e-3)


@pytest.mark.slow
def test_intervals_and_mean_squared_errors_of_simulated_clients():
    """600 files of 40 clients with an A about the size of s^2. The bounds of 4.9 standard errors between files are
    passed by chance once in 1e6; both are to the order 1/m, so that another percent is allowed for.
    """
    m, files = 40, 600
    _, s, z, _ = data(m, 3)
    rng = np.random.default_rng(1)
    theta = -200 + z @ np.array([1.0, 0.1]) + 0.9 * rng.normal(size=(files, m))
    x = theta + s * rng.normal(size=(files, m))
    found = jax.vmap(lambda x: fay_herriot(x, jnp.asarray(s), jnp.asarray(z)))(jnp.asarray(x))
    low, high = jax.vmap(lambda of: of.interval(0.95))(found)
    covered = np.asarray((low <= theta) & (theta <= high)).mean(axis=1)
    assert abs(covered.mean() - 0.95) < 0.01 + 4.9 * covered.std() / files**0.5
    off = np.asarray(found.mse - (found.mean - theta) ** 2).mean(axis=1)
    assert abs(off.mean()) < 0.01 * np.asarray(found.mse).mean() + 4.9 * off.std() / files**0.5
    risk = np.asarray(found.risks - (found.mean - theta) ** 2).mean(axis=1)
    assert abs(risk.mean()) < 0.03 + 4.9 * risk.std() / files**0.5  # the fitting of A is not in it
    assert abs(np.asarray(found.residual).std() - 1) < 0.02


def test_without_spread_all_are_on_the_line_and_not_sure_of_it():
    x, s, z, _ = data(spread=0)
    found = fay_herriot(x, s, z)
    assert found.variance == 0
    np.testing.assert_allclose(found.mean, found.regression)
    np.testing.assert_allclose(found.shrinkage, 1)
    np.testing.assert_array_equal(found.g1, 0)
    assert (found.mse > 0).all()
    assert found.p_value > 0.05


def test_a_client_that_alone_determines_a_coefficient():
    x, s, z, _ = data()
    z[:, 0] = np.arange(len(x)) == 7
    found = fay_herriot(x, s, z)
    np.testing.assert_allclose(found.mean[7], x[7])
    np.testing.assert_allclose(found.g1[7] + found.g2[7], s[7] ** 2)  # its own estimate's
    assert found.residual[7] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, s, z: (x, s, z[:4]), r"z must have a row for each of the 25 clients, got shape \(4, 2\)"),
        (lambda x, s, z: (x, s, np.where(z > 2018, np.nan, z)), "z must be finite, got nan for client .* in column 1"),
        (lambda x, s, z: (x, s, np.c_[z, z[:, 0] - z[:, 1]]), "z's column 2 is a linear combination of the columns be"),
        (lambda x, s, z: (x, s, np.full(25, 3.0)), "z's column 0 is a linear combination of .* and the intercept"),
        (lambda x, s, z: (x[:5], s[:5], z[:5]), "3 coefficients require at least 6 clients, got 5"),
        (lambda x, s, z: (x, s, [["a"]] * 25), r"z must be numbers, with a row for each of the clients, got \[\["),
    ],
)
def test_bad_arguments_are_refused_in_a_line(change, said):
    with pytest.raises(JaxpflError, match=said) as error:
        fay_herriot(*change(*data()[:3]))
    assert "\n" not in str(error.value)


def line(m: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    s, z = rng.uniform(0.5, 1.5, m), rng.normal(size=(m, 1))
    return 100 + z[:, 0] + spread * rng.normal(size=m) + s * rng.normal(size=m), s, z


@pytest.mark.parametrize("m", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_ends_are_quantiles_of_the_posterior_by_quadrature(m):
    """With the least number of clients the density of A falls as A^(-3/2)."""
    x, s, z = line(m, 0.4)
    design = np.hstack([np.ones((m, 1)), z])
    low, high = fay_herriot(x, s, z).interval(0.9)

    def at(A: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Restricted likelihood, and means and deviations of all theta, by dense matrices."""
        weight = np.diag(1 / (A + s**2))
        precision = design.T @ weight @ design
        beta = np.linalg.solve(precision, design.T @ weight @ x)
        r = x - design @ beta
        likelihood = np.exp(-(r @ weight @ r) / 2) * (np.linalg.det(weight) / np.linalg.det(precision)) ** 0.5
        B = np.diag(s**2 / (A + s**2))
        covariance = A * B + B @ design @ np.linalg.inv(precision) @ design.T @ B
        return likelihood, x - B @ r, np.diag(covariance) ** 0.5

    def below(A: float, ends: np.ndarray) -> np.ndarray:
        likelihood, mean, sd = at(A)
        return likelihood * np.append(1.0, stats.norm.cdf((ends - mean) / sd))

    for ends, p in ((np.asarray(low), 0.05), (np.asarray(high), 0.95)):
        # A = e^u, of which the far tail counts with five clients.
        whole = integrate.quad_vec(lambda u, ends=ends: np.exp(u) * below(np.exp(u), ends), -25, 40, epsabs=1e-12)[0]
        np.testing.assert_allclose(whole[1:] / whole[0], p, atol=2e-4 if m == 5 else 1e-6)


@pytest.mark.slow
def test_intervals_cover_where_the_spread_is_small():
    """1000 files of 15 clients with A = .3, s from .5 to 1.5. The bounds of 4.9 standard errors between files are
    passed by chance once in 1e6: the integrated ones cover at least nominally, those by the mean squared error do not.
    """
    m, files = 15, 1000
    _, s, z = line(m, 0.0)
    rng = np.random.default_rng(1)
    theta = z[:, 0] + 0.3**0.5 * rng.normal(size=(files, m))
    x = jnp.asarray(theta + s * rng.normal(size=(files, m)))
    found = jax.jit(jax.vmap(lambda x: fay_herriot(x, jnp.asarray(s), jnp.asarray(z))))(x)

    def coverage(by) -> tuple[float, float]:
        low, high = jax.jit(jax.vmap(lambda of: of.interval(0.95, by)))(found)
        each = np.asarray((low <= theta) & (theta <= high)).mean(axis=1)
        return each.mean(), 4.9 * each.std() / files**0.5

    covered, margin = coverage("integrated")
    assert covered > 0.95 - margin
    covered, margin = coverage("mse")
    assert covered < 0.95 - margin
