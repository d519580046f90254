"""Settings and shapes that the parties of a deployment share, and the encoding of pytrees for transport."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import algorithms
from jaxpfl.core.protocol import Message, Reduction
from jaxpfl.core.settings import is_default
from jaxpfl.core.types import Examples, Federation, PyTree
from jaxpfl.data import Scaling
from jaxpfl.engine import programs
from jaxpfl.engine.build import Assembled, assemble_shapes
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.spec import RunSpec, Settings
from jaxpfl.engine.state import init_server, number, server_context
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.support.errors import JaxpflError, shown

_SIMULATED = ("dropout", "stragglers", "time_model", "attack", "patience", "warm_start")


@dataclass(frozen=True, eq=False)
class Agreement:
    """Settings and shapes that the server and all nodes must have before a deployment begins.

    Attributes:
      spec: settings of the run; ``num_classes`` is set if the labels are classes.
      example: shapes of one example's input and label (`jax.ShapeDtypeStruct`).
      num_clients: number m of clients.
      scaling: scaling of the inputs; None if they are used as they are.
      seed: seed of the simulation that the deployment reproduces. Use it for checks only, because anyone with the seed
        can compute all clients' random numbers. If None, the server and each node draw their keys from the operating
        system.

    Raises:
      JaxpflError: if the method or a setting cannot be deployed.
    """

    spec: RunSpec
    example: Examples
    num_clients: int
    scaling: Scaling | None = None
    seed: int | None = None

    @classmethod
    def of(cls, spec: RunSpec, federation: Federation, scaling: Scaling | None = None, seed: int | None = None) -> Self:
        """Make an agreement from a simulated federation: its number of clients and the shapes of its examples."""
        example = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), federation.train.without_persons().examples
        )
        return cls(spec, example, federation.num_clients, scaling, seed)

    def __post_init__(self) -> None:
        spec, method = self.spec, self.spec.method
        self._refuse(
            {
                "it trains on pooled examples": method.pooled,
                "its rounds are asynchronous": method.asynchronous,
                "its clients form a graph": method.graph,
                "it is not a registered method": method is not algorithms.METHODS.get(method.name),
                "give each hyper-parameter a single value": any(map(np.ndim, jax.tree.leaves(spec.hp))),
                "privacy.unit = example calibrates noise to all clients' numbers of examples": spec.guards_examples,
                f"with privacy, seed = {self.seed} would let every node compute the noise: leave out the seed": (
                    self.seed is not None and spec.privacy is not None
                ),
            }
            | {f"leave out {name} = {shown(getattr(spec, name))}": not is_default(spec, name) for name in _SIMULATED}
        )
        algorithm, _ = self.assembled.algorithm()
        alone = algorithm.idle_cap > 0 and not self.assembled.cohorts.everyone
        self._refuse(
            {
                "its server uses individual uploads instead of their sum": algorithm.reduction is not Reduction.SUM,
                "with idle_rounds, nodes outside a cohort would need messages": alone,
                "its server sends each client its own message": bool(jax.tree.leaves(self.message.per_client)),
            }
        )

    def _refuse(self, reasons: Mapping[str, bool]) -> None:
        for reason, holds in reasons.items():
            if holds:
                raise JaxpflError(f"{self.spec.method.name} cannot be deployed: {reason}")

    @cached_property
    def assembled(self) -> Assembled:
        """Inputs of a simulation with these settings; each client's data are replaced by a placeholder example."""
        return assemble_shapes(self.spec, self.example, self.num_clients)

    @cached_property
    def message(self) -> Message:
        """Shapes of the server's message."""
        algorithm, hp = self.assembled.algorithm()
        begin = partial(init_server, algorithm.server, ctx=server_context(self.assembled.cohorts, 0))
        return programs.shapes(begin, jax.random.key(0), jax.tree.map(number, hp))[1]

    def to_json(self) -> dict[str, Any]:
        """Convert the agreement to JSON values, which `from_json` reads.

        Raises:
          JaxpflError: if a setting is neither text nor a number.
        """
        spec, parts = self.spec, self.scaling or ()
        settings = {f.name: getattr(spec, f.name) for f in fields(Settings) if not is_default(spec, f.name)}
        for name, value in settings.items():
            if not isinstance(value, str | int | float):
                raise JaxpflError(f"{name} must be a string or a number in a deployment, got {shown(value)}")
        return {
            "settings": settings | {"method": spec.method.name, "num_classes": spec.num_classes},
            "by_name": {"hyper": dict(spec.hyper), "options": dict(spec.options)},
            "privacy": None if spec.privacy is None else dataclasses.asdict(spec.privacy),
            "precision": spec.plan.precision,
            "example": [[list(leaf.shape), str(leaf.dtype)] for leaf in self.example],
            "clients": self.num_clients,
            "scaling": [np.asarray(part).tolist() for part in parts],
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Agreement:
        """Convert the result of `to_json` back to an agreement."""
        privacy, plan = stored["privacy"], ExecutionPlan(precision=stored["precision"])
        own = {"privacy": privacy and PrivacyConfig(**privacy), "plan": plan}
        example = Examples(*(jax.ShapeDtypeStruct(tuple(shape), np.dtype(name)) for shape, name in stored["example"]))
        scaling = Scaling(*map(np.asarray, stored["scaling"])) if stored["scaling"] else None
        spec = RunSpec(**stored["settings"], **stored["by_name"], **own)
        return cls(spec, example, stored["clients"], scaling, stored["seed"])


def encode(tree: PyTree) -> dict[str, np.ndarray]:
    """Convert a pytree to NumPy arrays. A dtype that NumPy lacks (bfloat16) is sent as integers of the same size."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return {str(i): leaf.view(f"u{leaf.itemsize}") if leaf.dtype.kind == "V" else leaf for i, leaf in enumerate(leaves)}


def decode(arrays: Mapping[str, np.ndarray], like: PyTree, what: str) -> PyTree:
    """Convert arrays from `encode` back to a pytree, after checking each leaf's shape and dtype.

    Args:
      arrays: result of `encode`, from another party.
      like: pytree of arrays or shapes with the structure, shapes and dtypes that the receiver expects.
      what: name of the pytree in error messages.

    Raises:
      JaxpflError: if an array is missing, or its shape or dtype differs from the corresponding leaf of ``like``.
    """
    leaves = []
    for i, leaf in enumerate(jax.tree.leaves(like)):
        dtype, array = np.dtype(leaf.dtype), arrays.get(str(i), np.empty(0, bool))
        if array.shape != leaf.shape or array.dtype != (f"u{dtype.itemsize}" if dtype.kind == "V" else dtype):
            needed, found = f"{dtype}{list(leaf.shape)}", f"{array.dtype}{list(array.shape)}"
            raise JaxpflError(f"{what}: array {i} must be {needed}, got {found}: use the same jaxpfl on all sides")
        leaves.append(jnp.asarray(array.view(dtype)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
