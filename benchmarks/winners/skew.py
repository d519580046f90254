"""Measures of a federation by which it is compared with the map's cells: sizes, numbers of classes, and label skew."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxpfl.core.types import Federation
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class Measures:
    """Properties of a split that are measured, not taken from its flags.

    Attributes:
      clients: number of clients m.
      examples: n, median over clients of the number of labeled examples, including validation.
      classes: median over clients of the number of classes that they have.
      num_classes: number of classes of the data set.
      skew: label skew, from 0 for iid clients to 1 for clients with a single class each (`label_skew`).
    """

    clients: int
    examples: float
    classes: float
    num_classes: int
    skew: float

    def to_json(self) -> dict[str, Any]:
        """Return the measures as JSON values."""
        return asdict(self)


def measures(federation: Federation, num_classes: int) -> Measures:
    """Measure a split on its training and validation examples.

    Raises:
      JaxpflError: if the label skew is undefined, for example because there is only one client or one class.
    """
    counts = _counts(federation, num_classes)
    skew = label_skew(counts)
    if math.isnan(skew):
        held = int((counts.sum(axis=0) > 0).sum())
        raise JaxpflError(
            f"no label skew can be measured: it requires two classes and two clients with two labeled examples; "
            f"clients {len(counts)}, labeled examples {int(counts.sum())}, classes {held}"
        )
    return Measures(
        len(counts),
        float(np.median(counts.sum(axis=1))),
        float(np.median((counts > 0).sum(axis=1))),
        num_classes,
        round(skew, 4),
    )


def sizes(federation: Federation) -> tuple[int, int]:
    """Return the smallest and the largest number of labeled examples of a client, including validation."""
    own = np.asarray(federation.train.size) + np.asarray(federation.validation.size)
    return int(own.min()), int(own.max())


def _counts(federation: Federation, num_classes: int) -> np.ndarray:
    """Return the number of labeled examples of each class, [m, num_classes]."""
    m, total = federation.num_clients, 0
    for part in (federation.train, federation.validation):
        owner = np.repeat(np.arange(m), np.asarray(part.size))
        cells = owner * num_classes + np.asarray(part.flat().y)
        total = total + np.bincount(cells, minlength=m * num_classes)
    return np.asarray(total).reshape(m, num_classes)


def label_skew(counts: np.ndarray) -> float:
    r"""Fraction of the variance of labels that is due to differences between clients (:math:`F_{ST}` in genetics).

    .. math:: F = \frac{\frac{1}{m-1} \sum_i |\pi_i - \bar\pi|^2}{1 - |\bar\pi|^2}

    Here pi_i are client i's class probabilities, and their mean is over clients. The variance of the observed
    proportions about pi_i, (1 - |pi_i|^2) / n_i, is subtracted without bias, so that small clients do not look skewed.
    For every n_i, iid clients have F = 0 up to noise, and clients with k of C classes each have F = (1/k - 1/C) / (1 -
    1/C).

    Args:
      counts: number of examples of each class, [m, C]; clients with fewer than two examples are left out.

    Returns:
      F, at least 0; NaN if it is undefined, as for a single class or fewer than two clients.

    Examples:
      >>> round(label_skew(np.array([[10, 0], [0, 10]])), 3), label_skew(np.array([[5, 5], [6, 4]]))
      (1.0, 0.0)
    """
    n = counts.sum(axis=1)
    counts, n = counts[n > 1], n[n > 1]
    if len(n) < 2:
        return math.nan
    shares = counts / n[:, None]
    mean = shares.mean(axis=0)
    noise = (1 - (shares**2).sum(axis=1)) / (n - 1)
    scatter = ((shares - mean) ** 2).sum() / (len(n) - 1)
    total = 1 - (mean**2).sum() + scatter / len(n)  # the mean of m clients varies too
    return float(np.clip((scatter - noise.mean()) / total, 0.0, 1.0)) if total > 0 else math.nan
