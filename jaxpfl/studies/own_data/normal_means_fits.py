"""Fits of the summaries of a file's clients: estimates with errors, about covariates or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core.types import Array, Key
from jaxpfl.estimators import (
    compare_priors,
    ebnm,
    fay_herriot,
    learned_gaussian,
)
from jaxpfl.estimators.normal_means import (
    NormalMixture,
    PriorScores,
    best,
    bootstrap,
    homogeneity,
    leads,
    ranks_of,
    robust_intervals,
)
from jaxpfl.estimators.normal_means.area import dependent
from jaxpfl.estimators.normal_means.bootstrap import REFITS
from jaxpfl.estimators.normal_means.compare import FOLDS, learns
from jaxpfl.estimators.normal_means.families import Family
from jaxpfl.estimators.rate_folds import CountScores
from jaxpfl.studies.own_data import private_fits
from jaxpfl.studies.own_data.summary_csv import Summaries
from jaxpfl.support.errors import JaxpflError, printable, shown

_DRAWN = 20_000_000
_MOST_DRAWS, _FEWEST_DRAWS = 1000, 100
_REFITTED, _FEWEST_REFITS, MOST_REFITTED = 200_000, 20, 100_000


class Fitted(NamedTuple):
    """Results of a fit.

    Attributes:
      facts: of all clients, as JSON; ``estimated`` with the ``mean`` among them.
      columns: of ``estimates.csv``, by name, [m] each.
      scores: of the estimates under their fitted marginal distributions, N(0, 1) if these are right, [m]; None for
        counts of which too many terms would have to be summed.
      files: further tables, by the name of their file.
      groups: names of the groups and their scores, [G] each; None without groups.
    """

    facts: dict[str, Any]
    columns: dict[str, np.ndarray]
    scores: np.ndarray | None
    files: Mapping[str, dict[str, list]] = {}
    groups: tuple[list[str], np.ndarray] | None = None


def of_areas(data: Summaries, options: Any) -> Fitted:
    """Fit estimates with standard errors about a regression on covariates.

    Raises:
      JaxpflError: as `fay_herriot`, the covariates by their names.
    """
    refuse_dependent(data)
    found = fay_herriot(data.first, data.second, data.covariates, fit=options.fit)
    low, high = found.interval(options.level)
    facts = {
        "prior": "normal",
        "fit": options.fit,
        "estimated": {"mean": float(found.regression.mean()), "sigma_theta": float(found.variance) ** 0.5},
        "coefficients": coefficients(("intercept", *data.covariate_names), found.beta, found.beta_covariance),
        "log_likelihood": float(found.log_likelihood),
        "risk": risk_of(data.second, np.asarray(found.risks)),
        "clients_differ": {
            "name": "Cochran's Q about the regression",
            "statistic": float(found.statistic),
            "p_value": float(found.p_value),
        },
    }
    columns = {
        "local": data.first, "local_stderr": data.second, "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "regression": found.regression,
        "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    return Fitted(facts, arrays(columns), np.asarray(found.residual))


def refuse_dependent(data: Summaries) -> None:
    """Refuse a covariate that those before it determine.

    Raises:
      JaxpflError: its name.
    """
    at = dependent(data.covariates)
    if at is not None:
        name = shown(data.covariate_names[at])
        raise JaxpflError(f"covariate {name} is a linear combination of the intercept and the covariates before it")


def coefficients(names: Sequence[str], beta: Any, covariance: Any) -> list[dict[str, Any]]:
    """Coefficients with standard errors and p-values, as JSON."""
    errors = np.sqrt(np.diag(covariance))
    p_values = 2 * np.asarray(jax.scipy.special.ndtr(-np.abs(np.asarray(beta)) / errors))
    return [
        {"name": name, "estimate": float(b), "stderr": float(error), "p_value": float(p)}
        for name, b, error, p in zip(names, beta, errors, p_values, strict=True)
    ]


def said_coefficients(result: dict[str, Any]) -> str:
    """A line on the coefficients of a result."""
    terms = ", ".join(
        f"{printable(row['name'])} {row['estimate']:.4g} ± {row['stderr']:.2g}" for row in result["coefficients"]
    )
    return f"regression: {terms}; ± is a standard error"


def of_estimates(data: Summaries, seed: int, options: Any) -> Fitted:
    """Fit a prior to estimates with standard errors.

    Raises:
      JaxpflError: as `ebnm`.
    """
    x, s = data.first, data.second
    prior, chosen = options.prior, {}
    if prior == "best":
        scores = compare_priors(x, s, folds=min(FOLDS, len(x)), center=options.center)
        prior, chosen = best(scores), {"compared": compared(scores)}
    center = options.center if options.prior != "best" or prior != "npmle" else None
    learned: Any = "learned" if center is None and learns(prior) else center
    if options.epsilon is not None:
        fit, chosen = private_fits.fitted(x, s, seed, options)
    else:
        fit = ebnm(x, s, prior=prior, center=learned, components=options.components, weights=data.weights)
    rank = partial(ranked, clients=len(x), seed=seed, level=options.level)
    how = _how(len(x), prior, center, options)
    if how == "integrated":
        # With few clients their mean and spread are not known, and the likeliest spread may be zero: integrate over
        # both for all that says how sure an estimate is.
        middle, scale = (of[:, 0] for of in learned_gaussian.posterior(jnp.asarray(x)[:, None], jnp.asarray(s) ** 2))
        reach = learned_gaussian.student(options.level, np.inf) * scale
        low, high = middle - reach, middle + reach
        stderr, lfsr = scale, jax.scipy.special.ndtr(-jnp.abs(middle) / scale)
        placed = rank(lambda key: middle + scale * jax.random.normal(key, middle.shape))
    else:
        sure = fit
        if how != "plug-in":
            refits = int(np.clip(_REFITTED // len(x), _FEWEST_REFITS, REFITS))
            drawn = jax.random.fold_in(jax.random.key(seed), 1)
            more = {"center": learned, "components": options.components, "refits": refits, "resampling": how}
            sure = bootstrap(drawn, x, s, prior, **more)
        low, high = sure.interval(options.level)
        stderr, lfsr, placed = sure.sd, sure.lfsr, rank(sure.sample)
    low, high = jnp.minimum(low, fit.mean), jnp.maximum(high, fit.mean)
    robust = robust_intervals(x, s, options.level)
    test = {name: float(value) for name, value in homogeneity(x, s)._asdict().items()}
    facts = {
        "prior": prior,
        "intervals": how,
        **chosen,
        "estimated": {"mean": float(fit.prior.mean), "sigma_theta": float(fit.prior.sd)},
        "log_marginal": float(fit.log_marginal),
        "risk": risk_of(s, np.asarray(fit.risks)),
        "clients_differ": {"name": "Cochran's Q", "statistic": test["statistic"], "p_value": test["p_value"]},
        "pooled": {"mean": test["mean"], "stderr": test["stderr"]},
        "kurtosis": robust.kurtosis,
    }
    if prior == "normal-mixture" and isinstance(fit.prior, NormalMixture):
        rows = zip(fit.prior.weights, fit.prior.means, fit.prior.sds, strict=True)
        facts["components"] = [{"weight": float(a), "mean": float(b), "sd": float(c)} for a, b, c in rows]
    facts |= weighting(data, options)
    columns = {
        "local": x, "local_stderr": s, "personalized": fit.mean, "personalized_stderr": stderr, "low": low,
        "high": high, "robust": robust.mean, "robust_low": robust.low, "robust_high": robust.high, "lfsr": lfsr,
        "shrinkage": fit.shrinkage, **placed, "score": fit.scores,
    }  # fmt: skip
    return Fitted(facts, arrays(columns), np.asarray(fit.scores))


def weighting(data: Summaries, options: Any) -> dict[str, Any]:
    """Column of the clients' weights, and Kish's number of equal clients, as JSON; empty without weights."""
    if data.weights is None:
        return {}
    share = data.weights / data.weights.sum()
    return {"weights": {"column": options.weights.strip().lower(), "effective_clients": float(1 / (share @ share))}}


def ranked(sample: Callable[[Key], Array], clients: int, seed: int, level: float) -> dict[str, Array]:
    """Columns of the clients' ranks, from fewer draws of more clients."""
    draws = int(np.clip(_DRAWN // clients, _FEWEST_DRAWS, _MOST_DRAWS))
    placed = ranks_of(sample, jax.random.key(seed), draws=draws, level=level)
    return {"rank": placed.expected, "rank_low": placed.low, "rank_high": placed.high}


def _how(clients: int, prior: Family, center: float | None, options: Any) -> str:
    """Source of the intervals of estimates: a name of the JSON, or a way to draw clients.

    Raises:
      JaxpflError: clients drawn where nothing is refitted.
    """
    if options.intervals == "plug-in" or options.weights is not None:
        refuse_drawn(options, "--weights")
        return "plug-in"
    if options.epsilon is not None:  # a refit would read every client's estimate
        refuse_drawn(options, "a private prior")
        return "plug-in"
    if prior == "normal" and center is None:
        if options.prior != "best":
            refuse_drawn(options, "the normal prior, whose mean and spread are integrated over")
        return "integrated"
    if clients > MOST_REFITTED:
        refuse_drawn(options, f"more than {MOST_REFITTED} clients")
        return "plug-in"
    return "clients" if options.intervals == "clients" else "parametric"


def refuse_drawn(options: Any, why: str) -> None:
    """Refuse intervals by drawn clients.

    Raises:
      JaxpflError.
    """
    if options.intervals == "clients":
        raise JaxpflError(f"intervals clients refit a prior to drawn clients, which is not for {why}")


def compared(scores: Mapping[Any, PriorScores | CountScores]) -> list[dict[str, Any]]:
    """Scores of every family as JSON, per client but for the likelihood of all."""
    behind, found = leads(scores), []
    for prior, of in scores.items():
        row = {
            "prior": prior,
            "log_marginal": float(of.log_marginal),
            "held_out_log_density": float(of.log_densities.mean()),
            "behind": float(behind[prior].difference),
            "behind_stderr": float(behind[prior].stderr),
        }
        if isinstance(of, PriorScores):
            row |= {"risk": float(of.risk), "held_out_risk": float(of.risks.mean())}
        found.append(row)
    return found


def risk_of(s: np.ndarray, each: np.ndarray) -> dict[str, float]:
    """Stein's unbiased estimate of the mean squared error from every client's term, and the error of x."""
    stderr = float(each.std(ddof=1) / len(s) ** 0.5)
    return {"local": float((s**2).mean()), "personalized": float(each.mean()), "stderr": stderr}


def arrays(columns: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(of) for name, of in columns.items()}
