"""Summary of how a federation splits its data, for ``jaxpfl data describe``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxpfl.core.types import Federation, Names
from jaxpfl.data.labels import are_classes, labelled_tokens
from jaxpfl.data.sources.base import Source
from jaxpfl.data.stack import listed
from jaxpfl.support.console import columns
from jaxpfl.support.errors import label

_MOST_COLUMNS = 20


@dataclasses.dataclass(frozen=True)
class Summary:
    """Example counts of a federation with m clients.

    Attributes:
      client_ids: id of each client, [m].
      sizes: split ("train", "validation" or "test") -> number of examples of each client, [m].
      capacities: split -> largest number of examples of a client, or an upper bound on this number.
      class_counts: number of each client's training examples of each class, [m, num_classes]; num_classes is 0 if
        labels are not classes.
      input_shape: shape of one input; a dictionary of shapes by name if an input is several arrays.
      unused: number of the source's examples that belong to no client, or None if the source was not given.
      clusters: true cluster of each client, [m], or None if there are no clusters.
      labels: mean and standard deviation of each client's labels, [m, 2], if labels are real numbers or vectors;
        otherwise None.
      tokens: split -> number of each client's tokens with a label, [m], for next-token prediction; otherwise None.
      client_names: names of the clients, as in `Federation.client_names`.
    """

    client_ids: np.ndarray
    sizes: dict[str, np.ndarray]
    capacities: dict[str, int]
    class_counts: np.ndarray
    input_shape: Any
    unused: int | None = None
    clusters: np.ndarray | None = None
    labels: np.ndarray | None = None
    tokens: dict[str, np.ndarray] | None = None
    client_names: Names | None = None

    @property
    def has_classes(self) -> bool:
        """True if each example's label is a class."""
        return self.labels is None and self.tokens is None

    @property
    def classes_held(self) -> np.ndarray:
        """Number of distinct classes among each client's training examples, [m]."""
        return (self.class_counts > 0).sum(axis=1)

    @property
    def holders(self) -> np.ndarray:
        """Number of clients with training examples of each class, [num_classes]."""
        return (self.class_counts > 0).sum(axis=0)


def summary(
    federation: Federation,
    num_classes: int,
    source: Source | None = None,
    member: np.ndarray | None = None,
    task: str | None = None,
) -> Summary:
    """Count a federation's examples.

    Args:
      federation: clients to count.
      num_classes: number of classes, such as `Source.num_classes`. The number is increased to cover all labels: for
        labels 0 and 1 with one logit, `Source.num_classes` is 1, but two classes are counted.
      source: source of the federation, to count the examples that no client has (examples of test users who are not
        clients, of users who were not chosen, and of dropped clients).
      member: true cluster of each client by id, from `true_clusters`.
      task: task of the labels; by default the source's task. Next-token labels are counted instead of averaged.
    """
    splits = {s: getattr(federation, s) for s in ("train", "validation", "test")}
    sizes = {s: np.asarray(data.size).astype(np.int64) for s, data in splits.items()}
    m = len(sizes["train"])
    own, labels, counts = np.repeat(np.arange(m), sizes["train"]), federation.train.flat().y, np.zeros((m, 0), int)
    moments = tokens = None
    if (task or (None if source is None else source.task)) == "next-token" and labels.ndim == 2:
        tokens = {s: labelled_tokens(data) for s, data in splits.items()}
    elif are_classes(labels):
        num_classes = max(num_classes, int(labels.max(initial=0)) + 1)
        counts = np.bincount(own * num_classes + labels, minlength=m * num_classes).reshape(m, num_classes)
    else:
        moments = _moments(own, labels, sizes["train"])
    unused = None
    if source is not None:
        there = len(source.y_train) + (0 if source.y_test is None else len(source.y_test))
        unused = there - int(sum(own.sum() for own in sizes.values()))
    return Summary(
        client_ids=np.asarray(federation.client_ids),
        sizes=sizes,
        capacities={s: data.capacity for s, data in splits.items()},
        class_counts=counts,
        input_shape=_shapes(federation.train.examples.x),
        unused=unused,
        clusters=None if member is None else member[np.asarray(federation.client_ids)],
        labels=moments,
        tokens=tokens,
        client_names=federation.client_names,
    )


def describe(counts: Summary) -> dict[str, Any]:
    """Convert a summary to JSON values: totals, minimum, median and maximum over clients, and a table by client."""
    shape = counts.input_shape
    described: dict[str, Any] = {
        "clients": len(counts.client_ids),
        "input_shape": {name: list(own) for name, own in shape.items()} if isinstance(shape, dict) else list(shape),
        "examples": {s: int(sizes.sum()) for s, sizes in counts.sizes.items()},
        "examples_per_client": {s: _spread(sizes) for s, sizes in counts.sizes.items()},
        "capacity": dict(counts.capacities),
    }
    if counts.unused is not None:
        described["unused_examples"] = counts.unused
    if counts.clusters is not None:
        number = counts.clusters.max() + 1
        described["clusters"] = [counts.client_ids[counts.clusters == c].tolist() for c in range(number)]
    own: list[dict[str, Any]]
    if counts.tokens is not None:
        described["tokens"] = {s: int(number.sum()) for s, number in counts.tokens.items()}
        described["tokens_per_client"] = {s: _spread(number) for s, number in counts.tokens.items()}
        rows = zip(*counts.tokens.values(), strict=True)
        own = [{"tokens": dict(zip(counts.tokens, map(int, row), strict=True))} for row in rows]
    elif counts.labels is not None:
        mean, std = counts.labels.T
        total = float(np.average(mean, weights=counts.sizes["train"]))
        spread = float(np.sqrt(np.average(std**2 + (mean - total) ** 2, weights=counts.sizes["train"])))
        described["labels"] = {"mean": total, "std": spread}
        own = [{"label_mean": a, "label_std": b} for a, b in counts.labels.tolist()]
    else:
        described["classes"] = counts.class_counts.shape[1]
        described["classes_per_client"] = _spread(counts.classes_held)
        described["clients_per_class"] = counts.holders.tolist()
        own = [{"class_counts": row} for row in counts.class_counts.tolist()]
    described["per_client"] = [
        {"client_id": int(client), **{s: int(sizes[i]) for s, sizes in counts.sizes.items()}, **own[i]}
        for i, client in enumerate(counts.client_ids)
    ]
    for row, name in zip(described["per_client"], counts.client_names or (), strict=False):
        row["client_name"] = name
    return described


