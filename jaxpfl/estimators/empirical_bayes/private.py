r"""Priors of normal means from private counts of cells.

A client's log likelihood is unbounded in its estimate, but its cell in a public grid is a bounded message: one of the
bins of its estimate, clipped to [low, high], times one of the bins of its standard error. Every family of priors is
then fitted to the released counts, as to clients in the middle of their bins with the variance of a uniform error
within a bin added (Sheppard),

.. math:: x_c, \quad s_c^2 + h^2 / 12

and each client computes its own posterior from the released prior and its own unrounded estimate, which sends nothing
more. Two releases:

- `central`: a trusted server counts, and adds N(0, sigma^2) to every cell, with sigma by the analytic calibration for a
  sensitivity of 1: (eps, delta)-DP for adding or removing one client, with all it sent.
- `local`: each client sends one randomised bit for each cell, 1 for its own, at eps / 2 each: two cells differ between
  two values of a client, so that the message is pure eps-LDP.

Taken for public: the grid, and in the local form who took part. A cell's noise does not fall with its count, so that
counts as released would tell of parameters everywhere: they are first replaced by the nearest that a population of
parameters can have (`smoothed`), which no noise of single cells is.

References: Erlingsson, Pihur and Korolova 2014, "RAPPOR", for the bits; Duchi, Shalev-Shwartz, Singer and Chandra 2008,
"Efficient projections onto the l1-ball", for the weights' projection; Balle and Wang 2018 for the calibration.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import checks, full_precision
from jaxpfl.core.randomness import numbered
from jaxpfl.core.types import Array, Key
from jaxpfl.estimators.empirical_bayes.normal_means import Family, NormalMeans, checked, ebnm, posterior
from jaxpfl.privacy import local_dp
from jaxpfl.privacy.claim import check_delta
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.support.errors import JaxpflError, warn

_STEPS = 2000
"""Gradient steps, from which the fitted counts no longer move."""
_CLEAR = 4.0
"""Standard deviations of the noise's sum of squares by which that of the counts is to exceed it."""
_EQUAL = 1e-5
"""Share by which a number may pass the grid's end, as a rounding error."""
_AT_ONCE = 1024
"""Clients whose bits are drawn at once."""


class Cells(NamedTuple):
    """Public grid of estimates and of standard errors.

    Attributes:
      low, high: of the estimates; those outside count in the cells at the ends.
      least, most: of the standard errors, as those of the estimates.
      bins: of the estimates, of equal width.
      error_bins: of the standard errors, equal on the logarithmic scale; one where all are nearly equal.
    """

    low: float
    high: float
    least: float
    most: float
    bins: int = 64
    error_bins: int = 1

    @property
    def number(self) -> int:
        """Number of cells."""
        return self.bins * self.error_bins

    def check(self) -> None:
        """Check the grid.

        Raises:
          JaxpflError: for bounds that are not finite or not in order, and fewer than two bins or one error bin.
        """
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low < self.high):
            raise JaxpflError(f"low and high must be finite with low < high, got {self.low} and {self.high}")
        checks.positive("least", self.least)
        checks.positive("most", self.most)
        if self.least > self.most:
            raise JaxpflError(f"least and most must be in order, got {self.least} and {self.most}")
        checks.count("error_bins", self.error_bins)
        if self.bins != int(self.bins) or self.bins < 2:
            raise JaxpflError(f"bins must be a whole number of at least 2, got {self.bins}")

    def place(self, x: Array, s: Array) -> Array:
        """Cell of each client, [m]; of an estimate that is not finite, the first one."""
        share = (jnp.nan_to_num(x, nan=self.low) - self.low) / (self.high - self.low)
        at = jnp.clip(jnp.floor(self.bins * share), 0, self.bins - 1).astype(jnp.int32)
        if self.error_bins == 1:
            return at
        share = jnp.log(jnp.nan_to_num(s, nan=self.least) / self.least) / np.log(self.most / self.least)
        of_error = jnp.clip(jnp.floor(self.error_bins * share), 0, self.error_bins - 1).astype(jnp.int32)
        return at * self.error_bins + of_error

    def middles(self) -> tuple[Array, Array]:
        """Middle estimate of every cell, and the standard error there with that of the place within a bin, [count]."""
        width = (self.high - self.low) / self.bins
        x = self.low + width * (jnp.arange(self.bins) + 0.5)
        ratio = (jnp.arange(self.error_bins) + 0.5) / self.error_bins
        s = jnp.sqrt(self.least ** (2 - 2 * ratio) * self.most ** (2 * ratio) + width**2 / 12)
        return jnp.repeat(x, self.error_bins), jnp.tile(s, self.bins)


