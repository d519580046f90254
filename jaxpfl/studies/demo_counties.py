"""Demos on US counties: the next election from those before, and a poll of each county beside all its votes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpfl.core.types import Scalar
from jaxpfl.data import Elections
from jaxpfl.estimators import ebbinomial, ebbinomial_regression, ebnm_groups, learned_bernoulli
from jaxpfl.studies.demo_shown import Shown
from jaxpfl.support.errors import JaxpflError

POLLED = 20
"""Voters of each county that are asked."""
_SEED = 0


class _Answer(NamedTuple):
    """Estimates of all counties' shares, and the ends of their intervals, [m] each."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def counties(elections: Elections, level: float) -> Shown:
    """Counties: the last election from a county's share of Republican wins in those before."""
    wins, n = elections.republican[:, :-1].sum(axis=1), elections.republican.shape[1] - 1
    fit = ebbinomial(wins, n)
    believed = learned_bernoulli.believed(wins, np.full(len(wins), n), level)
    last, outcome = int(elections.years[-1]), elections.republican[:, -1]
    share = wins / n
    estimates = {
        "local": share,
        "global": np.full_like(share, share.mean()),
        "personalized": np.asarray(fit.mean),
    }
    if elections.votes is not None:
        votes = np.log10(elections.votes[:, :-1].sum(axis=2).mean(axis=1))
        estimates["about votes"] = np.asarray(ebbinomial_regression(wins, np.full(len(wins), n), votes).mean)
    by_wins = [
        {
            "wins": int(z),
            "counties": int((wins == z).sum()),
            "local": float(z / n),
            "personalized": float(estimates["personalized"][wins == z][0]),
            "held_out": float(outcome[wins == z].mean()),
        }
        for z in np.unique(wins)
    ]
    alpha = float(fit.prior_mean * fit.prior_size)
    facts = {
        "held_out_year": last,
        "prior": {"alpha": alpha, "beta": float(fit.prior_size) - alpha},
        "by_wins": by_wins,
    }
    return Shown(
        f"{len(wins)} US counties, the election of {last} from the {n} before",
        "probability of a Republican win",
        [str(code) for code in elections.counties],
        estimates,
        believed.low,
        believed.high,
        outcome,
        facts,
        [
            f"{row['wins']} wins of {n}: local {row['local']:.2f}, personalized {row['personalized']:.3f}, "
            f"{last} {row['held_out']:.3f} ({row['counties']} counties)"
            for row in by_wins
        ],
    )


def polls(elections: Elections, level: float) -> Shown:
    """Counties' Republican shares in the last election, from a simulated poll of a few voters of each.

    The voters are drawn from the county's real votes without replacement, so that its share is known. A covariate is
    the election before, or the number of votes in it; groups are the states, on the arcsine scale, on which the errors
    of shares are nearly normal and equal. The last election is drawn from, and scores, and is used for nothing else.

    Raises:
      JaxpflError: without numbers of votes, and with a county of fewer votes than are polled.
    """
    if elections.votes is None:
        raise JaxpflError("the example polls needs votes of all elections, columns dem_YYYY and rep_YYYY")
    before, votes = elections.votes[:, -2], elections.votes[:, -1]
    few = votes.sum(axis=1) < POLLED
    if few.any():
        at = int(np.argmax(few))
        county = elections.counties[at]
        raise JaxpflError(f"the example polls needs {POLLED} votes of a county, got {votes[at].sum()} of {county}")
    z = np.random.default_rng(_SEED).hypergeometric(votes[:, 1], votes[:, 0], POLLED)
    share, truth = z / POLLED, votes[:, 1] / votes.sum(axis=1)
    odds = np.log((before[:, 1] + 0.5) / (before[:, 0] + 0.5))
    fits = {
        "personalized": ebbinomial(z, POLLED),
        "about votes": ebbinomial_regression(z, POLLED, np.log10(before.sum(axis=1) + 1)),
        "about before": ebbinomial_regression(z, POLLED, odds),
    }
    answers = {
        name: _Answer(*(np.asarray(of) for of in (fit.mean, *fit.interval(level)))) for name, fit in fits.items()
    }
    answers["in states"] = _in_states(z, elections.counties, level)
    states = len({code[:2] for code in elections.counties})
    covered = {
        name: {
            "coverage": float(((of.low <= truth) & (truth <= of.high)).mean()),
            "length": float((of.high - of.low).mean()),
        }
        for name, of in answers.items()
    }
    year, last = (int(of) for of in elections.years[-2:])
    estimates = {"local": share, "global": np.full_like(share, share.mean())}
    plain = answers["personalized"]
    return Shown(
        f"{len(z)} US counties, polls of {POLLED} voters each in {last}",
        "share of Republican votes",
        [str(code) for code in elections.counties],
        estimates | {name: of.mean for name, of in answers.items()},
        plain.low,
        plain.high,
        truth,
        {"polled": POLLED, "year": last, "states": states, "intervals": covered},
        [
            "the polled are drawn from each county's real votes, whose share is the truth",
            f"about votes and before: their number in {year}, and the result; in states: {states} groups of counties",
            *(
                f"{name}: intervals of {100 * level:g} % cover {100 * of['coverage']:.1f} %, mean length "
                f"{of['length']:.3f}"
                for name, of in covered.items()
            ),
        ],
    )


def _in_states(z: np.ndarray, counties: np.ndarray, level: Scalar) -> _Answer:
    """Shares of counties in states, by the first two digits of their codes; Anscombe's arcsine of their polls."""
    scaled = np.arcsin(np.sqrt((z + 3 / 8) / (POLLED + 3 / 4)))
    fit = ebnm_groups(scaled, 0.5 / np.sqrt(POLLED + 0.5), np.array([code[:2] for code in counties]))
    ends = (fit.mean, *fit.interval(level))
    return _Answer(*(np.sin(np.clip(np.asarray(of), 0, np.pi / 2)) ** 2 for of in ends))
