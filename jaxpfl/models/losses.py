"""Named losses for tasks other than classification. Each can define a distance between predictions and their mixture.

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
variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import settings
from jaxpfl.core.types import NO_LABEL, Array
from jaxpfl.support.errors import JaxpflError

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
LOSSES = tuple(_MAKERS)
"""Names of the losses for regression."""
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


def resolve(loss: str | PerExample) -> Loss:
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
