"""The task of a run, made from its settings, and checks that labels and model suit the task."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import jax
import numpy as np

from jaxpfl import models
from jaxpfl.core.settings import check_kind
from jaxpfl.core.types import NO_LABEL, ClientData, Federation, Store
from jaxpfl.data.labels import are_classes, digit_loss
from jaxpfl.engine import programs
from jaxpfl.engine.spec import MODEL, RunSpec
from jaxpfl.models import TASKS, PerClient, Pooled, Task, rewriting
from jaxpfl.models import metrics as task_metrics
from jaxpfl.models.base import (
    CLASSIFICATION,
    NEXT_TOKEN,
    Given,
    in_bfloat16,
    regression_task,
    smoothed_cross_entropy,
    start_from,
)
from jaxpfl.models.rewriting import Layer
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown, unknown_name, warn

_ONE_LABEL = "binary", "ranking"
ZERO_OR_ONE = (*_ONE_LABEL, "multilabel")
"""Tasks whose labels are zeros and ones."""


def task_of(spec: RunSpec, federation: Federation, unseen: Federation | None = None) -> Task:
    """Make the task of a run: the model with its loss, its metrics and the given initial parameters, if any.

    Raises:
      JaxpflError: if a label exceeds the number of classes or does not suit the task, if the loss does not apply to the
        task, if the model cannot read the inputs, or if the initial parameters do not fit the model.
    """
    kind = kind_of(spec, federation)
    given, outputs = spec.task, outputs_of(kind, spec, federation, unseen)
    model = given.model if isinstance(given, Task) else spec.model
    task = make_task(model, federation, outputs, unseen=unseen, every=kind == NEXT_TOKEN)
    if isinstance(given, Task):
        if given.input_shape != task.input_shape:
            raise JaxpflError(f"the task has input shape {given.input_shape}, but the data have {task.input_shape}")
        task = given._replace(model=task.model, input_dtype=task.input_dtype)
    if not isinstance(model, str):
        check_outputs(task, kind, outputs, federation.train.examples.y)
    task = on_model(kind, spec, task)
    if not isinstance(model, str) and spec.plan.convolutions != "plain":
        slow = [f"{layer.name} ({layer.what}): {layer.why_not}" for layer in layers_of(task) if layer.why_not]
        if slow:
            warn(f"the model has slow layers, which cannot run as matrix products: {'; '.join(slow)}")
    if spec.plan.precision == "bfloat16":
        task = in_bfloat16(task)
    init = task.model.init
    if isinstance(init, Given) and len(set(spec.seeds)) > 1 and spec.warm_start is None:
        warn(
            f"every seed starts from the parameters of the given {init.name}: to draw new parameters for each seed, "
            "give from_nnx or from_equinox a function that makes the module"
        )
    return task if spec.warm_start is None else start_from(task, spec.warm_start)


def make_task(
    model: Any, federation: Federation, num_classes: int, *, unseen: Federation | None = None, every: bool = False
) -> Task:
    """Make the classification task of a federation, for a registered model or a user's own model.

    Args:
      model: name of a registered model, or the user's model.
      federation: data of the clients.
      num_classes: number of classes.
      unseen: clients that are never trained; their tokens must be in the model's vocabulary too.
      every: whether a registered model predicts at each position of a sequence.

    Raises:
      JaxpflError: if the model cannot read the inputs, for example tokens outside its vocabulary.
    """
    shape = federation.input_shape
    if isinstance(model, FunctionType | type):
        try:
            model = model() if isinstance(model, type) else model(num_classes, shape)
        except TypeError as error:
            raise JaxpflError(f"cannot make the model ({error}): give a function (num_outputs, input_shape)") from error
        check_kind("the result of the model's function", model, MODEL)
    built = models.build_model(model, num_classes, shape, every=every) if isinstance(model, str) else model
    dtype = federation.train.examples.x.dtype
    # Floating-point inputs get JAX's default dtype (float64 with x64 enabled); integer tokens keep their dtype.
    task = models.classification(built, shape, num_classes, dtype if np.issubdtype(dtype, np.integer) else None)
    if task.model.vocabulary is not None:
        parts = [part for part in (federation, unseen) if part is not None]
        tokens = [split.flat().x for part in parts for split in part.all_splits]
        low, high = min(int(x.min(initial=0)) for x in tokens), max(int(x.max(initial=0)) for x in tokens)
        if low < 0:
            raise JaxpflError(f"token ids must be at least 0, but the data contain {low}")
        if high >= task.model.vocabulary:
            raise JaxpflError(
                f"the model accepts token ids from 0 to {task.model.vocabulary - 1}, but the data contain {high}: "
                "use a model with a larger vocabulary, or set num_classes"
            )
    if isinstance(model, str) or all(layer.why_not for layer in layers_of(task)):
        return task
    exchanged = task.model._replace(apply=rewriting.Exchanged(task.model.apply))
    if exchanged.statistics is not None:
        observe = rewriting.Exchanged(exchanged.statistics.observe)
        exchanged = exchanged._replace(statistics=exchanged.statistics._replace(observe=observe))
    return task._replace(model=exchanged)


def layers_of(task: Task) -> tuple[Layer, ...]:
    """Convolutions and pools in the user's own model. `Layer.why_not` says why a layer cannot be a matrix product."""
    model, apply = task.model, task.model.apply
    if isinstance(apply, rewriting.Exchanged):
        apply = apply.plain
    if task.statistics is not None:
        observe = task.statistics.observe
        observe = observe.plain if isinstance(observe, rewriting.Exchanged) else observe
        apply = model._replace(statistics=task.statistics._replace(observe=observe)).training
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    x = jax.ShapeDtypeStruct((1, *task.input_shape), jax.dtypes.canonicalize_dtype(task.input_dtype or float))
    given = apply, programs.shapes(task.init, jax.random.key(0)), x, key
    return programs.cached(programs.key_of("layers", *given), lambda: rewriting.layers(*given))


