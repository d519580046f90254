"""The number of Beta components of a mixture, by the likelihood of clients that were held out.

Without folds the likelihood never falls with the number of components.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxpfl.core import checks
from jaxpfl.estimators.normal_means.compare import FOLDS, best
from jaxpfl.estimators.rate_folds import CountScores, scores, split
from jaxpfl.estimators.rate_mixtures import fit_betas
from jaxpfl.estimators.rates import checked_trials

MOST = 4


def compare_components(successes: Any, trials: Any, most: int = MOST, *, folds: int = FOLDS) -> dict[int, CountScores]:
    """Score mixtures of 1 ... ``most`` Beta components on the same clients and folds, by their number.

    Runs on the host, on the distinct pairs of counts. Clients whose order has a period should be shuffled first.

    Args:
      successes, trials: as those of `ebbinomial`.
      most: the greatest number of components.
      folds: their number, from 2 to that of the clients.

    Raises:
      JaxpflError: as `ebbinomial`, also for the clients that are left without a fold; folds out of range; and under a
        transformation.
    """
    checks.count("most", most)
    of = split("compare_components", checked_trials, successes, trials, folds)
    return {number: scores(of, partial(fit_betas, components=number)) for number in range(1, most + 1)}


def best_components(found: Mapping[int, CountScores]) -> int:
    """The number of components of the greatest mean log density of held-out clients; the first of equals.

    Raises:
      JaxpflError: for no number with a finite score.
    """
    return best(found)
