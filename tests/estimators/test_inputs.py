"""Clients' numbers as users hold them: masks, indexes, large counts, and what transformations let through."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from jaxpfl.estimators.empirical_bayes import ebbinomial, ebnm, ebnm_groups, ebpoisson, fay_herriot, rates
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

S = np.full(8, 1.0)
X = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -3.0])
Z, N = np.array([1.0, 4, 2, 7, 3, 5, 0, 2]), np.full(8, 9.0)
GROUP = np.arange(8) % 3


def masked(of: np.ndarray) -> Any:
    found = np.ma.masked_array(of.copy(), mask=np.zeros(of.shape, bool))
    found[(2,) + (0,) * (of.ndim - 1)] = 999
    found.mask[(2,) + (0,) * (of.ndim - 1)] = True
    return found


CALLS = {
    "x": lambda of: ebnm(of(X), S),
    "s": lambda of: ebnm(X, of(S)),
    "weights": lambda of: ebnm(X, S, weights=of(S)),
    "successes": lambda of: ebbinomial(of(Z), N),
    "trials": lambda of: ebbinomial(Z, of(N)),
    "count": lambda of: ebpoisson(of(Z), N),
    "exposure": lambda of: ebpoisson(Z, of(N)),
    "z": lambda of: fay_herriot(X, S, of(Z)),
    "group": lambda of: ebnm_groups(X, S, of(GROUP)),
}


@pytest.mark.parametrize("name", CALLS)
def test_masked_entries_are_refused(name):
    with pytest.raises(JaxpflError, match=rf"^{name.split()[0]} must not be masked, got a masked entry at \[?2"):
        CALLS[name](masked)


def test_a_mask_of_nothing_is_none_and_columns_are_paired_by_their_index():
    names = list("abcdefgh")
    frame = pd.DataFrame({"x": X, "s": np.linspace(0.5, 1.5, 8)}, index=names)
    plain = ebnm(X, frame["s"].to_numpy())
    np.testing.assert_array_equal(ebnm(np.ma.masked_array(X), frame["s"].to_numpy()).mean, plain.mean)
    found = ebnm(frame["x"], frame["s"][::-1])
    np.testing.assert_array_equal(found.mean, plain.mean)
    assert not np.allclose(ebnm(X, frame["s"][::-1].to_numpy()).mean, plain.mean)  # by position it would differ

    made = found.to_frame(level=0.9)
    assert list(made.index) == names
    assert {"mean", "sd", "lfsr", "low", "high"} <= set(made.columns)
    assert not {"prior", "labels", "slack"} & set(made.columns)
    np.testing.assert_array_equal(made["mean"], plain.mean)
    np.testing.assert_array_equal(made["low"], plain.interval(0.9)[0])
    assert list(plain.to_frame().index) == [*range(8)]
    again = jax.jit(lambda of: of._replace(mean=2 * of.mean))(found)  # labels pass transformations
    assert list(again.to_frame().index) == names

    with pytest.raises(JaxpflError, match="the indexes of x and s must contain the same clients, but 'a' is only in x"):
        ebnm(frame["x"], frame["s"].rename({"a": "z"}))
    twice = frame["x"].set_axis(list("aabcdefg"))
    with pytest.raises(JaxpflError, match="the indexes of x and s differ and have repeated labels"):
        ebnm(twice, frame["s"])


beta_binomial, gamma_poisson = jax.jit(rates._beta_binomial), jax.jit(rates._gamma_poisson)


@pytest.mark.parametrize("n", [7.0, 1e3, 1e6, 1e9])
def test_marginals_of_large_counts_have_digits_in_single_precision(n):
    rng, size = np.random.default_rng(0), np.full(30, n)
    for mu, of in ((0.3, 50.0), (0.01, 3.0), (0.5, 0.01)):
        z = rng.binomial(int(n), rng.beta(mu * of, (1 - mu) * of, 30)).astype(float)
        z = z.astype(np.float32).astype(float)  # a count that single precision has
        z = np.minimum(z, n)
        c = rng.poisson(rng.gamma(mu * of, 1 / of, 30) * n).astype(np.float32).astype(float)
        found = beta_binomial(*(jnp.asarray(a, jnp.float32) for a in (z, size, mu, of)))
        other = gamma_poisson(*(jnp.asarray(a, jnp.float32) for a in (c, size, mu, of)))
        with jax.enable_x64(True):
            beta = beta_binomial(*map(jnp.asarray, (z, size, mu, of)))
            gamma = gamma_poisson(*map(jnp.asarray, (c, size, mu, of)))
            few = n < 1e4  # beyond, SciPy's log gamma functions cancel
            both = rates._log_saturated(*map(jnp.asarray, (z, size)), bounded=True)
            one = rates._log_saturated(jnp.asarray(c), jnp.asarray(c), bounded=False)
        tolerance = 1e-9 if few else 1e-3
        np.testing.assert_allclose(beta + both, stats.betabinom.logpmf(z, n, mu * of, (1 - mu) * of), atol=tolerance)
        np.testing.assert_allclose(gamma + one, stats.nbinom.logpmf(c, mu * of, of / (of + n)), atol=tolerance)
        np.testing.assert_allclose(found, beta, atol=1e-4)
        np.testing.assert_allclose(other, gamma, atol=2e-4)


def test_a_center_far_from_all_estimates_is_doubted():
    with pytest.raises(
        JaxpflWarning, match=r"prior scale-mixture is symmetric about 0 .* 8 of 8 estimates lie above 0"
    ):
        ebnm(X + 100, S, prior="scale-mixture", components=11)
