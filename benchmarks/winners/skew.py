"""Measures of a federation by which it is compared with the map's cells: sizes, classes held, and label skew."""

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
      clients: m.
      examples: n, median over clients of labeled examples, those of the validation among them.
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
    """Measure a split on its training and validation examples.

    Raises:
      JaxpflError: where it has no label skew, as of one client, or of one class.
    """
    counts = _counts(federation, num_classes)
    skew = label_skew(counts)
    if math.isnan(skew):
        held = int((counts.sum(axis=0) > 0).sum())
        raise JaxpflError(
            f"no label skew can be measured: it takes two clients of two labelled examples, and two classes; clients "
            f"{len(counts)}, labelled examples {int(counts.sum())}, classes {held}"
        )
    return Measures(
        len(counts),
        float(np.median(counts.sum(axis=1))),
        float(np.median((counts > 0).sum(axis=1))),
        num_classes,
        round(skew, 4),
    )


def sizes(federation: Federation) -> tuple[int, int]:
    """Fewest and most labeled examples of a client, those of the validation among them."""
    own = np.asarray(federation.train.size) + np.asarray(federation.validation.size)
    return int(own.min()), int(own.max())


def _counts(federation: Federation, num_classes: int) -> np.ndarray:
    """Labeled examples of each class, [m, num_classes]."""
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
      F, at least 0; NaN where it is not defined, as for a single class, and for fewer than two clients.

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
    total = 1 - (mean**2).sum() + scatter / len(n)  # the mean is of m clients, and scatters by that part
    return float(np.clip((scatter - noise.mean()) / total, 0.0, 1.0)) if total > 0 else math.nan
