r"""The knowledge-distillation prior of AdaPeD: personal models close to a global one in what they predict.

.. math:: -\log p(\theta; \mu, \psi) = \tfrac12 \log(2\psi) + \frac{1}{2\psi} f(\theta, \mu), \qquad
   f(\theta, \mu) = \operatorname{mean}_x KL(\operatorname{softmax}(b) \,\|\, \operatorname{softmax}(a))

with logits ``a`` of the personal model theta (the student) and ``b`` of the global model mu (the teacher).

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.types import Array


@jax.custom_vjp
def divergence(teacher: Array, student: Array) -> Array:
    """``KL(softmax(teacher) || softmax(student))`` of each row.

    Its logit gradients are ``q - p`` for the student and ``p (log p - log q - KL)`` for the teacher, with
    p = softmax(teacher), q = softmax(student); the rows of both sum to zero. They are written out: what a trace of
    the formula gives is three times the kernels.

    Args:
      teacher, student: logits, [n, classes].

    Returns:
      [n], non-negative up to rounding.
    """
    return _forward(teacher, student)[0]


def _forward(teacher: Array, student: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return kl, (log_p, log_q, kl)


def _backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array]:
    log_p, log_q, kl = residuals
    p, g = jnp.exp(log_p), g[:, None]
    return g * p * (log_p - log_q - kl[:, None]), g * (jnp.exp(log_q) - p)


divergence.defvjp(_forward, _backward)


def scale_gradient(psi: Array, mean_divergence: Array, c: Array) -> Array:
    """``d/dpsi [ log(2 psi) / 2 + c f / (2 psi) ] = 1/(2 psi) - c f / (2 psi^2)``; zero at ``psi = c f``."""
    return 1 / (2 * psi) - c * mean_divergence / (2 * psi**2)
