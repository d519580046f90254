r"""Tests that clients are normal about a regression, or about their groups and these about a mean of all.

The scores are the standardised residuals of the fitted model, with the leverage of what was fitted: a client's distance
to the regression over the root of

.. math:: \mathrm{Var}(x_i - z_i^\top \hat\beta) = A + s_i^2 - z_i^\top C^{-1} z_i,

of an estimated beta and a known A (`AreaMeans.residual`). They are the same whether or not the client had a part in
beta: its prediction from all others, over the error of that, is the same number. In groups they are distances of a
client to the prediction from all others, those of its group among them (`GroupMeans.residual`), and of a group's
weighted mean to the mean of all, which was estimated with it (`GroupMeans.group_residual`).

Scores depend on each other and on the fitted spreads, by which they lie closer to normal ones than normal ones do. The
p-value of Anderson and Darling's statistic is therefore from clients drawn from the fitted model at the same covariates
or in the same groups, to which the model is fitted anew; coefficients and the mean of all do not change the scores, and
are drawn as zero.

References: Cook and Weisberg 1982, "Residuals and Influence in Regression", section 2.2; Stute, Gonzalez Manteiga and
Presedo Quindimil 1993, "Bootstrap based goodness-of-fit tests".
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl import checks, full_precision
from jaxpfl.estimators.normal_means.area import AreaMeans, fay_herriot, solved
from jaxpfl.estimators.normal_means.area_fit import Likelihood
from jaxpfl.estimators.normal_means.goodness import DRAWS, Goodness, anderson_darling, beside, each_drawn
from jaxpfl.estimators.normal_means.groups import GroupMeans, ebnm_groups, solved_groups
from jaxpfl.types import Array, Key


class GroupGoodness(NamedTuple):
    """Tests of the clients within their groups, and of the groups."""

    clients: Goodness
    groups: Goodness


def goodness_about(
    key: Key, x: Any, s: Any, z: Any, *, fit: Likelihood = "reml", intercept: bool = True, draws: int = DRAWS
) -> Goodness:
    """Test that clients are normal about their regression, by the residuals of `fay_herriot`.

    Jits, and vmaps over problems and keys; ``fit``, ``intercept`` and ``draws`` are static.

    Args:
      key: of the draws.
      x, s, z, fit, intercept: as those of `fay_herriot`.
      draws: of all clients; the least p-value is 1 / (draws + 1).

    Raises:
      JaxpflError: as `fay_herriot`; for draws below one.

    Examples:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> z = rng.normal(size=80)
      >>> x = 2 * z + rng.choice([-3.0, 3.0], 80) + 0.5 * rng.normal(size=80)  # two kinds about the regression
      >>> float(goodness_about(jax.random.key(0), x, 0.5, z, draws=19).p_value).__round__(2)
      0.05
    """
    checks.count("draws", draws)
    found = fay_herriot(x, s, z, fit=fit, intercept=intercept)
    return _about(key, found._replace(labels=None), fit=fit, draws=int(draws))


def goodness_in_groups(
    key: Key,
    x: Any,
    s: Any,
    group: Any,
    *,
    groups: int | None = None,
    fit: Likelihood = "reml",
    draws: int = DRAWS,
) -> GroupGoodness:
    """Test that clients are normal about their groups, and groups about a mean of all, by `ebnm_groups`' residuals.

    Jits, and vmaps over problems and keys; ``groups``, ``fit`` and ``draws`` are static. With few groups nothing is
    found of their distribution.

    Args:
      key: of the draws.
      x, s, group, groups, fit: as those of `ebnm_groups`.
      draws: of all groups and clients; the least p-value is 1 / (draws + 1).

    Raises:
      JaxpflError: as `ebnm_groups`; for draws below one.
    """
    checks.count("draws", draws)
    found = ebnm_groups(x, s, group, groups=groups, fit=fit)
    return _in_groups(key, found._replace(labels=None), fit=fit, draws=int(draws))


@partial(full_precision.jit, static_argnames=("fit", "draws"))
def _about(key: Key, found: AreaMeans, *, fit: Likelihood, draws: int) -> Goodness:
    s, Q = found.s, found.basis
    sd = jnp.sqrt(found.variance + s**2)

    def drawn(key: Key) -> Array:
        x = sd * jax.random.normal(key, s.shape, s.dtype)
        return anderson_darling(solved(x, s, Q, fit=fit, intercept=False).residual)

    return beside(anderson_darling(found.residual), each_drawn(drawn, key, draws, len(s)))


@partial(full_precision.jit, static_argnames=("fit", "draws"))
def _in_groups(key: Key, found: GroupMeans, *, fit: Likelihood, draws: int) -> GroupGoodness:
    s, group, groups = found.s, found.group, len(found.group_mean)
    sd, between = jnp.sqrt(found.within + s**2), jnp.sqrt(found.between)

    def statistics(of: GroupMeans) -> Array:
        return jnp.stack([anderson_darling(scores) for scores in (of.residual, of.group_residual)])

    def drawn(key: Key) -> Array:
        of_groups, of_clients = jax.random.split(key)
        mu = between * jax.random.normal(of_groups, (groups,), s.dtype)
        x = mu[group] + sd * jax.random.normal(of_clients, s.shape, s.dtype)
        return statistics(solved_groups(x, s, group, groups=groups, fit=fit))

    own, others = statistics(found), each_drawn(drawn, key, draws, len(s))
    return GroupGoodness(*(beside(own[i], others[:, i]) for i in range(2)))
