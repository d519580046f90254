"""Priors of counts from private cells: what a client sends, how it is thinned, and what the fit makes of it."""

from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from jaxpfl.estimators import ebbinomial, private_rates
from jaxpfl.estimators.private_rates import private_ebbinomial, private_ebpoisson
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

KEY = jax.random.key(0)


def trials(m: int = 4000) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    n, p = rng.integers(10, 60, m), rng.beta(2, 6, m)
    return rng.binomial(n, p), n, p


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Cells of the clients, in place of a release; raised before any fit."""
    cells: list[np.ndarray] = []

    def stop(key, at, number, **of):
        cells.append(np.asarray(at))
        raise InterruptedError

    monkeypatch.setattr(private_rates, "central", stop)
    return cells


def test_what_a_client_sends_is_thinned_to_a_public_size(sent):
    z, n, _ = trials()
    z[0], n[0] = 3, 4
    with pytest.raises(InterruptedError), pytest.warns(JaxpflWarning, match="trials of 1 of 4000 clients are below 10"):
        private_ebbinomial(KEY, z, n, [10, 40], epsilon=1, delta=1e-6)
    cells, large = sent[0], n >= 40
    assert cells[0] == 52  # of those below all sizes, after 11 and 41 cells
    assert (cells[large] >= 11).all()
    assert (cells[~large][1:] < 11).all()
    kept = cells[large] - 11
    assert (kept <= z[large]).all()
    assert (40 - kept <= (n - z)[large]).all()
    # Beta-binomial counts stay so: chi-square of the thinned ones, false alarms 1 in 1000, fixed seed.
    few = np.bincount(cells[~large][1:], minlength=11)
    expected = few.sum() * stats.betabinom.pmf(np.arange(11), 10, 2, 6)
    whole = [*few[:6], few[6:].sum()], [*expected[:6], expected[6:].sum()]
    assert stats.chisquare(*whole).pvalue > 1e-3
    assert stats.chisquare(whole[0], few.sum() * np.full(7, 1 / 7)).pvalue < 1e-6  # which the test would tell
    with pytest.raises(InterruptedError):  # no client's cell depends on another's counts
        private_ebbinomial(KEY, np.append(z[1:], 5), np.append(n[1:], 30), [10, 40], epsilon=1, delta=1e-6)
    assert len(sent[1]) == 4000


def test_counts_are_thinned_by_their_exposure(sent):
    rng = np.random.default_rng(0)
    e, rate = rng.uniform(2, 6, 5000), rng.gamma(2, 0.7, 5000)
    with pytest.raises(InterruptedError):
        private_ebpoisson(KEY, rng.poisson(rate * e), e, [2.0], 30, epsilon=1, delta=1e-6)
    found = np.bincount(sent[0], minlength=31)
    expected = 5000 * stats.nbinom.pmf(np.arange(31), 2, 1 / (1 + 0.7 * 2))
    assert stats.chisquare([*found[:10], found[10:].sum()], [*expected[:10], 5000 - expected[:10].sum()]).pvalue > 1e-3


@pytest.mark.slow
def test_a_beta_prior_from_private_counts():
    z, n, p = trials()
    plain = ebbinomial(z, n)
    error = float(((plain.mean - p) ** 2).mean())
    alone = ((z / n - p) ** 2).mean()
    clear: Any = private_ebbinomial(KEY, z, n, [10], epsilon=50.0, delta=1e-6)
    np.testing.assert_allclose(clear.prior_mean, 0.25, rtol=0.05)
    np.testing.assert_allclose(clear.prior_size, 8, rtol=0.25)
    assert ((clear.mean - p) ** 2).mean() < 1.01 * error
    np.testing.assert_array_equal(clear.size, n)  # posteriors are of the whole counts
    with pytest.warns(JaxpflWarning, match="the noise hides the counts of all cells: nothing was learned"):
        hidden = private_ebbinomial(KEY, z, n, [10], epsilon=1e-3, delta=1e-6)
    assert ((hidden.mean - p) ** 2).mean() < 1.05 * alone  # a client keeps nearly what it has alone


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["beta-mixture", "npmle", "gamma", "gamma-mixture", "npmle of rates"])
def test_other_priors_and_the_local_form(prior):
    z, n, p = trials()
    rng = np.random.default_rng(1)
    e, rate = rng.uniform(2, 6, 4000), rng.gamma(2, 0.7, 4000)
    c = rng.poisson(rate * e)
    name = prior.split()[0]
    if prior in ("beta-mixture", "npmle"):
        found = private_ebbinomial(KEY, z, n, [10], epsilon=8.0, prior=name)
        error, alone = ((found.mean - p) ** 2).mean(), ((z / n - p) ** 2).mean()
    else:
        found = private_ebpoisson(KEY, c, e, [2.0], 30, epsilon=8.0, prior=name)
        error, alone = ((found.mean - rate) ** 2).mean(), ((c / e - rate) ** 2).mean()
    assert error < 0.9 * alone


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ([1], {}, r"sizes must be different public numbers of at least 2, got \[1\]"),
        ([5, 5], {}, "sizes must be different public numbers of at least 2"),
        ([], {}, "sizes must be different"),
        ([10, 200_000], {}, "sizes and greatest counts must make at most 100000 cells, got 200012"),
        ([2.5], {}, "sizes must be a whole number of at least 1, got 2.5"),
        ([5], {"epsilon": 0}, "epsilon must be > 0"),
        ([5], {"prior": "gamma"}, "unknown prior 'gamma'"),
        (20, {}, "sizes must be a list of public numbers, got 20"),
        (["five"], {}, r"sizes must be numbers, a list of public ones, got \['five'\]"),
        ([5], {"components": 7}, "prior beta has no components, got 7"),
        ([5], {"prior": "npmle", "components": 1}, "components must be at least 2 for npmle, got 1"),
    ],
)
def test_bad_grids_are_refused(sizes, options, said):
    z, n, _ = trials(20)
    with pytest.raises(JaxpflError, match=said):
        private_ebbinomial(KEY, z, n, sizes, **{"epsilon": 1.0, **options})


def test_bad_counts_and_exposures_are_refused():
    z, n, _ = trials(20)
    with pytest.raises(
        JaxpflError, match="trials must be at most 999999999 to be thinned, got 2000000000 for client 3"
    ):
        private_ebbinomial(KEY, z, np.where(np.arange(20) == 3, 2e9, n), [5], epsilon=1.0)
    with pytest.raises(JaxpflError, match="exposures must be a list of public numbers, got 2"):
        private_ebpoisson(KEY, z, n, 2.0, 30, epsilon=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(JaxpflError, match="prior gamma has no components, got 7"):
        private_ebpoisson(KEY, z, n, [2.0], 30, epsilon=1.0, components=7)