class Released(NamedTuple):
    """Noisy counts of all cells, [count], and the standard deviation of their noise, []."""

    counts: Array
    stddev: Array


def central(key: Key, cells: Array, count: int, *, epsilon: float, delta: float) -> Released:
    """Counts of all cells with Gaussian noise.

    Formal guarantees: (eps, delta)-DP for adding or removing a client, whose cell is all that is counted of it.

    Args:
      key: of the noise.
      cells: of the clients, [m].
      count: number of cells.
      epsilon, delta: of the release.

    Raises:
      JaxpflError: for eps that is not positive, and delta outside (0, 1).
    """
    stddev = local_dp.analytic_gaussian_stddev(epsilon, delta, 1.0)
    counts = jnp.zeros(count, jnp.result_type(float)).at[cells].add(1)
    return Released(add_gaussian(numbered(key, stddev), counts, stddev), jnp.asarray(stddev, counts.dtype))


def local(key: Key, cells: Array, count: int, *, epsilon: float) -> Released:
    r"""Sum over clients of their randomised bits, unbiased counts of all cells.

    With :math:`c = 1 / \tanh(\epsilon / 4)` a bit's value is :math:`(1 \pm c) / 2`, of variance :math:`(c^2 - 1) / 4`.

    Formal guarantees: a client's bits together are pure eps-LDP, as each is eps / 2 (`privacy.local_dp.one_bit_unit`)
    and two of them depend on which cell is its own.

    Args:
      key: of the clients' randomness.
      cells: of the clients, [m].
      count: number of cells.
      epsilon: of a client's message.

    Raises:
      JaxpflError: for eps that is not positive.
    """
    checks.positive("epsilon", epsilon)

    def message(number: Array, cell: Array) -> Array:
        own = jax.nn.one_hot(cell, count, dtype=jnp.result_type(float))
        return local_dp.one_bit_unit(jax.random.fold_in(key, number), own, epsilon / 2)

    m = len(cells)
    at_once = min(m, _AT_ONCE)
    places = jnp.arange(-(-m // at_once) * at_once).reshape(-1, at_once)

    def add(total: Array, places: Array) -> tuple[Array, None]:
        sent = jax.vmap(lambda i: message(i, cells[jnp.minimum(i, m - 1)]))(places)
        return total + jnp.where((places < m)[:, None], sent, 0).sum(axis=0), None

    counts = jax.lax.scan(add, jnp.zeros(count, jnp.result_type(float)), places)[0]
    return Released(counts, jnp.sqrt(m * (1 / jnp.tanh(jnp.asarray(epsilon, counts.dtype) / 4) ** 2 - 1) / 4))


def _warn_of_clipped(x: Array, s: Array, cells: Cells) -> None:
    if isinstance(x, Tracer) or isinstance(s, Tracer):
        return
    for name, of, low, high in (("x", x, cells.low, cells.high), ("s", s, cells.least, cells.most)):
        beyond = int(((of < low * (1 - _EQUAL * np.sign(low))) | (of > high * (1 + _EQUAL * np.sign(high)))).sum())
        if beyond:
            warn(f"{name} of {beyond} of {len(of)} clients lies beyond {low:g} to {high:g} and was clipped")


def smoothed(released: Released, cells: Cells) -> Array:
    r"""Counts that some population of parameters can have, nearest to the noisy ones, [count].

    Where the noise hides them they are equal for all parameters in the grid, under which clients keep nearly what they
    have alone: unless the sum of the noisy counts' squares is `_CLEAR` standard deviations above that of noise.

    Expected counts are a mixture, over parameters :math:`\theta_k` in the middle of the bins, of the probabilities of
    bins about them; with m_e for the noisy number of clients in error bin e, at least zero,

    .. math:: \min_\pi \sum_{be} \Big( \tilde c_{be} - m_e \sum_k \pi_k P_e(b \mid \theta_k) \Big)^2, \qquad
       \pi_k \ge 0, \quad \sum_k \pi_k = 1

    by projected gradient steps with Nesterov's momentum.
    """
    noisy = released.counts.reshape(cells.bins, cells.error_bins)
    x, s = (each.reshape(noisy.shape) for each in cells.middles())
    sizes = _nonnegative(noisy.sum(axis=0), jnp.maximum(noisy.sum(), 1))
    edges = jnp.append(x[:, 0] - (x[1, 0] - x[0, 0]) / 2, jnp.inf).at[0].set(-jnp.inf)
    below = jax.scipy.special.ndtr((edges[:, None, None] - x[:, 0]) / s[0][:, None])
    design = (sizes[:, None] * jnp.diff(below, axis=0)).reshape(-1, cells.bins)  # [bins * error_bins, parameters]
    nearest = design @ _projected(released.counts, design)
    return jnp.where(stands_out(released), nearest, sizes[None].repeat(cells.bins, axis=0).reshape(-1) + 1)


@full_precision.jit
def _projected(counts: Array, design: Array) -> Array:
    """Weights of the populations [k] whose expected counts, by ``design`` [count, k], are nearest to ``counts``."""
    rate = 1 / jnp.maximum(jnp.linalg.norm(design, ord=2) ** 2, jnp.finfo(counts.dtype).tiny)

    def step(k: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        last, ahead = at
        new = _nonnegative(ahead - rate * design.T @ (design @ ahead - counts), jnp.ones(()))
        return new, new + k / (k + 3) * (new - last)

    even = jnp.full(design.shape[1], 1 / design.shape[1], counts.dtype)
    return jax.lax.fori_loop(0, _STEPS, step, (even, even))[0]


def stands_out(released: Released) -> Array:
    """True if counts stand out of their noise: their sum of squares is `_CLEAR` standard deviations above its."""
    counts, stddev = released
    number = len(counts)
    energy = (counts**2).sum() - number * stddev**2
    return energy > _CLEAR * stddev**2 * jnp.sqrt(2.0 * number)


def _nonnegative(values: Array, total: Array) -> Array:
    """The values of at least zero with a sum that are nearest, [count]."""
    ordered = jnp.sort(values)[::-1]
    off = (jnp.cumsum(ordered) - total) / (jnp.arange(len(values)) + 1)
    last = (ordered > off).sum() - 1
    return jnp.maximum(values - off[last], 0)


def private_ebnm(
    key: Key,
    x: Any,
    s: Any,
    cells: Cells,
    *,
    epsilon: float,
    delta: float | None = None,
    prior: Family = "npmle",
    components: int | None = None,
) -> NormalMeans:
    """Fit the prior to private counts of cells, and return every client's posterior under it.

    The prior is private as `central` says where a delta is given, else as `local` says. The rest of the answer is what
    each client computes for itself: ``log_marginal`` and whatever else is put together of several clients' answers is
    not private.

    Args:
      key: key of the noise; another one for each release, also of another grid.
      x: the clients' estimates, [m].
      s: their standard errors, [m], or one for all.
      cells: the grid, chosen without a look at the data. Clients beyond it are counted in a warning, which is not
        private.
      epsilon: of the release, or of a client's message.
      delta: of the central release; None for the local one.
      prior, components: as `ebnm`; centers of the families that have one are learned where `ebnm` learns them.

    Raises:
      JaxpflError: as `ebnm`, `Cells.check`, `central` and `local`.
    """
    cells.check()
    own, errors = checked(x, s, one=False)
    _warn_of_clipped(own, errors, cells)
    at = cells.place(own, errors)
    if delta is None:
        released = local(key, at, cells.number, epsilon=epsilon)
    else:
        check_delta(delta, len(at))
        released = central(key, at, cells.number, epsilon=epsilon, delta=delta)
    clear = stands_out(released)
    if not isinstance(clear, Tracer) and not bool(clear):
        warn("the noise hides the counts of all cells: nothing was learned, and the prior keeps clients as they are")
    middle, spread = cells.middles()
    fit = ebnm(middle, spread, prior, components=components, weights=smoothed(released, cells))
    return posterior(fit.prior, own, errors, fit.slack)
