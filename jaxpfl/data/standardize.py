"""Standardisation of features to mean 0 and standard deviation 1.

Mean and standard deviation are computed over the pooled training examples of all clients of a federation, as if one
party saw all examples. The mean and the deviation are not private: every client's standardised inputs depend on all
clients' examples. New clients are scaled with the same mean and deviation, and not with statistics of their own data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.types import ClientData, Federation
from jaxpfl.data.labels import moments
from jaxpfl.data.sources.base import Source
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError


class Scaling(NamedTuple):
    """Mean and standard deviation of each feature in float64, each with the tree structure and shape of one input.

    The deviation of a constant feature is 1.
    """

    mean: Any
    deviation: Any


def scaling_of(federation: Federation) -> Scaling:
    """Compute the scaling of a federation from its clients' training examples.

    Raises:
      JaxpflError: if no client has training examples.
    """
    examples = federation.train.flat()
    if not len(examples.y):
        raise JaxpflError("standardize needs training examples, but no client has any")
    pairs = map(_scaling, jax.tree.leaves(examples.x))
    return Scaling(*(jax.tree.unflatten(jax.tree.structure(examples.x), part) for part in zip(*pairs, strict=True)))


def scaled(federation: Federation, scaling: Scaling) -> Federation:
    """Return the federation with inputs ``(x - mean) / deviation`` in float32; file inputs go to new files.

    Example::

        trained, unseen = jaxpfl.set_apart(federation, 10)
        scaling = scaling_of(trained)
        trained, unseen = scaled(trained, scaling), scaled(unseen, scaling)
    """

    def scale_split(split: ClientData) -> ClientData:
        def scale_leaf(leaf: Any, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
            return host_memory.converted(np.asarray(leaf), np.float32, lambda part: (part - mean) / deviation)

        return split.with_examples(x=jax.tree.map(scale_leaf, split.examples.x, scaling.mean, scaling.deviation))

    return Federation(
        federation.client_ids, *map(scale_split, federation.all_splits), client_names=federation.client_names
    )


def check_standardizable(source: Source) -> None:
    """Check that a source's inputs are features.

    Raises:
      JaxpflError: if the inputs are pixels or tokens.
    """
    if source.inputs == "pixels":
        raise JaxpflError(
            f"standardize is for features: {source.name} holds pixels, which are standardized when loaded"
        )
    if source.inputs == "tokens":
        raise JaxpflError(f"standardize is for features: {source.name} holds tokens")


def _scaling(x: np.ndarray) -> Scaling:
    """Compute the scaling of inputs [N, ...]."""
    mean, deviation = moments(x)
    # By rounding, even a constant feature can have a small deviation.
    constant = deviation <= np.finfo(np.float32 if x.dtype == np.float32 else np.float64).eps * np.abs(mean)
    return Scaling(mean, np.where(constant, 1.0, deviation))
