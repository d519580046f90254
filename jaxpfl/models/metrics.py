"""Metrics, such as accuracy, of individual examples or of all predictions for a client together.

A metric per example is ``f(predictions [n, ...], y [n, ...]) -> [n]``; a client's score is the mean over its examples.
A metric of all examples is ``per_client(f)`` with ``f(predictions, y, valid) -> []``. The mask ``valid`` [n] is true
for real examples; padded predictions and labels must be ignored. A `Pooled` metric is a ratio of two sums over a
client's examples. A score is NaN if it is not defined, such as the AUC of a client with a single class; means over
clients omit these clients. Predictions that are not finite get the worst score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array
from jaxpfl.models.losses import PerExample, aligned, check_positions, has_label, summed, token_cross_entropies
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

OfClient = Callable[[Array, Array, Array], Array]
_BINS = 15


class PerClient(NamedTuple):
    """Metric of all of a client's predictions, made by `per_client`.

    Attributes:
      function: the metric function.
      root: whether the metric is the root of a mean over examples, such as the RMSE. The score of several clients is
        then the root of the mean of their squared scores, weighted by numbers of examples.
    """

    function: OfClient
    root: bool = False


def per_client(function: OfClient, *, root: bool = False) -> PerClient:
    """Make a metric from a function of all of a client's examples.

    Args:
      function: the metric function, ``(predictions [n, ...], y [n, ...], valid [n]) -> []``.
      root: whether the metric is the root of a mean over examples, such as the RMSE; see `PerClient`.

    Example::

        bias = jaxpfl.per_client(lambda predictions, y, valid: ((predictions[:, 0] - y) * valid).sum() / valid.sum())
        jaxpfl.fit("fedavg", federation, task="regression", metrics={"bias": bias})
    """
    return PerClient(function, root)


OUTPUTS = PerClient(lambda predictions, y, valid: predictions)
"""Pseudo-metric that returns the predictions for a client's examples, [n, ...], instead of a score."""


class Pooled(NamedTuple):
    """A client's metric that is a ratio of two sums over its examples, such as a mean over all tokens.

    Attributes:
      total, number: functions ``(predictions, y) -> [n]``. The ratio is the sum of ``total`` over the client's
        examples, divided by the sum of ``number``.
      transform: function that converts the ratio to the score. The score is NaN if the sum of ``number`` is zero.
    """

    total: PerExample
    number: PerExample
    transform: Callable[[Array], Array] = lambda ratio: ratio

    def score(self, total: Array, number: Array) -> Array:
        """Return the score for the two sums, []."""
        return jnp.where(number > 0, self.transform(total / jnp.where(number > 0, number, 1)), jnp.nan)


Metric = PerExample | PerClient | Pooled


def correct(logits: Array, y: Array) -> Array:
    """Return 1.0 for each example whose label has the largest logit, else 0.0; the mean is the accuracy.

    Logits of N examples and K classes are [N, K], labels and results [N]. Logits that are not finite count as wrong.
    Otherwise a diverged model could be overlooked, because argmax of NaN is class 0.
    """
    right = (jnp.argmax(logits, axis=-1) == y) & jnp.isfinite(logits).all(axis=-1)
    return right.astype(logits.dtype)


