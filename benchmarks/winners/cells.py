"""Declaration of the map: its cells, and the methods with the settings that each tries.

A cell changes one or two factors of a center. To add a cell, declare it here and run the map again; finished
measurements are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxpfl.runs.records import Value

LOCAL_STEPS, BATCH = 10, 10
VALIDATION = 0.2
"""Fraction of a client's labeled examples by which learning rates, and then the best method, are chosen."""
SPLITS = 5
"""Number of split seeds of each cell; a run uses the seed of its split."""
FINE_TUNING = 0.15
"""Fraction of the gradient steps that fedavg-ft spends on fine-tuning."""
DELTA = 1e-3
OWN_TEST = 0.3
"""Fraction of a writer's digits on which all methods are compared."""
TEST = 100
"""Number of test examples of an MNIST client, whose images are drawn anew for each split."""
_DIGITS = 1797

Heterogeneity = Mapping[str, Any]
"""Fields of a split: its partition, and the partition's options."""


def _held(classes: int) -> Heterogeneity:
    return {"partition": "classes", "classes_per_client": classes}


def _dirichlet(alpha: float) -> Heterogeneity:
    return {"partition": "dirichlet", "alpha": alpha}


IID: Heterogeneity = {"partition": "iid"}
CLUSTERS: Heterogeneity = {"partition": "clusters", "clusters": 3}
WRITERS: Heterogeneity = {"partition": "natural", "users_per_client": 1}
THREE = _held(3)


@dataclass(frozen=True)
class Cell:
    """A federation and a budget, for which all methods are compared.

    Attributes:
      data, model: registered names.
      clients: number of clients m.
      examples: number n of labeled examples of a client, including validation; None for all examples of its users.
      split: heterogeneity of the clients.
      share: fraction of the clients that take part in a round.
      steps: expected number of gradient steps of a client.
      epsilon: user-level epsilon of the whole run; None without privacy.
      varies: factors in which the cell differs from its center.
    """

    data: str
    model: str
    clients: int
    examples: int | None
    split: Heterogeneity = field(default_factory=lambda: THREE)
    share: float = 1.0
    steps: int = 400
    epsilon: float | None = None
    varies: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The cell's settings as a unique name."""
        numbers = [f"m{self.clients}", f"n{self.examples or 'own'}", self.heterogeneity.replace(" ", "")]
        rest = [f"share{self.share:g}", f"steps{self.steps}"]
        rest += [] if self.epsilon is None else [f"eps{self.epsilon:g}"]
        return "-".join([self.data, self.model.replace(":", ""), *numbers, *rest])

    @property
    def heterogeneity(self) -> str:
        """Description of the split."""
        own = self.split
        if own["partition"] == "classes":
            return f"{own['classes_per_client']} classes"
        if own["partition"] == "dirichlet":
            return f"Dirichlet {own['alpha']:g}"
        return {"iid": "iid", "clusters": f"{own.get('clusters')} clusters", "natural": "writers"}[own["partition"]]

    @property
    def cohort(self) -> int:
        """Expected number of clients in a round."""
        return max(1, round(self.share * self.clients))

    def config(self, split_seed: int, rounds: int) -> dict[str, Any]:
        """Return the fields of a `RunConfig`, by name."""
        values: dict[str, Any] = {"data": self.data, "model": self.model, "clients": self.clients, **self.split}
        if self.examples is None:
            values["test_share"] = OWN_TEST
        elif self.data == "digits":
            values["test_share"] = 1 - self.examples * self.clients / _DIGITS
        else:
            values |= {"test_share": TEST / (self.examples + TEST), "pool_test": True}
        values |= {"validation_share": VALIDATION, "split_seed": split_seed, "seed": split_seed, "seeds": 1}
        values |= {"cohort": self.cohort, "local_steps": LOCAL_STEPS, "batch_size": BATCH, "rounds": rounds}
        if self.epsilon is not None:
            values["privacy"] = {"epsilon": self.epsilon, "delta": DELTA}
        return values


RATES = (0.01, 0.03, 0.06, 0.12, 0.25, 0.5)
FEW_RATES = (0.03, 0.12, 0.5)


@dataclass(frozen=True)
class Contender:
    """A method with the settings that it tries; all methods have the same number of tries.

    Attributes:
      method: registered name.
      tries: axis -> values; all combinations are tried.
      private: tries under privacy; None if the method is the same without privacy.
      reference: whether the method is only a reference because it is not federated.
      set: static options.
    """

    method: str
    tries: Mapping[str, tuple[Value, ...]] = field(default_factory=lambda: {"lr": RATES})
    private: Mapping[str, tuple[Value, ...]] | None = None
    reference: bool = False
    set: tuple[str, ...] = ()


