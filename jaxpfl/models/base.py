"""Models as pairs of pure functions, and tasks, which add a loss and metrics to a model.

Models and tasks are static: they contain functions and shapes. Close over them instead of passing them to a jitted
function.

A batch has N examples. K is the number of classes, d the number of labels of an example, and T the number of positions
of a sequence.

The functions at the end convert flax.linen, flax.nnx and equinox modules. Only flax.linen modules can have running
statistics of batch normalization. The statistics are part of the parameters: ``batch_stats/PATH/mean`` and
``batch_stats/PATH/var`` for the layer at PATH. Every method that averages, sends or stores a model therefore includes
the statistics. Statistics have no gradient. In training, a batch is normalized by its own mean and variance, and the
forward pass returns running statistics that are updated toward the batch's statistics. Padded examples have no effect.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from jaxpfl.core import trees
from jaxpfl.core.trees import PathPredicate
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.models.layers import BatchNorm
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
from jaxpfl.support.errors import JaxpflError, missing_extra, shown


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
        init, apply, observe = linen_functions(module)
    except TypeError:  # the module has an attribute that cannot be hashed, so it cannot be cached
        init, apply, observe = linen_functions.__wrapped__(module)

    def selects(path: tuple[str, ...]) -> bool:
        return path[:1] == (STATISTICS,)

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
    return Model(*nnx_functions(module), head, norm)


def from_equinox(module: Any, head: PathPredicate | None = None, norm: PathPredicate | None = None) -> Model:
    """Wrap an ``equinox.Module`` that takes a single example, or a function ``key -> equinox.Module``.

    Parameters are the module's float arrays, as nested dictionaries keyed by attribute name. As with `from_nnx`, if a
    function is given, each seed draws new parameters; if a module is given, every run starts from its parameters. The
    module is called with one example in the layout of the data (images are [H, W, C]), and with a `key` if it has an
    argument `key`.

    Raises:
      JaxpflError: if the module has state (BatchNorm), if no module is given or made, or if equinox is not installed.
    """
    return Model(*equinox_functions(module), head, norm)


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


STATISTICS = "batch_stats"
"""Name of flax's collection of running statistics, and of the statistics' entry in the parameters."""


LinenFunctions: TypeAlias = tuple[Callable[..., PyTree], Callable[..., Array], Callable[..., tuple[Array, PyTree]]]
"""Functions of a module: ``init`` and ``apply`` as in `Model`, and ``observe`` as in `Statistics`."""


@functools.lru_cache(maxsize=64)
def linen_functions(module: nn.Module) -> LinenFunctions:
    """Return the functions of a module. They pass ``train`` to the module's ``__call__`` if it has this argument.

    Equal modules get the same functions, so that compiled programs are reused. Layers of ``flax.linen.BatchNorm`` whose
    mode is not set use the running averages outside of training.
    """
    name = type(module).__name__
    takes_train = "train" in inspect.signature(type(module).__call__).parameters

    def run(call: Callable[..., Any], train: bool, valid: Array | None, found: set[tuple[str, ...]]) -> Any:
        with nn.intercept_methods(functools.partial(_pass_mask, name, train, valid, found)):
            return call(**({"train": train} if takes_train else {}))

    def init(key: Key, x: Array) -> PyTree:
        layers: set[tuple[str, ...]] = set()
        variables = run(lambda **flag: module.init(key, x, **flag), False, None, layers)
        others = sorted(set(variables) - {"params", STATISTICS})
        if others:
            raise JaxpflError(
                f"{name} must have no mutable collections other than 'params' and BatchNorm's 'batch_stats', got "
                f"{others[0]!r}"
            )
        params, statistics = variables.get("params", {}), variables.get(STATISTICS, {})
        if not statistics:
            return params
        if STATISTICS in params:
            raise JaxpflError(f"{name} must not have a parameter named {STATISTICS!r}: rename it")
        for path, _ in jax.tree.leaves_with_path(statistics):
            names = _names(path)
            if names[:-1] not in layers:
                raise JaxpflError(
                    f"{name} has the running statistic {'/'.join(names)!r}, whose layer is not a flax.linen.BatchNorm, "
                    "so that padded examples would change it: use GroupNorm"
                )
        # Convert the statistics to the parameters' default float dtype, because flax always makes them float32.
        return {**params, STATISTICS: jax.tree.map(lambda a: a.astype(jnp.result_type(float)), statistics)}

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        variables = _variables(params)
        if train and STATISTICS in variables:
            raise JaxpflError(
                f"{name} has running statistics (BatchNorm), which this training would not update: use GroupNorm, or a "
                "method that updates them, such as fedbn or fedavg"
            )
        rngs = None if key is None else {"dropout": key}
        # flax declares the result as output or (output, updates); without `mutable` it is only the output.
        return cast(Array, run(lambda **flag: module.apply(variables, x, rngs=rngs, **flag), train, None, set()))

    def observe(params: PyTree, x: Array, *, key: Key | None = None, train: bool = True, valid: Array) -> Any:
        rngs, variables = None if key is None else {"dropout": key}, _variables(params)
        anybody = valid.any()
        # In a batch without valid examples, use all slots to avoid 0/0, and keep the old statistics.
        used = valid | ~anybody

        def forward(**flag: Any) -> Any:
            return module.apply(variables, x, rngs=rngs, mutable=[STATISTICS], **flag)

        logits, updates = run(forward, train, used, set())

        def update(old: Array, new: Array) -> Array:
            return jnp.where(anybody, new.astype(old.dtype), old)

        statistics = jax.tree.map(update, params[STATISTICS], updates[STATISTICS])
        return logits, {**params, STATISTICS: jax.lax.stop_gradient(statistics)}

    return init, apply, observe


def _variables(params: PyTree) -> dict[str, PyTree]:
    """Return the collections of a flax.linen module."""
    if not isinstance(params, dict) or STATISTICS not in params:
        return {"params": params}
    rest = {name: part for name, part in params.items() if name != STATISTICS}
    return {"params": rest, STATISTICS: jax.tree.map_with_path(_usable, params[STATISTICS])}


def _usable(path: Any, leaf: Array) -> Array:
    """Clip a variance at zero, because compressed or extrapolated updates can make it negative."""
    return jnp.maximum(leaf, 0) if jax.tree_util.keystr(path[-1:], simple=True) == "var" else leaf


def _pass_mask(
    name: str,
    train: bool,
    valid: Array | None,
    found: set[tuple[str, ...]],
    call: Any,
    args: Any,
    kwargs: Any,
    context: Any,
) -> Any:
    """Intercept the calls of batch normalization layers, to pass the mask of real examples and the mode."""
    layer = context.module
    if context.method_name != "__call__" or not isinstance(layer, nn.BatchNorm | BatchNorm):
        return call(*args, **kwargs)
    found.add(tuple(layer.path))
    bound = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs)
    bound.apply_defaults()
    x, given, mask = (bound.arguments[key] for key in ("x", "use_running_average", "mask"))
    at = "/".join(layer.path)
    own = layer.use_running_average if given is None else given
    running = not train if own is None else own
    if not train and not running:
        raise JaxpflError(f"{name}/{at} normalizes by batches in evaluation: set use_running_average = not train")
    if valid is not None:
        mask = _mask(name, at, layer, x, valid, mask)
    told = None if layer.use_running_average is not None else running
    return call(x, use_running_average=told, mask=mask)


def _mask(name: str, at: str, layer: Any, x: Array, valid: Array, mask: Array | None) -> Array:
    """Combine the mask of valid examples and the layer's own mask into one mask over the entries of x."""
    if isinstance(layer, BatchNorm):
        axis = x.ndim - 1
    else:
        axis, features = 0, layer.axis if isinstance(layer.axis, tuple | list) else (layer.axis,)
        if getattr(layer, "axis_name", None) is not None:
            raise JaxpflError(
                f"{name}/{at} must not have an axis_name, got {layer.axis_name}: every client normalizes alone"
            )
        if any(one % x.ndim == 0 for one in features):
            raise JaxpflError(f"{name}/{at} must not normalize over the examples' axis, got axis = {layer.axis}")
    if x.shape[axis] != len(valid):
        raise JaxpflError(
            f"{name}/{at} must get one row per example, so that padding has no effect, got {x.shape[axis]} rows for "
            f"{len(valid)} examples"
        )
    shape = [1] * x.ndim
    shape[axis] = -1
    of_examples = valid.reshape(shape)
    return of_examples if mask is None else of_examples & mask


