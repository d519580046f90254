"""Registry of the methods. A new method needs one file and one line in `METHODS`; the conformance tests then test it.

Implements: Ozkara et al. 2023, appendix J.
Reference: Divi et al. 2021, Table 1.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpfl.algorithms.adamix import adamix
from jaxpfl.algorithms.adaped import adaped
from jaxpfl.algorithms.adaped_plus import AdaPeDPlusHyper, adaped_plus
from jaxpfl.algorithms.apfl import APFLHyper, apfl
from jaxpfl.algorithms.cfl import CFLHyper, cfl
from jaxpfl.algorithms.ditto import DittoHyper, ditto
from jaxpfl.algorithms.fedala import FedALAHyper, fedala
from jaxpfl.algorithms.fedamp import FedAMPHyper, fedamp
from jaxpfl.algorithms.fedavg import FedProxHyper, fedavg, fedavg_ft, fedprox
from jaxpfl.algorithms.fedbabu import FedBABUHyper, fedbabu
from jaxpfl.algorithms.fedbn import fedbn
from jaxpfl.algorithms.fedbuff import FedBuffHyper, fedbuff
from jaxpfl.algorithms.feddbe import FedDBEHyper, feddbe
from jaxpfl.algorithms.feddyn import FedDynHyper, feddyn
from jaxpfl.algorithms.fedem import FedEMHyper, fedem
from jaxpfl.algorithms.fedpac import FedPACHyper, fedpac
from jaxpfl.algorithms.fedper import fedper
from jaxpfl.algorithms.fedproto import FedProtoHyper, fedproto
from jaxpfl.algorithms.fedrep import FedRepHyper, fedrep
from jaxpfl.algorithms.fedrod import fedrod
from jaxpfl.algorithms.fml import FMLHyper, fml
from jaxpfl.algorithms.ifca import ifca
from jaxpfl.algorithms.knn_per import KnnPerHyper, knn_per
from jaxpfl.algorithms.l2gd import L2GDHyper, l2gd
from jaxpfl.algorithms.lg_fedavg import lg_fedavg
from jaxpfl.algorithms.local import local
from jaxpfl.algorithms.map_distillation import MapDistillationHyper, map_kd
from jaxpfl.algorithms.map_personalization import LaplaceHyper, MapHyper, MixtureHyper, map_gaussian, map_laplace
from jaxpfl.algorithms.moon import MoonHyper, moon
from jaxpfl.algorithms.mr_mtl import MRMTLHyper, mr_mtl
from jaxpfl.algorithms.network_lasso import NetworkHyper, network_lasso
from jaxpfl.algorithms.parts.distilled import AdaPeDHyper
from jaxpfl.algorithms.parts.hyper import AveragingHyper, SgdHyper
from jaxpfl.algorithms.perfedavg import PerFedAvgHyper, perfedavg
from jaxpfl.algorithms.persfl import persfl, persfl_gd
from jaxpfl.algorithms.pfedme import PFedMeHyper, pfedme
from jaxpfl.algorithms.pooled import pooled
from jaxpfl.algorithms.quped import QuPeDHyper, quped
from jaxpfl.algorithms.scaffold import ScaffoldHyper, scaffold
from jaxpfl.core.protocol import Algorithm
from jaxpfl.support import own_code
from jaxpfl.support.errors import JaxpflError, unknown_name


class Method(NamedTuple):
    """Registered method: its builder, default hyper-parameters and capabilities.

    Attributes:
      name: name on the command line.
      build: function that makes the `Algorithm`, ``build(task, work, **options)``; its keyword-only arguments are the
        method's static options.
      hyper: default hyper-parameters (traced).
      pooled: whether the method trains on all clients' examples together (`Algorithm.pooled`) and is not federated.
      uploads: whether clients upload anything.
      step_noise: whether the method supports clipping and noise in every local step (`LocalWork.step_noise`). In each
        of the tau local steps, the method must then compute one gradient of the uploaded parameters and apply
        `LocalWork.released` to it. No other part of the upload may depend on the data.
      scales: number of scalars (such as psi) that clients upload in addition to parameters. With noise in every step,
        the gradients of these scalars are clipped separately.
      releases: function from the options to the number of noisy sums in a round, for a method with its own private
        server (``LocalWork.privacy``). None if a round has a single sum, which `privatize` makes private.
      graph: whether the method needs a graph of the clients (``LocalWork.graph``).
      asynchronous: whether the algorithm has asynchronous rounds (``Algorithm.in_flight``).
      statistics: whether the method supports models with running statistics. Such a method trains whole models by `sgd`
        or `train`, which update the statistics, and combines models only by means.
      keeps_statistics: whether running statistics stay with the clients.
      weighs: whether ``LocalWork.weighting`` sets the clients' weights in the mean.
      source: ``FILE.py:NAME`` if the method was loaded from a user's file; otherwise empty.
    """

    name: str
    build: Callable[..., Algorithm]
    hyper: Any
    pooled: bool = False
    uploads: bool = True
    step_noise: bool = False
    scales: int = 0
    releases: Callable[[Mapping[str, Any]], int] | None = None
    graph: bool = False
    asynchronous: bool = False
    statistics: bool = False
    keeps_statistics: bool = False
    weighs: bool = True
    source: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Static options and their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("local", local, SgdHyper(), uploads=False, statistics=True, keeps_statistics=True, weighs=False),
        Method("fedavg", fedavg, AveragingHyper(), step_noise=True, statistics=True),
        Method("fedavg-ft", fedavg_ft, AveragingHyper(), step_noise=True, statistics=True),
        Method("fedprox", fedprox, FedProxHyper(), step_noise=True, statistics=True, weighs=False),
        Method("fedbn", fedbn, AveragingHyper(), statistics=True, keeps_statistics=True),
        Method("adaped", adaped, AdaPeDHyper(), step_noise=True, scales=1, weighs=False),
        Method("adaped-plus", adaped_plus, AdaPeDPlusHyper()),
        Method("fedper", fedper, AveragingHyper(), statistics=True),
        Method("fedrep", fedrep, FedRepHyper(), weighs=False),
        Method("ifca", ifca, AveragingHyper(), statistics=True, weighs=False),
        Method("fedem", fedem, FedEMHyper(), step_noise=True),
        Method("persfl", persfl, AveragingHyper()),
        Method("persfl-gd", persfl_gd, AveragingHyper()),
        Method("map-gaussian", map_gaussian, MapHyper(), weighs=False),
        Method("map-laplace", map_laplace, LaplaceHyper(), weighs=False),
        Method("map-kd", map_kd, MapDistillationHyper(), weighs=False),
        Method("adamix", adamix, MixtureHyper(), releases=lambda options: options["em_steps"], weighs=False),
        Method("pooled", pooled, SgdHyper(), pooled=True, statistics=True, weighs=False),
        Method("ditto", ditto, DittoHyper(), statistics=True),
        Method("pfedme", pfedme, PFedMeHyper(), weighs=False),
        Method("apfl", apfl, APFLHyper(), weighs=False),
        Method("perfedavg", perfedavg, PerFedAvgHyper(), weighs=False),
        Method("fml", fml, FMLHyper(), weighs=False),
        Method("quped", quped, QuPeDHyper(), weighs=False),
        Method("scaffold", scaffold, ScaffoldHyper(), weighs=False),
        Method("l2gd", l2gd, L2GDHyper(), weighs=False),
        Method("fedbabu", fedbabu, FedBABUHyper()),
        Method("lg-fedavg", lg_fedavg, AveragingHyper(), statistics=True),
        Method("mr-mtl", mr_mtl, MRMTLHyper(), statistics=True, weighs=False),
        Method("fedala", fedala, FedALAHyper()),
        Method("feddyn", feddyn, FedDynHyper(), weighs=False),
        Method("fedrod", fedrod, AveragingHyper()),
        Method("fedproto", fedproto, FedProtoHyper()),
        Method("knn-per", knn_per, KnnPerHyper()),
        Method("moon", moon, MoonHyper()),
        Method("cfl", cfl, CFLHyper(), weighs=False),
        Method("fedamp", fedamp, FedAMPHyper(), weighs=False),
        Method("feddbe", feddbe, FedDBEHyper()),
        Method("fedpac", fedpac, FedPACHyper()),
        Method("fedbuff", fedbuff, FedBuffHyper(), asynchronous=True),
        Method("network-lasso", network_lasso, NetworkHyper(), graph=True, weighs=False),
    )
}

FEDERATED: tuple[str, ...] = tuple(name for name, method in METHODS.items() if not method.pooled)
"""Names of the federated methods: all methods that do not train on pooled data."""


_own: dict[str, Method] = {}
"""Methods loaded from user files by the current command, by name."""


def get(name: str) -> Method:
    """Look up a method by name, or load it from a file, ``FILE.py:NAME``.

    Raises:
      JaxpflError: if the name is unknown (the error suggests the most similar name), or if the file or its method
        cannot be used.
    """
    if not own_code.is_reference(name):
        known = {**_own, **METHODS}
        if name not in known:
            raise unknown_name("method", name, known)
        return known[name]
    method: Method = own_code.load(name, lambda value: isinstance(value, Method), "Method")
    if not is_name(method.name):
        raise JaxpflError(f"{name}: a Method's name may contain only letters, digits, - and _, got {method.name!r}")
    if method.name in METHODS:
        raise JaxpflError(f"{name} needs another name than {method.name!r}, which is a registered method")
    fields = dataclasses.fields(method.hyper) if dataclasses.is_dataclass(method.hyper) else [None]
    if any(field is None or "is_rate" not in field.metadata for field in fields):
        raise JaxpflError(f"{name}: hyper must be a dataclass, with each field declared by jaxpfl.hyper")
    return method._replace(source=name)


def names_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of methods that are given by name or as ``FILE.py:NAME``.

    The methods from files are registered, so that `get` finds them by name.

    Raises:
      JaxpflError: if a method of a file cannot be used.
    """
    own = {text: get(text) for text in texts if own_code.is_reference(text)}
    _own.update({method.name: method for method in own.values()})
    return tuple(own[text].name if text in own else text for text in texts)


def is_name(name: object) -> bool:
    """Return whether a value can be a method's name, which must be usable in file names and flags."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w-]*", name) is not None
