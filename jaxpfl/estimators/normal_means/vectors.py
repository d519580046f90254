r"""Vectors of normal means with known standard errors, under any prior: the NPMLE in several dimensions.

Client i has :math:`x_i \sim N(\theta_i, \operatorname{diag}(s_i^2))`, and a priori :math:`\theta_i \sim G`, any
distribution on R^d. G is fitted as :math:`\sum_k \pi_k \delta_{a_k}`: atoms start from estimates of clients, with
weights of the greatest likelihood (`simplex`); EM steps then move the atoms, and the weights are solved again. No step
lowers the likelihood. Coordinates of a client inform each other through G, which fits of one coordinate at a time
cannot see.

References: Kiefer and Wolfowitz 1956; Soloff, Guntuboyina and Sen 2024, "Multivariate, heteroscedastic empirical Bayes
via nonparametric maximum likelihood", https://arxiv.org/abs/2109.03466, for atoms at the observations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array
from jaxpfl.estimators import inputs
from jaxpfl.estimators.frames import Labels, frame, labels_of
from jaxpfl.estimators.normal_means import simplex
from jaxpfl.support.errors import JaxpflError, shown

_ATOMS = 100
_MOVES = 20
_LEAST_ATOMS = 2


class NormalVectors(NamedTuple):
    """Empirical Bayes posteriors of m clients' vectors. The prior counts as known.

    Attributes:
      atoms: a_k, [K, d].
      weights: pi_k, [K], which sum to one.
      mean: posterior means, the personalised estimates, [m, d].
      covariance: posterior covariances, [m, d, d].
      log_marginal: log likelihood of all estimates, [].
      slack: by how much at most the mean log likelihood of a client is below that of the best weights of these atoms.
      labels: of the clients, where they came in a frame.
    """

    atoms: Array
    weights: Array
    mean: Array
    covariance: Array
    log_marginal: Array
    slack: Array
    labels: Labels | None = None

    def to_frame(self) -> Any:
        """A pandas frame of the posterior means, a column for each coordinate, and their standard deviations."""
        means, variances = self.mean, jnp.diagonal(self.covariance, axis1=1, axis2=2)
        return frame(_Coordinates(means, jnp.sqrt(variances), self.labels), len(means), None)


class _Coordinates(NamedTuple):
    mean: Array
    sd: Array
    labels: Labels | None


def ebnm_vectors(x: Any, s: Any, *, atoms: Any = None, moves: int = _MOVES) -> NormalVectors:
    """Fit the prior to all clients' vectors, and return every client's posterior under it.

    Jits, and vmaps over problems; the number of atoms and ``moves`` are static. It holds m x K numbers.

    Args:
      x: the clients' estimates, [m, d].
      s: their standard errors, [m, d], [d] for all clients, or one number; above zero.
      atoms: K, or the atoms to start from, [K, d]; the estimates of at most 100 clients unless given.
      moves: EM steps that move the atoms.

    Raises:
      JaxpflError: for x and s that are no numbers, not finite, s <= 0, of other shapes, or fewer than two clients; and
        fewer than two atoms. Under a transformation, where values are not known, such values make all results NaN.

    Examples:
      >>> angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 1000)
      >>> theta = 4 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
      >>> found = ebnm_vectors(theta + np.random.default_rng(1).normal(size=(1000, 2)), 1.0)
      >>> bool(((found.mean - theta) ** 2).sum(1).mean() < 1.3)  # 2 for each client alone
      True
    """
    own, errors = _checked(x, s)
    if atoms is None or isinstance(atoms, int | np.integer):
        count = min(_ATOMS if atoms is None else int(atoms), len(own))
        if count < _LEAST_ATOMS:
            raise JaxpflError(f"atoms must be at least {_LEAST_ATOMS}, got {atoms}")
        # Spread over the clients in order of an estimate, so that it does not matter in which order they come.
        places = jnp.argsort(own[:, 0])[np.linspace(0, len(own) - 1, count).round().astype(int)]
        begin = own[places]
    else:
        begin = jnp.asarray(atoms, own.dtype)
        if begin.ndim != 2 or begin.shape[1] != own.shape[1] or len(begin) < _LEAST_ATOMS:
            raise JaxpflError(f"atoms must be at least {_LEAST_ATOMS} of {own.shape[1]} numbers, got {begin.shape}")
    return _solve(own, errors, begin, moves=moves)._replace(labels=labels_of(x, s))


@partial(full_precision.jit, static_argnames="moves")
def _solve(x: Array, s: Array, atoms: Array, *, moves: int) -> NormalVectors:
    good = jnp.isfinite(x).all() & (jnp.isfinite(s) & (s > 0)).all() & jnp.isfinite(atoms).all()
    # About the middle, in units of each coordinate's error, so that squares keep their digits.
    center, unit = jnp.median(x, axis=0), jnp.exp(jnp.log(s).mean(axis=0))
    y, e, a = (jnp.where(good, x, jnp.nan) - center) / unit, s / unit, (atoms - center) / unit
    precision = 1 / e**2

    def densities(a: Array) -> Array:
        """Log densities of all clients under all atoms, [m, K], in units of the errors."""
        square = (y**2 * precision).sum(axis=1)[:, None] - 2 * (y * precision) @ a.T + precision @ (a**2).T
        return -(jnp.maximum(square, 0) + jnp.log(2 * jnp.pi * e**2).sum(axis=1)[:, None]) / 2

    def shares(a: Array, weights: Array) -> tuple[Array, Array]:
        joint = densities(a) + jnp.log(weights)
        total = jax.nn.logsumexp(joint, axis=1)
        return jnp.exp(joint - total[:, None]), total

    def moved(_: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        a, weights = at
        of = shares(a, weights)[0]
        heavy = of.T @ precision
        near = jnp.where(heavy > 0, (of.T @ (y * precision)) / jnp.where(heavy > 0, heavy, 1), a)
        return near, of.mean(axis=0)

    weights, slack = simplex.weights(densities(a))
    if moves:
        a, _ = jax.lax.fori_loop(0, moves, moved, (a, weights))
        weights, slack = simplex.weights(densities(a))
    of, total = shares(a, weights)
    mean = of @ a
    second = jnp.einsum("ik,kp,kq->ipq", of, a, a) - mean[:, :, None] * mean[:, None, :]
    log_marginal = total.sum() - len(x) * jnp.log(unit).sum()
    return NormalVectors(
        a * unit + center, weights, mean * unit + center, second * unit * unit[:, None], log_marginal, slack
    )


def _checked(x: Any, s: Any) -> tuple[Array, Array]:
    """Estimates and errors [m, d] in JAX's floating-point type, checked as far as their values are known."""
    own, errors = (
        inputs.numbers(name, of, "some for each client")
        for name, of in zip("xs", inputs.aligned(x=x, s=s), strict=True)
    )
    if own.ndim != 2 or own.shape[1] < 1:
        raise JaxpflError(f"x must be of shape [clients, numbers], got {own.shape}")
    if len(own) < 2:
        raise JaxpflError(f"needs at least 2 clients, got {len(own)}")
    if errors.shape not in ((), own.shape[1:], own.shape):
        raise JaxpflError(f"s must be one number, or of shape {own.shape[1:]} or {own.shape}, got {errors.shape}")
    if isinstance(own, np.ndarray) and not np.isfinite(own).all():
        client = int(np.argmin(np.isfinite(own).all(axis=1)))
        raise JaxpflError(f"x must be finite, got {shown(own[client].tolist())} for client {client}")
    if isinstance(errors, np.ndarray) and not (np.isfinite(errors) & (errors > 0)).all():
        raise JaxpflError(f"s must be finite and > 0, got {float(errors.min())} at the least")
    kind = jnp.result_type(float)
    return jnp.asarray(own, kind), jnp.broadcast_to(jnp.asarray(errors, kind), own.shape)
