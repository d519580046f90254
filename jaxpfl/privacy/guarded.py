r"""Guarded examples: training data from which a method obtains noisy clipped gradients and nothing else.

Under example-level privacy a client's functions receive a `GuardedData` instead of their examples. The number of
examples is public. Only `GuardedBatch.gradient` reads the examples, and a `Ledger` records every gradient, so that the
run can be accounted for. Any other access to an example (a pass over all examples, class counts, a loss, a teacher's
prediction) raises an error while the method is traced. Therefore every use of an example is accounted for, even in a
method that a user has written.

Formal guarantees: adding or removing any example changes the sum of a batch's clipped gradients by at most C. If the
persons of the examples are known, this also holds for all examples of a person together. Noise N(0, z^2 C^2 I) is added
to the sum. Each mini-batch is drawn anew, from a random stream that depends on the round, the client, the descent (a
sequence of local steps) and the step. The noise is drawn from a different stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import exclusions, trees
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    LocalEpochs,
    Message,
    NoiseStream,
    Upload,
    wrapped_client,
)
from jaxpfl.core.randomness import Purpose, stream, words_of
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.privacy.noise import add_gaussian, bits, clip
from jaxpfl.privacy.silos import WORD, SiloMechanism
from jaxpfl.support.errors import JaxpflError

ExampleLoss = Callable[[PyTree, Key, PyTree, Array], Array]
"""Loss of a mini-batch of one example: ``(parameters, key, x [1, ...], y [1, ...]) -> [1]``."""


class Access(NamedTuple):
    """Mini-batches drawn by one descent (a sequence of local steps) in a call of a client's function.

    Attributes:
      steps: largest number of steps.
      own: function that returns a client's number of steps, at most ``steps``; None if all clients take ``steps``.
      batches: number of mini-batches per step.
      releases: number of gradients per mini-batch.
    """

    steps: int
    own: LocalEpochs | None
    batches: int
    releases: int

    def gradients(self, examples: int) -> int:
        """Number of mini-batches that a client with this many examples draws."""
        steps = self.steps
        if self.own is not None:
            steps = min(steps, int(self.own.on_host(np.array([examples]))[0]))
        return steps * self.batches


class Ledger:
    """Record of how one call of a client function uses the client's examples, written while the call is traced.

    Args:
      method: name of the method, for error messages.
      call: name of the function: ``update``, ``idle``, ``personalize`` or ``cluster``.

    Attributes:
      accesses: descents (sequences of local steps) on the examples.
      loss: mean training loss of the last descent, []. The loss is reported to the user, outside the private release.
        The method cannot read the loss.
    """

    def __init__(self, method: str, call: str):
        self.method, self.call = method, call
        self.accesses: list[Access] = []
        self.loss: Array | None = None
        self._level = jax.extend.core.get_opaque_trace_state(convention="flax")

    def enter(self, access: Access) -> int:
        """Record a descent and return its index among the call's descents.

        Raises:
          JaxpflError: if called in a JAX loop or conditional of the method, which may run a descent several times.
        """
        if jax.extend.core.get_opaque_trace_state(convention="flax") != self._level:
            self.refuse("trains inside its own loop or branch, where its steps cannot be counted")
        self.accesses.append(access)
        return len(self.accesses) - 1

    def released(self, descent: int, releases: int) -> None:
        """Record that a descent computes at least ``releases`` gradients per mini-batch."""
        access = self.accesses[descent]
        self.accesses[descent] = access._replace(releases=max(access.releases, releases))

    def refuse(self, why: str) -> NoReturn:
        """Reject the method with the reason ``why``.

        Raises:
          JaxpflError: always.
        """
        raise JaxpflError(f"{self.method} cannot protect individual examples (privacy.unit = example): it {why}")


class _OfClient(NamedTuple):
    """Traced settings of one client, [] each, from its `Silo`.

    ``whole`` is true if every mini-batch contains all examples. ``stddev`` is the standard deviation ``z_i C`` of the
    noise. ``expected`` is the expected size of a mini-batch.
    """

    threshold: Array
    whole: Array
    stddev: Array
    expected: Array


class GuardedBatch:
    """Mini-batch of guarded examples; a method can only compute its `gradient`.

    Attributes:
      loss: mean loss [] of the examples at the last gradient; only for `GuardedData.report`.
    """

    def __init__(
        self,
        ledger: Ledger,
        descent: int,
        units: tuple[PyTree, Array, Array],
        noise_key: Key,
        mechanism: tuple[_OfClient, float],
    ):
        self._ledger, self._descent = ledger, descent
        self._units, self._noise_key, self._mechanism = units, noise_key, mechanism
        self._level = jax.extend.core.get_opaque_trace_state(convention="flax")
        self._releases = 0
        self.loss = jnp.zeros(())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._ledger.refuse(f"reads {name} of a mini-batch instead of its private gradient")

    def gradient(self, loss: ExampleLoss, params: PyTree, key: Key) -> tuple[Array, PyTree]:
        """Compute the noisy sum of the clipped gradients of examples (or persons), divided by the expected batch size.

        Args:
          loss: loss of one example.
          params: parameters at which to take the gradient.
          key: key of the step, for dropout; each example gets its own key.

        Returns:
          Two results: NaN in place of the loss, which is not released; and the noisy mean gradient.

        Raises:
          JaxpflError: if called in a JAX loop, conditional or gradient of the method.
        """
        if jax.extend.core.get_opaque_trace_state(convention="flax") != self._level:
            self._ledger.refuse("takes gradients of a mini-batch inside a loop, a branch or another gradient")
        self._releases += 1
        self._ledger.released(self._descent, self._releases)
        noise_key = stream(self._noise_key, Purpose.RELEASE_NOISE, self._releases)
        (x, y, valid), (of_client, limit) = self._units, self._mechanism
        keys = jax.vmap(lambda nth: jax.random.fold_in(key, nth))(jnp.arange(valid.size)).reshape(valid.shape)

        def unit_gradient(x: PyTree, y: Array, valid: Array, keys: Key) -> tuple[Array, PyTree]:
            def unit_loss(at: PyTree) -> tuple[Array, Array]:
                each = jax.vmap(lambda key, *one: loss(at, key, *jax.tree.map(lambda a: a[None], one))[0])(keys, x, y)
                return jnp.where(valid, each, 0).sum(), each

            gradient, each = jax.grad(unit_loss, has_aux=True)(params)
            return each, clip(gradient, limit)[0]

        values, gradients = jax.vmap(unit_gradient)(x, y, valid, keys)
        total = jax.tree.map(lambda g: trees.where_rows(valid[:, 0], g).sum(axis=0), gradients)
        noisy = add_gaussian(noise_key, total, of_client.stddev, "a batch")
        mean = jax.tree.map(lambda g, p: (g / of_client.expected).astype(p.dtype), noisy, params)
        self.loss = trees.valid_mean(valid.ravel(), values.ravel()).astype(self.loss.dtype)
        return jnp.full_like(self.loss, jnp.nan), mean


class GuardedData:
    """One client's guarded data, from which a method can only draw `GuardedBatch`es.

    Attributes:
      size: number of examples, [] int32, public.
      capacity: largest number of examples of any client, static.
    """

    def __init__(self, ledger: Ledger, data: ClientData, drawn: tuple[Key, _OfClient, SiloMechanism] | None = None):
        if drawn is not None and (drawn[2].person_examples is None) != (data.persons is None):
            raise ValueError("the mechanism and the data disagree on whether persons are protected")
        self.size, self.capacity = data.size, data.capacity
        self._ledger, self._data, self._drawn = ledger, data, drawn

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        what = "validation examples" if self._drawn is None else "a client's examples"
        self._ledger.refuse(f"reads {what} ({name}) outside private gradients in {self._ledger.call}")

    def refuse(self, why: str) -> NoReturn:
        """Reject the method as in `Ledger.refuse`."""
        self._ledger.refuse(why)

    def report(self, loss: Array) -> None:
        """Record a descent's mean training loss, [], for the user's report; it is not part of the private release."""
        self._ledger.loss = loss

    def batches(self, steps: int, own: LocalEpochs | None, each: int) -> Callable[[Scalar], tuple[GuardedBatch, ...]]:
        """Poisson mini-batches of a descent, as a function of the step t.

        Args:
          steps: largest number of steps.
          own: function that returns a client's number of steps, at most ``steps``; None if all clients take ``steps``.
          each: number of mini-batches per step.

        Raises:
          JaxpflError: if the method may not train on these examples (validation examples, for instance), or if called
            in a JAX loop or conditional of the method.
        """
        if self._drawn is None:
            self._ledger.refuse(f"trains in {self._ledger.call} on examples that it may not read")
        key, of_client, mechanism = self._drawn
        descent = self._ledger.enter(Access(steps, own, each, 0))
        of_descent = stream(key, Purpose.EXAMPLES, descent)

        def batches_of(t: Scalar) -> tuple[GuardedBatch, ...]:
            return tuple(
                self._batch(jax.random.fold_in(of_descent, t * each + nth), descent, of_client, mechanism)
                for nth in range(each)
            )

        return batches_of

    def _batch(self, key: Key, descent: int, of_client: _OfClient, mechanism: SiloMechanism) -> GuardedBatch:
        data, most = self._data, mechanism.person_examples

        def gathered(leaf: Array, places: Array) -> Array:
            return leaf.at[data.start + places].get(mode="promise_in_bounds", wrap_negative_indices=False)

        first = jnp.arange(data.capacity) < data.size
        if most is not None:
            own = gathered(data.persons, jnp.where(first, jnp.arange(data.capacity), 0))
            first &= (jnp.arange(data.capacity) == 0) | (own != jnp.roll(own, 1))
        places, valid = poisson_batch(key, of_client, first, mechanism.slots)
        # All indices are in bounds: invalid slots read the client's first example, and empty clients start at 0.
        places, valid = places[:, None], valid[:, None]
        if most is not None:  # a person's examples are adjacent, and the rest is padded by the first one
            rows = places + jnp.arange(most)
            own = rows < data.size
            own &= gathered(data.persons, jnp.where(own, rows, places)) == gathered(data.persons, places)
            places, valid = jnp.where(own, rows, places), valid & own
        x, y = jax.tree.map(lambda leaf: gathered(leaf, places), data.examples[:2])
        # Zero invalid examples before the model: masking its output would still give NaN gradients.
        x, y = jax.tree.map(lambda a: trees.where_rows(valid[:, 0], a), (x, y))
        return GuardedBatch(self._ledger, descent, (x, y, valid), key, (of_client, mechanism.clipping_norm))


def poisson_batch(key: Key, of_client: _OfClient, first: Array, slots: int) -> tuple[Array, Array]:
    """Draw every example (or person) independently with the client's rate.

    A draw of more than ``slots`` examples (or persons) is reduced to a random subset of this size.

    Args:
      key: key of the mini-batch.
      of_client: the client's settings.
      first: mask of the client's examples, or of the first example of each of its persons, [capacity].
      slots: largest number of drawn examples (or persons).

    Returns:
      Two arrays: the indices of the drawn examples among the client's examples, [slots] int32, and the mask of valid
      slots, [slots]. Invalid slots have the index 0. If the capacity is below ``slots``, each example has a slot.
    """
    (capacity,) = first.shape
    score = (bits(stream(key, Purpose.BATCHES), (capacity,)) >> 1).astype(jnp.int32)
    drawn = first & (of_client.whole | (score < of_client.threshold))
    # Keep the smallest scores. The scores of drawn examples are independent and uniform, so all subsets of the same
    # size are equally likely.
    best, places = jax.lax.top_k(jnp.where(drawn, -score, -jnp.iinfo(jnp.int32).max - 1), min(slots, capacity))
    valid = best > -jnp.iinfo(jnp.int32).max - 1
    return jnp.where(valid, places, 0).astype(jnp.int32), valid


def guard_examples(
    algorithm: Algorithm, method: str, mechanism: SiloMechanism, ledgers: list[Ledger] | None = None
) -> Algorithm:
    """Wrap an algorithm so that its clients obtain noisy clipped gradients of their examples and nothing else.

    If a client function uses an example in any other way, tracing it raises a `JaxpflError`.

    Args:
      algorithm: the method's algorithm.
      method: name of the method, for error messages.
      mechanism: mechanism of the run's silos.
      ledgers: list to which every traced call of a client function appends its ledger; None for no list.

    Raises:
      JaxpflError: if the algorithm pools the clients' examples.
    """
    exclusions.check({"pooled data": algorithm.pooled and method, "unit": "example"})

    def opened(call: str) -> Ledger:
        ledger = Ledger(method, call)
        if ledgers is not None:
            ledgers.append(ledger)
        return ledger

    # Drop the numbers that only the accounting needs. A run with more rounds then reuses the compiled program and
    # continues the same noise stream.
    kinds = tuple(
        dict.fromkeys(replace(silo, clients=1, per_round=0, once=0, persons=None) for silo in mechanism.silos)
    )
    kind = replace(mechanism, silos=kinds, rounds=1, releases=1)
    clients = tuple(_client(client, kind, opened) for client in algorithm.clients)
    noise = None
    if mechanism.noise_multiplier > 0:
        settings = mechanism.clipping_norm, mechanism.slots, words_of(kinds).tolist()
        units = "examples" if (most := mechanism.person_examples) is None else f"persons of {most} examples"
        noise = NoiseStream(f"{units} {settings}", mechanism.noise_seed == "secret")
    return algorithm._replace(clients=clients, noise=noise, guarded=True)


def _client(inner: Client, mechanism: SiloMechanism, opened: Callable[[str], Ledger]) -> Client:
    def guard(ledger: Ledger, key: Key, splits: Splits, read: bool = True) -> Splits:
        drawn = (key, _numbers_of(splits.train.size, mechanism), mechanism) if read else None
        return Splits(*cast(Any, (GuardedData(ledger, splits.train, drawn), GuardedData(ledger, splits.validation))))

    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        ledger = opened("update")
        state, upload, metrics = inner.update(key, hp, ctx, message, state, guard(ledger, key, splits))
        return state, upload, _reported(metrics, ledger)

    def idle(key: Key, hp: PyTree, ctx: ClientContext, state: PyTree, splits: Splits) -> tuple[PyTree, Metrics]:
        assert inner.idle is not None
        ledger = opened("idle")
        state, metrics = inner.idle(key, hp, ctx, state, guard(ledger, key, splits))
        return state, _reported(metrics, ledger)

    def personalize(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> PyTree:
        # The engine passes the same key after every round, so the round is added for fresh noise.
        own = guard(opened("personalize"), stream(key, Purpose.EXAMPLES, ctx.round), splits)
        return inner.personalize(key, hp, ctx, message, state, own)

    def cluster(hp: PyTree, message: Message, state: PyTree, splits: Splits) -> Array:
        assert inner.cluster is not None
        return inner.cluster(hp, message, state, guard(opened("cluster"), jax.random.key(0), splits, read=False))

    client = wrapped_client(inner, update=update)
    return client._replace(idle=inner.idle and idle, personalize=personalize, cluster=inner.cluster and cluster)


def _reported(metrics: Metrics, ledger: Ledger) -> Metrics:
    """Replace the metric ``train_loss`` by the recorded loss, which the method cannot read."""
    if ledger.loss is None or "train_loss" not in metrics:
        return metrics
    return metrics | {"train_loss": ledger.loss}


def _numbers_of(size: Array, mechanism: SiloMechanism) -> _OfClient:
    """Look up the silo settings of a client with this many examples; the noise is NaN if no silo has this size."""
    silos = mechanism.silos
    sizes = jnp.array([silo.examples for silo in silos], jnp.int32)
    at = jnp.clip(jnp.searchsorted(sizes, size), 0, len(silos) - 1)

    def column(values: list[Any], dtype: Any) -> Array:
        return jnp.array(values, dtype)[at]

    real = jnp.result_type(float)
    stddev = column([silo.noise_multiplier * mechanism.clipping_norm for silo in silos], real)
    return _OfClient(
        threshold=column([min(silo.threshold, WORD - 1) for silo in silos], jnp.int32),
        whole=column([silo.threshold == WORD for silo in silos], bool),
        # A client without examples has nothing to protect.
        stddev=jnp.where((sizes[at] == size) | (size == 0), stddev, jnp.nan),
        expected=column([silo.expected for silo in silos], real),
    )
