"""A posterior of two parameters of a population on a grid, and quantiles of the mixture that it makes of a client's.

It runs on the host, for `learned_bernoulli` and `learned_poisson`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

CELLS = 24
"""Cells along each parameter, unless another number is given."""
_ZOOMS = 8
_NEGLIGIBLE = 16.0  # in units of the log density, below its maximum
_UNLIKELY = 1e-5  # of a cell, beside the likeliest
_HALVINGS = 45
_ENOUGH = 1e-4
_OF_STDDEV = 1e-3
_LARGE = 1e3
_AT_ONCE = 256
_TERMS = 4096


class Population(NamedTuple):
    """A posterior of the population of all clients, on a grid.

    Attributes:
      first, second: alpha and beta of Beta distributions, or shape and pseudo-exposure of Gamma ones, [cells] each.
      lower, upper: probabilities of the cells by the priors of the lower and of the upper end, [cells]; None where that
        end is the least or the greatest possible and its prior improper.
      bounded: whether the distributions are Beta.
    """

    first: np.ndarray
    second: np.ndarray
    lower: np.ndarray | None
    upper: np.ndarray | None
    bounded: bool

    @property
    def middle(self) -> np.ndarray:
        """Mean of the probabilities of both ends, for all that is neither, [cells]."""
        return np.mean([of for of in (self.lower, self.upper) if of is not None], axis=0)


class Believed(NamedTuple):
    """Ends of the intervals, and posterior standard deviations, [m] each.

    Without any events the posterior has nearly all its mass next to zero and a long tail: its standard deviation may
    then exceed the interval's upper end.
    """

    low: np.ndarray
    high: np.ndarray
    stddev: np.ndarray


def zoomed(
    log_densities: Callable[[np.ndarray], Sequence[np.ndarray]], ends: np.ndarray, cells: int = CELLS
) -> np.ndarray:
    """Midpoints of a grid over the part of a box where a density is not negligible, [2, cells].

    Args:
      log_densities: places [2, cells] to the logarithms of one or several densities there, [cells] each.
      ends: of the box, [2, 2], a row for each parameter.
      cells: along each of them.
    """
    for _ in range(_ZOOMS):
        places = _midpoints(ends, cells)
        likely = places[:, np.any([of > of.max() - _NEGLIGIBLE for of in log_densities(places)], axis=0)]
        width = (ends[:, 1] - ends[:, 0]) / cells
        low, high = likely.min(axis=1) - width, likely.max(axis=1) + width
        ends = np.stack([np.maximum(low, ends[:, 0]), np.minimum(high, ends[:, 1])], axis=1)
    return _midpoints(ends, cells)


def _midpoints(ends: np.ndarray, cells: int) -> np.ndarray:
    width = (ends[:, 1:] - ends[:, :1]) / cells
    axes = ends[:, :1] + width * (np.arange(cells) + 0.5)
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])


def shares(log_density: np.ndarray) -> np.ndarray:
    """Probabilities in proportion to a density, [cells]."""
    p = np.exp(log_density - log_density.max())
    return p / p.sum()


def quantile(
    below: Callable[[np.ndarray, np.ndarray], np.ndarray], p: np.ndarray, stddev: np.ndarray, q: float
) -> np.ndarray:
    """Quantiles of clients' mixtures on an unbounded scale, by bisection, [number].

    They are right to 1e-4 of the scale, and to a thousandth of a standard deviation.

    Args:
      below: places [number, 1] and the kept cells [cells] bool to the probabilities of each cell's posterior up to
        there, [number, kept].
      p: probabilities of the cells.
      stddev: a client's posterior standard deviation on the scale, about, [number].
      q: the probability.
    """
    kept = p > _UNLIKELY * p.max()
    weights = p[kept] / p[kept].sum()
    enough = np.minimum(_ENOUGH, _OF_STDDEV * stddev)
    number = len(stddev)
    low, high = np.full(number, -_HALVINGS, float), np.full(number, _HALVINGS, float)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        left = below(middle[:, None], kept) @ weights < q
        low, high = np.where(left, middle, low), np.where(left, high, middle)
        if (high - low < enough).all():
            break
    return (low + high) / 2


def of_each(answer: Callable[[np.ndarray], np.ndarray], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Answers of all clients from those of the distinct pairs of their numbers, some at once, [k, m].

    Args:
      answer: pairs [2, some] to k numbers, [k, some].
      first, second: numbers of each client, [m].
    """
    pairs, of_client = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    parts = np.array_split(pairs, -(-pairs.shape[1] // _AT_ONCE), axis=1)
    return np.concatenate([answer(part) for part in parts], axis=1)[:, of_client.ravel()]


def log_rise(start: np.ndarray, counts: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Sum over clients of log Gamma(start + count) - log Gamma(start), [cells].

    Stirling's series where the difference of large numbers would cancel.
    """
    from scipy import special

    def of(counts: np.ndarray) -> np.ndarray:
        a = start[:, None]
        exact = special.gammaln(a + counts) - special.gammaln(a)
        far = (a + counts - 0.5) * np.log1p(counts / a) + counts * (np.log(a) - 1) + (1 / (a + counts) - 1 / a) / 12
        return np.where(a > _LARGE, far, exact)

    return total(of, counts, clients)


def total(of: Callable[[np.ndarray], np.ndarray], values: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Sum of ``of(values) [cells, some]`` over values that so many clients have, some at once, [cells]."""
    parts = range(0, len(values), _TERMS)
    return np.sum([of(values[at : at + _TERMS]) @ clients[at : at + _TERMS] for at in parts], axis=0)
