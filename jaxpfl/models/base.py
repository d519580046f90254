"""Models as pairs of pure functions, and tasks, which add a loss and metrics to a model.

Models and tasks are static: they contain functions and shapes. Close over them instead of passing them to a jitted
function.

A batch has N examples. K is the number of classes, d the number of labels of an example, and T the number of positions
of a sequence.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxpfl.core import trees
from jaxpfl.core.trees import PathPredicate
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models import modules
from jaxpfl.models.metrics import (
    LOGISTIC,
    TOKEN_METRICS,
    Metric,
    Mixture,
    PerExample,
    absolute_error,
    auc,
    calibration_error,
    class_mixture,
    correct,
    cross_entropy,
    has_label,
    macro_f1,
    parse_loss,
    r2,
    right,
    rmse,
    token_divergence,
    token_loss,
)
from jaxpfl.support.errors import JaxpflError


class InitFn(Protocol):
    def __call__(self, key: Key, x: Array, /) -> PyTree: ...


class Statistics(NamedTuple):
    """Functions for a model's running statistics: arrays among its parameters that training updates without a gradient.

    Attributes:
      selects: predicate that is true for the paths of running statistics.
      observe: function ``(params, x, *, key, train=True, valid [N] bool) -> (logits, params)`` that computes the
        forward pass of a batch in training mode. The returned parameters have statistics that are updated from the
        batch's valid examples.
    """

    selects: PathPredicate
    observe: Callable[..., tuple[Array, PyTree]]

    def select(self, params: PyTree) -> PyTree:
        """Return the running statistics in a tree of parameters, with None for all other leaves."""
        return trees.split_by_path(params, self.selects)[0]

    def put(self, params: PyTree, statistics: PyTree) -> PyTree:
        """Replace the running statistics in a tree of parameters."""
        return trees.merge(statistics, trees.split_by_path(params, self.selects)[1])


class Model(NamedTuple):
    """A classifier (or regressor) as two pure functions; ``fit`` accepts any ``Model(init, apply)``.

    Attributes:
      init: function ``(key, x) -> params`` that draws parameters, using only the shape ``[N, *input_shape]`` and the
        dtype of x.
      apply: function ``(params, x, key=None, train=False) -> logits`` that predicts logits [N, num_classes]. `key` is
        for dropout. `as_model` adds the last two arguments to a function without them.
      head: predicate that is true for the paths of the personal head's parameters (FedPer, FedRep); None if the model
        defines no head.
      norm: predicate that is true for the paths of normalization layers' scales and biases (FedBN); None if the model
        defines no such layers.
      vocabulary: number of tokens if inputs are tokens 0 .. vocabulary - 1; None if they are real numbers.
      statistics: functions for running statistics (of batch normalization) among the parameters; None if the model
        cannot have running statistics. `apply` uses the running statistics, and raises an error if there are any and
        ``train`` is true.
    """

    init: InitFn
    apply: Callable[..., Array]
    head: PathPredicate | None = None
    norm: PathPredicate | None = None
    vocabulary: int | None = None
    statistics: Statistics | None = None

    def training(self, params: PyTree, x: Array, key: Key | None = None, train: bool = True) -> Array:
        """Return training-mode logits for a batch without padding, for models with or without running statistics."""
        if self.statistics is None or not jax.tree.leaves(self.statistics.select(params)):
            return self.apply(params, x, key=key, train=train)
        return self.statistics.observe(params, x, key=key, train=train, valid=jnp.ones(x.shape[0], bool))[0]


def from_linen(module: nn.Module, head: PathPredicate | None = None, norm: PathPredicate | None = None) -> Model:
    """Wrap a flax.linen module; ``params`` is the module's "params" collection.

    The argument `train` is passed to the module's ``__call__`` if ``__call__`` has an argument of this name. The key of
    `apply` becomes the "dropout" stream. The running statistics of ``flax.linen.BatchNorm`` become the entry
    "batch_stats" of ``params`` (`Model.statistics`). The head includes the running statistics of the head's layers.
    `Model.init` raises an error if the module has any other collection.
    """
    try:
        init, apply, observe = modules.linen_functions(module)
    except TypeError:  # the module has an attribute that cannot be hashed, so it cannot be cached
        init, apply, observe = modules.linen_functions.__wrapped__(module)

    def selects(path: tuple[str, ...]) -> bool:
        return path[:1] == (modules.STATISTICS,)

    def layer_head(path: tuple[str, ...]) -> bool:
        assert head is not None
        return head(path[1:] if selects(path) else path)

    return Model(init, apply, head and layer_head, norm, statistics=Statistics(selects, observe))


def from_nnx(module: Any, head: PathPredicate | None = None, norm: PathPredicate | None = None) -> Model:
    """Wrap a ``flax.nnx.Module``, or a function that makes one from ``nnx.Rngs``.

    A function draws new parameters for each seed. An instance already has parameters, and every run starts from these
    parameters, whatever its seed. Parameters are the ``nnx.Param`` variables, as nested dictionaries by attribute. In
    training with a key, the module is in the mode that ``module.train()`` sets; `train` is also passed to ``__call__``
    if this method has an argument `train`. All random streams derive from the key of `apply`.

    Example::

        jaxpfl.fit("fedavg", federation, model=jaxpfl.from_nnx(lambda rngs: LeNet(10, rngs=rngs)))

    Raises:
      JaxpflError: if the module has other variables, such as the running statistics of BatchNorm, or if no module is
        given or made.
    """
    return Model(*modules.nnx_functions(module), head, norm)


def from_equinox(module: Any, head: PathPredicate | None = None, norm: PathPredicate | None = None) -> Model:
    """Wrap an ``equinox.Module`` that takes a single example, or a function ``key -> equinox.Module``.

    Parameters are the module's float arrays, as nested dictionaries keyed by attribute name. As with `from_nnx`, if a
    function is given, each seed draws new parameters; if a module is given, every run starts from its parameters. The
    module is called with one example in the layout of the data (images are [H, W, C]), and with a `key` if it has an
    argument `key`.

    Raises:
      JaxpflError: if the module has state (BatchNorm), if no module is given or made, or if equinox is not installed.
    """
    return Model(*modules.equinox_functions(module), head, norm)


def module_adapter(value: Any) -> Callable[[Any], Model] | None:
    """Return the function that converts a module to a `Model`; None if the value is not a module of a known library."""
    if isinstance(value, nn.Module):
        return from_linen
    # If a library has not been imported, the value cannot be an instance of its classes, so there is no need to import
    # it.
    for library, adapter in (("flax.nnx", from_nnx), ("equinox", from_equinox)):
        module = getattr(sys.modules.get(library), "Module", None)
        if module is not None and isinstance(value, module):
            return adapter
    return None


def as_model(model: Any) -> Model:
    """Convert a module, or a pair of functions, to a model with an ``apply`` that accepts ``key`` and ``train``."""
    adapter = None if isinstance(model, Model) else module_adapter(model)
    if adapter is not None:
        return adapter(model)
    parameters = inspect.signature(model.apply).parameters
    takes = {name for name in ("key", "train") if name in parameters}
    if len(takes) == 2 or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return model

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        given = {"key": key, "train": train}
        return model.apply(params, x, **{name: given[name] for name in takes})

    return model._replace(apply=apply)


def smoothed_cross_entropy(smoothing: float) -> PerExample:
    """Return the cross-entropy with label smoothing.

    With K classes and s = ``smoothing``, in [0, 1), the target is ``(1 - s) one-hot + s / K``.

    Reference: Szegedy et al. 2016 (Rethinking the Inception architecture), section 7.
    """

    def loss(logits: Array, y: Array) -> Array:
        labels = jax.nn.one_hot(y, logits.shape[-1], dtype=logits.dtype)
        return optax.safe_softmax_cross_entropy(logits, optax.smooth_labels(labels, smoothing))

    return loss


CLASSIFICATION_METRICS: Mapping[str, PerExample] = {"accuracy": correct, "loss": cross_entropy}
CLASSIFICATION, NEXT_TOKEN = "classification", "next-token"


class Task(NamedTuple):
    """A model with a loss and metrics.

    The loss returns a value per example, so that callers can mask and weight the examples. A metric also returns a
    value per example, or it scores all examples of a client together; see `per_client`.

    Attributes:
      model: model whose predictions are scored.
      input_shape: shape of one example's input.
      num_classes: number of classes K, or number of values that the model returns per example.
      loss: function of predictions [N, K] (logits or values) and labels [N] (or [N, d]) that returns each example's
        loss, [N].
      metrics: metrics by name; a metric is a function like the loss, or the result of `per_client`.
      input_dtype: dtype of the inputs, such as int32 for tokens; None for the default float.
      kind: name of the kind of task: a key of `TASKS`, or your own. The labels of `CLASSIFICATION` are classes.
      headline: name of the main metric, for reports, for comparisons with local training, and for choosing settings.
      lower: whether lower values of the headline metric are better.
      divergence: function of a teacher's and a student's predictions, [N, K] each, that returns their distance for each
        example, [N]; used for distillation. If None, a classification uses the divergence of class probabilities, and
        other tasks do not support methods with distillation.
      mixture: function that computes the prediction of a mixture of models, for FedEM. If None, a classification uses
        the mixture of class probabilities, and other tasks do not support FedEM.
      counted: function of labels [N, T] that returns the mask of the positions with a label, [N, T] bool, if the model
        predicts at each position; None if the model makes one prediction per example.
    """

    model: Model
    input_shape: tuple[int, ...]
    num_classes: int
    loss: PerExample = cross_entropy
    metrics: Mapping[str, Metric] = CLASSIFICATION_METRICS
    input_dtype: Any = None
    kind: str = CLASSIFICATION
    headline: str = "accuracy"
    lower: bool = False
    divergence: PerExample | None = None
    mixture: Mixture | None = None
    counted: Callable[[Array], Array] | None = None

    def init(self, key: Key) -> PyTree:
        """Draw the parameters of one client."""
        return self.model.init(key, jnp.zeros((1, *self.input_shape), self.input_dtype))

    @property
    def statistics(self) -> Statistics | None:
        """Functions for the model's running statistics; None if the model has none."""
        found, wide = self.model.statistics, jax.dtypes.canonicalize_dtype(float).itemsize > 4
        if found is None:
            return None
        shapes = _shapes(self.model.init, self.input_shape, self.input_dtype, wide)
        paths = (trees.names(path) for path, _ in jax.tree.leaves_with_path(shapes))
        return found if any(map(found.selects, paths)) else None

    @property
    def has_classes(self) -> bool:
        """True for a classification, whose predictions are logits of classes."""
        return self.kind == CLASSIFICATION


