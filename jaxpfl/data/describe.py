"""What a split looks like: for ``jaxpfl data describe`` and for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxpfl.types import Federation


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of a federation's m clients.

    Attributes:
      client_ids: [m].
      sizes: for "train", "validation" and "test" the clients' numbers of examples, [m].
      capacities: for each split the padded length.
      class_counts: [m, num_classes] training examples of each class.
      input_shape: the shape of one input.
    """

    client_ids: np.ndarray
    sizes: dict[str, np.ndarray]
    capacities: dict[str, int]
    class_counts: np.ndarray
    input_shape: tuple[int, ...]

    @property
    def classes_held(self) -> np.ndarray:
        """The number of distinct classes among each client's training examples, [m]."""
        return (self.class_counts > 0).sum(axis=1)

    @property
    def holders(self) -> np.ndarray:
        """The number of clients with training examples of each class, [num_classes]."""
        return (self.class_counts > 0).sum(axis=0)


def summary(federation: Federation, num_classes: int) -> Summary:
    """Counts a federation's examples; labels must lie in 0 .. num_classes - 1."""
    splits = {s: getattr(federation, s) for s in ("train", "validation", "test")}
    masks = {s: np.asarray(data.mask) for s, data in splits.items()}
    labels, mask = np.asarray(federation.train.y), masks["train"]
    cells = np.nonzero(mask)[0] * num_classes + labels[mask]
    counts = np.bincount(cells, minlength=len(mask) * num_classes).reshape(len(mask), num_classes)
    return Summary(
        client_ids=np.asarray(federation.client_ids),
        sizes={s: m.sum(axis=1) for s, m in masks.items()},
        capacities={s: m.shape[1] for s, m in masks.items()},
        class_counts=counts,
        input_shape=federation.input_shape,
    )


def describe(counts: Summary) -> dict[str, Any]:
    """The summary as JSON-able values: totals, min / median / max over clients, and the table of each
    client."""
    return {
        "clients": len(counts.client_ids),
        "input_shape": list(counts.input_shape),
        "classes": counts.class_counts.shape[1],
        "examples": {s: int(sizes.sum()) for s, sizes in counts.sizes.items()},
        "examples_per_client": {s: _spread(sizes) for s, sizes in counts.sizes.items()},
        "capacity": dict(counts.capacities),
        "classes_per_client": _spread(counts.classes_held),
        "clients_per_class": counts.holders.tolist(),
        "per_client": [
            {
                "client_id": int(client),
                **{s: int(sizes[i]) for s, sizes in counts.sizes.items()},
                "class_counts": counts.class_counts[i].tolist(),
            }
            for i, client in enumerate(counts.client_ids)
        ],
    }


def format_description(described: dict[str, Any], most_clients: int = 20) -> str:
    """The dictionary of `describe` as plain text for a terminal, with the first ``most_clients`` clients."""
    shape = " x ".join(map(str, described["input_shape"])) or "scalar"
    lines = [f"{described['clients']} clients, {described['classes']} classes, inputs {shape}", ""]
    lines.append(f"{'per client':<12}{'min':>8}{'median':>10}{'max':>8}{'total':>10}")
    for split, spread in described["examples_per_client"].items():
        lines.append(_spread_line(split, spread) + f"{described['examples'][split]:>10}")
    lines.append(_spread_line("classes", described["classes_per_client"]))
    lines += ["", "training examples by class", _row("client", range(described["classes"]))]
    for client in described["per_client"][:most_clients]:
        lines.append(_row(client["client_id"], (count or "." for count in client["class_counts"])))
    if described["clients"] > most_clients:
        lines.append(f"... and {described['clients'] - most_clients} more clients")
    lines.append(_row("clients", described["clients_per_class"]))
    return "\n".join(lines)


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _spread_line(name: str, spread: dict[str, float]) -> str:
    return f"{name:<12}{spread['min']:>8}{spread['median']:>10g}{spread['max']:>8}"


def _row(name: Any, cells: Any) -> str:
    return f"{name!s:<8}" + "".join(f"{cell!s:>6}" for cell in cells)