def kind_of(spec: RunSpec, federation: Federation) -> str:
    """Name of a run's task; classification by default.

    Raises:
      JaxpflError: if the name is unknown, or if the task is a classification and the labels are not classes.
    """
    task = spec.task
    if isinstance(task, Task):
        return task.kind
    if task is not None and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    y = federation.train.examples.y
    if task in (None, CLASSIFICATION) and not are_classes(y):
        found = "several for each example" if y.ndim > 1 else f"{y.dtype}"
        fitting = "regression" if np.issubdtype(y.dtype, np.floating) else "multilabel, regression or next-token"
        raise JaxpflError(
            f"labels are {found}, but classification requires integers [n]: choose another task, such as {fitting}"
        )
    return task or CLASSIFICATION


def outputs_of(kind: str, spec: RunSpec, federation: Federation, unseen: Federation | None) -> int:
    """Number of values that the model must return for an example.

    This is the number of classes for a classification task, the number of tokens for next-token prediction, and the
    number of an example's labels for other tasks.

    Raises:
      JaxpflError: if a label exceeds the number of classes or does not suit the task.
    """
    parts = [part for part in (federation, unseen) if part is not None]
    examples = [split.flat() for part in parts for split in part.all_splits]
    labels = [part.y for part in examples]
    of_first = federation.train.examples.y.shape[1:]
    stated = spec.task.num_classes if isinstance(spec.task, Task) else spec.num_classes
    for y in labels:
        if (found := y.shape[1:]) != of_first:
            raise JaxpflError(f"labels of all splits and unseen clients must have the shape {of_first}, got {found}")
    if kind == CLASSIFICATION:
        _check(labels, lambda y: y >= 0, "labels of the task 'classification' must be >= 0")
        largest = max(int(y.max(initial=0)) for y in labels)
        classes = largest + 1 if stated is None else stated
        if classes <= largest:
            raise JaxpflError(f"num_classes must be greater than the largest label ({largest}), got {classes}")
        return classes
    if kind == NEXT_TOKEN:
        return _tokens(stated, federation, examples)
    if kind in _ONE_LABEL and of_first:
        raise JaxpflError(f"labels of {kind!r} must be [n], got {of_first[0]} for each example: use 'multilabel'")
    if kind == "multilabel" and not of_first:
        raise JaxpflError("labels of 'multilabel' must be [n, labels], got [n]: use 'binary'")
    if kind in ZERO_OR_ONE:
        _check(labels, lambda y: (y == 0) | (y == 1), f"labels of the task {kind!r} must be 0 or 1")
    if kind == "ranking" and not has_pairs(federation.test):
        raise JaxpflError("AUC is undefined: the task 'ranking' requires a client with test examples of both classes")
    if kind == "regression" and str(spec.loss).startswith("poisson"):
        _check(labels, lambda y: y >= 0, "labels of the loss 'poisson' must be >= 0")
    if kind == "regression" and (lost := digit_loss(federation.train.examples.y)) is not None:
        warn(f"labels: {lost}: subtract an offset from them")
    return of_first[0] if of_first else 1


def _tokens(stated: int | None, federation: Federation, examples: list[Store]) -> int:
    """Size of the vocabulary that inputs and labels of next-token prediction share."""
    y, shape, labels = federation.train.examples.y, federation.input_shape, [part.y for part in examples]
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 2 or tuple(shape)[:1] != y.shape[1:]:
        raise JaxpflError(
            f"labels of the task 'next-token' must be integers [n, T], one for each input token (-1 for none), "
            f"got {y.dtype} {list(y.shape)} for inputs {['n', *shape]}"
        )
    _check(labels, lambda y: y >= NO_LABEL, "labels of the task 'next-token' must be tokens, or -1 for none")
    largest = max(int(y.max(initial=0)) for y in labels)
    if stated is None:
        read = np.issubdtype(federation.train.examples.x.dtype, np.integer)
        tokens = max(int(part.x.max(initial=0)) for part in examples) if read else 0
        return max(largest, tokens) + 1
    if largest >= stated:
        raise JaxpflError(
            f"num_classes (the number of tokens) must be greater than the largest label ({largest}), got {stated}"
        )
    return stated


