"""Federated methods, one file each. A method is a set of pure functions for one client and for the server.

`registry` lists the methods.

Notation: m clients; the cohort S of a round; a client's loss f_i and its number of training examples n_i; tau local
steps in a round (``LocalWork.steps``).
"""

from jaxpfl.algorithms.map_personalization import MapHyper, map_personalization
from jaxpfl.algorithms.parts.hyper import AveragingHyper, SgdHyper, hyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps, sgd, train
from jaxpfl.algorithms.parts.optimizers import Optimizer
from jaxpfl.algorithms.parts.servers import trained_part, with_server_optimizer
from jaxpfl.algorithms.parts.split_models import head_and_body
from jaxpfl.algorithms.registry import FEDERATED, METHODS, Method, get, is_name, names_of

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
    "gradients",
    "head_and_body",
    "hyper",
    "is_name",
    "map_personalization",
    "names_of",
    "run_steps",
    "sgd",
    "train",
    "trained_part",
    "with_server_optimizer",
]
