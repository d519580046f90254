"""Warnings about data that can be trained on without an error but hardly learned from."""

from __future__ import annotations

import numpy as np

from jaxpfl.core.types import Federation
from jaxpfl.data.labels import are_classes
from jaxpfl.support.errors import warn
from jaxpfl.support.mapped import in_parts

_FEW, _CLASSES = 5, 20
"""Thresholds: fewer examples per label on average, of at least so many labels, suggest measured amounts."""
_APART = 1000.0
_LARGEST_PIXEL = 100.0


def check_labels(federation: Federation, strict: bool = False) -> None:
    """Warn if labels look like a rounded regression target: many of them, most with few examples.

    Raises:
      JaxpflError: instead of the warning, if ``strict``.
    """
    if not are_classes(federation.train.examples.y):
        return
    labels, examples = np.zeros(0, np.int32), 0
    for split in federation.all_splits:
        for part in in_parts(split.flat().y):
            labels, examples = np.union1d(labels, part), examples + len(part)
    distinct = len(labels)
    if distinct >= _CLASSES and examples < _FEW * distinct:
        warn(
            f"there are {distinct} different labels in {examples} examples, most of them in one or a few: if they "
            "are amounts, not classes, a classifier cannot learn them: name the task regression",
            strict=strict,
        )


def check_scales(federation: Federation, strict: bool = False) -> None:
    """Warn if features of vectors differ in scale by a factor of a thousand or more, or images of floats exceed 100.

    A feature's scale is the root mean square of its nonzero entries, so that rare features do not count as small.

    Raises:
      JaxpflError: instead of the warning, if ``strict``.
    """
    x = federation.train.flat().x
    if not hasattr(x, "ndim") or x.ndim not in (2, 3, 4) or not np.issubdtype(x.dtype, np.floating):
        return
    if x.ndim > 2:
        largest = max((float(max(part.max(), -part.min())) for part in in_parts(x)), default=0.0)
        if largest > _LARGEST_PIXEL:
            warn(
                f"inputs [N, {', '.join(map(str, x.shape[1:]))}] go up to {largest:.4g}, too much for usual learning "
                "rates: of images, store bytes (uint8) or divide by 255; else use --standardize, or "
                "federate(standardize=True)",
                strict=strict,
            )
        return
    squares, counts = np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    for examples in in_parts(x):
        squares += np.square(examples, dtype=np.float64).sum(axis=0)
        counts += np.count_nonzero(examples, axis=0)
    scales = np.sqrt(squares / np.maximum(counts, 1))
    used = np.flatnonzero(scales > 0)
    if not len(used):
        return
    least, most = used[np.argmin(scales[used])], used[np.argmax(scales[used])]
    if scales[most] >= _APART * scales[least]:
        warn(
            f"features differ in scale by a factor of {scales[most] / scales[least]:.0f} (feature {least} is about "
            f"{scales[least]:.3g}, feature {most} about {scales[most]:.3g}), too much for one learning rate: use "
            "--standardize, or federate(standardize=True)",
            strict=strict,
        )
