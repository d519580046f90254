r"""User-level differential privacy for any method whose uploads are summed: a wrapper around its `Algorithm`.

In a round, client i's upload :math:`\Delta_i` (as a whole: parameters, psi, ...) is clipped, and the server receives

.. math:: \frac1D \Bigl( \sum_{i \in S} \Delta_i \min(1, C / \|\Delta_i\|_2) + N(0, z^2 C^2 I) \Bigr)

in place of the mean, with a fixed public divisor D, the expected cohort. The method's server update is post-processing.
The personalised models stay with their clients.

Formal guarantees: adding or removing one client changes the sum by at most C in L2 norm, whatever its data, even if not
finite; so each round is a Gaussian mechanism with noise multiplier z. The guarantee of a run follows by accounting
(`PrivacyPlan`). The training losses and accuracies that the simulator reports are not part of the release.

References: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models"; Andrew et al. 2021,
"Differentially Private Learning with Adaptive Clipping".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl import checks, trees
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.privacy.clipping import clip
from jaxpfl.privacy.noise import add_gaussian
from jaxpfl.privacy.step_noise import StepNoise
from jaxpfl.protocol import (
    ALL_STEPS,
    Algorithm,
    Client,
    ClientContext,
    Message,
    NoiseStream,
    Reduced,
    Reduction,
    Server,
    ServerContext,
    Upload,
)
from jaxpfl.types import Array, Key, Metrics, PyTree, Scalar, Splits

NOISE_SEEDS = ("run", "secret")
_LEAST_STDDEV = 1e-30
"""Least standard deviation whose lattice single precision can represent, with shares of a million clients."""


@dataclass(frozen=True)
class Mechanism:
    """A privacy mechanism: clipping and noise.

    Implements: Ozkara et al. 2023, section 3.3.
    Reference: Ozkara et al. 2022, Figure 3.

    Attributes:
      noise_multiplier: z, the noise's standard deviation over C; 0 for clipping alone. One number, or one per run.
      clipping_norm: C, or with ``quantile`` the C of the first round. One number, or one per run.
      noise: the source of the noise. ``central``: the server, on the sum. ``distributed``: each client adds its share,
        of variance z^2 C^2 / min_uploads, as under secure aggregation. ``per_step``: each client in every local step,
        as printed (`StepNoise`), with standard deviation z C; C and z are then those of a step.
      min_uploads: K_min, public: a round with fewer uploads releases nothing. Required for distributed noise; for noise
        per step it defaults to the expected cohort.
      quantile: adapts C to this quantile of the clients' norms (Andrew et al. 2021): each client also reports whether
        its norm was below C; the privacy cost of the count is included in z (`noise_multiplier_of_sum`).
      quantile_lr: rate of C's geometric steps.
      count_stddev: standard deviation of the noise on that count.
      scale_clipping_norm: for noise per step, C_2, of the gradient of an uploaded scale (psi); C unless given.
      joint: for noise per step, clip and noise the gradients of parameters and scale as one vector.
      noise_seed: source of the randomness of cohorts and noise: ``run``, the run's seed (with all its settings and
        data, so that no two runs share it), which makes the run reproducible and is stored beside the model; or
        ``secret``, the operating system, for models to be published: the run's state alone holds the key
        (``RunState.noise``).

    Raises:
      JaxpflError: for a value out of range, or adaptive clipping without central noise.

    Example:
      >>> from jaxpfl import participation, privacy
      >>> mechanism = Mechanism(noise_multiplier=2.0, clipping_norm=0.5)
      >>> plan = privacy.plan_of(mechanism, participation.poisson(1000, rate=0.1), rounds=100)
      >>> round(plan.epsilon(delta=1e-4), 3)
      1.966
    """

    noise_multiplier: float | tuple[float, ...]
    clipping_norm: float | tuple[float, ...] = 1.0
    noise: Literal["central", "distributed", "per_step"] = "central"
    min_uploads: int | None = None
    quantile: float | None = None
    quantile_lr: float = 0.2
    count_stddev: float | None = None
    scale_clipping_norm: float | None = None
    joint: bool = False
    noise_seed: Literal["run", "secret"] = "run"

    def __post_init__(self) -> None:
        if self.noise_seed not in NOISE_SEEDS:
            raise unknown_name("noise_seed", str(self.noise_seed), NOISE_SEEDS)
        z = np.asarray(self.noise_multiplier, float)
        if not (np.isfinite(z).all() and (z >= 0).all()):
            raise JaxpflError(f"noise_multiplier must be >= 0 and finite, got {self.noise_multiplier}")
        for limit in np.ravel(self.clipping_norm):
            checks.positive("clipping_norm", float(limit))
        stddevs = np.ravel(z)[:, None] * np.ravel(np.asarray(self.clipping_norm, float))
        if ((stddevs > 0) & (stddevs < _LEAST_STDDEV)).any():
            raise JaxpflError(
                f"noise_multiplier * clipping_norm, the noise's standard deviation, must be at least {_LEAST_STDDEV:g} "
                f"or 0, got {stddevs.min():g}: single precision holds no smaller noise"
            )
        if self.noise not in ("central", "distributed", "per_step"):
            raise JaxpflError(f"noise must be central, distributed or per_step, got {self.noise!r}")
        if self.noise != "per_step" and (self.joint or self.scale_clipping_norm is not None):
            raise JaxpflError("scale_clipping_norm and joint are for noise = per_step")
        if self.noise == "per_step" and (z.ndim or np.ndim(self.clipping_norm)):
            raise JaxpflError("noise = per_step takes one noise_multiplier and one clipping_norm for all runs")
        if self.noise == "distributed" and self.min_uploads is None:
            raise JaxpflError("noise = distributed needs min_uploads, the least number of uploads of a round")
        if self.noise == "central" and self.min_uploads is not None:
            raise JaxpflError("min_uploads is for noise that the clients add: noise = distributed or per_step")
        if self.min_uploads is not None and self.min_uploads < 1:
            raise JaxpflError(f"min_uploads must be at least 1, got {self.min_uploads}")
        if self.quantile is not None:
            self._check_adaptive(self.quantile, z.max())

    def _check_adaptive(self, quantile: float, z: float) -> None:
        checks.probability("quantile", quantile)
        checks.positive("quantile_lr", self.quantile_lr)
        if self.noise != "central":
            raise JaxpflError(f"adaptive clipping has central noise only: leave out quantile, or noise = {self.noise}")
        if self.count_stddev is None or not 0 < self.count_stddev < math.inf:
            raise JaxpflError(f"count_stddev must be > 0 and finite, got {self.count_stddev}")
        if 2 * self.count_stddev <= z:
            raise JaxpflError(
                f"count_stddev must be above noise_multiplier / 2 = {z / 2:g}, got {self.count_stddev}: the count "
                "alone would cost more than the whole budget"
            )

    @property
    def noise_multiplier_of_sum(self) -> np.ndarray:
        """The sum's noise over C for which sum and count together are as private as z (Andrew et al., Theorem 1)."""
        z = np.asarray(self.noise_multiplier, float)
        if self.quantile is None:
            return z
        assert self.count_stddev is not None
        return z / np.sqrt(1 - (z / (2 * self.count_stddev)) ** 2)

    def least_uploads(self, expected_cohort: float) -> int:
        """K_min, the uploads that a round needs for its sum to be released; 0 if there is no minimum."""
        if self.noise == "central":
            return 0
        return self.min_uploads if self.min_uploads is not None else round(expected_cohort)

    @property
    def stream(self) -> NoiseStream | None:
        """Name of the noise stream, which separates its noise from that of other mechanisms; None without noise.

        Numbers that are one per run are left out, since they are hyper-parameters.
        """
        if not np.any(self.noise_multiplier):
            return None
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.noise != "per_step":
            del settings["noise_multiplier"], settings["clipping_norm"]
        return NoiseStream(repr(settings), self.noise_seed == "secret")

    @property
    def step_noise(self) -> StepNoise | None:
        """Noise of local steps, for `LocalWork`; None unless the noise is added in every step."""
        if self.noise != "per_step":
            return None
        z, c1 = float(np.asarray(self.noise_multiplier)), float(np.asarray(self.clipping_norm))
        c2 = c1 if self.scale_clipping_norm is None else self.scale_clipping_norm
        return StepNoise(c1, z * c1, c2, z * c2, self.joint)


