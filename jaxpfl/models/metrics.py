"""Losses and metrics of predictions, by name.

A prediction is what a model returns for n examples: [n] or [n, 1] for one number, [n, d] for d numbers, [n, T, V] for
the logits of V tokens at T positions. The loss of several numbers is the sum of their losses. With residual r =
prediction - y, the losses are

- ``squared``: r^2 / 2, the negative log-likelihood of a Gaussian of unit variance up to a constant;
- ``absolute``: |r|;
- ``huber:delta=1``: r^2 / 2 up to delta, and delta (|r| - delta / 2) beyond (Huber 1964);
- ``quantile:q=0.5``: max(-q r, (1 - q) r), whose minimizer is the q-quantile (Koenker and Bassett 1978);
- ``poisson``: exp(a) - y a, where the prediction a is the logarithm of the rate of counts y;
- ``logistic``: log(1 + exp(a)) - y a, where a is the logit of y = 1, in tasks with one or several binary labels.

Distillation compares two predictions a and b by a divergence: for ``poisson`` and ``logistic``, the Kullback-Leibler
divergence of two Poisson or Bernoulli distributions; for other losses, |b - a|^2 / 2, as for two Gaussians of unit
variance. A loss can also define the prediction of a mixture of models.

A metric per example is ``f(predictions [n, ...], y [n, ...]) -> [n]``; a client's score is the mean over its examples.
A metric of all examples is ``per_client(f)`` with ``f(predictions, y, valid) -> []``. The mask ``valid`` [n] is true
for real examples; padded predictions and labels must be ignored. A `Pooled` metric is a ratio of two sums over a
client's examples. A score is NaN if it is not defined, such as the AUC of a client with a single class; means over
clients omit these clients. Predictions that are not finite get the worst score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import settings
from jaxpfl.core.types import NO_LABEL, Array
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

PerExample = Callable[[Array, Array], Array]
"""Maps predictions [n, ...] and labels [n, ...] to one value per example, [n]."""
Mixture = Callable[[Array, Array], Array]
"""Maps weights [k] and the predictions of k models, [k, n, ...], to the mixture's prediction, [n, ...]."""


class Loss(NamedTuple):
    """A loss for predictions that are real numbers.

    Attributes:
      function: the loss function.
      divergence: function ``(teacher, student) -> [n]`` that returns the distance between two predictions, for
        distillation; None if no distance is defined.
      mixture: function that computes the prediction of a mixture of models (`Mixture`); None unless the loss is a
        negative log-likelihood.
      mean: function from predictions to expected labels.
    """

    function: PerExample
    divergence: PerExample | None = None
    mixture: Mixture | None = None
    mean: Callable[[Array], Array] = lambda predictions: predictions


def aligned(predictions: Array, y: Array) -> tuple[Array, Array]:
    """Reshape predictions to the labels' shape, and convert labels to the predictions' dtype.

    Raises:
      JaxpflError: if there is not one predicted value per label. Without this check, arithmetic would broadcast
        silently.
    """
    if predictions.size != y.size or predictions.shape[:1] != y.shape[:1]:
        raise JaxpflError(
            f"a model must return one value for each label, got predictions of shape {list(predictions.shape)} for "
            f"labels of shape {list(y.shape)}"
        )
    return predictions.reshape(y.shape), y.astype(predictions.dtype)


def summed(values: Array) -> Array:
    """Sum values [n, ...] over all axes except the examples' axis."""
    return values.reshape(values.shape[0], -1).sum(axis=1)


def cross_entropy(logits: Array, y: Array) -> Array:
    """Cross-entropy ``-log softmax(logits)[y]`` of N examples, [N], from logits [N, K] for K classes and labels [N]."""
    # With integer labels as indices, the gradient would be a scatter, which XLA compiles and runs slowly on a CPU.
    return optax.safe_softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1], dtype=logits.dtype))


def _huber(delta: float = 1.0) -> PerExample:
    return partial(optax.huber_loss, delta=delta)