def nnx_functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """Return ``init`` and ``apply`` for an ``nnx.Module``, or for a function ``rngs -> nnx.Module``.

    Raises:
      JaxpflError: if there are variables other than parameters and random streams (such as running statistics or
        caches), or if no module is given or made.
    """
    from flax import nnx

    def split_module(module: Any) -> tuple[Any, Mapping[Any, Any], Any]:
        """Return the structure, the parameters by path, and the random streams of a module."""
        structure, params, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
        for path, variable in nnx.to_flat_state(others):
            raise JaxpflError(
                f"{type(module).__name__} must have only variables of type nnx.Param, got {type(variable).__name__} "
                f"{'/'.join(map(str, path))!r}: use GroupNorm in place of BatchNorm"
            )
        return structure, dict(nnx.to_flat_state(params)), streams

    instance = isinstance(made, nnx.Module)
    example: Any = made if instance else nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    if not isinstance(example, nnx.Module):
        raise JaxpflError(f"from_nnx takes an nnx.Module or a function of rngs that makes one, got {shown(made)}")
    name = type(example).__name__
    example = nnx.clone(example)
    structures = {}
    for train in (False, True):
        example.train() if train else example.eval()  # sets attributes of layers such as dropout, which are not arrays
        structures[train], variables, streams = split_module(example)
    paths = list(variables)
    kinds = {path: jax.tree.structure(variable) for path, variable in variables.items()}
    of_streams, leaves = jax.tree.structure(streams), jax.tree.leaves(streams)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    takes_train = "train" in inspect.signature(type(example).__call__).parameters

    def parameters(found: Mapping[Any, Any]) -> PyTree:
        return nested({path: jnp.asarray(variable.get_value()) for path, variable in found.items()})

    def init(key: Key, x: Array) -> PyTree:
        return parameters(split_module(made(nnx.Rngs(key)))[1])

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        # Make a new module for each call, because nnx does not allow one trace to change a counter of another trace.
        state = nnx.from_flat_state({path: jax.tree.unflatten(kinds[path], [value_at(params, path)]) for path in paths})
        source = jax.random.key(0) if key is None else key
        values = [
            jax.random.fold_in(source, i) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        # Without a key there must be no randomness, so the module is in evaluation mode.
        module = nnx.merge(structures[train and key is not None], state, jax.tree.unflatten(of_streams, values))
        return module(x, train=train) if takes_train else module(x)

    return (Given(name, parameters(dict(split_module(made)[1]))) if instance else init), apply


def equinox_functions(made: Any) -> tuple[Callable[..., PyTree], Callable[..., Array]]:
    """Return ``init`` and ``apply`` for an ``equinox.Module``, or for a function ``key -> equinox.Module``.

    Parameters are the module's float arrays. As usual in equinox, the module is applied to one example at a time; if
    the module has an argument `key`, each example gets a separate key.

    Raises:
      JaxpflError: if the module has state (running statistics), if no module is given or made, or if equinox is not
        installed.
    """
    try:
        import equinox as eqx
    except ImportError:
        raise missing_extra("from_equinox", "equinox", "equinox") from None

    instance = isinstance(made, eqx.Module)
    example: Any = made if instance else eqx.filter_eval_shape(made, jax.random.key(0))
    if not isinstance(example, eqx.Module):
        raise JaxpflError(
            f"from_equinox takes an equinox.Module or a function of a key that makes one, got {shown(made)}"
        )
    name = type(example).__name__

    def is_state(leaf: Any) -> bool:
        return isinstance(leaf, eqx.nn.StateIndex)

    if any(map(is_state, jax.tree.leaves(example, is_leaf=is_state))):
        raise JaxpflError(f"{name} must not have state (equinox.nn.StateIndex): use GroupNorm in place of BatchNorm")

    def is_parameter(leaf: Any) -> bool:
        return eqx.is_inexact_array(leaf) or (
            isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        )

    variables, rest = eqx.partition(example, is_parameter)
    for path, leaf in jax.tree.leaves_with_path(rest):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise JaxpflError(
                f"{name}{jax.tree_util.keystr(path)} is an array of {leaf.dtype}, which cannot be a parameter: pass an "
                "instance of the module instead of a function"
            )
    paths = [_names(path) for path, _ in jax.tree.leaves_with_path(variables)]
    structure = jax.tree.structure(variables)
    at_rest = {train: eqx.nn.inference_mode(rest, value=not train) for train in (False, True)}
    takes_key = "key" in inspect.signature(type(example).__call__).parameters

    def parameters(module: Any) -> PyTree:
        arrays = jax.tree.leaves(eqx.filter(module, eqx.is_inexact_array))
        return nested(dict(zip(paths, arrays, strict=True)))

    def init(key: Key, x: Array) -> PyTree:
        return parameters(made(key))

    def apply(params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        leaves = [value_at(params, path) for path in paths]
        # Without a key there must be no randomness, so the module is in inference mode.
        module: Any = eqx.combine(jax.tree.unflatten(structure, leaves), at_rest[train and key is not None])
        if not takes_key or key is None:
            return jax.vmap(module)(x)
        return jax.vmap(lambda one, key: module(one, key=key))(x, jax.random.split(key, x.shape[0]))

    return (Given(name, parameters(made)) if instance else init), apply


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((part,), simple=True) for part in path)


class Given:
    """Function `Model.init` for a module that already has parameters; it returns these parameters for every key.

    Attributes:
      name: name of the module's class.
      parameters: nested dictionaries of arrays.
    """

    def __init__(self, name: str, parameters: PyTree):
        self.name, self.parameters = name, parameters

    def __call__(self, key: Key, x: Any) -> PyTree:
        return jax.tree.map(jnp.asarray, self.parameters)


def nested(values: Mapping[Iterable[Any], Any]) -> PyTree:
    """Build nested dictionaries from values by path.

    Examples:
      >>> nested({("conv", "kernel"): 1, ("layers", 0): 2})
      {'conv': {'kernel': 1}, 'layers': {'0': 2}}
    """
    return unflatten_dict({tuple(map(str, path)): value for path, value in values.items()})


def value_at(tree: PyTree, path: Iterable[Any]) -> Any:
    """Return the value at a path in the result of `nested`."""
    return functools.reduce(lambda node, name: node[str(name)], path, tree)