def check_outputs(task: Task, kind: str, outputs: int, y: np.ndarray) -> None:
    """Check the shape of a user model's predictions, and warn if there are more outputs than classes.

    Args:
      task: any task with the model.
      kind: result of `kind_of`. For a kind that is not in `TASKS`, nothing is checked, because the number of outputs is
        unknown.
      outputs: result of `outputs_of`.
      y: labels of any split, [N] or [N, d].

    Raises:
      JaxpflError: if the model returns fewer outputs than there are classes or tokens, or if its number of outputs
        differs from the number of an example's labels.
    """
    if kind not in TASKS:
        return
    n = 2  # with one example, a model that returns [K, n] instead of [n, K] could be overlooked
    x = jax.ShapeDtypeStruct((n, *task.input_shape), jax.dtypes.canonicalize_dtype(task.input_dtype or float))
    output = programs.shapes(task.model.apply, programs.shapes(task.init, jax.random.key(0)), x)
    if not (hasattr(output, "dtype") and np.issubdtype(output.dtype, np.floating)):
        what = getattr(output, "dtype", type(output).__name__)
        raise JaxpflError(f"the model must return one array of real numbers for n examples, got a {what}")
    found = output.shape
    returns = f"the model returns {_shape(n, found)} for n examples"
    if kind not in (CLASSIFICATION, NEXT_TOKEN):
        if found[:1] != (n,) or math.prod(found) != n * outputs:
            raise JaxpflError(
                f"{returns}, but {kind!r} with labels {_shape(n, (n, *y.shape[1:]))} requires {outputs} per example"
            )
        return
    rows, what = ((n,), "classes") if kind == CLASSIFICATION else ((n, *y.shape[1:]), "vocabulary entries")
    if found[:-1] != rows or found[-1] < outputs:
        one = ", or task = binary for one logit" if kind == CLASSIFICATION and outputs == 2 else ""
        raise JaxpflError(f"{returns}, but {outputs} {what} require {_shape(n, (*rows, outputs))}{one}")
    if found[-1] > outputs:
        warn(f"{returns}, but the data have {outputs} {what}: set num_classes = {found[-1]} if there are more")


def _shape(n: int, shape: tuple[int, ...]) -> str:
    """A shape as text, with n for the number of examples."""
    return f"[{', '.join('n' if not i and size == n else str(size) for i, size in enumerate(shape))}]"


def on_model(kind: str, spec: RunSpec, task: Task) -> Task:
    """Turn a classification task into the run's task, with the run's loss and the user's metrics.

    Raises:
      JaxpflError: if the loss does not apply to the task; if ``label_smoothing`` is combined with another task than
        classification or with a given loss; if a metric is not a function or has the name of one of the task's metrics;
        or if the headline is not among the metrics.
    """
    loss, smoothing = spec.loss, spec.label_smoothing
    if isinstance(loss, str) and kind != "regression":
        raise JaxpflError(f"loss = {loss} requires task = regression, got {kind}")
    if smoothing and kind != CLASSIFICATION:
        raise JaxpflError(f"label_smoothing = {smoothing:g} requires task = classification, got {kind}")
    if smoothing and loss is not None:
        raise JaxpflError("label_smoothing applies only to the cross-entropy: leave it out, or leave out loss")
    if kind == "regression":
        task = regression_task(task, "squared" if loss is None else loss)
    elif kind in TASKS and not isinstance(spec.task, Task):
        task = TASKS[kind](task)
    if callable(loss) and kind != "regression":
        task = task._replace(loss=loss, metrics={**task.metrics, "loss": loss}, mixture=None)
    if smoothing:
        task = task._replace(loss=smoothed_cross_entropy(smoothing))
    own, added = list(task.metrics), {}
    for name, metric in task_metrics.parse_metrics(spec.metrics).items():
        if isinstance(metric, str):
            if name == metric and name in task.metrics:  # naming a metric that the task already has is not an error
                continue
            metric = task.metrics.get(metric) or task_metrics.task_metric(metric, task.kind, own)
        if name in task.metrics or name == "diverged":
            raise JaxpflError(f"the task already has a metric {name!r}: give yours another name")
        if not isinstance(metric, PerClient | Pooled) and not callable(metric):
            raise JaxpflError(f"the metric {name!r} must be a function of predictions and labels, got {shown(metric)}")
        added[name] = metric
    if task.headline not in task.metrics:
        raise JaxpflError(
            f"Task.headline is {task.headline!r}, which is not among its metrics: {', '.join(task.metrics) or 'none'}"
        )
    return task._replace(metrics={**task.metrics, **added}) if added else task


def has_pairs(data: ClientData) -> bool:
    """True if at least one client has examples with label 0 and examples with label 1."""
    ends = np.cumsum(np.asarray(data.size, np.int64))
    ones = np.append(0, np.cumsum(np.asarray(data.flat().y, np.int64)))
    of_client = ones[ends] - ones[ends - data.size]
    return bool(((of_client > 0) & (of_client < data.size)).any())


def _check(labels: list[np.ndarray], fits: Any, words: str) -> None:
    for y in labels:
        for part in host_memory.iterate(y):
            good = fits(part)
            if not good.all():
                raise JaxpflError(f"{words}, got {part[~good].reshape(-1)[0]:g}")