@struct.dataclass
class PrivateHyper:
    """Hyper-parameters of a method and of its mechanism, all traced, so that they can be swept over runs."""

    method: Any
    noise_multiplier: Scalar
    clipping_norm: Scalar


class _Guarded(NamedTuple):
    """Server state: the method's own, and the current C if it adapts (else nothing)."""

    state: PyTree
    clipping_norm: PyTree


class _Sent(NamedTuple):
    """Message to every client: the method's own, and the current C if it adapts."""

    shared: PyTree
    clipping_norm: PyTree


class _Released(NamedTuple):
    """Upload of a client: its clipped change; under adaptive clipping also 1/2 if its norm is below C, else -1/2."""

    change: PyTree
    below: PyTree


def privatize(algorithm: Algorithm, hp: PyTree, mechanism: Mechanism) -> tuple[Algorithm, PrivateHyper]:
    """Wrap an algorithm and its hyper-parameters in a privacy mechanism.

    The clipped quantity is a client's increment without its weight: all clients have the same weight. A client whose
    work is not finite contributes zero (and its share of distributed noise), and counts as diverged.

    Raises:
      JaxpflError: if the method's uploads are not summed or, when traced, have several weights, which would be a
        release of their own.
    """
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError("a private sum needs uploads that are summed: this method's server sees each of them")
    if mechanism.noise == "per_step":  # nothing is left to do but the public divisor
        hyper = PrivateHyper(hp, 0.0, math.inf)
    else:
        hyper = PrivateHyper(hp, mechanism.noise_multiplier_of_sum, np.asarray(mechanism.clipping_norm, float))
    # Of the numbers that are hyper-parameters the functions hold none: a compiled program serves all of them.
    kind = replace(mechanism, noise_multiplier=0.0, clipping_norm=1.0)
    clients = tuple(_client(client, kind) for client in algorithm.clients)
    server = _server(algorithm.server, kind)
    return algorithm._replace(clients=clients, server=server, noise=mechanism.stream), hyper


