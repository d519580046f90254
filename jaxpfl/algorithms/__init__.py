"""Federated methods, one file each: pure functions of one client and of the server; `registry` has them by name."""

from jaxpfl.algorithms.hyper import SgdHyper, hyper
from jaxpfl.algorithms.local_work import Batch, LocalWork, descend, run_steps, sgd
from jaxpfl.algorithms.registry import METHODS, Method, get

__all__ = [
    "METHODS",
    "Batch",
    "LocalWork",
    "Method",
    "SgdHyper",
    "descend",
    "get",
    "hyper",
    "run_steps",
    "sgd",
]
