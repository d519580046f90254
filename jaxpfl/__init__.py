"""jaxpfl: personalized federated learning and estimation, with every round as one compiled JAX program.

To use the package from Python, ``load`` a data set, ``federate`` it (or ``stack_clients`` your own arrays), and ``fit``
a method. To define your own method, write a function that builds an `Algorithm`, and wrap it in a `Method`.

A name of this module is imported, together with JAX, when it is first used. ``import jaxpfl`` alone is therefore fast,
and the command line can handle Ctrl-C before the slow imports begin.
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
"""Modules of subpackages that are also attributes of this package: attribute -> full name of the module."""

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            value = getattr(importlib.import_module("jaxpfl.public"), name)
            globals()[name] = value
            return value
        if not name.startswith("_"):
            module = _MODULES.get(name, f"jaxpfl.{name}")
            try:
                return importlib.import_module(module)  # so that ``jaxpfl.models`` works after ``import jaxpfl`` alone
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        raise AttributeError(f"module 'jaxpfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
