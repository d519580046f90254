"""Tasks of a run: the named or given task on the model, and checks of the labels against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpfl.core.types import NO_LABEL, ClientData, Examples, Federation
from jaxpfl.data.labels import are_classes, lost_digits
from jaxpfl.engine import compiled
from jaxpfl.engine.spec import RunSpec
from jaxpfl.models import TASKS, PerClient, Pooled, Task, metrics
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN, as_regression, smoothed_cross_entropy
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown, unknown_name, warn

_ONE_LABEL, _ZERO_OR_ONE = ("binary", "ranking"), ("binary", "multilabel", "ranking")


def kind_of(spec: RunSpec, federation: Federation) -> str:
    """Name of the task of a run; a classification unless the run says otherwise.

    Raises:
      JaxpflError: for an unknown name, and labels that are no classes without one.
    """
    task = spec.training.task
    if isinstance(task, Task):
        return task.kind
    if task is not None and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    y = federation.train.examples.y
    if task in (None, CLASSIFICATION) and not are_classes(y):
        found = "several for each example" if y.ndim > 1 else f"{y.dtype}"
        fitting = "regression" if np.issubdtype(y.dtype, np.floating) else "multilabel, regression or next-token"
        raise JaxpflError(
            f"labels are {found}, and those of a classification integers [n]: name the task, such as {fitting}"
        )
    return task or CLASSIFICATION


def outputs_of(kind: str, spec: RunSpec, federation: Federation, unseen: Federation | None) -> int:
    """Number of values that the model returns for an example: classes, or labels of one example.

    Raises:
      JaxpflError: for labels beyond the classes, or that are not those of the task.
    """
    examples = list(_examples(federation, unseen))
    labels = [part.y for part in examples]
    of_first = federation.train.examples.y.shape[1:]
    stated = spec.training.task.num_classes if isinstance(spec.training.task, Task) else spec.num_classes
    for y in labels:
        if (found := y.shape[1:]) != of_first:
            raise JaxpflError(f"every split's and unseen clients' labels must be of shape {of_first}, got {found}")
    if kind == CLASSIFICATION:
        _check(labels, lambda y: y >= 0, "labels of the task classification must be >= 0")
        largest = max(int(y.max(initial=0)) for y in labels)
        classes = largest + 1 if stated is None else stated
        if classes <= largest:
            raise JaxpflError(f"num_classes is {classes} but labels go up to {largest}")
        return classes
    if kind == NEXT_TOKEN:
        return _tokens(stated, federation, examples)
    if kind in _ONE_LABEL and of_first:
        raise JaxpflError(f"labels of the task {kind} are [n], got {of_first[0]} for each example: use multilabel")
    if kind == "multilabel" and not of_first:
        raise JaxpflError("labels of the task multilabel are [n, labels], got [n]: use binary")
    if kind in _ZERO_OR_ONE:
        _check(labels, lambda y: (y == 0) | (y == 1), f"labels of the task {kind} must be 0 or 1")
    if kind == "ranking" and not has_pairs(federation.test):
        raise JaxpflError("no client has both labels among its test examples: no AUC of the task ranking is defined")
    if kind == "regression" and str(spec.training.loss).startswith("poisson"):
        _check(labels, lambda y: y >= 0, "labels of the loss poisson must be >= 0")
    if kind == "regression" and (lost := lost_digits(federation.train.examples.y)) is not None:
        warn(f"of the labels {lost}: subtract an offset from them")
    return of_first[0] if of_first else 1


def _tokens(stated: int | None, federation: Federation, examples: list[Examples]) -> int:
    """Number V of tokens of sequences and their labels."""
    y, shape, labels = federation.train.examples.y, federation.input_shape, [part.y for part in examples]
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 2 or tuple(shape)[:1] != y.shape[1:]:
        raise JaxpflError(
            f"labels of the task next-token are integers [n, T], one for each position of inputs [n, T] (-1 for none), "
            f"got {y.dtype} {list(y.shape)} for inputs {['n', *shape]}"
        )
    _check(labels, lambda y: y >= NO_LABEL, "labels of the task next-token must be tokens, or -1 for none")
    largest = max(int(y.max(initial=0)) for y in labels)
    if stated is None:
        read = np.issubdtype(federation.train.examples.x.dtype, np.integer)
        tokens = max(int(part.x.max(initial=0)) for part in examples) if read else 0
        return max(largest, tokens) + 1
    if largest >= stated:
        raise JaxpflError(f"there are {stated} tokens, but labels go up to {largest}")
    return stated


def check_outputs(task: Task, kind: str, outputs: int, y: np.ndarray) -> None:
    """Check the shape of what a model returns, and warn of more outputs than classes; registered ones are built to fit.

    Args:
      task: any task of the model.
      kind: as `kind_of`; nothing is known of the outputs of a task of the user's own.
      outputs: as `outputs_of`.
      y: labels of any split, [N] or [N, d].

    Raises:
      JaxpflError: for fewer outputs than classes or tokens, and another number than one for each label.
    """
    if kind not in TASKS:
        return
    n = 2  # of one example, [1, K] might be [K, 1]
    x = jax.ShapeDtypeStruct((n, *task.input_shape), jax.dtypes.canonicalize_dtype(task.input_dtype or float))
    output = compiled.shapes(task.model.apply, compiled.shapes(task.init, jax.random.key(0)), x)
    if not (hasattr(output, "dtype") and np.issubdtype(output.dtype, np.floating)):
        what = getattr(output, "dtype", type(output).__name__)
        raise JaxpflError(f"the model returns a {what} and must return one array of real numbers for n examples")
    found = output.shape
    returns = f"the model returns {_shape(n, found)} for n examples"
    if kind not in (CLASSIFICATION, NEXT_TOKEN):
        if found[:1] != (n,) or math.prod(found) != n * outputs:
            raise JaxpflError(
                f"{returns}, and {kind} with labels {_shape(n, (n, *y.shape[1:]))} needs {outputs} of each"
            )
        return
    rows, what = ((n,), "classes") if kind == CLASSIFICATION else ((n, *y.shape[1:]), "tokens at each position")
    if found[:-1] != rows or found[-1] < outputs:
        one = ", or task = binary for one logit" if kind == CLASSIFICATION and outputs == 2 else ""
        raise JaxpflError(f"{returns}, and {outputs} {what} need {_shape(n, (*rows, outputs))}{one}")
    if found[-1] > outputs:
        warn(f"{returns}, and there are {outputs} {what}: num_classes = {found[-1]} if others may come")


def _shape(n: int, shape: tuple[int, ...]) -> str:
    """A shape in words, with n for the number of examples."""
    return f"[{', '.join('n' if not i and size == n else str(size) for i, size in enumerate(shape))}]"


def on_model(kind: str, spec: RunSpec, task: Task) -> Task:
    """The task of a run on the model of a classification, with its loss and the user's metrics.

    Raises:
      JaxpflError: for a loss that is not the task's, label smoothing where there are no classes, and a metric of a
        taken name or that is no function.
    """
    loss, smoothing = spec.training.loss, spec.training.label_smoothing
    if isinstance(loss, str) and kind != "regression":
        raise JaxpflError(f"loss = {loss} is of the task regression, this run's is {kind}")
    if smoothing and kind != CLASSIFICATION:
        raise JaxpflError(f"label_smoothing = {smoothing:g} is of classes, and the task is {kind}")
    if smoothing and loss is not None:
        raise JaxpflError("label_smoothing is of the cross-entropy: leave it out with a loss of your own")
    if kind == "regression":
        task = as_regression(task, "squared" if loss is None else loss)
    elif kind in TASKS and not isinstance(spec.training.task, Task):
        task = TASKS[kind](task)
    if callable(loss) and kind != "regression":
        task = task._replace(loss=loss, metrics={**task.metrics, "loss": loss}, mixture=None)
    if smoothing:
        task = task._replace(loss=smoothed_cross_entropy(smoothing))
    return _with_metrics(task, metrics.by_name(spec.training.metrics))


def _with_metrics(task: Task, metrics: dict[str, Any]) -> Task:
    own, added = list(task.metrics), {}
    for name, metric in metrics.items():
        if isinstance(metric, str):
            if name == metric and name in task.metrics:  # asking for what a task has anyway is no mistake
                continue
            metric = task.metrics.get(metric) or metrics.of_task(metric, task.kind, own)
        if name in task.metrics or name == "diverged":
            raise JaxpflError(f"the metric {name!r} is the task's own: give yours another name")
        if not isinstance(metric, PerClient | Pooled) and not callable(metric):
            raise JaxpflError(f"the metric {name!r} must be a function of predictions and labels, got {shown(metric)}")
        added[name] = metric
    if task.headline not in task.metrics:
        raise JaxpflError(
            f"Task.headline is {task.headline!r}, which is not among its metrics: {', '.join(task.metrics) or 'none'}"
        )
    return task._replace(metrics={**task.metrics, **added}) if added else task


def has_pairs(data: ClientData) -> bool:
    """True if some client has both labels 0 and 1 among its examples."""
    ends = np.cumsum(np.asarray(data.size, np.int64))
    ones = np.append(0, np.cumsum(np.asarray(data.flat().y, np.int64)))
    of_client = ones[ends] - ones[ends - data.size]
    return bool(((of_client > 0) & (of_client < data.size)).any())


def _examples(*federations: Federation | None) -> Iterator[Examples]:
    for part in federations:
        for split in () if part is None else part.all_splits:
            yield split.flat()


def _check(labels: list[np.ndarray], fits: Any, words: str) -> None:
    for y in labels:
        for part in host_memory.in_parts(y):
            good = fits(part)
            if not good.all():
                raise JaxpflError(f"{words}, got {part[~good].reshape(-1)[0]:g}")
