r"""Distances between clients: by their data, the covariance of their features, or their models.

Each kind gives every client a vector, and the distance between two clients is that between their vectors:

- `mean_embedding`: data. The maximum mean discrepancy of the Gaussian kernel exp(-|x - y|^2 / (2 b^2)), through random
  Fourier features (Rahimi and Recht 2007).
- `covariance`: the Frobenius distance of covariance matrices.
- models: the vectors of the models' parameters (``trees`` flattened by the caller).

Implements: Zhao et al., section II-A.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core.types import Array, Key, Scalar


def mean_embedding(key: Key, x: Array, mask: Array, bandwidth: Scalar, number: int) -> Array:
    """A client's mean of random Fourier features, [number].

    Distances between clients' embeddings approximate their discrepancy, with an error of about ``1 / sqrt(number)``.

    Args:
      key: the same for all clients.
      x: [n, q], with mask [n] bool; the embedding is zero for a client without examples.
      bandwidth: b of the kernel.
      number: of features.
    """
    of_frequency, of_phase = jax.random.split(key)
    frequency = jax.random.normal(of_frequency, (x.shape[1], number), x.dtype) / bandwidth
    phase = jax.random.uniform(of_phase, (number,), x.dtype, maxval=2 * jnp.pi)
    features = jnp.sqrt(2 / number) * jnp.cos(jnp.where(mask[:, None], x, 0) @ frequency + phase)
    return _mean(features, mask)


def covariance(x: Array, mask: Array) -> Array:
    """A client's covariance matrix as a vector, [q (q + 1) / 2], whose Euclidean distances are the Frobenius ones.

    Entries off the diagonal are scaled to count twice. x is [n, q] with mask [n] bool; zero for a client without
    examples.
    """
    apart = jnp.where(mask[:, None], x - _mean(x, mask), 0)
    matrix = apart.T @ apart / jnp.maximum(mask.sum(), 1)
    row, column = jnp.triu_indices(x.shape[1])
    return matrix[row, column] * jnp.where(row == column, 1, jnp.sqrt(2.0)).astype(x.dtype)


def _mean(x: Array, mask: Array) -> Array:
    return jnp.where(mask[:, None], x, 0).sum(axis=0) / jnp.maximum(mask.sum(), 1)