def format_description(described: dict[str, Any], most_clients: int = 20) -> str:
    """Format the dictionary of `describe` as text for a terminal, with the first ``most_clients`` clients.

    The table has one column per class if there are at most 20 classes and the terminal is wide enough. Otherwise the
    table shows the number of classes of each client.
    """
    has_classes, has_tokens = "classes" in described, "tokens" in described
    if has_tokens:
        kind = f"{sum(described['tokens'].values())} tokens with a label"
    elif has_classes:
        kind = f"{described['classes']} classes"
    else:
        kind = "labels {mean:.4g} ± {std:.4g}".format(**described["labels"])
    lines = [f"{described['clients']} clients, {kind}, inputs {_shape_text(described['input_shape'])}"]
    if "source" in described:
        lines.append(described["source"])
    if described.get("standardized"):
        lines.append("features scaled to mean 0 and standard deviation 1 over the training examples")
    if names := described.get("class_names"):
        lines.append(f"the classes 0 .. {len(names) - 1} are the labels {listed(names, most_clients, ' ')}")
    if described.get("unused_examples"):
        lines.append(f"{described['unused_examples']} examples of the data set are left out")
    if unseen := described.get("unseen"):
        parts = ", ".join(f"{count} {split}" for split, count in unseen["examples"].items() if count)
        lines.append(f"and {unseen['clients']} unseen clients from the test set ({parts} examples)")
    lines += ["", f"{'per client':<12}{'min':>8}{'median':>10}{'max':>8}{'total':>10}"]
    lines += _spread_lines(described["examples_per_client"], described["examples"])
    if has_tokens:
        lines += ["tokens with a label", *_spread_lines(described["tokens_per_client"], described["tokens"])]
    if has_classes:
        lines += _spread_lines({"classes": described["classes_per_client"]}, {})
    if "clusters" in described:
        lines += ["", "clients of each cluster"]
        lines += [f"{i:<8}{listed(ids, most_clients, ' ')}" for i, ids in enumerate(described["clusters"])]
    narrow = has_classes and described["classes"] <= min(_MOST_COLUMNS, (columns() - 8) // 6)
    clients, width = described["per_client"][:most_clients], 6 if narrow else 10
    if narrow:
        heads = list(range(described["classes"]))
        rows = [[count or "." for count in client["class_counts"]] for client in clients]
    elif has_classes:
        heads = ["train", "classes"]
        rows = [[client["train"], sum(count > 0 for count in client["class_counts"])] for client in clients]
    elif has_tokens:
        heads = ["train", "tokens"]
        rows = [[client["train"], client["tokens"]["train"]] for client in clients]
    else:
        heads = ["train", "mean", "std"]
        rows = [[c["train"], f"{c['label_mean']:.4g}", f"{c['label_std']:.4g}"] for c in clients]
    who = ["client", *(label(client.get("client_name", str(client["client_id"]))) for client in clients)]
    first = max(8, *(len(one) + 2 for one in who))
    lines += ["", "training examples by class" if narrow else "training examples"]
    lines += [_row(one, row, width, first) for one, row in zip(who, [heads, *rows], strict=True)]
    if described["clients"] > most_clients:
        lines.append(f"... and {described['clients'] - most_clients} more clients")
    if narrow:
        lines.append(_row("clients", described["clients_per_class"], width, first))
    return "\n".join(lines)


def _moments(own: np.ndarray, labels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Mean and standard deviation of each client's labels, [m, 2]. All entries of a label vector are included.

    Args:
      own: client of each of N examples, [N].
      labels: labels of the examples, [N] or [N, d].
      sizes: number of examples of each client, [m], all above 0.
    """
    rows = labels.reshape(len(labels), -1).astype(np.float64)
    entries = sizes * rows.shape[1]
    mean = np.bincount(own, rows.sum(axis=1), len(sizes)) / entries
    squares = np.bincount(own, np.square(rows - mean[own][:, None]).sum(axis=1), len(sizes))
    return np.stack([mean, np.sqrt(squares / entries)], axis=1)


def _shapes(x: Any) -> Any:
    """Shape of one input: a tuple, or a dictionary of tuples by the arrays' names."""
    paths = jax.tree_util.tree_flatten_with_path(x)[0]
    if len(paths) == 1 and not paths[0][0]:
        return tuple(x.shape[1:])
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape[1:]) for path, leaf in paths}


def _shape_text(shape: Any) -> str:
    if isinstance(shape, dict):
        return ", ".join(f"{name} {_shape_text(own)}" for name, own in shape.items())
    return " x ".join(map(str, shape)) or "scalar"


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _spread_lines(spreads: dict[str, dict[str, float]], totals: dict[str, int]) -> list[str]:
    return [
        f"{name:<12}{own['min']:>8}{own['median']:>10g}{own['max']:>8}{totals.get(name, ''):>10}".rstrip()
        for name, own in spreads.items()
    ]


def _row(name: str, cells: Any, width: int, first: int) -> str:
    return f"{name:<{first}}" + "".join(f"{cell!s:>{width}}" for cell in cells)
