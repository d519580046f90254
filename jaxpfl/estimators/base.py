r"""The estimator interface: a client's message, the server's broadcast, and the client's estimate, as pure functions.

Client i has n_i samples, whose distribution depends on the client's own parameter theta_i. The client sends a message
(`summarize`), the server combines all messages into a broadcast (`combine`), and the client combines the broadcast with
its own data (`personalize`). Estimators with several rounds repeat these three steps; each round starts from the
server's last broadcast.

All functions can be jitted, and vmapped over repetitions and settings. The arguments of functions that return an
`Estimator` may be traced if they are real numbers; numbers of components, steps and bits are static. In most
estimators, the server needs only the `Moments` of the messages.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation", section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.support.errors import JaxpflError

_NODES = 64  # Gauss-Legendre nodes
_NEGLIGIBLE = 40.0  # log densities this far below their maximum are negligible


class Samples(NamedTuple):
    """Samples of one client, padded to length n; for stacked clients, every leaf has a leading axis [m].

    Attributes:
      x: samples, [n, ...].
      mask: mask of the real samples, [n] bool.
    """

    x: Array
    mask: Array

    @property
    def size(self) -> Array:
        """Number n_i of real samples, as a floating-point number, []; [m] for stacked clients."""
        return self.mask.sum(axis=-1).astype(jnp.result_type(self.x.dtype, jnp.float32))

    @property
    def mean(self) -> Array:
        """Mean of the client's real samples, [...]; zero for a client without samples."""
        return self._total(self.x) / jnp.maximum(self.size, 1)

    @property
    def scatter(self) -> Array:
        """Sum of squared deviations of the real samples from their mean, [...]."""
        return self._total((self.x - self.mean) ** 2)

    def _total(self, values: Array) -> Array:
        mask = self.mask.reshape(-1, *[1] * (values.ndim - 1))
        return jnp.where(mask, values, 0).sum(axis=0)


class Estimator(NamedTuple):
    """A collaborative estimator of the clients' own parameters.

    Implements: Ozkara et al. 2023, equation (1).

    Attributes:
      summarize: function ``(key, shared, samples) -> (message, local)`` that computes one client's message and local
        state. Only the message leaves the client.
      combine: function ``(key, shared, messages, sent) -> shared`` that computes the server's next broadcast. Messages
        have leaves [m, ...]. ``sent``, [m] bool, is true for uploaded messages; the function ignores the other
        messages.
      personalize: function ``(shared, message, sent, local) -> estimate`` that computes the estimate of one client,
        which need not have uploaded a message. The client's own message is an argument because some estimators remove
        it from the combined messages.
      start: the broadcast before the first round, or None.
    """

    summarize: Callable[[Key, PyTree, Samples], tuple[PyTree, PyTree]]
    combine: Callable[[Key, PyTree, PyTree, Array], PyTree]
    personalize: Callable[[PyTree, PyTree, Array, PyTree], Array]
    start: PyTree = None


class Estimated(NamedTuple):
    """The clients' estimates, leaves [m, ...], and the server's last broadcast."""

    estimates: Array
    shared: PyTree


