"""Declaration of the map: its cells, and the methods with the settings that each tries.

A cell changes one factor of a center, or two. To add one, add it here and run the map again: what is measured is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxpfl.runs.records import Value

LOCAL_STEPS, BATCH = 10, 10
VALIDATION = 0.2
"""Share of a client's labeled examples by which rates, and then the best method, are chosen."""
SPLITS = 5
"""Split seeds of each cell; the run's seed is the split's."""
FINE_TUNING = 0.15
"""Share of its gradient steps that fedavg-ft spends on fine-tuning."""
DELTA = 1e-3
OWN_TEST = 0.3
"""Share of a writer's digits by which all methods are compared."""
TEST = 100
"""Test examples of a client of MNIST, whose images are drawn anew for each split."""
_DIGITS = 1797

Heterogeneity = Mapping[str, Any]
"""Fields of a split: its partition with the partition's options."""


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
    """A federation and a budget, on which all methods are compared.

    Attributes:
      data, model: registered names.
      clients: m.
      examples: n, labeled examples of a client, those of the validation among them; None for the users' own.
      split: the heterogeneity.
      share: of the clients that take part in a round.
      steps: gradient steps of a client, expected.
      epsilon: of the whole run, user-level; None without privacy.
      varies: the factors in which it differs from its center.
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
        """The split in words."""
        own = self.split
        if own["partition"] == "classes":
            return f"{own['classes_per_client']} classes"
        if own["partition"] == "dirichlet":
            return f"Dirichlet {own['alpha']:g}"
        return {"iid": "iid", "clusters": f"{own.get('clusters')} clusters", "natural": "writers"}[own["partition"]]

    @property
    def cohort(self) -> int:
        """Number of clients in a round, expected."""
        return max(1, round(self.share * self.clients))

    def config(self, split_seed: int, rounds: int) -> dict[str, Any]:
        """Fields of a `RunConfig`, by name."""
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
    """A method with the settings that it tries, as many as every other.

    Attributes:
      method: registered name.
      tries: axis -> values, crossed.
      private: the tries under privacy; None where the method stays as it is.
      reference: true if it is no contender: not federated.
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
    """Methods of a cell: fedper where the model has layers, ifca and fedem where clients are clustered.

    At the centers also training on pooled data, as a reference; it compiles anew for every split.
    """
    found = [*EVERYWHERE]
    found += [] if cell.model == "linear" else [_LAYERED]
    found += _OF_CLUSTERS if cell.split == CLUSTERS else ()
    found += [] if cell.varies else [_POOLED]
    return tuple(found)


def _varied(centre: Cell, **groups: tuple[Mapping[str, Any], ...]) -> tuple[Cell, ...]:
    """A center with the cells around it; ``groups`` names factors (``a_x_b`` for a pair) with the fields changed."""
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
"""Cells of a quick run, which shows that the command works, and nothing else."""
QUICK_SPLITS = 2
QUICK_METHODS = ("local", "fedavg-ft")
