"""Fit of estimates with standard errors of clients in groups: columns of a file's clients, and of its groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpfl.estimators import ebnm_groups
from jaxpfl.studies.own_data.normal_means_fits import Fitted, arrays, risk_of
from jaxpfl.studies.own_data.summary_csv import Summaries

FILE = "groups.csv"


def of_groups(data: Summaries, groups: list[str], options: Any) -> Fitted:
    """Fit estimates with standard errors about their groups' means.

    Raises:
      JaxpflError: as `ebnm_groups`.
    """
    names, index = np.unique(np.array(groups), return_inverse=True)
    found = ebnm_groups(data.first, data.second, index, fit=options.fit)
    low, high = found.interval(options.level)
    group_low, group_high = found.group_interval(options.level)
    within, between = float(found.within), float(found.between)
    facts = {
        "prior": "normal",
        "fit": options.fit,
        "estimated": {
            "mean": float(found.overall), "stderr": float(found.overall_stderr), "sigma_theta": within**0.5,
            "sigma_groups": between**0.5,
        },
        "groups": len(names),
        "log_likelihood": float(found.log_likelihood),
        "risk": risk_of(data.second, np.asarray(found.risks)),
        "clients_differ": {
            "name": "Cochran's Q about the groups",
            "statistic": float(found.statistic),
            "p_value": float(found.p_value),
        },
        "groups_differ": {
            "name": "likelihood ratio",
            "statistic": float(found.ratio),
            "p_value": float(found.group_p_value),
        },
    }  # fmt: skip
    columns = {
        "local": data.first, "local_stderr": data.second, "personalized": found.mean,
        "personalized_stderr": np.sqrt(found.mse), "low": low, "high": high, "group": np.array(groups),
        "group_mean": np.asarray(found.group_mean)[index], "shrinkage": found.shrinkage, "residual": found.residual,
    }  # fmt: skip
    rows = {
        "clients": np.bincount(index), "mean": found.group_mean, "stderr": np.sqrt(found.group_mse),
        "low": group_low, "high": group_high, "shrinkage": found.group_shrinkage, "residual": found.group_residual,
    }  # fmt: skip
    table = {"group": names.tolist()} | {name: np.asarray(of).tolist() for name, of in rows.items()}
    of = (names.tolist(), np.asarray(found.group_residual))
    return Fitted(facts, arrays(columns), np.asarray(found.residual), {FILE: table}, of)


def said(result: dict[str, Any]) -> list[str]:
    """Lines on the spreads, and on whether groups differ."""
    of, test = result["estimated"], result["groups_differ"]
    differ = "groups differ" if test["p_value"] < 0.05 else "no sign that groups differ"
    return [
        f"learned of {result['groups']} groups by {result['fit']}: mean {of['mean']:.4g} ± {of['stderr']:.2g}, "
        f"sigma_groups {of['sigma_groups']:.4g}, sigma_theta within groups {of['sigma_theta']:.4g}",
        f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}",
    ]
