"""Questions to answers of counts: probabilities of being above a threshold, draws and ranks, beside SciPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from jaxpfl.estimators import ebbinomial, ebpoisson, learned_bernoulli, learned_poisson, learned_rates, rate_draws
from jaxpfl.estimators.normal_means import ranks
from jaxpfl.estimators.poisson_mixtures import Gammas, Places
from jaxpfl.estimators.rate_answers import Rates
from jaxpfl.estimators.rate_mixtures import Atoms, Betas
from jaxpfl.estimators.rate_mixtures import posterior as mixed
from jaxpfl.estimators.rates import posterior
from jaxpfl.support.errors import JaxpflError

Z, N = np.array([3, 0, 12, 7, 20]), np.array([20, 15, 20, 20, 21])
WEIGHTS, MEANS, SIZES = np.array([0.3, 0.7]), np.array([0.2, 0.6]), np.array([6.0, 20.0])
PLACES = np.array([0.1, 0.35, 0.8])


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def answers() -> dict[str, Any]:
    """Posteriors under priors that are given: nothing is fitted, so that SciPy has the same ones."""
    z, n, zero = jnp.asarray(Z, float), jnp.asarray(N, float), jnp.zeros(())
    two = [jnp.asarray(of) for of in (WEIGHTS, MEANS, SIZES)]
    three = jnp.asarray([0.5, 0.2, 0.3]), jnp.asarray(PLACES)
    return {
        "beta": posterior(z, n, jnp.asarray(0.4), jnp.asarray(8.0), zero, bounded=True),
        "gamma": posterior(z, n, jnp.asarray(0.4), jnp.asarray(8.0), zero, bounded=False),
        "betas": mixed(Betas(*two), z, n, zero),
        "gammas": mixed(Gammas(*two), z, n, zero),
        "atoms": mixed(Atoms(*three), z, n, zero),
        "places": mixed(Places(*three), z, n, zero),
    }


def components(name: str) -> tuple[np.ndarray, Any]:
    """Posterior shares of the components [m, K], and SciPy's distributions of these; of atoms None."""
    z, n = Z[:, None], N[:, None]
    if name in ("beta", "gamma"):
        w, mean, size = np.ones(1), np.array([0.4]), np.array([8.0])
    elif name in ("betas", "gammas"):
        w, mean, size = WEIGHTS, MEANS, SIZES
    else:
        law = stats.binom.pmf(z, n, PLACES) if name == "atoms" else stats.poisson.pmf(z, n * PLACES)
        shares = law * [0.5, 0.2, 0.3]
        return shares / shares.sum(axis=1, keepdims=True), None
    a = mean * size
    if name.startswith("beta"):
        shares, law = w * stats.betabinom.pmf(z, n, a, size - a), stats.beta(a + z, size - a + n - z)
    else:
        shares, law = w * stats.nbinom.pmf(z, a, size / (size + n)), stats.gamma(a + z, scale=1 / (size + n))
    return shares / shares.sum(axis=1, keepdims=True), law


def drawn(name: str, number: int, rng: np.random.Generator) -> np.ndarray:
    """NumPy's draws from SciPy's posteriors, [number, m]."""
    shares, law = components(name)
    kind = np.array([rng.choice(shares.shape[1], number, p=p) for p in shares]).T
    place = np.arange(len(Z))
    if law is None:
        return PLACES[kind]
    return law.rvs((number, *shares.shape), random_state=rng)[np.arange(number)[:, None], place, kind]


NAMES = ("beta", "gamma", "betas", "gammas", "atoms", "places")


@pytest.mark.parametrize("name", NAMES)
def test_exceedance_is_the_upper_tail(name):
    found, (shares, law) = answers()[name], components(name)

    def above(t: Any) -> np.ndarray:
        t = np.broadcast_to(t, len(Z))[:, None]
        return (shares * (t < PLACES if law is None else law.sf(t))).sum(axis=1)

    for t in (0.5, PLACES[1], [0.1, 0.2, 0.3, 0.4, 0.999]):
        np.testing.assert_allclose(found.exceedance(t), above(t), rtol=1e-9, atol=1e-300)
    mean = {"beta": 0.4, "gamma": 0.4, "betas": WEIGHTS @ MEANS, "gammas": WEIGHTS @ MEANS}
    np.testing.assert_allclose(found.exceedance(), above(mean.get(name, PLACES @ [0.5, 0.2, 0.3])), rtol=1e-9)


def test_a_small_upper_tail_is_not_rounded_away():
    assert 0 < answers()["beta"].exceedance(0.999)[1] < 1e-40
    assert 0 < answers()["gamma"].exceedance(9.0)[1] < 1e-40


@pytest.mark.slow
def test_without_spread_none_is_above_the_mean_of_all():
    for found in (ebbinomial([3] * 4, 10), ebpoisson([3] * 4, 10.0)):
        assert isinstance(found, Rates)
        assert np.isinf(found.prior_size)
        assert (np.asarray(found.exceedance()) == 0).all()
        assert (np.asarray(found.exceedance(0.29)) == 1).all()
        assert (np.asarray(found.sample(jax.random.key(0))) == found.prior_mean).all()
    one = mixed(Atoms(jnp.ones(3) / 3, jnp.full(3, 0.3)), jnp.array([3.0]), jnp.array([10.0]), jnp.zeros(()))
    assert one.exceedance()[0] == 0  # whatever the rounding of the mean of its atoms


