"""Aliases of modules that moved: importing an old name finds the new module and warns."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_DATA_SOURCES = (
    *("cifar", "csv_text", "dirichlet_mixture", "elections", "idx", "idx_sets", "leaf", "leaf_text", "libsvm", "npz"),
    *("pickles", "planted", "tensorflow_sets", "token_counts", "token_files", "writers"),
)
_PARTS = (
    *("architectures", "averaging", "local_work", "masks", "optimizers", "own_part", "private_em"),
    *("server_optimizer", "several_models", "stored_models"),
)
"""``algorithms.hyper`` is left out: importing it would put a module in the place of the function of that name."""
_HISTOGRAM_ESTIMATORS = (
    *("clusters", "denoised", "dimred", "dirichlet", "printed"),
    *("private", "standardised", "start", "tuning"),
)
_HISTOGRAM_STUDIES = (
    *("convergence", "data", "fitting", "methods"),
    *("private_methods", "report", "settings", "tune"),
)
_OWN_DATA = ("client_csv", "csv_columns", "csv_doubts", "csv_header")

MOVED = {
    "algorithms": {name: f"algorithms.parts.{name}" for name in _PARTS},
    "data": {
        "apportion": "data.partition.apportion",
        "source": "data.sources.base",
        **{f"partition_{name}": f"data.partition.{name}" for name in ("classes", "clusters", "skew", "users")},
        **{name: f"data.sources.{name}" for name in _DATA_SOURCES},
    },
    "engine": {"memory": "engine.device_memory", "plan": "engine.execution_plan"},
    "estimate": {
        "histogram": "studies.histograms.study",
        "own": "studies.own_data",
        "priors": "studies.probability_priors",
        **{f"histogram_{name}": f"studies.histograms.{name}" for name in _HISTOGRAM_STUDIES},
        **{name: f"studies.own_data.{name}" for name in _OWN_DATA},
    },
    "estimators": {
        "histogram": "estimators.histograms.base",
        **{f"histogram_{name}": f"estimators.histograms.{name}" for name in _HISTOGRAM_ESTIMATORS},
    },
    "experiment": {"checksums": "checksums", "files": "files", "model_files": "engine.model_files"},
    "privacy": {"checks": "checks", "local": "privacy.local_dp"},
}
"""Package -> a module's old name in it -> its place in jaxpfl today."""


def place(name: str) -> str | None:
    """Present full name of a module that was renamed since version 0.1; None for any other.

    Examples:
      >>> place("jaxpfl.estimate.gaussian"), place("jaxpfl.data.idx"), place("jaxpfl.data.stack")
      ('jaxpfl.studies.gaussian', 'jaxpfl.data.sources.idx', None)
    """
    if name == "jaxpfl.estimate":
        return "jaxpfl.studies"
    root, _, rest = name.partition(".")
    package, _, module = rest.partition(".")
    if root != "jaxpfl":
        return None
    known = MOVED.get(package, {})
    first, dot, inner = module.partition(".")
    if first in known:
        return f"jaxpfl.{known[first]}{dot}{inner}"
    return f"jaxpfl.studies.{module}" if package == "estimate" else None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for the old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = place(fullname)
        if new is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname.startswith("jaxpfl.estimate"))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = place(old)
        assert new is not None
        sys.modules[old] = importlib.import_module(new)
        warnings.warn(f"{old} is {new} now; the old name will go", DeprecationWarning, stacklevel=2)


def install() -> None:
    """Install the hook before all others: inside an old package, Python would load the new module a second time."""
    sys.meta_path.insert(0, Finder())
