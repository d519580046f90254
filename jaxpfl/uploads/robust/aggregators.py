"""Aggregations by name with arguments, for ``--aggregate`` and ``jaxpfl.fit(aggregate=)``.

- ``mean``: the weighted mean, what each method has by itself.
- ``median``: of each coordinate.
- ``trimmed-mean:fraction=0.2``: of each coordinate, without that share of the smallest and of the largest values.
- ``krum:attackers=2``: the one update nearest to its neighbours, against two assumed attackers in a round.
- ``multi-krum:attackers=2``: the mean of the n - attackers - 2 updates that Krum would choose first; ``select=3`` for
  another number.
- ``geometric-median:steps=100,smoothing=1e-6,tolerance=1e-5``: by at most so many steps, until they are shorter.
- ``norm-bound:bound=1``: the mean of updates that are shortened to that norm; without a bound to the median of the
  round's norms.

`rules` has the equations and the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from jaxpfl.core import choices
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.robust import rules

MEAN = "mean"


class Aggregator(NamedTuple):
    """An aggregation of a round's uploads.

    Attributes:
      name: as it was given.
      rule: the estimate; None for the weighted mean.
      quorum: the number of uploads from which on the rule's guarantee holds.
      trims: share of the values that are cut on each side; 0 for a rule that cuts none.
    """

    name: str
    rule: rules.Rule | None = None
    quorum: int = 1
    trims: float = 0.0

    def check(self, cohort: int) -> None:
        """Refuse a cohort of so many slots in which the rule means nothing.

        Raises:
          JaxpflError: for fewer slots than the quorum, and a share to trim that is less than one of them.
        """
        if cohort < self.quorum:
            raise JaxpflError(f"aggregate = {self.name} needs cohorts of at least {self.quorum} clients, got {cohort}")
        if self.trims and not rules.trimmed(self.trims, cohort):
            raise JaxpflError(
                f"aggregate = {self.name} trims nobody of {cohort} clients in a round: give a fraction of at least "
                f"{1 / cohort:.3g}, or a larger cohort"
            )


def resolve(aggregate: str) -> Aggregator:
    """The aggregation of that name with those arguments.

    Examples:
      >>> resolve("krum:attackers=2").quorum
      7

    Raises:
      JaxpflError: if the name or an argument is unknown, an argument is missing, or a value is out of range.
    """
    name, values = choices.arguments("aggregate", aggregate, AGGREGATORS)
    return AGGREGATORS[name](**values)._replace(name=aggregate)


def _mean() -> Aggregator:
    return Aggregator(MEAN)


def _median() -> Aggregator:
    return Aggregator("median", rules.median)


def _trimmed_mean(fraction: float = 0.2) -> Aggregator:
    if not 0 < fraction < 0.5:
        raise JaxpflError(f"trimmed-mean:fraction must be > 0 and < 0.5, got {fraction:g}")
    return Aggregator("trimmed-mean", partial(rules.trimmed_mean, fraction=fraction), trims=fraction)


def _krum(attackers: int) -> Aggregator:
    _at_least("krum:attackers", attackers, 0)
    return Aggregator("krum", partial(rules.krum, attackers=attackers), 2 * attackers + 3)


def _multi_krum(attackers: int, select: int = 0) -> Aggregator:
    _at_least("multi-krum:attackers", attackers, 0)
    _at_least("multi-krum:select", select, 0)
    rule = partial(rules.multi_krum, attackers=attackers, select=select)
    return Aggregator("multi-krum", rule, max(2 * attackers + 3, select))


def _geometric_median(steps: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-5) -> Aggregator:
    _at_least("geometric-median:steps", steps, 1)
    for name, value in (("smoothing", smoothing), ("tolerance", tolerance)):
        if not 0 < value < math.inf:
            raise JaxpflError(f"geometric-median:{name} must be > 0 and finite, got {value:g}")
    given = {"steps": steps, "smoothing": smoothing, "tolerance": tolerance}
    return Aggregator("geometric-median", partial(rules.geometric_median, **given))


def _norm_bound(bound: float = 0.0) -> Aggregator:
    if not 0 <= bound < math.inf:
        raise JaxpflError(f"norm-bound:bound must be >= 0 and finite, got {bound:g}")
    return Aggregator("norm-bound", partial(rules.norm_bound, bound=bound))


AGGREGATORS: Mapping[str, Callable[..., Aggregator]] = {
    MEAN: _mean,
    "median": _median,
    "trimmed-mean": _trimmed_mean,
    "krum": _krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "norm-bound": _norm_bound,
}
"""Name -> ``**arguments -> Aggregator``."""


def _at_least(what: str, value: int, least: int) -> None:
    if value < least:
        raise JaxpflError(f"{what} must be at least {least}, got {value}")
