"""Examples beside their published figures, and the real counties of docs/estimation.md."""

import numpy as np
import pytest

from jaxpfl.benchmarks.studies.elections import ELECTIONS_FILE, load_elections
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.base import data_directory
from jaxpfl.estimators.empirical_bayes import (
    ebbinomial,
    ebbinomial_regression,
    ebnm,
    ebnm_groups,
    homogeneity,
    james_stein,
    learned_gaussian,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]

HITS = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
LATER = np.array([
    *(0.346, 0.298, 0.276, 0.222, 0.273, 0.270, 0.263, 0.210, 0.269, 0.230, 0.264, 0.256, 0.303, 0.264, 0.226, 0.285),
    *(0.316, 0.200),
])  # fmt: skip
EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def arcsine(average: np.ndarray) -> np.ndarray:
    return np.sqrt(45) * np.arcsin(2 * average - 1)


def test_batters_have_the_published_errors():
    """Efron and Morris 1975: 17.58 and 5.00 on the arcsine scale, with the weight .209."""
    early = np.round(HITS / 45, 3)
    x, truth = arcsine(early), arcsine(LATER)
    stein = james_stein(x, 1.0)
    estimates = (x, np.full(18, x.mean()), np.asarray(ebnm(x, 1.0).mean), np.asarray(stein.mean))
    total = [float(((estimate - truth) ** 2).sum()) for estimate in estimates]
    assert (round(total[0], 2), round(total[3], 2), round(float(stein.weight), 3)) == (17.58, 5.00, 0.209)
    assert total == sorted(total, reverse=True)
    averages = (np.sin(np.asarray(stein.mean) / np.sqrt(45)) + 1) / 2
    assert [round(float(((a - LATER) ** 2).sum()), 3) for a in (early, averages)] == [0.075, 0.022]
    low, high = (np.asarray(end)[:, 0] for end in learned_gaussian.morris(x[:, None], np.ones(18), 0.95))
    assert ((low < stein.mean) & (stein.mean < high)).all()
    assert ((low <= truth) & (truth <= high)).sum() >= 16


def test_schools_have_the_published_mean():
    """Rubin 1981: 7.69 with a standard error of 4.07; the likeliest spread is zero, and the intervals are not."""
    pooled, fit = homogeneity(EFFECTS, ERRORS), ebnm(EFFECTS, ERRORS)
    assert (round(float(pooled.mean), 2), round(float(pooled.stderr), 2)) == (7.69, 4.07)
    assert float(fit.prior.sd) == 0
    low, high = fit.interval(0.95)
    np.testing.assert_array_equal(low, high)
    low, high = learned_gaussian.morris(EFFECTS[:, None], ERRORS**2, 0.95)
    assert (np.asarray(high - low) > 25).all()
    center, _ = learned_gaussian.posterior(EFFECTS[:, None], ERRORS**2)
    assert 0 < np.ptp(np.asarray(center)) < np.ptp(EFFECTS) / 2


def test_real_counties():
    """The last election from the winners before it, and polls of 20 voters drawn from it."""
    if not (data_directory() / "elections").is_dir():
        pytest.skip("no elections in JAXPFL_DATA_DIR")
    elections = load_elections()
    table = csv_text.read(data_directory() / "elections" / ELECTIONS_FILE)
    counted = [[table.numbers(f"{party}_{year}") for party in ("dem", "rep")] for year in elections.years]
    votes_of = np.array(counted, int).transpose(2, 0, 1)
    wins, outcome = elections.republican[:, :-1].sum(axis=1), elections.republican[:, -1]
    before = np.log10(votes_of[:, :-1].sum(axis=2).mean(axis=1))
    fits = ebbinomial(wins, 5), ebbinomial_regression(wins, np.full(len(wins), 5), before)
    found = [((estimate - outcome) ** 2).sum() for estimate in (wins / 5, *(np.asarray(fit.mean) for fit in fits))]
    assert np.round(found, 1).tolist() == [176.3, 169.1, 165.2]

    last, votes = votes_of[:, -2], votes_of[:, -1]
    truth = votes[:, 1] / votes.sum(axis=1)
    z = np.random.default_rng(0).hypergeometric(votes[:, 1], votes[:, 0], 20)
    odds = np.log((last[:, 1] + 0.5) / (last[:, 0] + 0.5))
    states = np.array([code[:2] for code in elections.counties])
    scaled = ebnm_groups(np.arcsin(np.sqrt((z + 3 / 8) / 20.75)), 0.5 / np.sqrt(20.5), states)
    shares = {
        "alone": z / 20,
        "one prior": ebbinomial(z, 20).mean,
        "about votes": ebbinomial_regression(z, 20, np.log10(last.sum(axis=1) + 1)).mean,
        "in states": np.sin(np.clip(np.asarray(scaled.mean), 0, np.pi / 2)) ** 2,
        "about the election before": ebbinomial_regression(z, 20, odds).mean,
    }
    found = {name: round(float(((np.asarray(share) - truth) ** 2).sum()), 1) for name, share in shares.items()}
    assert list(found.values()) == [32.1, 23.2, 20.7, 20.7, 2.0]
