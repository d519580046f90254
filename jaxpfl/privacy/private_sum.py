r"""User-level differential privacy for any method whose server sums the uploads: a wrapper around its `Algorithm`.

In each round, client i's upload :math:`\Delta_i` (parameters, scales, ... together) is clipped. Instead of the mean
over the cohort S, the server receives

.. math:: \frac1D \Bigl( \sum_{i \in S} \Delta_i \min(1, C / \|\Delta_i\|_2) + N(0, z^2 C^2 I) \Bigr)

The divisor D is fixed and public: the expected cohort size. The method's server update is post-processing. The
personalized models stay with their clients.

Formal guarantees: adding or removing one client changes the sum by at most C in L2 norm, for any data of the client,
even if they are not finite. Each round is therefore a Gaussian mechanism with noise multiplier z. Accounting
(`PrivacyPlan`) gives the guarantee for the run. The training losses and accuracies that the simulator reports are not
part of the release.

References: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models"; Andrew et al. 2021,
"Differentially Private Learning with Adaptive Clipping".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core import exclusions, trees
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Upload,
    wrapped_client,
    wrapped_server,
)
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.privacy.mechanism import Mechanism, released_gradients
from jaxpfl.privacy.noise import add_banded, add_gaussian, clip
from jaxpfl.support.errors import JaxpflError


@struct.dataclass
class PrivateHyper:
    """Hyper-parameters of a method and its privacy mechanism, all traced so that they may differ between runs."""

    method: Any
    noise_multiplier: Scalar
    clipping_norm: Scalar


class Guarded(NamedTuple):
    """Server state: the method's state, the current clipping norm (if adaptive), and recent noise (if banded).

    The norm and the noise are ``()`` if they are not needed.
    """

    state: PyTree
    clipping_norm: PyTree
    past: PyTree = ()


_Changed: TypeAlias = Callable[[Message, PrivateHyper], PyTree]
"""Function ``(broadcast, hyper-parameters) -> shapes and types of a client's clipped upload``."""


class _Sent(NamedTuple):
    """Broadcast: the method's message, and the current clipping norm C (if adaptive)."""

    shared: PyTree
    clipping_norm: PyTree


class _Released(NamedTuple):
    """A client's clipped upload and, if C adapts, 1/2 if the norm before clipping was at most C, otherwise -1/2."""

    change: PyTree
    below: PyTree


def privatize(
    algorithm: Algorithm, hp: PyTree, mechanism: Mechanism, splits: Splits | None = None
) -> tuple[Algorithm, PrivateHyper]:
    """Wrap an algorithm and its hyper-parameters in a privacy mechanism.

    The mechanism clips a client's upload divided by its weight, so all clients have the same weight. A client whose
    state or upload is not finite contributes zero (plus its share of distributed noise) and counts as diverged.

    Banded noise depends on the noise of the last b - 1 rounds. The server's state contains this noise. To compute it
    again would require all draws since the first round, because the inverse of a banded matrix is dense.

    Args:
      algorithm: the method's algorithm.
      hp: the method's hyper-parameters.
      mechanism: mechanism for every round; banded noise needs coefficients (`claim.planned`).
      splits: splits of one client, as arrays or shapes; required for banded noise, to determine the shapes of the
        noise.

    Returns:
      The private algorithm and its hyper-parameters.

    Raises:
      JaxpflError: if the method's uploads are not summed, or if banded noise lacks its coefficients or ``splits``.
        Tracing a round raises the error if an upload has several weights (such as one for each cluster), which would
        reveal the client's choice; or if noise in every step is requested and the method's update adds none.
    """
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError("a private sum requires summed uploads, but this method's server uses individual uploads")
    if mechanism.noise == "per_step":  # clients clip and add noise in every step, so the server only has to divide
        hyper = PrivateHyper(hp, 0.0, math.inf)
    else:
        hyper = PrivateHyper(hp, mechanism.noise_multiplier_of_sum, np.asarray(mechanism.clipping_norm, float))
    # Hyper-parameters are traced instead of stored in the functions, so that one compiled program serves all values.
    kind = replace(mechanism, noise_multiplier=0.0, clipping_norm=1.0)
    clients = tuple(_client(client, kind) for client in algorithm.clients)
    changed: _Changed | None = None
    if kind.noise == "banded":
        if kind.coefficients is None or splits is None:
            raise JaxpflError("banded noise requires coefficients (see privacy.claim.planned) and one client's splits")
        # Only banded noise needs shapes; functions that contain them are recompiled for data of another shape.
        changed = partial(_change, algorithm, splits)
    server = _server(algorithm.server, kind, changed)
    # Compressors compress the same entries of the change as without privacy, and not the count. Clipping covers all
    # entries, because all are released.
    increments = _Released(algorithm.increments, below=False)
    return algorithm._replace(clients=clients, server=server, noise=mechanism.stream, increments=increments), hyper