def _quantile(q: float = 0.5) -> PerExample:
    return lambda prediction, y: jnp.maximum(q * (y - prediction), (q - 1) * (y - prediction))


def example_loss(value_loss: Callable[[Array, Array], Array]) -> PerExample:
    """Convert a loss per value to a loss per example."""

    def loss(predictions: Array, y: Array) -> Array:
        return summed(value_loss(*aligned(predictions, y)))

    return loss


def gaussian_divergence(teacher: Array, student: Array) -> Array:
    """Divergence ``|teacher - student|^2 / 2`` of Gaussians of unit variance, [n]."""
    return summed(jnp.square(teacher - student)) / 2


def poisson_divergence(teacher: Array, student: Array) -> Array:
    """Divergence ``e^b (b - a) - e^b + e^a`` of Poisson distributions, [n], with log rates b (teacher) and a."""
    return summed(jnp.exp(teacher) * (teacher - student - 1) + jnp.exp(student))


def bernoulli_divergence(teacher: Array, student: Array) -> Array:
    """Kullback-Leibler divergence of Bernoulli distributions with these logits, [n]."""
    one = jax.nn.sigmoid(teacher) * (jax.nn.log_sigmoid(teacher) - jax.nn.log_sigmoid(student))
    zero = jax.nn.sigmoid(-teacher) * (jax.nn.log_sigmoid(-teacher) - jax.nn.log_sigmoid(-student))
    return summed(one + zero)


@jax.custom_vjp
def class_divergence(teacher: Array, student: Array) -> Array:
    """Divergence ``KL(softmax(teacher) || softmax(student))`` of each example.

    Let p = softmax(teacher) and q = softmax(student). The gradient with respect to the student's logits is ``q - p``,
    and with respect to the teacher's logits ``p (log p - log q - KL)``. The rows of both gradients sum to zero. The
    gradients are implemented explicitly, because automatic differentiation of the formula compiles to three times as
    many kernels.

    Args:
      teacher, student: logits, [n, classes].

    Returns:
      The divergences, [n], which are nonnegative up to rounding errors.
    """
    return _class_forward(teacher, student)[0]


def _class_forward(teacher: Array, student: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return kl, (log_p, log_q, kl)


def _class_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array]:
    log_p, log_q, kl = residuals
    p, g = jnp.exp(log_p), g[:, None]
    return g * p * (log_p - log_q - kl[:, None]), g * (jnp.exp(log_q) - p)


class_divergence.defvjp(_class_forward, _class_backward)


def has_label(y: Array) -> Array:
    """Return the mask of the positions that have a label, [n, T] bool."""
    return y != NO_LABEL


def token_cross_entropies(logits: Array, y: Array) -> Array:
    """Sum of the cross-entropies of each sequence's tokens, [n], for logits [n, T, V] and labels [n, T].

    Raises:
      JaxpflError: if there is not one row of logits per position.
    """
    check_positions(logits, y)
    return jnp.where(has_label(y), cross_entropy(logits, y), 0).sum(axis=1)


def token_loss(logits: Array, y: Array) -> Array:
    r"""Loss of next-token prediction, [n], for logits [n, T, V] and labels [n, T], where -1 means no label.

    The logits of position t may depend only on the tokens up to t. Let :math:`\ell_{st}` be the cross-entropy at
    position t of sequence s, and :math:`c_{st} = 1` where the label is not -1, else 0. The loss of sequence s is

    .. math:: \ell_s = \frac1T \sum_t c_{st}\, \ell_{st}.

    The loss of a batch is the mean over its sequences. Each token therefore has the same weight, independently of the
    length of its sequence. This holds in a batch, among a client's examples and, if the method weights clients by their
    numbers of examples, in the whole federation. The divisor is the constant T instead of the number of labels in a
    batch, as in FedJAX (Ro et al. 2021, https://arxiv.org/abs/2108.02117), which calls it ``expected_length``. A
    batch's loss is therefore a mean over examples, and its gradient is an unbiased estimate of the client's gradient.
    If all positions have labels, the loss is the mean over tokens; if half of a batch is padding, the step is half as
    large.
    """
    return token_cross_entropies(logits, y) / y.shape[1]


