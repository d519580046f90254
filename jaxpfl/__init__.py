"""jaxpfl: personalized federated learning and estimation, every round one compiled JAX program.

The names here are the notebook's: ``load`` a data set, ``federate`` it (or ``stack_clients`` your own arrays), ``fit``
a method. A method of your own is a `Method` around a builder of an `Algorithm`.

They are imported, and JAX with them, when the first of them is used: the command line must be able to answer a Ctrl-C
before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpfl import algorithms as algorithms
    from jaxpfl import data as data
    from jaxpfl import engine as engine
    from jaxpfl import estimators as estimators
    from jaxpfl import models as models
    from jaxpfl import priors as priors
    from jaxpfl import privacy as privacy
    from jaxpfl import similarity as similarity
    from jaxpfl import studies as studies
    from jaxpfl.core import participation as participation
    from jaxpfl.core import protocol as protocol
    from jaxpfl.core import randomness as randomness
    from jaxpfl.core import trees as trees
    from jaxpfl.core import types as types
    from jaxpfl.public import *  # noqa: F403
    from jaxpfl.uploads import compression as compression
    from jaxpfl.uploads import robust as robust

__version__ = "0.2.0"

__all__ = [  # noqa: F405
    "METHODS",
    "Algorithm",
    "Client",
    "ClientContext",
    "ClientData",
    "ExecutionPlan",
    "Federation",
    "Fit",
    "Gradients",
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
    "from_equinox",
    "from_linen",
    "from_nnx",
    "hyper",
    "load",
    "load_models",
    "load_sweep",
    "open_federation",
    "per_client",
    "save_federation",
    "set_apart",
    "stack_clients",
    "use_cpu_cores",
]


_MODULES = {
    **{name: f"jaxpfl.core.{name}" for name in ("participation", "protocol", "randomness", "trees", "types")},
    **{name: f"jaxpfl.uploads.{name}" for name in ("compression", "robust")},
}
"""Modules of other packages that are attributes of this one."""

if not TYPE_CHECKING:  # to which every name would be one of ours

    def __getattr__(name: str) -> Any:
        if name in __all__:
            value = getattr(importlib.import_module("jaxpfl.public"), name)
            globals()[name] = value
            return value
        if not name.startswith("_"):
            module = _MODULES.get(name, f"jaxpfl.{name}")
            try:
                return importlib.import_module(module)  # its packages need no import of their own
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        raise AttributeError(f"module 'jaxpfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
