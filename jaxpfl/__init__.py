"""jaxpfl: personalized federated learning and estimation, every round one compiled JAX program.

The names here are the notebook's: ``load`` a data set, ``federate`` it (or ``stack_clients`` your own arrays), ``fit``
a method. A method of your own is a `Method` around a builder of an `Algorithm`.
"""

__version__ = "0.1.0"

from jaxpfl.algorithms import METHODS, LocalWork, Method, SgdHyper, hyper
from jaxpfl.data import federate, load, set_apart, stack_clients
from jaxpfl.engine import ExecutionPlan, Fit, RunState, Simulation, fit, use_cpu_cores
from jaxpfl.errors import JaxpflError, JaxpflWarning
from jaxpfl.experiment.model_files import load_models
from jaxpfl.models import Model, Task, classification, from_linen
from jaxpfl.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.types import ClientData, Federation, Splits

__all__ = [
    "METHODS",
    "Algorithm",
    "Client",
    "ClientContext",
    "ClientData",
    "ExecutionPlan",
    "Federation",
    "Fit",
    "JaxpflError",
    "JaxpflWarning",
    "LocalWork",
    "Message",
    "Method",
    "Model",
    "Reduced",
    "Reduction",
    "RunState",
    "Server",
    "ServerContext",
    "SgdHyper",
    "Simulation",
    "Splits",
    "Stacked",
    "Task",
    "Upload",
    "__version__",
    "classification",
    "federate",
    "fit",
    "from_linen",
    "hyper",
    "load",
    "load_models",
    "set_apart",
    "stack_clients",
    "use_cpu_cores",
]
