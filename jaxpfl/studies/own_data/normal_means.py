"""Personalised estimates from one summary of each of the user's clients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import JaxpflError, printable
from jaxpfl.estimators import differences, ebnm, learned_bernoulli, learned_gaussian
from jaxpfl.estimators.normal_means import homogeneity, ranks_of, robust_intervals
from jaxpfl.estimators.rates import Rates, ebbinomial, ebpoisson
from jaxpfl.presentation import INK, literal, new_axes, save
from jaxpfl.studies.own_data import output
from jaxpfl.studies.own_data.common import SIMULATED, Own, Picture
from jaxpfl.studies.own_data.summary_csv import PAIRS, Summaries, read
from jaxpfl.studies.plots import color
from jaxpfl.studies.settings import refuse_given
from jaxpfl.studies.study import Block, Results

_DRAWN = 20_000_000
_MOST_DRAWS, _FEWEST_DRAWS = 1000, 100


def results(path: Path, given: Any, options: Any) -> Results:
    """Estimates of a file's clients.

    Args:
      path: of the file; see `summary_csv.read`.
      given: the settings, of which those of simulated clients must be at their defaults.
      options: with ``level``, ``prior`` and ``center``.

    Raises:
      JaxpflError: for a bad file, a level outside (0, 1), a prior or center that does not apply to the file, and as
        `ebnm`, `ebbinomial` and `ebpoisson`.
    """
    checks.probability("level", options.level)
    refuse_given(
        given,
        (*SIMULATED[:1], "truth", "priors", "repetitions"),
        "is of simulated data, which a CSV file takes the place of",
    )
    data = read(path)
    if data.kind != "estimate":
        refuse_given(
            options, ("prior", "center"), f"is of estimate,se, and {path.name} has {','.join(PAIRS[data.kind])}"
        )
    try:
        with jax.enable_x64(True):
            if data.kind == "estimate":
                facts, columns, z = _estimates(data, given.seed, options)
            else:
                facts, columns = _rates(data, given.seed, options.level)
                z = None
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    result: dict[str, Any] = {
        "study": "normal-means",
        "csv": path.name,
        "read": {"columns": list(PAIRS[data.kind]), "ignored": data.ignored},
        "clients": len(data.names),
        "level": options.level,
        "settings": {"seed": given.seed},
    } | facts
    picture = Picture(
        "", columns["local"], columns["personalized"], columns["low"], columns["high"], data.second * 0 + 1,
        facts["estimated"]["mean"],
    )  # fmt: skip
    if data.kind != "estimate":
        picture = picture._replace(sizes=data.second)
    table = {"client": data.names} | {name: np.asarray(values).tolist() for name, values in columns.items()}
    own = Own(result, table, [picture])

    def plots(folder: Path) -> list[Path]:
        found = output.write(folder, own)
        return found if z is None else [*found, _quantiles(folder, z, path.name, options.prior)]

    hint = f"estimates of every client, with {output.percent(options.level)} intervals: --output FOLDER"
    return Results(result, lambda: _said(result), plots, files=output.FILES, hint=hint)


def _estimates(data: Summaries, seed: int, options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray]:
    x, s = data.first, data.second
    learns = options.prior in ("normal", "point-normal", "point-laplace")
    center = options.center if options.center is not None else "learned" if learns else None
    fit = ebnm(x, s, prior=options.prior, center=center)
    draws = int(np.clip(_DRAWN // len(x), _FEWEST_DRAWS, _MOST_DRAWS))
    rank = partial(ranks_of, key=jax.random.key(seed), draws=draws, level=options.level)
    if options.prior == "normal" and center == "learned":
        # With few clients their mean and spread are not known, and the likeliest spread may be zero: integrate over
        # both for all that says how sure an estimate is.
        middle, scale = (of[:, 0] for of in learned_gaussian.posterior(jnp.asarray(x)[:, None], jnp.asarray(s) ** 2))
        reach = learned_gaussian.student(options.level, np.inf) * scale
        low, high = jnp.minimum(middle - reach, fit.mean), jnp.maximum(middle + reach, fit.mean)
        stderr, lfsr = scale, jax.scipy.special.ndtr(-jnp.abs(middle) / scale)
        placed = rank(lambda key: middle + scale * jax.random.normal(key, middle.shape))
    else:
        low, high = fit.interval(options.level)
        stderr, lfsr, placed = fit.sd, fit.lfsr, rank(fit.sample)
    robust = robust_intervals(x, s, options.level)
    test = {name: float(value) for name, value in homogeneity(x, s)._asdict().items()}
    each = np.asarray((fit.mean - fit.x) ** 2 + 2 * fit.sd**2 - fit.s**2)
    facts = {
        "prior": options.prior,
        "estimated": {"mean": float(fit.prior.mean), "sigma_theta": float(fit.prior.sd)},
        "log_marginal": float(fit.log_marginal),
        "risk": {
            "local": float((s**2).mean()),
            "personalized": float(fit.risk),
            "stderr": float(each.std(ddof=1) / len(x) ** 0.5),
        },
        "clients_differ": {"name": "Cochran's Q", "statistic": test["statistic"], "p_value": test["p_value"]},
        "pooled": {"mean": test["mean"], "stderr": test["stderr"]},
        "kurtosis": robust.kurtosis,
    }
    columns = {
        "local": x, "local_stderr": s, "personalized": fit.mean, "personalized_stderr": stderr, "low": low,
        "high": high, "robust": robust.mean, "robust_low": robust.low, "robust_high": robust.high, "lfsr": lfsr,
        "shrinkage": fit.shrinkage, "rank": placed.expected, "rank_low": placed.low, "rank_high": placed.high,
    }  # fmt: skip
    below = fit.prior.marginal_below(fit.x, fit.s)
    return facts, {name: np.asarray(of) for name, of in columns.items()}, np.asarray(jax.scipy.special.ndtri(below))


def _rates(data: Summaries, seed: int, level: float) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    z, n = data.first, data.second
    if data.kind == "successes":
        fit: Rates = ebbinomial(z, n)
        believed = learned_bernoulli.believed(z, n, level)
        low, high = believed.low, believed.high
        test = differences.of_shares(z, n, seed)._asdict()
    else:
        fit = ebpoisson(z, n)
        low, high = (np.asarray(end) for end in fit.interval(level))
        test = _equal_rates(z, n)
    mean, size = float(fit.prior_mean), float(fit.prior_size)
    spread = mean * (1 - mean) / (1 + size) if data.kind == "successes" else mean / size
    facts = {
        "prior": "beta" if data.kind == "successes" else "gamma",
        "estimated": {"mean": mean, "sigma_theta": spread**0.5},
        "prior_size": size if np.isfinite(size) else None,
        "log_marginal": float(fit.log_marginal),
        "clients_differ": test,
    }
    own = np.asarray(fit.mean)
    columns = {
        "local": z / n, "personalized": own, "personalized_stderr": fit.sd, "low": np.minimum(low, own),
        "high": np.maximum(high, own), "shrinkage": fit.shrinkage,
    }  # fmt: skip
    return facts, {name: np.asarray(of) for name, of in columns.items()}


def _equal_rates(z: np.ndarray, e: np.ndarray) -> dict[str, Any]:
    """Pearson's chi-square test of equal rates."""
    from scipy import special

    expected = e * z.sum() / e.sum()
    statistic = float(((z - expected) ** 2 / expected).sum())
    return {"name": "chi-square", "statistic": statistic, "p_value": float(special.chdtrc(len(z) - 1, statistic))}


