"""The methods by name. A new one is a file and a line here; its conformance tests come from this table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxpfl.algorithms.adaped import AdaPeDHyper, adaped
from jaxpfl.algorithms.fedavg import FedProxHyper, fedavg, fedavg_ft, fedprox
from jaxpfl.algorithms.hyper import SgdHyper
from jaxpfl.algorithms.local import local
from jaxpfl.errors import unknown_name
from jaxpfl.protocol import Algorithm


class Method(NamedTuple):
    """A registered method.

    Attributes:
      name: as on the command line.
      build: ``(task, work, **options) -> Algorithm``; its keyword-only arguments are the static options.
      hyper: the default hyper-parameters (traced).
    """

    name: str
    build: Callable[..., Algorithm]
    hyper: Any

    @property
    def options(self) -> dict[str, Any]:
        """The static options and their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("local", local, SgdHyper()),
        Method("fedavg", fedavg, SgdHyper()),
        Method("fedavg-ft", fedavg_ft, SgdHyper()),
        Method("fedprox", fedprox, FedProxHyper()),
        Method("adaped", adaped, AdaPeDHyper()),
    )
}


def get(name: str) -> Method:
    """The method of that name.

    Raises:
      JaxpflError: for an unknown name, with the nearest known one.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