def _client(inner: Client, mechanism: Mechanism) -> Client:
    def received(message: Message) -> Message:
        return message._replace(shared=message.shared.shared)

    def update(
        key: Key, hp: PrivateHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        limit = hp.clipping_norm if mechanism.quantile is None else message.shared.clipping_norm
        state, upload, metrics = inner.update(key, hp.method, ctx, received(message), state, splits)
        if any(jnp.ndim(weight) for weight in jax.tree.leaves(upload.weight)):
            raise JaxpflError("a private sum needs one weight for an upload: this method's say what a client chose")
        finite = trees.all_finite((state, upload))
        change, size = clip(trees.prefix_divide(upload.total, upload.weight), limit)
        if mechanism.noise != "per_step":  # there the upload already holds the client's share of the noise
            change = trees.where(finite, change, jax.tree.map(jnp.zeros_like, change))
        below: PyTree = ()
        if mechanism.quantile is not None:
            below = jnp.where(finite, jnp.where(size <= limit, 0.5, -0.5), 0.0)
        if mechanism.noise == "distributed":
            assert mechanism.min_uploads is not None
            share = hp.noise_multiplier * limit / math.sqrt(mechanism.min_uploads)
            change = add_gaussian(_noise_key(key), change, share)
        metrics |= {"upload_norm": size}
        if mechanism.noise != "per_step":
            metrics |= {"clipped": (size > limit).astype(size.dtype)}
        return state, Upload(_Released(change, below), jnp.ones(()), failed=~finite), metrics

    def init(key: Key, hp: PrivateHyper, ctx: ClientContext, message: Message) -> PyTree:
        return inner.init(key, hp.method, ctx, received(message))

    def personalize(
        key: Key, hp: PrivateHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        return inner.personalize(key, hp.method, ctx, received(message), state, splits)

    def predict(hp: PrivateHyper, personal: PyTree, x: PyTree) -> Array:
        return inner.predict(hp.method, personal, x)

    def idle(key: Key, hp: PrivateHyper, ctx: ClientContext, state: PyTree, splits: Splits) -> tuple[PyTree, Metrics]:
        assert inner.idle is not None
        return inner.idle(key, hp.method, ctx, state, splits)

    def cluster(hp: PrivateHyper, message: Message, state: PyTree, splits: Splits) -> Array:
        assert inner.cluster is not None
        return inner.cluster(hp.method, received(message), state, splits)

    gradients = inner.gradients
    if gradients is not None:
        count = gradients.update
        gradients = gradients._replace(update=lambda steps, message: count(steps, received(message)))
    return Client(init, update, personalize, predict, inner.idle and idle, inner.cluster and cluster, gradients)


def _server(inner: Server, mechanism: Mechanism) -> Server:
    def init(key: Key, hp: PrivateHyper, ctx: ServerContext) -> _Guarded:
        start = () if mechanism.quantile is None else jnp.asarray(hp.clipping_norm, jnp.result_type(float))
        return _Guarded(inner.init(key, hp.method, ctx), start)

    def broadcast(key: Key, hp: PrivateHyper, ctx: ServerContext, guarded: _Guarded) -> Message:
        message = inner.broadcast(key, hp.method, ctx, guarded.state)
        return message._replace(shared=_Sent(message.shared, guarded.clipping_norm))

    def update(
        key: Key, hp: PrivateHyper, ctx: ServerContext, guarded: _Guarded, reduced: Reduced
    ) -> tuple[_Guarded, Metrics]:
        released: _Released = reduced.total
        total = released.change
        norm = hp.clipping_norm if mechanism.quantile is None else guarded.clipping_norm
        of_sum, of_count = jax.random.split(_noise_key(key))
        # The number of participants is not public: a method's server uses the expected cohort.
        divisor = jnp.asarray(ctx.expected_cohort)
        if mechanism.noise == "central":
            total = add_gaussian(of_sum, total, hp.noise_multiplier * norm)
        else:
            enough = reduced.contributors >= mechanism.least_uploads(ctx.expected_cohort)
            total = trees.where(enough, total, jax.tree.map(jnp.zeros_like, total))
            divisor = jnp.where(enough, divisor, 0)
        public = Reduced(total, divisor, jnp.round(divisor).astype(jnp.int32))
        state, metrics = inner.update(key, hp.method, ctx, guarded.state, public)
        # Sum and noise are in float32 whatever the model's dtype; the server's state keeps its own.
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, guarded.state)
        if mechanism.noise != "per_step":
            metrics |= {"clipping_norm": jnp.asarray(norm)}
        if mechanism.quantile is None:
            return _Guarded(state, ()), metrics
        assert mechanism.count_stddev is not None
        count = add_gaussian(of_count, released.below, mechanism.count_stddev)
        below = 0.5 + count / ctx.expected_cohort
        norm = norm * jnp.exp(-mechanism.quantile_lr * (below - mechanism.quantile))
        return _Guarded(state, norm), metrics

    predict, greet = inner.predict_global, inner.welcome

    def predict_global(hp: PrivateHyper, guarded: _Guarded, x: PyTree) -> Array:
        assert predict is not None
        return predict(hp.method, guarded.state, x)

    def welcome(key: Key, hp: PrivateHyper, ctx: ServerContext, guarded: _Guarded) -> Message:
        assert greet is not None
        message = greet(key, hp.method, ctx, guarded.state)
        return message._replace(shared=_Sent(message.shared, guarded.clipping_norm))

    return Server(
        init,
        broadcast,
        update,
        None if predict is None else predict_global,
        None if greet is None else welcome,
    )


def _noise_key(key: Key) -> Key:
    """Key of the noise: local steps use ``fold_in(key, step)``, and none has this number."""
    return jax.random.fold_in(key, ALL_STEPS)
