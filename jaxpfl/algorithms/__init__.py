"""Federated methods, one file each: pure functions of one client and of the server; `registry` has them by name."""

from jaxpfl.algorithms.hyper import AveragingHyper, SgdHyper, hyper
from jaxpfl.algorithms.local_work import Batch, Descent, LocalWork, run_steps, sgd, train
from jaxpfl.algorithms.map_personalization import MapHyper, map_personalization
from jaxpfl.algorithms.optimizers import Optimizer
from jaxpfl.algorithms.registry import FEDERATED, METHODS, Method, get
from jaxpfl.algorithms.server_optimizer import with_server_optimizer

__all__ = [
    "FEDERATED",
    "METHODS",
    "AveragingHyper",
    "Batch",
    "Descent",
    "LocalWork",
    "MapHyper",
    "Method",
    "Optimizer",
    "SgdHyper",
    "get",
    "hyper",
    "map_personalization",
    "run_steps",
    "sgd",
    "train",
    "with_server_optimizer",
]