def token_divergence(teacher: Array, student: Array) -> Array:
    """Divergence ``KL(softmax(teacher) || softmax(student))`` for logits [n, T, V], averaged over T positions."""
    rows = class_divergence(*(logits.reshape(-1, logits.shape[-1]) for logits in (teacher, student)))
    return rows.reshape(teacher.shape[:2]).sum(axis=1) / teacher.shape[1]


def check_positions(logits: Array, y: Array) -> None:
    """Check that there is one row of logits per position."""
    if logits.ndim != 3 or logits.shape[:2] != y.shape:
        raise JaxpflError(
            "a model for next-token prediction must return logits [n, T, tokens] for labels [n, T], got shape "
            f"{list(logits.shape)} for labels of shape {list(y.shape)}"
        )


def _model_axis(weights: Array, predictions: Array) -> Array:
    return weights.reshape(-1, *[1] * (predictions.ndim - 1))


def _mean_mixture(weights: Array, predictions: Array) -> Array:
    return (_model_axis(weights, predictions) * predictions).sum(axis=0)


def _log_mixture(weights: Array, predictions: Array) -> Array:
    return jax.nn.logsumexp(predictions, b=_model_axis(weights, predictions), axis=0)


def _logit_mixture(weights: Array, predictions: Array) -> Array:
    one, zero = (_log_mixture(weights, jax.nn.log_sigmoid(sign * predictions)) for sign in (1, -1))
    return one - zero


def class_mixture(weights: Array, logits: Array) -> Array:
    """Logarithm of the weighted mean of k models' class probabilities, for weights [k] and logits [k, ..., classes]."""
    return _log_mixture(weights, jax.nn.log_softmax(logits))


def _squared(prediction: Array, y: Array) -> Array:
    return jnp.square(prediction - y) / 2


SQUARED = example_loss(_squared)
_MAKERS: Mapping[str, Callable[..., PerExample]] = {
    "squared": lambda: _squared,
    "absolute": lambda: lambda prediction, y: jnp.abs(prediction - y),
    "huber": _huber,
    "quantile": _quantile,
    "poisson": lambda: lambda prediction, y: jnp.exp(prediction) - y * prediction,
}
"""Factory functions of losses per value, which take the loss's arguments, such as delta."""
_MORE: Mapping[str, dict[str, Any]] = {
    "squared": {"function": SQUARED, "mixture": _mean_mixture},
    "poisson": {"divergence": poisson_divergence, "mixture": _log_mixture, "mean": jnp.exp},
}

LOGISTIC = Loss(
    example_loss(lambda prediction, y: jax.nn.softplus(prediction) - y * prediction),
    bernoulli_divergence,
    _logit_mixture,
    jax.nn.sigmoid,
)
"""Loss for labels 0 and 1."""


def parse_loss(loss: str | PerExample) -> Loss:
    """Return a regression loss. ``loss`` is a function, or a text ``NAME`` or ``NAME:argument=value``.

    Raises:
      JaxpflError: if a name or argument is unknown, the argument delta is not positive, or q is outside (0, 1).
    """
    if not isinstance(loss, str):
        return Loss(loss, gaussian_divergence)
    name, arguments = settings.parse_choice("loss", loss, _MAKERS)
    for key, value in arguments.items():
        if not (0 < value < (1 if key == "q" else float("inf"))):
            raise JaxpflError(f"{name}:{key} must be {'> 0 and < 1' if key == 'q' else '> 0'}, got {value:g}")
    known = {"function": example_loss(_MAKERS[name](**arguments)), "divergence": gaussian_divergence}
    return Loss(**{**known, **_MORE.get(name, {})})


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
