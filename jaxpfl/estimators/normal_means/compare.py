r"""The choice of a prior: by likelihood, by Stein's unbiased risk, and both on clients that were held out.

Client i is in fold i modulo the number of folds, and is scored under the prior fitted to all other folds: by the log
density of its estimate, and by :math:`(\hat\theta_i - x_i)^2 + 2 \mathrm{sd}_i^2 - s_i^2`, which has exactly the
expectation of :math:`(\hat\theta_i - \theta_i)^2`, as that prior does not depend on x_i. The scores without folds are
of the prior fitted to all: they flatter a family with many parameters.

References: Stein 1981, "Estimation of the mean of a multivariate normal distribution"; Xie, Kou and Brown 2012, "SURE
estimates for a heteroscedastic hierarchical model".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.families import COMPONENTS, FAMILIES, Family
from jaxpfl.estimators.normal_means.fit import checked, fitted
from jaxpfl.types import Array, Scalar

By: TypeAlias = Literal["likelihood", "risk"]
FOLDS = 5


class PriorScores(NamedTuple):
    """Scores of a family of priors.

    Attributes:
      log_marginal: log likelihood of all estimates under the prior fitted to all, [].
      risk: Stein's estimate of the mean squared error under it, [].
      log_densities: of every client's estimate, under the prior fitted to the other folds, [m].
      risks: unbiased estimates of every client's squared error under the prior fitted to the other folds, [m].
    """

    log_marginal: Array
    risk: Array
    log_densities: Array
    risks: Array


class Lead(NamedTuple):
    """A difference of two families' means over clients, with the standard error of the clients' differences, []."""

    difference: Array
    stderr: Array


def compare_priors(
    x: Any, s: Any, priors: Sequence[Family] = FAMILIES, *, folds: int = FOLDS, center: Scalar | None = None
) -> dict[Family, PriorScores]:
    """Score families of priors on the same clients and folds.

    Jits, and vmaps over problems; the families and the number of folds are static. Each family is fitted once for each
    fold, and once to all. Clients whose order has a period should be shuffled first.

    Args:
      x, s: as those of `ebnm`.
      priors: the families.
      folds: their number, from 2 to that of the clients.
      center: of all families but npmle; learned unless given, for scale-mixture 0.

    Raises:
      JaxpflError: as `ebnm`; no family, one twice, folds out of range, or so few clients that without a fold there is
        one.
    """
    checks.count("folds", folds)
    if not priors:
        raise JaxpflError("priors must be at least one family, got none")
    for prior in priors:
        if prior not in FAMILIES:
            raise unknown_name("prior", prior, FAMILIES)
        if list(priors).count(prior) > 1:
            raise JaxpflError(f"priors must differ, got {prior} {list(priors).count(prior)} times")
    own, errors = checked(x, s, one=False)
    m = len(own)
    if not 2 <= folds <= m:
        raise JaxpflError(f"folds must be from 2 to the number of clients, {m}, got {folds}")
    if m - -(-m // folds) < 2:
        raise JaxpflError(f"{folds} folds of {m} clients leave a single client to fit a prior to: give more clients")
    at = jnp.asarray(0.0 if center is None else center, own.dtype)
    return {
        prior: _scores(own, errors, at, prior=prior, learned=learns(prior) and center is None, folds=folds)
        for prior in priors
    }


def learns(prior: Family) -> bool:
    """Tell the families that can learn their center from those on a grid about it."""
    return prior not in COMPONENTS


def best(scores: dict[Family, PriorScores], by: By = "likelihood") -> Family:
    """The family of the best mean score on held-out clients: log density, or risk; the first of equals.

    Raises:
      JaxpflError: an unknown ``by``, or no family with a finite score.
    """
    means: dict[Family, float] = {prior: float(of.mean()) for prior, of in _held_out(scores, by).items()}
    finite: dict[Family, float] = {prior: value for prior, value in means.items() if jnp.isfinite(value)}
    if not finite:
        raise JaxpflError("no prior has a finite score")
    return max(finite, key=lambda prior: finite[prior])


def leads(scores: dict[Family, PriorScores], by: By = "likelihood") -> dict[Family, Lead]:
    """Distance of each family to the best one on held-out clients, at least 0, with paired standard errors.

    Raises:
      JaxpflError: as `best`.
    """
    held_out = _held_out(scores, by)
    top = held_out[best(scores, by)]
    gaps: dict[Family, Array] = {prior: top - of for prior, of in held_out.items()}
    return {prior: Lead(gap.mean(), gap.std(ddof=1) / len(gap) ** 0.5) for prior, gap in gaps.items()}


def _held_out(scores: dict[Family, PriorScores], by: By) -> dict[Family, Array]:
    """Scores of every client, larger for better."""
    if by not in get_args(By):
        raise unknown_name("by", by, get_args(By))
    return {prior: of.log_densities if by == "likelihood" else -of.risks for prior, of in scores.items()}


@partial(jax.jit, static_argnames=("prior", "learned", "folds"))
def _scores(x: Array, s: Array, center: Array, *, prior: Family, learned: bool, folds: int) -> PriorScores:
    good = jnp.isfinite(x).all() & (jnp.isfinite(s) & (s > 0)).all()
    x = jnp.where(good, x, jnp.nan)
    fold = jnp.arange(len(x)) % folds
    components = COMPONENTS.get(prior, 0)

    def without(left_out: Array) -> tuple[Array, Array]:
        """Log densities and risks of all clients, [m] each, under the prior of those not in a fold."""
        w = (fold != left_out).astype(x.dtype)
        of = fitted(x, s, w / w.sum(), center, prior=prior, learned=learned, components=components).prior

        def each(x: Array, s: Array) -> tuple[Array, Array]:
            mean, sd = of.moments(x, s)
            return of.log_marginal(x, s), (mean - x) ** 2 + 2 * sd**2 - s**2

        return in_blocks(each, x, s)

    densities, risks = jax.lax.map(without, jnp.arange(folds + 1))  # the last leaves nobody out
    own = jnp.arange(len(x))
    return PriorScores(densities[-1].sum(), risks[-1].mean(), densities[fold, own], risks[fold, own])
