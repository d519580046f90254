r"""Intervals for one client's theta_i: how sure it can be of its personalised estimate.

All functions are for one entry and broadcast. ``a`` is the weight of the client's own mean, ``s2`` its variance.

- `known`: the errors of the Gaussian model with known variances are exactly normal, so these intervals cover exactly.
- `morris`: mu and st2 are learned from the same clients, maybe few; the intervals are wider for that.
- `robust`: the theta_i need not be Gaussian. Their distribution enters only by its variance, and the interval covers at
  least with its probability on average over the clients, whatever that distribution.
- `beta`: for Bernoulli clients, quantiles of the posterior under a known Beta prior.
- `beta_learned`: mu and v are learned from the same clients.

References: Morris 1983, "Parametric empirical Bayes inference"; Armstrong, Kolesar and Plagborg-Moller 2022, "Robust
empirical Bayes confidence intervals".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.types import Array, Scalar

_HALVINGS = 60
_POINTS = 64
_CELLS = 24
_ZOOMS = 4
_NEGLIGIBLE = 20.0  # in units of the log density, below its maximum
_AT_ONCE = 4096
_TINY = 1e-30


def known(estimate: Array, mse: Scalar, level: Scalar) -> tuple[Array, Array]:
    """``estimate -/+ z sqrt(mse)``, with the exact error of `gaussian_closed_form`."""
    reach = _normal(level) * jnp.sqrt(mse)
    return estimate - reach, estimate + reach


def morris(own: Array, s2: Array | Scalar, level: Scalar, *, degrees: float | None = None) -> tuple[Array, Array]:
    r"""With mu and st2 unknown: the posterior means of all that depends on them, with flat priors on both.

    Given st2, with :math:`B_i = s_i^2 / (s_i^2 + st^2)`, :math:`w_i = 1 / (s_i^2 + st^2)` and M the mean with these
    weights, theta_i is normal about :math:`\bar X_i - B_i (\bar X_i - M)` with variance
    :math:`st^2 B_i + B_i^2 / \sum_j w_j`; and st2 has the density

    .. math:: \Big(\prod_i w_i \Big/ \sum_i w_i\Big)^{d/2} \exp\Big(-\frac12 \sum_i w_i |\bar X_i - M|^2\Big)

    which is summed over a grid. The intervals are those of normal distributions with the mean and variance that theta_i
    then has; for equal sizes they are Morris's. Where (m - 1) d <= 2 a flat prior leaves st2 infinite: there the prior
    is flat in s^2 / (s^2 + st^2).

    Args:
      own: the clients' own means, [m, d].
      s2: their variances, [m] or one for all.
      degrees: of freedom, where s2 was pooled from few samples (on the host, with the level): the intervals are then
        those of Student's t, as they are for a client by itself. None: s2 is known.
    """
    m, d = own.shape
    s2 = jnp.broadcast_to(jnp.maximum(s2, _TINY), (m,))
    mean = own.mean(axis=0)
    y = own - mean
    squares = (y**2).sum(axis=1)
    scale = jnp.maximum(s2.mean(), squares.sum() / max((m - 1) * d, 1))

    def given(u: Array) -> tuple[Array, Array, Array, Array]:
        """At st2 = scale (1 / u^2 - 1), in which the density is bounded for every m: st2, its log density, w, M."""
        st2 = scale * (1 - u) * (1 + u) / u**2
        w = 1 / (st2[:, None] + s2)
        total = w.sum(axis=1)
        off = w @ y / total[:, None]
        log_p = d / 2 * (jnp.log(w).sum(axis=1) - jnp.log(total)) - 3 * jnp.log(u)
        log_p -= (w @ squares - total * (off**2).sum(axis=1)) / 2
        if (m - 1) * d <= 2:
            log_p -= 2 * jnp.log(s2.mean() + st2)
        return st2, log_p, w, off

    def narrow(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        u, step = _cells(*ends)
        log_p = given(u)[1]
        likely = log_p > log_p.max() - _NEGLIGIBLE
        low, high = jnp.where(likely, u, 1).min(), jnp.where(likely, u, 0).max()
        return jnp.maximum(low - step, ends[0]), jnp.minimum(high + step, ends[1])

    u, _ = _cells(*jax.lax.fori_loop(0, _ZOOMS, narrow, (jnp.zeros_like(scale), jnp.ones_like(scale))))
    st2, log_p, w, off = given(u)
    p = jax.nn.softmax(log_p)[:, None]
    B = s2 * w
    EB, of_mean = (p * B).sum(axis=0)[:, None], (p * B).T @ off
    within = (p * (st2[:, None] * B + B**2 / w.sum(axis=1, keepdims=True))).sum(axis=0)[:, None]
    # The variance of B (y - off) over the grid.
    spread = B - EB[:, 0]
    between = (p * spread**2).sum(axis=0)[:, None] * y**2 - 2 * y * ((p * spread * B).T @ off)
    between += (p * B**2).T @ off**2 - of_mean**2
    reach = _normal(level) if degrees is None else _student(level, degrees)
    center, reach = own - EB * y + of_mean, reach * jnp.sqrt(within + jnp.maximum(between, 0))
    return center - reach, center + reach


def robust(estimate: Array, a: Scalar, s2: Scalar, st2: Scalar, level: Scalar) -> tuple[Array, Array]:
    """``estimate -/+ cva(t) a sqrt(s2)``: t = ((1 - a)/a)^2 st2 / s2 is the mean square of the estimate's bias, in
    standard deviations of its own, for theta_i about a known mean of whose distribution only st2 is known."""
    deviation = a * jnp.sqrt(s2)
    t = jnp.where(deviation > 0, (1 - a) ** 2 * st2 / jnp.where(deviation > 0, deviation, 1) ** 2, jnp.inf)
    # Without any spread of its own, the estimate is off by its bias alone: Chebyshev.
    chebyshev = (1 - a) * jnp.sqrt(st2 / (1 - level))
    reach = jnp.where(deviation > 0, critical_value(jnp.where(deviation > 0, t, 0), 1 - level) * deviation, chebyshev)
    return estimate - reach, estimate + reach


def critical_value(t: Scalar, alpha: Scalar) -> Array:
    """cva: the chi with ``worst_miss(t, chi) = alpha``, by bisection."""
    t, alpha = jnp.broadcast_arrays(jnp.asarray(t, float), jnp.asarray(alpha, float))
    low = -jax.scipy.special.ndtri(alpha / 2)
    return _bisect(lambda chi: worst_miss(t, chi) > alpha, low, jnp.sqrt((1 + t) / alpha))


def worst_miss(t: Array, chi: Array) -> Array:
    r"""The largest probability that |Z + b| > chi over all distributions of b with mean square t, Z standard normal.

    With r(u) = P(|Z + sqrt u| > chi), convex and then concave in u: the value at t of its concave envelope, which is r
    beyond the point whose tangent passes through (0, r(0)), and that tangent before it.
    """

    def miss(u: Array) -> Array:
        root = jnp.sqrt(u)
        return jax.scipy.special.ndtr(root - chi) + jax.scipy.special.ndtr(-root - chi)

    def slope(u: Array) -> Array:
        root = jnp.sqrt(jnp.maximum(u, 1e-12))
        pdf = jax.scipy.stats.norm.pdf
        return (pdf(root - chi) - pdf(-root - chi)) / (2 * root)

    # Before the tangent's point the chord from 0 is less steep than r itself.
    before = lambda u: slope(u) * u > miss(u) - miss(jnp.zeros_like(u))  # noqa: E731
    # Below chi = sqrt(3), r is concave from the start, and the envelope is r.
    touch = jnp.where(chi > jnp.sqrt(3.0), _bisect(before, chi**2 / 16, (chi + 3) ** 2 + 0 * t), 0)
    chord = miss(jnp.zeros_like(t)) + t / jnp.where(touch > 0, touch, 1) * (miss(touch) - miss(jnp.zeros_like(t)))
    return jnp.where(t < touch, chord, miss(t))


def beta(mu: Scalar, v: Scalar, share: Array, size: Array, level: Scalar) -> tuple[Array, Array]:
    """For Bernoulli clients and a prior that is known: quantiles of Beta(alpha + Z, beta + n - Z).

    Where v is 0 all probabilities are mu; where it is mu (1 - mu) the prior says nothing: alpha, beta are kept above
    1e-3.

    Args:
      mu, v: the prior's mean and variance.
      share: the clients' shares of ones, Z / n.
      size: n.
    """
    most = mu * (1 - mu)
    total = jnp.clip(jnp.where(v > 0, most / jnp.where(v > 0, v, 1) - 1, 1e6), 2e-3, 1e6)
    alpha = jnp.maximum(mu * total, 1e-3) + share * size
    other = jnp.maximum((1 - mu) * total, 1e-3) + (1 - share) * size

    def quantile(p: Scalar) -> Array:
        below = lambda x: jax.scipy.special.betainc(alpha, other, x) < p  # noqa: E731
        return _bisect(below, jnp.zeros_like(alpha), jnp.ones_like(alpha))

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def beta_learned(ones: np.ndarray, size: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    r"""For Bernoulli clients, with mu and v unknown: what `morris` is for Gaussian ones. On the host, by SciPy.

    Of Beta distributions with mean mu and variance :math:`v = \rho\, \mu (1 - \mu)`, each (mu, rho) counts by how
    likely it makes all clients' counts, with flat priors on (0, 1): a grid of both. The intervals are quantiles of the
    Beta distributions with the mean and variance that p_i then has.

    Args:
      ones: the clients' numbers of ones Z, [m].
      size: n, [m].
    """
    from scipy import special

    pairs, of_client = np.unique(np.stack([ones, size]).astype(float), axis=1, return_inverse=True)
    # Few distinct numbers of ones, of zeros and of samples, many clients.
    counted = [np.unique(each, return_counts=True) for each in (ones, np.subtract(size, ones), size)]

    def log_rises(start: np.ndarray, counts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return (special.gammaln(start[:, None] + counts[0]) - special.gammaln(start)[:, None]) @ counts[1]

    def grid(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Middles [2, cells] of the cells of mu and rho between their ends [2, 2], alpha and alpha + beta there, and
        the log density."""
        width = (ends[:, 1:] - ends[:, :1]) / _CELLS
        axes = ends[:, :1] + width * (np.arange(_CELLS) + 0.5)
        mu, rho = middles = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
        total = 1 / rho - 1
        of_ones, of_zeros, of_all = map(log_rises, (mu * total, (1 - mu) * total, total), counted)
        return middles, mu * total, total, of_ones + of_zeros - of_all

    ends = np.array([[0.0, 1.0], [0.0, 1.0]])
    for _ in range(2 * _ZOOMS):
        middles, _, _, log_p = grid(ends)
        likely = middles[:, log_p > log_p.max() - _NEGLIGIBLE]
        width = (ends[:, 1] - ends[:, 0]) / _CELLS
        ends = np.stack(
            [np.maximum(likely.min(axis=1) - width, ends[:, 0]), np.minimum(likely.max(axis=1) + width, ends[:, 1])],
            axis=1,
        )
    _, alpha, total, log_p = grid(ends)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()

    def moments(of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z, n = of[:, :, None]
        first = (alpha + z) / (total + n)
        mean = first @ p
        return mean, (first * (1 - first) / (total + n + 1) + (first - mean[:, None]) ** 2) @ p

    parts = np.array_split(pairs, -(-pairs.shape[1] // _AT_ONCE), axis=1)
    mean, variance = (np.concatenate(each) for each in zip(*map(moments, parts), strict=True))
    total = mean * (1 - mean) / variance - 1
    low, high = (special.betaincinv(mean * total, (1 - mean) * total, (1 + sign * level) / 2) for sign in (-1, 1))
    return low[of_client], high[of_client]


def _normal(level: Scalar) -> Array:
    return -jax.scipy.special.ndtri((1 - level) / 2)


def _student(level: Scalar, degrees: float) -> float:
    from scipy import special

    return float(special.stdtrit(degrees, (1 + level) / 2))


def _cells(low: Array, high: Array) -> tuple[Array, Array]:
    """The middles of `_POINTS` cells, and their width."""
    step = (high - low) / _POINTS
    return low + step * (jnp.arange(_POINTS) + 0.5), step


def _bisect(below, low: Array, high: Array) -> Array:
    """The point where ``below`` turns from true to false."""
    low, high = jnp.broadcast_arrays(low, high)

    def halve(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (at[0] + at[1]) / 2
        up = below(middle)
        return jnp.where(up, middle, at[0]), jnp.where(up, at[1], middle)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))
    return (low + high) / 2