@functools.lru_cache(maxsize=64)
def _shapes(init: InitFn, shape: tuple[int, ...], dtype: Any, wide: bool) -> PyTree:
    """Return the shapes of the model's parameters."""
    return jax.eval_shape(lambda key: init(key, jnp.zeros((1, *shape), dtype)), jax.random.key(0))


def classification(model: Any, input_shape: tuple[int, ...], num_classes: int, input_dtype: Any = None) -> Task:
    """Return the task of softmax classification, with the cross-entropy loss, and metrics "accuracy" and "loss".

    Args:
      model: a `Model`, or a module of flax.linen, flax.nnx or equinox.
      input_shape: shape of one example.
      num_classes: number of classes K.
      input_dtype: dtype of the inputs; None for the default float.

    Raises:
      JaxpflError: if the model reads tokens but inputs are not integers.
    """
    task = Task(as_model(model), tuple(input_shape), num_classes, input_dtype=input_dtype)
    tokens = input_dtype is not None and jnp.issubdtype(input_dtype, jnp.integer)
    if task.model.vocabulary is not None and not tokens:
        raise JaxpflError(f"inputs must be integers for a model of tokens, got dtype {input_dtype or 'float'}")
    return task


def regression_task(task: Task, loss: str | PerExample = "squared") -> Task:
    """Return the task of predicting real labels, with metrics "rmse" (the headline), "mae", "r2" and "loss".

    Args:
      task: task whose model returns one value per label of an example.
      loss: a name in `jaxpfl.models.metrics`, or a function of predictions and labels that returns a value per example.

    Raises:
      JaxpflError: if the loss is unknown.
    """
    found = parse_loss(loss)
    metrics = {"rmse": rmse(found.mean), "mae": absolute_error(found.mean), "r2": r2(found.mean)}
    return task._replace(
        loss=found.function,
        metrics=metrics | {"loss": found.function},
        kind="regression",
        headline="rmse",
        lower=True,
        divergence=found.divergence,
        mixture=found.mixture,
    )


