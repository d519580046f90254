"""Measures of a federation by which it is compared with the map's cells: sizes, classes held, and label skew."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxpfl.types import Federation


@dataclass(frozen=True)
class Measures:
    """Properties of a split that are measured, not taken from its flags.

    Attributes:
      clients: m.
      examples: n, median over clients of labelled examples, those of the validation among them.
      classes: median over clients of the classes held.
      num_classes: of the data set.
      skew: of the labels, 0 for iid clients to 1 for clients of a single class each (`label_skew`).
    """

    clients: int
    examples: float
    classes: float
    num_classes: int
    skew: float

    def to_json(self) -> dict[str, Any]:
        """The measures as JSON-able values."""
        return asdict(self)


def measures(federation: Federation, num_classes: int) -> Measures:
    """Measure a split on its training and validation examples."""
    counts = _counts(federation, num_classes)
    return Measures(
        len(counts),
        float(np.median(counts.sum(axis=1))),
        float(np.median((counts > 0).sum(axis=1))),
        num_classes,
        round(label_skew(counts), 4),
    )


def _counts(federation: Federation, num_classes: int) -> np.ndarray:
    """Labelled examples of each class, [m, num_classes]."""
    m, total = federation.num_clients, 0
    for part in (federation.train, federation.validation):
        owner = np.repeat(np.arange(m), np.asarray(part.size))
        cells = owner * num_classes + np.asarray(part.flat().y)
        total = total + np.bincount(cells, minlength=m * num_classes)
    return np.asarray(total).reshape(m, num_classes)


def label_skew(counts: np.ndarray) -> float:
    r"""Share of the variance of labels that lies between clients, population genetics' :math:`F_{ST}`.

    .. math:: F = \frac{\frac{1}{m-1} \sum_i |\pi_i - \bar\pi|^2}{1 - |\bar\pi|^2}

    where pi_i are client i's class probabilities and their mean is over clients. The variance of the observed
    proportions about pi_i, (1 - |pi_i|^2) / n_i, is taken off without bias, so that few examples do not look like
    skew: iid clients give 0 but for noise, whatever n_i, and k of C classes each give (1/k - 1/C) / (1 - 1/C).

    Args:
      counts: examples of each class, [m, C]; clients with fewer than two are left out.

    Returns:
      F, at least 0; 0 where it is not defined, as for a single class.

    Examples:
      >>> round(label_skew(np.array([[10, 0], [0, 10]])), 3), label_skew(np.array([[5, 5], [6, 4]]))
      (1.0, 0.0)
    """
    n = counts.sum(axis=1)
    counts, n = counts[n > 1], n[n > 1]
    if not len(n):
        return 0.0
    shares = counts / n[:, None]
    mean = shares.mean(axis=0)
    noise = (1 - (shares**2).sum(axis=1)) / (n - 1)
    scatter = ((shares - mean) ** 2).sum() / max(len(n) - 1, 1)
    total = 1 - (mean**2).sum() + scatter / len(n)  # the mean is of m clients, and scatters by that part
    return float(np.clip((scatter - noise.mean()) / total, 0.0, 1.0)) if total > 0 else 0.0
