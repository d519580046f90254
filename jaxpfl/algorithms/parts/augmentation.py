r"""Augmentation of mini-batches by pure functions in the local step.

``flip`` mirrors an image from left to right with probability 1/2. ``crop`` pads an image with ``padding`` zeros on
every side and cuts out a window of the original size at a uniformly random position. ``mixup`` (Zhang et al. 2018)
draws one :math:`\lambda \sim \text{Beta}(\alpha, \alpha)` and one permutation :math:`\pi` of the examples for each
batch, and trains on

.. math:: \lambda x_i + (1 - \lambda) x_{\pi(i)} \quad\text{with loss}\quad
          \lambda \ell(\cdot, y_i) + (1 - \lambda) \ell(\cdot, y_{\pi(i)})

Several augmentations are joined by ``+`` and applied from left to right. Every local step, also in personalization,
augments its batch with new random numbers. Evaluations, and passes over all of a client's examples, use the original
examples. The random numbers derive from the step's key and `Purpose.AUGMENTATION`. Each example has its own random
number, so padding does not change the result.

Reference: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", https://arxiv.org/abs/1710.09412.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import checks, settings
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


def _flip() -> float:
    return 0.0


def _crop(padding: int = 4) -> float:
    checks.count("augmentation crop:padding", padding, most=1024)
    return float(padding)


def _mixup(alpha: float = 0.2) -> float:
    checks.positive("augmentation mixup:alpha", alpha)
    if alpha > 1000:
        raise JaxpflError(f"augmentation mixup:alpha must be at most 1000, got {alpha:g}")
    return alpha


AUGMENTATIONS: Mapping[str, Callable[..., float]] = {"flip": _flip, "crop": _crop, "mixup": _mixup}
"""For each augmentation, a function that checks and returns its argument, or returns 0 if it has no argument."""


class Mixed(NamedTuple):
    """Labels of mixed examples: each example's two labels, both [b], and the weight of the first label, []."""

    first: Array
    second: Array
    share: Array


@dataclass(frozen=True)
class Augmentation:
    """Sequence of augmentations, each with its name and its argument (0 without an argument)."""

    parts: tuple[tuple[str, float], ...]

    @property
    def mixes(self) -> bool:
        """True if the labels of the augmented batch are `Mixed`."""
        return any(name == "mixup" for name, _ in self.parts)

    def __call__(self, key: Key, x: PyTree, y: Array, valid: Array) -> tuple[PyTree, Any]:
        """Augment a batch; return its inputs and labels.

        Args:
          key: random key, which must not be reused.
          x: inputs, [b, ...]; zero where ``valid`` is false.
          y: labels, [b].
          valid: mask of the real examples, which come first, [b] bool.
        """
        labels: Any = y
        for nth, (name, argument) in enumerate(self.parts):
            one = jax.random.fold_in(key, nth)
            if name == "flip":
                x = flipped(one, x)
            elif name == "crop":
                x = cropped(one, x, int(argument))
            else:
                x, labels = mixed(one, x, y, valid, argument)
        return x, labels


def parse(text: str) -> Augmentation:
    """Parse augmentations such as ``flip+crop:padding=2``.

    Examples:
      >>> parse("flip+crop:padding=2").parts
      (('flip', 0.0), ('crop', 2.0))

    Raises:
      JaxpflError: if a name or an argument is unknown, a value is outside its range, a name is given twice, or mixup is
        not the last augmentation.
    """
    parts: list[tuple[str, float]] = []
    for one in text.split("+"):
        name, given = settings.parse_choice("augmentation", one, AUGMENTATIONS)
        if name in dict(parts):
            raise JaxpflError(f"augment = {text} names {name} twice")
        parts.append((name, AUGMENTATIONS[name](**given)))
    if any(name == "mixup" for name, _ in parts[:-1]):
        raise JaxpflError(f"augment = {text}: mixup must come last")
    return Augmentation(tuple(parts))


def check(augmentation: Augmentation, task: Task) -> None:
    """Refuse augmentations that do not suit the task's inputs or labels.

    Raises:
      JaxpflError: if flip or crop is set although inputs are not images, or mixup is set although inputs are tokens or
        the task has no classes.
    """
    tokens = task.input_dtype is not None and jnp.issubdtype(task.input_dtype, jnp.integer)
    for name, _ in augmentation.parts:
        if name == "mixup":
            if tokens:
                raise JaxpflError("augment = mixup requires numeric inputs, got tokens")
            if not task.has_classes:
                raise JaxpflError(f"augment = mixup requires a classification task, got {task.kind}")
        elif tokens or len(task.input_shape) != 3:
            raise JaxpflError(f"augment = {name} requires images [height, width, channels], got {task.input_shape}")


def mixed_label_task(task: Task) -> Task:
    """Return the task with a loss that also accepts `Mixed` labels."""
    plain = task.loss

    def loss(predictions: Array, y: Any) -> Array:
        if not isinstance(y, Mixed):
            return plain(predictions, y)
        return y.share * plain(predictions, y.first) + (1 - y.share) * plain(predictions, y.second)

    return task._replace(loss=loss)


def flipped(key: Key, x: Array) -> Array:
    """Mirror each image of a batch, [b, h, w, c], from left to right with probability 1/2."""
    turn = jax.random.uniform(key, x.shape[:1]) < 0.5
    return jnp.where(turn[:, None, None, None], x[:, :, ::-1], x)


def cropped(key: Key, x: Array, padding: int) -> Array:
    """Pad each image of a batch, [b, h, w, c], with ``padding`` zeros on every side, and cut out a random window."""
    scores = jnp.stack([jax.random.uniform(one, x.shape[:1]) for one in jax.random.split(key)], axis=1)
    corners = jnp.minimum((scores * (2 * padding + 1)).astype(jnp.int32), 2 * padding)
    wide = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, jnp.int32(0)), x.shape[1:]))(wide, corners)


def mixed(key: Key, x: Array, y: Array, valid: Array, alpha: float) -> tuple[Array, Mixed]:
    """Mix each example with the example that a random permutation assigns to it; return mixtures and labels."""
    of_share, of_order = jax.random.split(key)
    share = jax.random.beta(of_share, alpha, alpha).astype(x.dtype)
    scores = jnp.where(valid, jax.random.uniform(of_order, y.shape[:1]), jnp.inf)
    # Infinite scores sort the invalid slots last, so that real examples are permuted only among themselves.
    other = jnp.where(valid, jnp.argsort(scores), jnp.arange(len(scores)))
    return share * x + (1 - share) * x[other], Mixed(y, y[other], share)
