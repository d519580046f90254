"""Public names of the package, imported by ``jaxpfl/__init__.py`` when one is first used."""

# ruff: noqa: F401

from jaxpfl.algorithms import METHODS, LocalWork, Method, SgdHyper
from jaxpfl.algorithms.parts.hyper import hyper
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Gradients,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Stacked,
    Upload,
)
from jaxpfl.core.types import ClientData, Federation, Splits
from jaxpfl.data import federate, load, open_federation, save_federation, set_apart, stack_clients
from jaxpfl.engine import ExecutionPlan, Fit, RunState, Simulation, use_cpu_cores
from jaxpfl.engine.model_files import load_models
from jaxpfl.models import Model, Task, classification, from_equinox, from_linen, from_nnx, per_client
from jaxpfl.runs.fit import fit
from jaxpfl.runs.records import load_sweep
from jaxpfl.support.errors import JaxpflError, JaxpflWarning