def _said(result: dict[str, Any]) -> list[Block]:
    ignored = result["read"]["ignored"]
    unused = f"; not used: {printable(', '.join(ignored))}" if ignored else ""
    lines = [f"read as: {','.join(result['read']['columns'])} of {result['clients']} clients{unused}"]
    of, test = result["estimated"], result["clients_differ"]
    lines.append(
        f"learned of all, prior {result['prior']}: mean {of['mean']:.4g}, sigma_theta {of['sigma_theta']:.4g}, "
        f"log likelihood {result['log_marginal']:.6g}"
    )
    differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
    lines.append(f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}")
    if "risk" in result:
        risk = result["risk"]
        lines.append(
            f"mean squared error by Stein's unbiased estimate: {risk['personalized']:.4g} ± {risk['stderr']:.2g}, "
            f"local {risk['local']:.4g}"
        )
    return [*lines]


def _quantiles(folder: Path, z: np.ndarray, name: str, prior: str) -> Path:
    """Plot the quantiles of the estimates under their fitted marginal distributions, as normal scores."""
    from scipy import special

    figure, axes = new_axes(
        "expected normal score", "score under the fitted marginal", f"{literal(name)}: prior {prior}"
    )
    order = np.sort(z)
    expected = special.ndtri((np.arange(len(z)) + 0.5) / len(z))
    axes.plot(expected, expected, color=INK, linewidth=1, linestyle=":", label="the prior fits")
    axes.plot(expected, order, ".", color=color("personalized"), label="a client")
    axes.legend(frameon=False, fontsize=9)
    return save(figure, folder, "quantiles")
