"""Normal means with known standard errors: `ebnm`, `fay_herriot` with covariates, `ebnm_groups`, intervals, tests."""

from jaxpfl.estimators.normal_means.answer import NormalMeans, posterior
from jaxpfl.estimators.normal_means.area import AreaMeans, fay_herriot
from jaxpfl.estimators.normal_means.bootstrap import bootstrap
from jaxpfl.estimators.normal_means.compare import PriorScores, best, compare_priors, leads
from jaxpfl.estimators.normal_means.families import FAMILIES, Family
from jaxpfl.estimators.normal_means.fit import ebnm
from jaxpfl.estimators.normal_means.groups import GroupMeans, ebnm_groups
from jaxpfl.estimators.normal_means.homogeneity import Homogeneity, homogeneity
from jaxpfl.estimators.normal_means.james_stein import Shrunken, james_stein
from jaxpfl.estimators.normal_means.normal_mixture import NormalMixture
from jaxpfl.estimators.normal_means.point_laplace import PointLaplace
from jaxpfl.estimators.normal_means.private import Cells, private_ebnm
from jaxpfl.estimators.normal_means.ranks import Ranks, ranks, ranks_of
from jaxpfl.estimators.normal_means.robust import RobustIntervals, critical_value, robust_intervals
from jaxpfl.estimators.normal_means.unit_level import UnitMeans, unit_level
from jaxpfl.estimators.normal_means.vectors import NormalVectors, ebnm_vectors

__all__ = [
    "FAMILIES",
    "AreaMeans",
    "Cells",
    "Family",
    "GroupMeans",
    "Homogeneity",
    "NormalMeans",
    "NormalMixture",
    "NormalVectors",
    "PointLaplace",
    "PriorScores",
    "Ranks",
    "RobustIntervals",
    "Shrunken",
    "UnitMeans",
    "best",
    "bootstrap",
    "compare_priors",
    "critical_value",
    "ebnm",
    "ebnm_groups",
    "ebnm_vectors",
    "fay_herriot",
    "homogeneity",
    "james_stein",
    "leads",
    "posterior",
    "private_ebnm",
    "ranks",
    "ranks_of",
    "robust_intervals",
    "unit_level",
]