def _client(inner: Client, mechanism: Mechanism) -> Client:
    def received(message: Message) -> Message:
        return message._replace(shared=message.shared.shared)

    def update(
        key: Key, hp: PrivateHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        limit = hp.clipping_norm if mechanism.quantile is None else message.shared.clipping_norm
        # The list is filled while the update is traced. The claim assumes that every local step adds noise.
        with released_gradients() as noisy:
            state, upload, metrics = inner.update(key, hp.method, ctx, received(message), state, splits)
        silent = not noisy and "the update never calls LocalWork.released"
        exclusions.check({"noise": mechanism.noise, "steps without noise": silent})
        if any(jnp.ndim(weight) for weight in jax.tree.leaves(upload.weight)):
            raise JaxpflError("a private sum requires one weight per upload: several would reveal the client's choice")
        finite = trees.all_finite((state, upload))
        change, size = clip(trees.prefix_divide(upload.total, upload.weight), limit)
        if mechanism.noise != "per_step":  # with per_step the upload already contains the client's noise
            change = trees.where(finite, change, jax.tree.map(jnp.zeros_like, change))
        below: PyTree = ()
        if mechanism.quantile is not None:
            below = jnp.where(finite, jnp.where(size <= limit, 0.5, -0.5), 0.0)
        if mechanism.noise == "distributed":
            assert mechanism.min_uploads is not None
            share = hp.noise_multiplier * limit / math.sqrt(mechanism.min_uploads)
            change = add_gaussian(stream(key, Purpose.RELEASE_NOISE), change, share, "a client's share")
        metrics |= {"upload_norm": size}
        if mechanism.noise != "per_step":
            metrics |= {"clipped": (size > limit).astype(size.dtype)}
        return state, Upload(_Released(change, below), jnp.ones(()), failed=~finite), metrics

    return wrapped_client(inner, update=update, hyper=_method_hyper, received=received)


def _server(inner: Server, mechanism: Mechanism, changed: _Changed | None) -> Server:
    c = mechanism.coefficients or (1.0,)
    correlated = len(c) > 1

    def init(key: Key, hp: PrivateHyper, ctx: ServerContext) -> Guarded:
        start = () if mechanism.quantile is None else jnp.asarray(hp.clipping_norm, jnp.result_type(float))
        state, past = inner.init(key, hp.method, ctx), ()
        if correlated:
            assert changed is not None
            change = changed(inner.broadcast(key, hp.method, ctx, state), hp)
            past = jax.tree.map(lambda a: jnp.zeros((len(c) - 1, *a.shape), a.dtype), change)
        return Guarded(state, start, past)

    def send(message: Message, guarded: Guarded) -> Message:
        return message._replace(shared=_Sent(message.shared, guarded.clipping_norm))

    def update(
        key: Key, hp: PrivateHyper, ctx: ServerContext, guarded: Guarded, reduced: Reduced
    ) -> tuple[Guarded, Metrics]:
        released: _Released = reduced.total
        total = released.change
        norm = hp.clipping_norm if mechanism.quantile is None else guarded.clipping_norm
        sum_key, count_key = jax.random.split(stream(key, Purpose.RELEASE_NOISE))
        # The number of participants is not public, so the method's server divides by the expected cohort size.
        divisor = jnp.asarray(ctx.expected_cohort)
        past = guarded.past
        if correlated:
            total, past = add_banded(sum_key, total, hp.noise_multiplier * norm, c, past, "sum")
        elif mechanism.server_adds:
            total = add_gaussian(sum_key, total, hp.noise_multiplier * norm, "sum")
        else:
            enough = reduced.contributors >= mechanism.least_uploads(ctx.expected_cohort)
            total = trees.where(enough, total, jax.tree.map(jnp.zeros_like, total))
            divisor = jnp.where(enough, divisor, 0)
        public = Reduced(total, divisor, jnp.round(divisor).astype(jnp.int32))
        state, metrics = inner.update(key, hp.method, ctx, guarded.state, public)
        # Sum and noise are at least float32; the server's state keeps the model's dtype.
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, guarded.state)
        if correlated:
            # If the new state overflows, keep the old state but the new noise, on which the next round's noise depends.
            # The engine's own check would restore the old noise too.
            sound = trees.all_finite(state)
            state = trees.where(sound, state, guarded.state)
            metrics |= {"overflowed": (~sound).astype(jnp.float32)}
        if mechanism.noise != "per_step":
            metrics |= {"clipping_norm": jnp.asarray(norm)}
        if mechanism.quantile is None:
            return Guarded(state, (), past), metrics
        assert mechanism.count_stddev is not None
        count = add_gaussian(count_key, released.below, mechanism.count_stddev, "count")
        below = 0.5 + count / ctx.expected_cohort
        norm = norm * jnp.exp(-mechanism.quantile_lr * (below - mechanism.quantile))
        return Guarded(state, norm), metrics

    return wrapped_server(
        inner, init=init, update=update, state=lambda guarded: guarded.state, hyper=_method_hyper, send=send
    )


def _change(algorithm: Algorithm, splits: Splits, message: Message, hp: PrivateHyper) -> PyTree:
    """Shapes and types of a client's clipped upload after noise is added."""
    client, zero, key = algorithm.clients[0], jnp.int32(0), jax.random.key(0)
    if message.per_client is not None:
        message = message._replace(per_client=jax.tree.map(lambda a: a[0], message.per_client))
    ctx = ClientContext(zero, zero, zero, algorithm.local_steps, key)
    state = client.init(key, hp.method, ctx, message)

    def uploaded(splits: Splits) -> PyTree:
        _, upload, _ = client.update(key, hp.method, ctx, message, state, splits)
        return clip(trees.prefix_divide(upload.total, upload.weight), hp.clipping_norm)[0]

    shapes = jax.eval_shape(uploaded, splits)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.promote_types(a.dtype, jnp.float32)), shapes)


def _method_hyper(hp: PrivateHyper) -> PyTree:
    return hp.method