def binary_task(task: Task) -> Task:
    """Return the task of predicting labels 0 and 1 with one logit.

    Its metrics are "accuracy" (the headline), "auc", "calibration_error" and "loss".
    """
    metrics = {"accuracy": right, "auc": auc, "calibration_error": calibration_error, "loss": LOGISTIC.function}
    return _logistic(task)._replace(metrics=metrics, kind="binary", headline="accuracy")


def ranking_task(task: Task) -> Task:
    """Return the task of ranking examples with label 1 above examples with label 0, with a single logit.

    Its metrics are "auc" (the headline) and "loss".

    The loss is the logistic loss of `binary_task`. The minimizer of this loss, the log-odds of label 1, has the largest
    AUC. Unlike a loss over pairs of examples, the logistic loss is a mean over examples, and is therefore defined even
    if a client or mini-batch has only one class.
    """
    return _logistic(task)._replace(metrics={"auc": auc, "loss": LOGISTIC.function}, kind="ranking", headline="auc")


def multilabel_task(task: Task) -> Task:
    """Return the task of predicting several binary labels, with one logit for each.

    Its metrics are "macro_f1" (the headline), "accuracy" and "loss".
    """
    metrics = {"macro_f1": macro_f1, "accuracy": right, "loss": LOGISTIC.function}
    return _logistic(task)._replace(metrics=metrics, kind="multilabel", headline="macro_f1")


