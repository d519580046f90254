"""Warnings of data that train without an error and to no use."""

from __future__ import annotations

import numpy as np

from jaxpfl.data.standardize import in_parts
from jaxpfl.errors import warn
from jaxpfl.types import Federation

_FEW, _CLASSES = 5, 20
"""Examples of a label on average below which so many labels, or more, are taken for numbers that were measured."""
_APART = 1000.0


def check_labels(federation: Federation, strict: bool = False) -> None:
    """Warns where labels look like a regression's target made whole: many of them, most with few examples.

    Raises:
      JaxpflError: the warning, where ``strict`` is true.
    """
    splits = (federation.train, federation.validation, federation.test)
    labels = np.concatenate([np.asarray(split.y)[np.asarray(split.mask)] for split in splits])
    distinct = len(np.unique(labels))
    if distinct >= _CLASSES and len(labels) < _FEW * distinct:
        warn(
            f"there are {distinct} different labels in {len(labels)} examples, most of them in one or a few: if they "
            "are amounts, not classes, they cannot be learnt so (there is no regression yet)",
            strict=strict,
        )


def check_scales(federation: Federation, strict: bool = False) -> None:
    """Warns where inputs that are a vector of features hold some a thousand times as large as others.

    A feature's scale is the root mean square of its entries that are not zero, so that rare ones are not small ones.

    Raises:
      JaxpflError: the warning, where ``strict`` is true.
    """
    x, real = federation.train.x, np.asarray(federation.train.mask)
    if not hasattr(x, "ndim") or x.ndim != 3 or not np.issubdtype(x.dtype, np.floating):
        return
    squares, counts = np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    for examples in in_parts(np.asarray(x), real):
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
            f"{scales[least]:.3g}, feature {most} about {scales[most]:.3g}), which gradient steps of one rate cannot "
            "serve: --standardize, or federate(standardize=True), brings them to one",
            strict=strict,
        )
