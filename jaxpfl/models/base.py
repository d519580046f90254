"""Models as pairs of pure functions, and tasks, which add a loss and metrics.

Both are static: they hold functions and shapes, so they are closed over by a compiled program and never
passed through ``jax.jit`` as arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxpfl.errors import JaxpflError
from jaxpfl.trees import PathPredicate
from jaxpfl.types import Array, Key, PyTree

PerExample = Callable[[Array, Array], Array]
"""Maps logits [N, K] and labels [N] to one value per example, [N]."""


class InitFn(Protocol):
    def __call__(self, key: Key, x: Array, /) -> PyTree: ...


class Model(NamedTuple):
    """A classifier (or regressor) as two pure functions; ``fit`` takes any ``Model(init, apply)``.

    Attributes:
      init: ``(key, x) -> params``; x is [N, *input_shape], of which only shape and dtype matter.
      apply: ``(params, x, key=None, train=False) -> logits`` of shape [N, num_classes]. `key` feeds dropout. A function
        without the last two is completed by `as_model`.
      head: selects the parameters of the personal head (FedPer, FedRep); None if the model defines none.
      norm: selects the scales and biases of normalisation layers (FedBN); None if the model defines none.
      vocabulary: number of tokens if inputs are tokens 0 .. vocabulary - 1; None if they are real numbers.
    """

    init: InitFn
    apply: Callable[..., Array]
    head: PathPredicate | None = None
    norm: PathPredicate | None = None
    vocabulary: int | None = None


def from_linen(module: nn.Module, head: PathPredicate | None = None, norm: PathPredicate | None = None) -> Model:
    """Wrap a flax.linen module; ``params`` is the inner dictionary of its "params" collection.

    If the module's ``__call__`` takes `train`, it is passed. The apply key is its "dropout" stream.
    A module with any other collection is refused by `Model.init`: running statistics (BatchNorm) are neither parameters
    to average nor data that stay with a client, and updating them would make the function impure.
    """
    takes_train = "train" in inspect.signature(type(module).__call__).parameters

    def flag(train: bool) -> dict[str, Any]:
        return {"train": train} if takes_train else {}

    def init(key: Key, x: Array) -> PyTree:
        variables = module.init(key, x, **flag(False))
        others = sorted(set(variables) - {"params"})
        if others:
            raise JaxpflError(
                f"{type(module).__name__} has the mutable collection {others[0]!r}: "
                "only 'params' is supported, use GroupNorm in place of BatchNorm"
            )
        return variables.get("params", {})

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        rngs = None if key is None else {"dropout": key}
        # Declared as output or (output, updates); without `mutable` it is the output alone.
        return cast(Array, module.apply({"params": params}, x, rngs=rngs, **flag(train)))

    return Model(init, apply, head, norm)


def as_model(model: Model | nn.Module) -> Model:
    """A model whose ``apply`` takes ``key`` and ``train``, from a linen module or a pair that may lack them."""
    if isinstance(model, nn.Module):
        return from_linen(model)
    parameters = inspect.signature(model.apply).parameters
    takes = {name for name in ("key", "train") if name in parameters}
    if len(takes) == 2 or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return model

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        given = {"key": key, "train": train}
        return model.apply(params, x, **{name: given[name] for name in takes})

    return model._replace(apply=apply)


def cross_entropy(logits: Array, y: Array) -> Array:
    """Cross-entropy ``-log softmax(logits)[y]`` per example: [N, K], [N] -> [N]."""
    # Labels as indices would make the gradient a scatter, which XLA compiles and runs slowly on a CPU.
    return optax.safe_softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1], dtype=logits.dtype))


def smoothed_cross_entropy(smoothing: float) -> PerExample:
    """Cross-entropy with label smoothing: the target of an example is ``(1 - s) one-hot + s / K``, s in [0, 1).

    Reference: Szegedy et al. 2016 (Rethinking the Inception architecture), section 7.
    """

    def loss(logits: Array, y: Array) -> Array:
        labels = jax.nn.one_hot(y, logits.shape[-1], dtype=logits.dtype)
        return optax.safe_softmax_cross_entropy(logits, optax.smooth_labels(labels, smoothing))

    return loss


def correct(logits: Array, y: Array) -> Array:
    """1.0 if the largest logit is the label's, else 0.0: [N, K], [N] -> [N]. Its mean is the accuracy.

    Logits that are not finite count as wrong: argmax of NaN is class 0, which would hide a diverged model.
    """
    right = (jnp.argmax(logits, axis=-1) == y) & jnp.isfinite(logits).all(axis=-1)
    return right.astype(logits.dtype)


CLASSIFICATION_METRICS: Mapping[str, PerExample] = {"accuracy": correct, "loss": cross_entropy}


class Task(NamedTuple):
    """A model with its loss and metrics, all per example so that the caller can apply masks and weights.

    Attributes:
      model: the `Model`.
      input_shape: the shape of one example's input.
      num_classes: K.
      loss: logits [N, K], labels [N] -> [N].
      metrics: name -> logits [N, K], labels [N] -> [N].
      input_dtype: the inputs' dtype, if not the default float (for tokens, say).
    """

    model: Model
    input_shape: tuple[int, ...]
    num_classes: int
    loss: PerExample = cross_entropy
    metrics: Mapping[str, PerExample] = CLASSIFICATION_METRICS
    input_dtype: Any = None

    def init(self, key: Key) -> PyTree:
        """Parameters for one client."""
        return self.model.init(key, jnp.zeros((1, *self.input_shape), self.input_dtype))


def classification(
    model: Model | nn.Module, input_shape: tuple[int, ...], num_classes: int, input_dtype: Any = None
) -> Task:
    """Softmax classification: cross-entropy loss; metrics "accuracy" and "loss".

    Raises:
      JaxpflError: if the model reads tokens and inputs are not integers.
    """
    task = Task(as_model(model), tuple(input_shape), num_classes, input_dtype=input_dtype)
    tokens = input_dtype is not None and jnp.issubdtype(input_dtype, jnp.integer)
    if task.model.vocabulary is not None and not tokens:
        raise JaxpflError("the model reads tokens, so inputs must be integers; those of this data set are not")
    return task