@full_precision.products
def estimate(
    estimator: Estimator,
    key: Key,
    clients: Samples,
    *,
    client_ids: Array | None = None,
    sent: Array | None = None,
    rounds: int = 1,
) -> Estimated:
    """Run an estimator on all clients.

    Implements: Ozkara et al. 2023, equation (1); Ozkara et al. 2023, Remark 7.

    Args:
      estimator: estimator to run.
      key: source of all randomness.
      clients: stacked samples, leaves [m, n, ...].
      client_ids: distinct ids [m], by default 0 ... m - 1. A client's randomness depends only on the key and the
        client's id, so permuting the clients together with their ids permutes the estimates.
      sent: mask of the clients that upload (Remark 7 of the paper), [m] bool; by default all clients upload.
      rounds: number of rounds; more than 1 only for iterative estimators.

    Examples:
      >>> from jaxpfl.estimators import gaussian
      >>> rng = np.random.default_rng(0)
      >>> theta = rng.normal(size=(200, 1))
      >>> clients = stack(list(theta[:, None] + 2 * rng.normal(size=(200, 5, 1))))
      >>> found = jax.jit(lambda key: estimate(gaussian.personalized(), key, clients))(jax.random.key(0))
      >>> round(float(((found.estimates - theta) ** 2).mean()), 1)  # 0.8 for each client alone
      0.4
    """
    m = clients.mask.shape[0]
    ids = jnp.arange(m) if client_ids is None else client_ids
    uploads = jnp.ones(m, bool) if sent is None else sent

    def one_round(round: Array | int, shared: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        keys = jax.vmap(lambda i: stream(key, Purpose.LOCAL_WORK, round, i))(ids)
        message, local = jax.vmap(estimator.summarize, in_axes=(0, None, 0))(keys, shared, clients)
        return estimator.combine(stream(key, Purpose.SERVER_UPDATE, round), shared, message, uploads), message, local

    shared = estimator.start
    if rounds > 1:
        shared = jax.lax.fori_loop(0, rounds - 1, lambda t, shared: one_round(t, shared)[0], shared)
    # The last round is outside the loop, because only its messages and local states are needed.
    shared, message, local = one_round(rounds - 1, shared)
    estimates = jax.vmap(estimator.personalize, in_axes=(None, 0, 0, 0))(shared, message, uploads, local)
    return Estimated(estimates, shared)


def stack(clients: list[np.ndarray]) -> Samples:
    """Stack clients with different numbers of samples: pad arrays [n_i, ...] to the largest n_i.

    The samples are converted to JAX's floating-point type: float32, or float64 under ``jax.enable_x64(True)``.

    Raises:
      JaxpflError: if there are no clients; if a client has no samples; if clients' samples have different shapes; if a
        value is NaN or infinite; or if values are so large that a client's different samples become equal in this type
        (`full_precision.check_digits`).
    """
    if not clients:
        raise JaxpflError("at least one client is required, got none")
    arrays = [np.asarray(x, np.float64) for x in clients]
    shape = arrays[0].shape[1:]
    for i, x in enumerate(arrays):
        if x.ndim == 0 or len(x) == 0:
            raise JaxpflError(f"client {i} has no samples: leave it out")
        if x.shape[1:] != shape:
            raise JaxpflError(f"client {i} has samples of shape {x.shape[1:]}, but the first client has {shape}")
        if not np.isfinite(x).all():
            raise JaxpflError(f"client {i} has a sample that is NaN or infinite")
    largest = np.max([np.abs(x).max(axis=0) for x in arrays], axis=0)
    full_precision.check_digits(largest, np.max([np.ptp(x, axis=0) for x in arrays], axis=0))
    n = max(map(len, arrays))
    x, mask = np.zeros((len(arrays), n, *shape)), np.zeros((len(arrays), n), bool)
    for i, own in enumerate(arrays):
        x[i, : len(own)], mask[i, : len(own)] = own, True
    return Samples(jnp.asarray(x), jnp.asarray(mask))


def every(x: Array) -> Samples:
    """Make `Samples` from an array [m, n, ...] without padding."""
    return Samples(x, jnp.ones(x.shape[:2], bool))


class Moments(NamedTuple):
    """Number [], mean [...] and summed squared deviations [...] of messages with shape [...].

    Deviations are taken from the mean, because the difference between two large sums would lose its digits in single
    precision.
    """

    number: Array
    mean: Array
    scatter: Array

    @property
    def variance(self) -> Array:
        """Unbiased variance, [...]; zero for fewer than two messages."""
        return self.scatter / jnp.maximum(self.number - 1, 1)


def moments(messages: Array, sent: Array) -> Moments:
    """Moments of the messages [m, ...] for which ``sent`` [m] is true."""
    chosen = sent.reshape(-1, *[1] * (messages.ndim - 1))
    number = sent.sum().astype(messages.dtype)
    mean = jnp.where(chosen, messages, 0).sum(axis=0) / jnp.maximum(number, 1)
    return Moments(number, mean, jnp.where(chosen, (messages - mean) ** 2, 0).sum(axis=0))


def without(all_sent: Moments, message: Array, sent: Array) -> Moments:
    """Moments of the other clients' messages: ``all_sent`` without this client's ``message``, if the client sent it."""
    number = all_sent.number - 1
    deviation = message - all_sent.mean
    others = jnp.maximum(number, 1)
    mean = all_sent.mean - deviation / others
    # Rounding could make the difference negative.
    scatter = jnp.maximum(all_sent.scatter - deviation**2 * all_sent.number / others, 0)
    left_out = Moments(number, jnp.where(number > 0, mean, 0), jnp.where(number > 0, scatter, 0))
    return Moments(*(jnp.where(sent, a, b) for a, b in zip(left_out, all_sent, strict=True)))


def truncated_mean(mean: Array, stddev: Array, most: Array) -> Array:
    """Mean of the normal distribution N(mean, stddev^2), truncated to [0, most].

    This is the posterior mean of a number in [0, most] under a flat prior, given the estimate ``mean`` with standard
    error ``stddev``. If ``mean`` is far below 0, the result is close to 0; if it is far above ``most``, the result is
    close to ``most``. The integral is computed by Gauss-Legendre quadrature around the mode, because the textbook
    formula suffers from cancellation if stddev >> most, or if the mean is far outside.
    """
    mean, stddev, most = jnp.broadcast_arrays(*(jnp.asarray(each, float) for each in (mean, stddev, most)))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    scale = jnp.where(stddev > 0, stddev, 1)
    likeliest = jnp.clip(mean, 0, most)
    outside = (likeliest - mean) / scale
    reach = scale * 2 * _NEGLIGIBLE / (jnp.abs(outside) + jnp.sqrt(outside**2 + 2 * _NEGLIGIBLE))
    low, high = jnp.maximum(-likeliest, -reach), jnp.minimum(most - likeliest, reach)
    u = low[..., None] + (high - low)[..., None] * ((nodes + 1) / 2)
    z = u / scale[..., None]
    p = jax.nn.softmax(jnp.log(weights) - z * (z / 2 + outside[..., None]))
    return jnp.where(stddev > 0, likeliest + (p * u).sum(axis=-1), likeliest)