def _example_mean(values: Array) -> Array:
    """Mean over all axes except the example axis, [n]."""
    return summed(values) / max(values.size // max(values.shape[0], 1), 1)


def _mean(values: Array, valid: Array) -> Array:
    return jnp.where(valid, values, 0).sum() / jnp.maximum(valid.sum(), 1)


def absolute_error(mean: Callable[[Array], Array]) -> PerExample:
    """Make the metric "absolute error", averaged over an example's labels; ``mean`` predicts the expected labels."""

    def metric(predictions: Array, y: Array) -> Array:
        expected, y = aligned(mean(predictions), y)
        return _example_mean(jnp.abs(expected - y))

    return metric


def rmse(mean: Callable[[Array], Array]) -> PerClient:
    """Make the metric "root mean squared error" of a client's examples; ``mean`` predicts the expected labels."""

    def metric(predictions: Array, y: Array, valid: Array) -> Array:
        expected, y = aligned(mean(predictions), y)
        root = jnp.sqrt(_mean(_example_mean(jnp.square(expected - y)), valid))
        return jnp.where(jnp.isnan(root), jnp.inf, root)

    return PerClient(metric, root=True)


def r2(mean: Callable[[Array], Array]) -> PerClient:
    """Make the metric "coefficient of determination", ``1 - sum (y - f)^2 / sum (y - mean y)^2`` of a client.

    f is the expected label, which ``mean`` computes from a prediction. If examples have several labels, the sums
    include all labels, and each label has its own mean of y. The score is NaN for constant labels.
    """

    def metric(predictions: Array, y: Array, valid: Array) -> Array:
        expected, y = aligned(mean(predictions), y)
        expected, y = (a.reshape(a.shape[0], -1) for a in (expected, y))
        rows = valid[:, None]
        center = jnp.where(rows, y, 0).sum(axis=0) / jnp.maximum(valid.sum(), 1)
        left = jnp.where(rows, jnp.square(y - expected), 0).sum()
        spread = jnp.where(rows, jnp.square(y - center), 0).sum()
        share = jnp.where(jnp.isfinite(left), 1 - left / jnp.where(spread > 0, spread, 1), -jnp.inf)
        return jnp.where(spread > 0, share, jnp.nan)

    return PerClient(metric)


def right(predictions: Array, y: Array) -> Array:
    """Share of an example's labels (0 or 1) that match the signs of their logits; a zero logit predicts label 0."""
    logits, y = aligned(predictions, y)
    return _example_mean(((logits > 0) == (y > 0.5)) & jnp.isfinite(logits)).astype(predictions.dtype)


def _auc(predictions: Array, y: Array, valid: Array) -> Array:
    logits, y = aligned(predictions, y)
    logits, y = logits.reshape(-1), y.reshape(-1)
    positive, negative = valid & (y > 0.5), valid & (y <= 0.5)
    # Scores that are not finite are replaced by the worst case: a positive example ranks last, and a negative first.
    scores = jnp.where(jnp.isfinite(logits), logits, jnp.where(positive, -jnp.inf, jnp.inf))
    others = jnp.sort(jnp.where(negative, scores, jnp.nan))  # NaN sorts last
    count = negative.sum()
    below, upto = (jnp.minimum(jnp.searchsorted(others, scores, side=side), count) for side in ("left", "right"))
    # Average, over positives, the share of negatives with lower scores; an integer count of pairs could overflow.
    share = (below + upto) / (2 * jnp.maximum(count, 1))
    number = positive.sum()
    mean = jnp.where(positive, share, 0).sum() / jnp.maximum(number, 1)
    return jnp.where((number > 0) & (count > 0), mean, jnp.nan)


auc = PerClient(_auc)
"""Area under the ROC curve of one logit per example: the fraction of pairs of examples, one with each label, that the
logits rank in the right order; a tie counts a half. NaN for a client with one class."""


def _macro_f1(predictions: Array, y: Array, valid: Array) -> Array:
    finite = jnp.isfinite(predictions).reshape(len(valid), -1).all(axis=1)
    if predictions.size == y.size and predictions.shape[-1] > 0:  # labels 0 and 1
        logits, labels = aligned(predictions, y)
        truth = labels.reshape(len(valid), -1) > 0.5
        guess = jnp.where(finite[:, None], logits.reshape(len(valid), -1) > 0, ~truth)
    else:
        classes = jnp.arange(predictions.shape[-1])
        truth = y[:, None] == classes
        guess = (jnp.argmax(predictions, axis=-1)[:, None] == classes) & finite[:, None]
    rows = valid[:, None]
    counts = ((rows & which).sum(axis=0) for which in (truth & guess, truth & ~guess, guess & ~truth))
    hits, misses, false = (count.astype(predictions.dtype) for count in counts)
    all_of = 2 * hits + misses + false
    scores = jnp.where(all_of > 0, 2 * hits / jnp.maximum(all_of, 1), 0)
    number = (all_of > 0).sum()  # number of classes that occur
    return jnp.where(number > 0, scores.sum() / jnp.maximum(number, 1), jnp.nan)


def auc_of_classes(predictions: Array, y: Array, valid: Array) -> Array:
    """Mean over classes of the AUC of each class's log-odds against all other classes.

    Predictions of K classes are [n, K], and labels [n]. A class is omitted if none or all of the client's examples
    belong to it; the result is NaN if no class remains.
    """
    classes = jnp.arange(predictions.shape[-1])

    def class_auc(label: Array) -> Array:
        others = jax.nn.logsumexp(jnp.where(classes == label, -jnp.inf, predictions), axis=-1)
        odds = predictions[:, label] - others  # log-odds, because probabilities saturate
        return _auc(odds, y == label, valid)

    return jnp.nanmean(jax.lax.map(class_auc, classes))


def auc_of_labels(predictions: Array, y: Array, valid: Array) -> Array:
    """Mean over the binary labels of each label's AUC, [].

    Labels with the same value for all examples are omitted. The result is NaN if no label remains.
    """
    logits, y = aligned(predictions, y)
    logits, y = (values.reshape(len(valid), -1).T for values in (logits, y))  # [labels, n]
    return jnp.nanmean(jax.lax.map(lambda label: _auc(label[0], label[1], valid), (logits, y)))


def balanced_accuracy(predictions: Array, y: Array, valid: Array) -> Array:
    """Accuracy on the examples of each class, averaged over the classes among a client's labels, []."""
    right = (jnp.argmax(predictions, axis=-1) == y) & jnp.isfinite(predictions).all(axis=-1)
    member = (y[:, None] == jnp.arange(predictions.shape[-1])) & valid[:, None]
    counts, hits = member.sum(axis=0), (member & right[:, None]).sum(axis=0)
    return (hits / jnp.maximum(counts, 1)).sum() / jnp.maximum((counts > 0).sum(), 1)


def two_class_metric(metric: OfClient) -> PerClient:
    """Apply a metric for classes to labels 0 and 1 with one logit a, as if the logits were 0 and a."""

    def logit_metric(predictions: Array, y: Array, valid: Array) -> Array:
        logits, labels = aligned(predictions, y)
        logits = logits.reshape(-1)
        return metric(jnp.stack([jnp.zeros_like(logits), logits], axis=1), labels.reshape(-1) > 0.5, valid)

    return PerClient(logit_metric)


macro_f1 = PerClient(_macro_f1)
"""F1 of each class (or label) that occurs among a client's labels or predictions, averaged over these classes."""


def _calibration_error(predictions: Array, y: Array, valid: Array) -> Array:
    if predictions.size == y.size:  # one logit per label
        logits, labels = aligned(predictions, y)
        logits, labels = logits.reshape(len(valid), -1), labels.reshape(len(valid), -1)
        sure, hit = jax.nn.sigmoid(jnp.abs(logits)), (logits > 0) == (labels > 0.5)
    else:
        sure = jax.nn.softmax(predictions).max(axis=-1, keepdims=True)
        hit = (jnp.argmax(predictions, axis=-1) == y)[:, None]
    finite = jnp.isfinite(sure)
    sure, hit = jnp.where(finite, sure, 1.0), hit & finite
    gap = jnp.where(valid[:, None], hit - sure, 0)
    bins = jnp.clip((sure * _BINS).astype(jnp.int32), 0, _BINS - 1)
    by_bin = jnp.zeros(_BINS, gap.dtype).at[bins.reshape(-1)].add(gap.reshape(-1))
    return jnp.abs(by_bin).sum() / jnp.maximum(valid.sum() * sure.shape[1], 1)


calibration_error = PerClient(_calibration_error)
"""Expected calibration error: the gap between confidence and accuracy in 15 bins of equal width, averaged over a
client's examples.

Reference: Guo et al. 2017, "On Calibration of Modern Neural Networks", https://arxiv.org/abs/1706.04599."""


def _right_tokens(logits: Array, y: Array) -> Array:
    """Count a sequence's labeled tokens whose logit is the largest at their position, [n]."""
    check_positions(logits, y)
    return jnp.where(has_label(y), correct(logits, y), 0).sum(axis=1)


def _number_of_tokens(logits: Array, y: Array) -> Array:
    """Count a sequence's tokens that have a label, [n]."""
    return has_label(y).sum(axis=1).astype(logits.dtype)


def _nan_to_worst(value: Array) -> Array:
    return jnp.where(jnp.isnan(value), jnp.inf, value)


TOKEN_METRICS: Mapping[str, Pooled] = {
    "accuracy": Pooled(_right_tokens, _number_of_tokens),
    "perplexity": Pooled(token_cross_entropies, _number_of_tokens, lambda mean: _nan_to_worst(jnp.exp(mean))),
    "loss": Pooled(token_cross_entropies, _number_of_tokens, _nan_to_worst),
}
"""Metrics over all of a client's labeled tokens, regardless of their sequence: the share of tokens whose logit is the
largest, the exponential of the mean cross-entropy, and the mean cross-entropy."""


_F1_OF_TWO, _BALANCED_OF_TWO = two_class_metric(macro_f1.function), two_class_metric(balanced_accuracy)
_CLASSES, _TWO, _SEVERAL, _RANKED, _TOKENS = "classification", "binary", "multilabel", "ranking", "next-token"

NAMED_METRICS: Mapping[str, Mapping[str, Metric | None]] = {
    "accuracy": {_CLASSES: None, _TWO: None, _SEVERAL: None, _RANKED: right, _TOKENS: None},
    "balanced_accuracy": {_CLASSES: PerClient(balanced_accuracy), _TWO: _BALANCED_OF_TWO, _RANKED: _BALANCED_OF_TWO},
    "macro_f1": {_CLASSES: macro_f1, _TWO: _F1_OF_TWO, _SEVERAL: None, _RANKED: _F1_OF_TWO},
    "auc": {_CLASSES: PerClient(auc_of_classes), _TWO: None, _SEVERAL: PerClient(auc_of_labels), _RANKED: None},
    "calibration_error": dict.fromkeys((_CLASSES, _SEVERAL, _RANKED), calibration_error) | {_TWO: None},
    **{name: {"regression": None} for name in ("rmse", "mae", "r2")},
    "perplexity": {_TOKENS: None},
}
"""Metrics by name, then by task; None if the task has the metric by default."""
_NEEDS = {
    "balanced_accuracy": "one class per example",
    **dict.fromkeys(("rmse", "mae", "r2"), "numeric labels"),
    "perplexity": "a label at each position",
}


def parse_metrics(metrics: Any) -> dict[str, Any]:
    """Parse metrics: ``"auc,macro_f1"``, a sequence of names, or a mapping from your names to names or functions.

    Returns:
      Dictionary from each metric's name to a registered name or a function.

    Raises:
      JaxpflError: if a name is empty or not registered.
    """
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        names = metrics.split(",") if isinstance(metrics, str) else metrics or ()
        found = {name.strip(): name.strip() for name in names}
    for name in found.values():
        if name == "":
            raise JaxpflError(f"metrics must be names separated by commas, got {shown(metrics)}")
        if isinstance(name, str) and name not in (*NAMED_METRICS, "loss"):
            raise unknown_name("metric", name, [*NAMED_METRICS, "loss"])
    return found


def task_metric(name: str, kind: str, own: Sequence[str]) -> Metric:
    """Return a registered metric for a task that does not have it by default.

    Args:
      name: name of the metric.
      kind: name of the task.
      own: names of the task's default metrics, for the message.

    Raises:
      JaxpflError: if the metric does not fit the task.
    """
    fitting = NAMED_METRICS.get(name, {})
    if (metric := fitting.get(kind)) is None:
        raise JaxpflError(
            f"metric {name} requires {_NEEDS.get(name, 'classes, or labels 0 and 1')} (task {' or '.join(fitting)}), "
            f"got task {kind}: use {', '.join(own)}"
        )
    return metric
