"""Empirical Bayes beyond the papers: an annex with one door, which imports core and support only.

One summary of each client: estimates with standard errors (`ebnm`; about covariates `fay_herriot`; in groups
`ebnm_groups`), successes of trials and events in exposures (`ebbinomial`,
`ebpoisson`, and `ebbinomial_regression`, `ebpoisson_regression` about covariates). Long samples about covariates:
`unit_level`, and `random_coefficients` and `common_representation` where each client has coefficients of its own.
Intervals that integrate over the population: `learned_gaussian`, `learned_rates`; for any population:
`robust_intervals`. Tests that clients differ: `homogeneity`, `differences`.
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
