"""The sampling of the engine is the sampling that is accounted: each client independently, at the stated rate.

Fixed seeds; each bound is passed by right code with probability above 1 - 1e-5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl import JaxpflError
from jaxpfl.core.participation import of, poisson

M, RATE, ROUNDS = 20, 0.3, 4000
IDS = jnp.arange(100, 100 + M)


def taking_part(cap: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Participation, [ROUNDS, M] bool, and the number left out, [ROUNDS]."""
    participation = poisson(M, RATE, cap)
    assert participation.left_out is not None
    keys = jax.random.split(jax.random.key(1), ROUNDS)
    rows, left_out = jax.jit(
        lambda keys: jax.lax.map(lambda k: (participation.sample(k, IDS), participation.left_out(k, IDS)), keys)
    )(keys)
    rows = np.asarray(rows)
    assert (np.diff(rows, axis=1) >= 0).all(), "rows are sorted, empty slots last"
    assert ((np.diff(rows, axis=1) > 0) | (rows[:, 1:] == M)).all(), "and distinct"
    return (rows[:, :, None] == np.arange(M)).any(axis=1), np.asarray(left_out)


def test_each_client_at_the_rate_independently():
    here, left_out = taking_part()
    assert not left_out.any()
    # Each client's count is binomial: M two-sided tests at 1e-5 / M.
    for count in here.sum(axis=0):
        assert stats.binomtest(int(count), ROUNDS, RATE).pvalue > 1e-5 / M
    # The size of a cohort is binomial(M, q): a chi-squared test on the sizes that are expected five times or more.
    expected = ROUNDS * stats.binom.pmf(np.arange(M + 1), M, RATE)
    common = expected >= 5
    observed = np.bincount(here.sum(axis=1), minlength=M + 1)
    table = np.append(observed[common], observed[~common].sum()), np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(*table).pvalue > 1e-5
    # Pairs are uncorrelated: 190 correlations of standard error ROUNDS^-1/2; 6 of them leave 4e-7.
    correlations = np.corrcoef(here.T.astype(float))[np.triu_indices(M, 1)]
    assert np.abs(correlations).max() < 6 / ROUNDS**0.5


def test_a_cap_takes_a_uniform_part_of_those_drawn():
    cap = 5
    drawn, _ = taking_part()
    here, left_out = taking_part(cap)
    assert (here <= drawn).all(), "the same draw"
    np.testing.assert_array_equal(here.sum(axis=1), np.minimum(drawn.sum(axis=1), cap))
    np.testing.assert_array_equal(left_out, drawn.sum(axis=1) - here.sum(axis=1))
    full = drawn.sum(axis=1) == cap + 2
    chances = here[full].sum(axis=0) / np.maximum(drawn[full].sum(axis=0), 1)
    error = np.sqrt(cap / (cap + 2) * 2 / (cap + 2) / drawn[full].sum(axis=0))
    assert (np.abs(chances - cap / (cap + 2)) < 5 * error).all()  # 20 clients at 5 standard errors: 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11), "between 1 and the number of clients"),
        ((10, 5, "binomial"), "unknown participation"),
        ((10, 5, "full"), "cohort of all 10"),
        ((10, 5, "uniform", 7), "cap = 7 requires participation = poisson"),
        ((10, 5, "poisson", 11), "between 1 and 10"),
        ((10, 5, "poisson", 0), "between 1 and 10"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(JaxpflError, match=message):
        of(*arguments)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(JaxpflError, match="must be > 0 and <= 1"):
        poisson(10, rate)
