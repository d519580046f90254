r"""The choice of a prior: by likelihood, by Stein's unbiased risk, and both on clients that were held out.

Client i is in fold i modulo the number of folds, and is scored under the prior fitted to all other folds: by the log
density of its estimate, and by :math:`(\hat\theta_i - x_i)^2 + 2 \mathrm{sd}_i^2 - s_i^2`, which has exactly the
expectation of :math:`(\hat\theta_i - \theta_i)^2`, as that prior does not depend on x_i. The scores without folds are
of the prior fitted to all: they flatter a family with many parameters.

References: Stein 1981, "Estimation of the mean of a multivariate normal distribution"; Xie, Kou and Brown 2012, "SURE
estimates for a heteroscedastic hierarchical model".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp

from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Scalar
from jaxpfl.estimators.normal_means.answer import in_blocks
from jaxpfl.estimators.normal_means.families import COMPONENTS, FAMILIES, Family
from jaxpfl.estimators.normal_means.fit import checked, fitted
from jaxpfl.support.errors import JaxpflError, unknown_name

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


class HeldOut(Protocol):
    """Scores of a family of priors, also of counts."""

    @property
    def log_densities(self) -> Array:
        """Log density of every client under the prior fitted to the other folds, [m]."""
        ...


Choice = TypeVar("Choice", bound=Hashable)
"""Name of a family of priors, or number of its components."""


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
    check_priors(priors, FAMILIES)
    own, errors = checked(x, s, one=False)
    check_folds(folds, len(own))
    at = jnp.asarray(0.0 if center is None else center, own.dtype)
    return {
        prior: _scores(own, errors, at, prior=prior, learned=learns(prior) and center is None, folds=folds)
        for prior in priors
    }


def check_priors(priors: Sequence[str], known: Sequence[str]) -> None:
    """Check names of families that are to be compared.

    Raises:
      JaxpflError: for none, an unknown one, and one that is there twice.
    """
    if not priors:
        raise JaxpflError("priors must be at least one family, got none")
    for prior in priors:
        if prior not in known:
            raise unknown_name("prior", prior, known)
        if list(priors).count(prior) > 1:
            raise JaxpflError(f"priors must differ, got {prior} {list(priors).count(prior)} times")


def check_folds(folds: int, m: int) -> None:
    """Check a number of folds of m clients.

    Raises:
      JaxpflError: out of range, or where a single client is left without a fold.
    """
    checks.count("folds", folds)
    if not 2 <= folds <= m:
        raise JaxpflError(f"folds must be from 2 to the number of clients, {m}, got {folds}")
    if m - -(-m // folds) < 2:
        raise JaxpflError(f"{folds} folds of {m} clients leave a single client to fit a prior to: give more clients")


def learns(prior: Family) -> bool:
    """Tell the families that can learn their center from those on a grid about it."""
    return prior not in COMPONENTS


def best(scores: Mapping[Choice, HeldOut], by: By = "likelihood") -> Choice:
    """The family of the best mean score on held-out clients: log density, or risk; the first of equals.

    Args:
      scores: as `compare_priors` returns them, or, by likelihood alone, those of counts.
      by: the score.

    Raises:
      JaxpflError: an unknown ``by``, risks of counts, or no family with a finite score.
    """
    means = {prior: float(of.mean()) for prior, of in _held_out(scores, by).items()}
    finite = {prior: value for prior, value in means.items() if jnp.isfinite(value)}
    if not finite:
        raise JaxpflError("no prior has a finite score")
    return max(finite, key=lambda prior: finite[prior])


def leads(scores: Mapping[Choice, HeldOut], by: By = "likelihood") -> dict[Choice, Lead]:
    """Distance of each family to the best one on held-out clients, at least 0, with paired standard errors.

    Args:
      scores, by: as those of `best`.

    Raises:
      JaxpflError: as `best`.
    """
    held_out = _held_out(scores, by)
    top = held_out[best(scores, by)]
    gaps = {prior: top - of for prior, of in held_out.items()}
    return {prior: Lead(gap.mean(), gap.std(ddof=1) / len(gap) ** 0.5) for prior, gap in gaps.items()}


def _held_out(scores: Mapping[Choice, HeldOut], by: By) -> dict[Choice, Array]:
    """Scores of every client, larger for better."""
    if by not in get_args(By):
        raise unknown_name("by", by, get_args(By))
    if by == "likelihood":
        return {prior: of.log_densities for prior, of in scores.items()}
    risks = {prior: -of.risks for prior, of in scores.items() if isinstance(of, PriorScores)}
    if len(risks) < len(scores):
        raise JaxpflError("by must be likelihood for counts, whose scores have no risk, got risk")
    return risks


@partial(full_precision.jit, static_argnames=("prior", "learned", "folds"))
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
