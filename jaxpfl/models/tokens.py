r"""Next-token prediction: a label at each position of a sequence, [n, T], and -1 at positions that have none.

A model returns logits of all V tokens at each position, [n, T, V]; those of position t may depend on the tokens up to t
alone. With cross-entropies :math:`\ell_{st}` and :math:`c_{st} = 1` where the label is not -1, else 0, the loss of
sequence s is

.. math:: \ell_s = \frac1T \sum_t c_{st}\, \ell_{st}.

A batch's loss is the mean over its sequences, so each token weighs the same, whatever the length of its sequence: in a
batch, among a client's examples and, where a method weighs clients by their examples, in the whole federation. The
divisor is the constant T in place of the number of labels in a batch, as in FedJAX (Ro et al. 2021,
https://arxiv.org/abs/2108.02117), whose ``expected_length`` it is: the loss stays a sum over examples, and its gradient
unbiased for the client's. Where all positions have labels it is the mean over tokens; a batch that is padded by half
takes half the step.

Scores are means over all tokens of a client with a label, whatever sequence they are in.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from jaxpfl.core.types import NO_LABEL, Array
from jaxpfl.models.losses import class_divergence, class_mixture, cross_entropy
from jaxpfl.models.metrics import Pooled, correct
from jaxpfl.support.errors import JaxpflError

mixture = class_mixture


def counted(y: Array) -> Array:
    """Positions that have a label, [n, T] bool."""
    return y != NO_LABEL


def loss(logits: Array, y: Array) -> Array:
    """Sum of a sequence's cross-entropies over T, [n, T, V], [n, T] -> [n].

    Raises:
      JaxpflError: for logits that are not one row for each position.
    """
    return _cross_entropies(logits, y) / y.shape[1]


def divergence(teacher: Array, student: Array) -> Array:
    """Sum over the positions of ``KL(softmax(teacher) || softmax(student))``, over T: [n, T, V] twice -> [n]."""
    rows = class_divergence(*(logits.reshape(-1, logits.shape[-1]) for logits in (teacher, student)))
    return rows.reshape(teacher.shape[:2]).sum(axis=1) / teacher.shape[1]


def _cross_entropies(logits: Array, y: Array) -> Array:
    """Sum of the cross-entropies of a sequence's tokens, [n]."""
    _check(logits, y)
    return jnp.where(counted(y), cross_entropy(logits, y), 0).sum(axis=1)


def _right(logits: Array, y: Array) -> Array:
    """Number of a sequence's tokens that have the largest logit, [n]."""
    _check(logits, y)
    return jnp.where(counted(y), correct(logits, y), 0).sum(axis=1)


def _number(logits: Array, y: Array) -> Array:
    """Number of a sequence's tokens, [n]."""
    return counted(y).sum(axis=1).astype(logits.dtype)


def _at_worst(value: Array) -> Array:
    return jnp.where(jnp.isnan(value), jnp.inf, value)


METRICS: Mapping[str, Pooled] = {
    "accuracy": Pooled(_right, _number),
    "perplexity": Pooled(_cross_entropies, _number, lambda mean: _at_worst(jnp.exp(mean))),
    "loss": Pooled(_cross_entropies, _number, _at_worst),
}
"""Share of tokens with the largest logit, the exponential of the mean cross-entropy of tokens, and that mean."""


def _check(logits: Array, y: Array) -> None:
    if logits.ndim != 3 or logits.shape[:2] != y.shape:
        raise JaxpflError(
            f"predictions are {list(logits.shape)} and labels {list(y.shape)}: for next-token a model must return "
            "logits of all tokens at each position, [n, T, tokens]"
        )