@pytest.mark.parametrize("name", NAMES)
def test_ranks_beside_draws_of_scipy(name):
    """Mean ranks of 4000 draws each differ by at most 5 standard errors: of 30 such, one fails in 6e4 other seeds."""
    found = answers()[name]
    own = ranks(found, jax.random.key(1), draws=4000)
    others = stats.rankdata(drawn(name, 4000, np.random.default_rng(2)), axis=1)
    error = others.std(axis=0) * (2 / 4000) ** 0.5
    assert (np.abs(own.expected - others.mean(axis=0)) <= 5 * error + 1e-9).all()
    low, high = np.quantile(others, [0.025, 0.975], axis=0, method="nearest")
    assert (np.abs(own.low - low) <= 0.5).all()
    assert (np.abs(own.high - high) <= 0.5).all()
    np.testing.assert_allclose(own.expected.sum(), 15, rtol=1e-5)  # 1 + ... + 5


@pytest.mark.slow
def test_expected_ranks_by_quadrature():
    """Rank of i: 1/2 plus the sum of P(p_j < p_i), over all j, by a sum over a grid of 1e5 points; to 5 errors."""
    found = answers()["beta"]
    law: Any = stats.beta(3.2 + Z[:, None], 4.8 + (N - Z)[:, None])
    t = (np.arange(100_000) + 0.5) / 100_000
    below = law.cdf(t)
    chances = law.pdf(t) @ below.T / 100_000  # [i, j]: of p_j below p_i
    expected = 1 + chances.sum(axis=1) - np.diag(chances)
    own = ranks(found, jax.random.key(3), draws=20_000)
    np.testing.assert_allclose(own.expected, expected, atol=5 * 1.4 / 20_000**0.5)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_a_learned_population_is_integrated_over(shares):
    """Beside a sum over its cells, and draws of these by NumPy; mean ranks to 5 errors, as above."""
    z, n = np.array([4, 6, 3, 5]), np.array([10, 12, 10, 11])
    of = (learned_bernoulli if shares else learned_poisson).population(z, n)
    p = of.middle

    def law(first, second):
        a, b = first + z, second + n
        return stats.beta(a, b - z) if shares else stats.gamma(a, scale=1 / b)

    expected = sum(w * law(a, b).sf(0.4) for w, a, b in zip(p, of.first, of.second, strict=True))
    np.testing.assert_allclose(learned_rates.exceedance(of, z, n, 0.4), expected, rtol=1e-9)
    rng = np.random.default_rng(4)
    cells = rng.choice(len(p), 4000, p=p)
    others = stats.rankdata([law(of.first[c], of.second[c]).rvs(random_state=rng) for c in cells], axis=1)
    sample = learned_rates.sampler(of, z, n)
    own = ranks(Sample(sample), jax.random.key(5), draws=4000)
    assert (np.abs(own.expected - others.mean(axis=0)) <= 5 * others.std(axis=0) * (2 / 4000) ** 0.5).all()
    # A prior that is taken for known has no spread here, and every client the mean rank.
    fit = (ebbinomial if shares else ebpoisson)(z, n)
    assert np.ptp(ranks(fit, jax.random.key(0), draws=10).expected) == 0
    assert np.ptp(own.expected) > 0.2


class Sample:
    def __init__(self, sample: Any) -> None:
        self.sample = sample


def test_frames_have_exceedances_and_ranks():
    frame = pd.DataFrame({"z": Z, "n": N}, index=list("abcde"))
    fit = ebbinomial(frame["z"], frame["n"])
    made = fit.to_frame()
    assert "rank" not in made.columns
    np.testing.assert_allclose(made["exceedance"], fit.exceedance())
    made = fit.to_frame(0.5, threshold=pd.Series([0.9, 0.1], index=["e", "a"]).reindex(list("edcba"), fill_value=0.4),
                        key=jax.random.key(0))  # fmt: skip
    np.testing.assert_allclose(made["exceedance"], fit.exceedance([0.1, 0.4, 0.4, 0.4, 0.9]))
    placed = ranks(fit, jax.random.key(0), level=0.5)
    np.testing.assert_allclose(made[["rank", "rank_low", "rank_high"]].to_numpy().T, placed)


@pytest.mark.parametrize("name", ["betas", "gammas", "atoms", "places"])
def test_repeated_draws_are_those_of_single_ones(name, monkeypatch):
    found = answers()[name]
    for i in range(20):
        key = jax.random.key(i)
        np.testing.assert_array_equal(rate_draws.sampler(found)(key), found.sample(key))
    monkeypatch.setattr(rate_draws, "_MOST_KEPT", 1)
    assert rate_draws.sampler(found) == found.sample


@pytest.mark.slow
def test_questions_jit_and_vmap():
    batch = jnp.stack([jnp.asarray(Z), jnp.asarray(Z[::-1].copy())])
    size = jnp.full(5, 21)

    def asked(z):
        found = ebbinomial(z, size)
        return found.exceedance(0.3), found.sample(jax.random.key(0))

    together = jax.jit(jax.vmap(asked))(batch)
    for i in range(2):
        for one, all_of in zip(asked(batch[i]), together, strict=True):
            np.testing.assert_allclose(all_of[i], one, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "threshold", "said"),
    [
        ("beta", 40, "threshold must be from 0 to 1 for probabilities, got 40"),
        ("atoms", -0.1, "threshold must be from 0 to 1 for probabilities, got -0.1"),
        ("gamma", float("inf"), "threshold must be finite and at least 0, got inf"),
        ("gammas", float("nan"), "threshold must be finite and at least 0, got nan"),
        ("beta", [0.1, 0.2], r"threshold must be one number, or one for each of 5 clients, got shape \(2,\)"),
        ("beta", "high", "threshold must be numbers, one, or one for each client, got 'high'"),
    ],
)
def test_bad_thresholds_are_refused_in_a_line(name, threshold, said):
    with pytest.raises(JaxpflError, match=said) as error:
        answers()[name].exceedance(threshold)
    assert "\n" not in str(error.value)