_PRIVATE = MappingProxyType({"lr": FEW_RATES, "privacy.clipping_norm": (0.3, 1.0)})
LOCAL = Contender("local")
EVERYWHERE = (
    LOCAL,
    Contender("fedavg", private=_PRIVATE),
    Contender("fedavg-ft", private=_PRIVATE),
    Contender("ditto", {"lr": FEW_RATES, "ditto.lam": (0.1, 1.0)}, _PRIVATE),
    Contender("apfl", private=_PRIVATE),
    Contender("adaped", {"lr": FEW_RATES, "adaped.psi_init": (1.0, 3.5)}, _PRIVATE),
)
_POOLED = Contender("pooled", reference=True)
_LAYERED = Contender("fedper", private=_PRIVATE)
_OF_CLUSTERS = (Contender("ifca", set=("ifca.clusters=3",)), Contender("fedem", set=("fedem.components=3",)))


def contenders(cell: Cell) -> tuple[Contender, ...]:
    """Return the methods of a cell: fedper only for models with layers, ifca and fedem only for clustered clients.

    At the centers, training on pooled data is included as a reference. It is compiled anew for every split, so it would
    be too slow for all cells.
    """
    found = [*EVERYWHERE]
    found += [] if cell.model == "linear" else [_LAYERED]
    found += _OF_CLUSTERS if cell.split == CLUSTERS else ()
    found += [] if cell.varies else [_POOLED]
    return tuple(found)


def _varied(centre: Cell, **groups: tuple[Mapping[str, Any], ...]) -> tuple[Cell, ...]:
    """Return a center and the cells around it; ``groups`` maps factors (``a_x_b`` for a pair) to changed fields."""
    found: dict[str, Cell] = {centre.name: centre}
    for factor, changes in groups.items():
        for change in changes:
            cell = Cell(**{**vars(centre), **change, "varies": tuple(factor.split("_x_"))})
            found.setdefault(cell.name, cell)
    return tuple(found.values())


_HETEROGENEITY = tuple({"split": s} for s in (_held(2), _held(5), IID, _dirichlet(0.1), _dirichlet(1.0), CLUSTERS))
DIGITS = Cell("digits", "linear", 20, 45)
MNIST = Cell("mnist", "linear", 20, 100, steps=200)
MANY = Cell("digits", "linear", 100, 10, steps=100)

CELLS: tuple[Cell, ...] = (
    *_varied(
        DIGITS,
        heterogeneity=_HETEROGENEITY,
        examples=tuple({"examples": n} for n in (10, 20, 72)),
        clients=({"clients": 5}, {"clients": 10}),
        participation=({"share": 0.25},),
        steps=({"steps": 100}, {"steps": 1600}),
        examples_x_heterogeneity=tuple({"examples": n, "split": s} for n in (10, 72) for s in (_held(2), IID)),
    ),
    *_varied(
        MNIST,
        heterogeneity=_HETEROGENEITY,
        examples=tuple({"examples": n} for n in (20, 300)),
        clients=({"clients": 50},),
        examples_x_heterogeneity=tuple({"examples": n, "split": s} for n in (20, 300) for s in (_held(2), IID)),
    ),
    *_varied(
        MANY,
        heterogeneity=({"split": IID},),
        epsilon=({"epsilon": 2.0}, {"epsilon": 8.0}),
        heterogeneity_x_epsilon=({"split": IID, "epsilon": 2.0}, {"split": IID, "epsilon": 8.0}),
    ),
    Cell("mnist-writers", "linear", 66, None, WRITERS, steps=200),
    Cell("mnist-writers", "linear", 20, None, WRITERS, steps=200, varies=("clients",)),
    *_varied(
        Cell("digits", "mlp:32", 20, 45),
        heterogeneity=({"split": _held(2)}, {"split": IID}, {"split": CLUSTERS}),
        examples=({"examples": 10},),
    ),
    *_varied(Cell("mnist", "cnn", 10, 100, steps=100), heterogeneity=({"split": IID},), examples=({"examples": 20},)),
)
QUICK: tuple[Cell, ...] = (Cell("digits", "linear", 5, 20, steps=40),)
"""Cells of a quick run, which shows only that the command works."""
QUICK_SPLITS = 2
QUICK_METHODS = ("local", "fedavg-ft")
