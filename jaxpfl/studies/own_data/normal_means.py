"""Personalised estimates from one summary of each of the user's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.data.sources import csv_text
from jaxpfl.estimators import inputs
from jaxpfl.studies.own_data import categories, client_csv, diagnostics, group_fits, output, private_fits, rate_fits
from jaxpfl.studies.own_data import normal_means_fits as fits
from jaxpfl.studies.own_data.common import SIMULATED, Own, Picture
from jaxpfl.studies.own_data.summary_csv import PAIRS, read
from jaxpfl.studies.study import Block, Results, refuse_given
from jaxpfl.support.console import literal, new_table
from jaxpfl.support.errors import JaxpflError, printable


def results(path: Path, given: Any, options: Any) -> Results:
    """Estimates of a file's clients.

    Args:
      path: of the file; see `summary_csv.read`.
      given: the settings, of which those of simulated clients must be at their defaults.
      options: with ``level``, ``prior``, ``center``, ``components``, ``covariates``, ``groups``, ``fit`` and
        ``weights``.

    Raises:
      JaxpflError: for a bad file, a level outside (0, 1), an option that does not apply to the file or beside another,
        and as `ebnm`, `fay_herriot`, `ebnm_groups`, `ebbinomial` and `ebpoisson`.
    """
    inputs.level(options.level, np.float64)
    refuse_given(
        given,
        (*SIMULATED[:1], "truth", "nonzero", "size", "priors", "repetitions"),
        "is of simulated data, which a CSV file takes the place of",
    )
    _refuse_beside(options)
    table = csv_text.read(path, options.sep, options.decimal, options.encoding, options.missing_words)
    if categories.given(table):
        names = ("prior", "center", "components", "covariates", "groups", "weights", "fit", "epsilon", "threshold")
        refuse_given(options, names, f"is of other summaries, and {path.name} has {categories.PREFIX}NAME")
        fits.refuse_drawn(options, "a Dirichlet prior, whose mean and size are integrated over")
        return categories.results(table, options.client, given.seed, options.level, options.intervals)
    data = read(table, options.covariates, client=options.client, groups=options.groups, weights=options.weights)
    known = rate_fits.MIXTURES.get(data.kind, ())
    chosen = options.prior in known or (bool(known) and options.prior == "best")
    if known and options.prior == "normal":
        refuse_given(options, ("components",), f"is of --prior {' or '.join(known)}")
    for kind, priors in rate_fits.MIXTURES.items():
        if options.prior in priors and options.prior != "npmle" and kind != data.kind:
            columns = ",".join(PAIRS[kind])
            has = ",".join(PAIRS[data.kind])
            raise JaxpflError(f"prior {options.prior} is of {columns}, and {path.name} has {has}")
    if options.covariates or options.groups is not None:
        why = "whose intervals are of one kind: regression and spread count as known for successes and counts, else not"
        refuse_given(options, ("intervals",), f"is without --covariates and --groups, {why}")
    if data.kind == "estimate":
        names = ("threshold", "sizes", "most_events")
        refuse_given(options, names, f"is of successes and counts, and {path.name} has estimate,se")
    else:
        names = ("prior", "center", "components", "groups", "fit", "range", "error_range")
        refuse_given(
            options,
            [name for name in names if not (chosen and name in ("prior", "components"))],
            f"is of estimate,se, and {path.name} has {','.join(PAIRS[data.kind])}",
        )
    try:
        with jax.enable_x64(True):
            if data.kind != "estimate":
                found = rate_fits.of_counts(data, given.seed, options)
            elif options.covariates:
                found = fits.of_areas(data, options)
            elif data.groups is not None:
                found = group_fits.of_groups(data, data.groups, options)
            else:
                found = fits.of_estimates(data, given.seed, options)
    except JaxpflError as error:
        raise JaxpflError(f"{path}: {error}") from None
    facts, columns = found.facts, found.columns
    if found.scores is not None:
        facts["outlying"] = diagnostics.outlying(found.scores, data.names)
    if found.groups is not None:
        facts["groups_outlying"] = diagnostics.outlying(found.groups[1], found.groups[0])
    more = [name.strip() for name in (options.groups, options.weights) if name is not None]
    result: dict[str, Any] = {
        "study": "normal-means",
        "csv": path.name,
        "read": {
            "client": data.client,
            "columns": [*PAIRS[data.kind], *data.covariate_names, *more],
            "ignored": data.ignored,
        },
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
        drawn = output.write(folder, own)
        for name, rows in found.files.items():
            client_csv.write(folder.parent / name, rows)
        if found.scores is None:
            return drawn
        of = f"about {', '.join(data.covariate_names)}" if data.covariate_names else f"prior {facts['prior']}"
        of = f"about groups by {more[0]}" if data.groups is not None else of
        title = literal(f"{path.name}: {of}")
        drawn.append(diagnostics.quantiles(folder, found.scores, data.names, title))
        if found.groups is not None:
            names, scores = found.groups
            of_groups = literal(f"{path.name}: groups by {more[0]}")
            drawn.append(diagnostics.quantiles(folder, scores, names, of_groups, "group-quantiles"))
        return drawn

    known = ", for which the prior counts as known" if facts.get("intervals") == "plug-in" else ""
    hint = f"estimates of every client, with {output.percent(options.level)} intervals{known}: --output FOLDER"
    files = output.FILES.replace("plots/", ", ".join([*found.files, "plots/"]))
    return Results(result, lambda: _said(result), plots, files=files, hint=hint)


def _refuse_beside(options: Any) -> None:
    """Refuse options that would be ignored beside others.

    Raises:
      JaxpflError.
    """
    if options.covariates:
        names = ("prior", "center", "components", "weights", "groups")
        refuse_given(options, names, "is without --covariates, about which clients have a prior of their own")
    elif options.groups is not None:
        refuse_given(
            options, ("prior", "center", "components", "weights"), "is without --groups, about which clients are normal"
        )
    else:
        refuse_given(options, ("fit",), "is of --covariates or --groups, and there are none")
    if options.epsilon is None:
        refuse_given(
            options,
            ("delta", "range", "error_range", "sizes", "most_events"),
            "needs epsilon, without which nothing is private",
        )
    else:
        names = ("covariates", "groups", "weights", "center")
        refuse_given(options, names, "is without --epsilon: counts of cells have no such prior")
        if options.prior == "best":
            raise JaxpflError("prior best is without --epsilon: each fit that it compares would be a further release")
    if options.prior == "best":
        refuse_given(options, ("components", "weights"), "is of a given --prior, and best compares without")


def _said(result: dict[str, Any]) -> list[Block]:
    lines = [client_csv.told_of_summaries(",".join(result["read"]["columns"]), result)]
    of, test = result["estimated"], result["clients_differ"]
    if "coefficients" in result:
        lines.append(fits.said_coefficients(result))
        by = f" by {result['fit']}" if "fit" in result else ""
        lines.append(f"spread about it{by}: sigma_theta {of['sigma_theta']:.4g}")
    elif "groups" in result:
        lines += group_fits.said(result)
    else:
        lines.append(
            f"learned of all, prior {result['prior']}: mean {of['mean']:.4g}, sigma_theta {of['sigma_theta']:.4g}"
            + (f", log likelihood {result['log_marginal']:.6g}" if "log_marginal" in result else "")
        )
    if "components" in result:
        kinds = ", ".join(
            f"{row['weight']:.3g} of mean {row['mean']:.4g} and {_spread(row)}" for row in result["components"]
        )
        lines.append(f"components: {kinds}")
    if "weights" in result:
        of = result["weights"]
        lines.append(
            f"prior weighted by {printable(of['column'])}: as by {of['effective_clients']:.4g} equal clients; tests, "
            "ranks and outlying clients count each row once"
        )
    differ = "clients differ" if test["p_value"] < 0.05 else "no sign that clients differ"
    lines.append(f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}")
    if "threshold" in result:
        more = result["threshold"]
        of_each = "its place on the regression" if more is None else f"{more:.4g}"
        lines.append(f"exceedance in estimates.csv: probability of more than {of_each}")
    if "privacy" in result:
        lines += private_fits.said(result["privacy"])
    if "risk" in result:
        risk = result["risk"]
        lines.append(
            f"mean squared error by Stein's unbiased estimate: {risk['personalized']:.4g} ± {risk['stderr']:.2g}, "
            f"local {risk['local']:.4g}"
        )
    if "outlying" in result:
        lines.append(diagnostics.told(result["outlying"]))
    if "groups_outlying" in result:
        lines.append(f"of the groups, {diagnostics.told(result['groups_outlying'], 'group')}")
    if "compared" not in result:
        return [*lines]
    return [*lines[:1], _table(result["compared"]), *lines[1:]]


def _spread(component: dict[str, float]) -> str:
    name = "sd" if "sd" in component else "size"
    return f"{name} {component[name]:.4g}"


def _table(rows: list[dict[str, Any]]) -> Block:
    """Table of the families of priors."""
    risks = "held_out_risk" in rows[0]
    of = "log density and risk (Stein's estimate of the squared error)" if risks else "log density"
    found = new_table(
        "families of priors, per client",
        f"{of} of clients held out in turn; the best log density is taken; ± one standard error",
    )
    found.add_column("prior", style="bold", no_wrap=True)
    for name in ("log likelihood", "log density", "behind", *["risk"] * risks):
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        behind = f"{row['behind']:.3f} ± {row['behind_stderr']:.3f}" if row["behind"] else "best"
        cells = [f"{row['log_marginal']:.6g}", f"{row['held_out_log_density']:.4f}", behind]
        if risks:
            cells.append(f"{row['held_out_risk']:.4g}")
        found.add_row(row["prior"], *cells)
    return found