def next_token_task(task: Task) -> Task:
    """Return the task of predicting a token at each position of a sequence.

    Its metrics are "accuracy" (the headline), "perplexity" and "loss", over the positions with a label
    (`metrics.token_loss`).
    """
    return task._replace(
        loss=token_loss,
        metrics=TOKEN_METRICS,
        kind=NEXT_TOKEN,
        headline="accuracy",
        lower=False,
        divergence=token_divergence,
        mixture=class_mixture,
        counted=has_label,
    )


def _logistic(task: Task) -> Task:
    loss = LOGISTIC
    return task._replace(loss=loss.function, lower=False, divergence=loss.divergence, mixture=loss.mixture)


TASKS: Mapping[str, Callable[[Task], Task]] = {
    CLASSIFICATION: lambda task: task,
    "regression": regression_task,
    "binary": binary_task,
    "multilabel": multilabel_task,
    NEXT_TOKEN: next_token_task,
    "ranking": ranking_task,
}
"""Registered tasks: name -> function that converts a classification task to this task, with the same model."""


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by path, such as ``dense0/kernel``; the path of a single array is ``parameters``.

    A dictionary by path is returned unchanged, so that a tree and its stored form can be compared.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") or "parameters": leaf for path, leaf in leaves}


def start_from(task: Task, parameters: PyTree) -> Task:
    """Return the task with a `Task.init` that returns the given parameters for every key.

    Args:
      task: any task.
      parameters: a tree like the parameters of the task's model, or a dictionary of arrays by path.

    Raises:
      JaxpflError: if a parameter is missing or unknown, has a different shape, or contains a value that is not a finite
        number; the message names the first such parameter.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    wanted, given = leaves_by_path(shapes), leaves_by_path(parameters)
    values = {}
    for path in wanted | given:
        here, there = (f"{np.shape(d[path])}" if path in d else "absent" for d in (given, wanted))
        if here != there:
            raise JaxpflError(f"the given parameters do not fit the model: {path!r} must be {there}, got {here}")
        value = np.asarray(given[path])
        if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
            raise JaxpflError(f"the given parameters must be numbers, got {value.dtype} for {path!r}")
        with np.errstate(over="ignore"):  # values that overflow become infinite, and are refused below
            values[path] = value.astype(wanted[path].dtype)
        if not np.isfinite(values[path]).all():
            raise JaxpflError(f"the given parameters must be finite, got a NaN or infinite value in {path!r}")
    tree = jax.tree.unflatten(jax.tree.structure(shapes), list(values.values()))
    return task._replace(model=task.model._replace(init=lambda key, x: jax.tree.map(jnp.asarray, tree)))


@dataclass(frozen=True)
class Affine:
    """`Model.apply` of a linear model with parameters {"head": {"kernel": [F, K], "bias": [K]}}, on flattened inputs.

    Attributes:
      plain: the function that computes the predictions, with the four arguments of `Model.apply`.
    """

    plain: Callable[..., Array]

    def __call__(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        return self.plain(params, x, key=key, train=train)


@dataclass(frozen=True)
class Half:
    """`Model.apply` in bfloat16: parameters and inputs are rounded, and logits get the parameters' dtype again.

    Gradients pass through the rounding unchanged, and have the parameters' dtype. Optimizer steps, sums, clipping and
    noise are computed in the parameters' dtype.

    Attributes:
      plain: the original function, with the four arguments of `Model.apply`.
    """

    plain: Callable[..., Array]

    def __call__(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        wide = jnp.result_type(*leaves) if leaves else jnp.result_type(float)
        return self.plain(*jax.tree.map(_rounded, (params, x)), key=key, train=train).astype(wide)


def in_bfloat16(task: Task) -> Task:
    """Return the task with the model in `Half` precision; loss and metrics receive logits in the parameters' dtype.

    Raises:
      JaxpflError: if the model has running statistics, whose small updates would be rounded away.
    """
    if task.statistics is not None:
        raise JaxpflError(
            "precision must be float32 with running statistics (BatchNorm), got bfloat16, which loses small updates"
        )
    return task._replace(model=task.model._replace(apply=Half(task.model.apply)))


def _rounded(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf
