"""Empirical Bayes methods beyond Ozkara et al. 2023 (see `base`). This package imports only core and support.

- For one estimate with a standard error per client: `ebnm`; with covariates, `fay_herriot`; with groups, `ebnm_groups`.
- Counts per client: `ebbinomial` for successes in trials, and `ebpoisson` for events in an exposure; with covariates:
  `ebbinomial_regression` and `ebpoisson_regression`.
- Individual samples with covariates: `unit_level`. If every client has its own coefficients: `random_coefficients` and
  `common_representation`.
- Intervals that account for the uncertainty of the fitted population: `learned_gaussian`, `learned_rates`. Intervals
  that are valid for any population: `robust_intervals`.
- Tests of whether clients differ: `homogeneity`, `differences`.
"""

from jaxpfl.estimators.empirical_bayes import (
    common_representation,
    differences,
    learned_gaussian,
    learned_rates,
    random_coefficients,
)
from jaxpfl.estimators.empirical_bayes.area import AreaMeans, dependent, fay_herriot
from jaxpfl.estimators.empirical_bayes.groups import GroupMeans, ebnm_groups
from jaxpfl.estimators.empirical_bayes.inputs import level_within
from jaxpfl.estimators.empirical_bayes.normal_means import (
    FAMILIES,
    Family,
    Homogeneity,
    NormalMeans,
    NormalMixture,
    Shrunken,
    ebnm,
    homogeneity,
    james_stein,
    posterior,
)
from jaxpfl.estimators.empirical_bayes.rates import (
    AtomRates,
    Rates,
    RegressedRates,
    ebbinomial,
    ebbinomial_regression,
    ebpoisson,
    ebpoisson_regression,
)
from jaxpfl.estimators.empirical_bayes.robust import RobustIntervals, critical_value, robust_intervals
from jaxpfl.estimators.empirical_bayes.unit_level import UnitMeans, unit_level

__all__ = [
    "FAMILIES",
    "AreaMeans",
    "AtomRates",
    "Family",
    "GroupMeans",
    "Homogeneity",
    "NormalMeans",
    "NormalMixture",
    "Rates",
    "RegressedRates",
    "RobustIntervals",
    "Shrunken",
    "UnitMeans",
    "common_representation",
    "critical_value",
    "dependent",
    "differences",
    "ebbinomial",
    "ebbinomial_regression",
    "ebnm",
    "ebnm_groups",
    "ebpoisson",
    "ebpoisson_regression",
    "fay_herriot",
    "homogeneity",
    "james_stein",
    "learned_gaussian",
    "learned_rates",
    "level_within",
    "posterior",
    "random_coefficients",
    "robust_intervals",
    "unit_level",
]
