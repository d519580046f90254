"""Noise keys of private runs, which differ between any two runs on the same users.

If two runs used the same noise, the noise would cancel in the difference of their models. A run therefore draws its
cohorts and its noise from a key that is derived from the seed and from a string. The string describes everything on
which the run's published results depend: method, settings, mechanism, hyper-parameters, model, initial parameters,
participation, and a checksum of the data. Equal runs that one call of `Simulation.init` starts are numbered, and the
key depends on this number too. The key does not depend on the order of the clients, on padding or on the execution
plan. A string cannot describe a user's own function or object. The key of a run that uses such an object is therefore
drawn from the operating system's random numbers and stored only in the run's state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import METHODS, LocalWork, Method
from jaxpfl.core.participation import Availability, Participation
from jaxpfl.core.protocol import Algorithm, NoiseStream
from jaxpfl.core.randomness import Purpose, stream, words_of
from jaxpfl.core.types import Federation, Key, PyTree
from jaxpfl.engine.programs import named
from jaxpfl.engine.state import RunState
from jaxpfl.models import Task
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import Compressor


def add_method(
    algorithm: Algorithm, method: Method, options: dict[str, Any], work: LocalWork, compressor: Compressor | None
) -> Algorithm:
    """Make the noise keys of a private algorithm depend on its method and on the settings with which it was built."""
    return _extend_name(
        algorithm,
        method.name,
        None if method is METHODS.get(method.name) else method.build,
        sorted((method.options | options).items()),
        (work.steps, work.batch_size, work.draw, work.weighting, work.epochs, work.clip, work.keeps_optimizer),
        work.augment and work.augment.parts,
        [np.asarray(leaf) for leaf in jax.tree.leaves(work.graph)],
        (work.optimizer, work.server_optimizer, compressor),
    )


def add_task(algorithm: Algorithm, task: Task) -> Algorithm:
    """Make the noise keys of a private algorithm depend on the loss, the model and the given initial parameters."""
    return _extend_name(algorithm, task.model, task.loss)


def _extend_name(algorithm: Algorithm, *settings: Any) -> Algorithm:
    noise, text = algorithm.noise, named(*settings)
    assert noise is not None
    if text is None:
        return algorithm._replace(noise=noise._replace(secret=True))
    return algorithm._replace(noise=noise._replace(name=f"{noise.name} {text}"))


def names_of(
    noise: NoiseStream, federation: Federation, participation: Participation, availability: Availability
) -> tuple[str, ...]:
    """Strings that describe the runs of a simulation: one for all runs, or one for each run if failure rates differ.

    The strings are empty if the noise key is secret.
    """
    each = availability.per_run
    if noise.secret:
        return ("",) * len(each)
    part = (participation.name, participation.num_clients, participation.capacity, participation.rate)
    common, data = (noise, *part, participation.cycle), _checksum(federation)
    # The time model is left out, because no released value depends on it.
    failures = ((own.dropout, own.stragglers, own.same_stragglers) for own in each)
    return tuple(repr((common, own, data)) for own in failures)


def keys(noise: NoiseStream, names: Sequence[str], seeds: Sequence[int], hp: PyTree) -> Key:
    """Noise key of each run, [S].

    Args:
      noise: description of the algorithm's noise.
      names: result of `names_of`.
      seeds: the runs' seeds, [S].
      hp: the runs' hyper-parameters, leaves [S].
    """
    if noise.secret:
        shape = (len(seeds), *jax.random.key_data(jax.random.key(0)).shape)
        own = processes.on_first(lambda: os.urandom(4 * int(np.prod(shape))).hex())
        drawn = np.frombuffer(bytes.fromhex(own), np.uint32).reshape(shape)
        return jax.random.wrap_key_data(jnp.asarray(drawn))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(hp)]
    words, seen = [], Counter()
    for run, seed in enumerate(seeds):
        name = names[run if len(names) > 1 else 0]
        own = (int(seed), name, str(jax.tree.structure(hp)), [leaf[run].item() for leaf in leaves])
        words.append(words_of(own, seen[repr(own)]))
        seen[repr(own)] += 1

    def one(seed: jax.Array, words: jax.Array) -> Key:
        return stream(jax.random.key(seed), Purpose.NOISE, *words)

    return jax.vmap(one)(jnp.asarray(seeds, jnp.uint32), jnp.asarray(np.stack(words)))


def _checksum(federation: Federation) -> int:
    """Checksum of the clients' examples, which does not depend on the order of the clients."""
    total = 0
    for split in (federation.train, federation.validation):
        flat, sizes = jax.tree.leaves(split.flat()), np.asarray(split.size)
        ends = np.cumsum(sizes, dtype=np.int64)
        for client, low, high in zip(np.asarray(federation.client_ids), ends - sizes, ends, strict=True):
            digest = hashlib.sha256(repr((int(client), [(a.shape[1:], str(a.dtype)) for a in flat])).encode())
            for leaf in flat:
                digest.update(leaf[low:high].tobytes())
            total += int.from_bytes(digest.digest(), "little")
    return total % 2**256


@dataclasses.dataclass
class Ours:
    """Noise keys of the runs that a simulation started, or that it continues from a given state.

    Only digests of the keys are stored, so that a secret key exists only in its run's state.

    Attributes:
      private: whether the simulation is private; otherwise it has no keys.
      last: keys of the state that the simulation returned last. `check` accepts them without computing their digests.
    """

    private: bool
    last: Key | None = None
    _digests: set[bytes] = dataclasses.field(default_factory=set)

    def add(self, keys: Key | None) -> None:
        """Add the noise keys of some runs, [S]; None if the runs are not private."""
        if keys is not None:
            self._digests |= _digests(keys)

    def check(self, keys: Key | None) -> None:
        """Check that the keys belong to this simulation's runs.

        If this simulation continued another simulation's runs, no privacy claim would count all of their rounds, and
        noise could be used twice.

        Raises:
          JaxpflError: if a key is unknown; the message gives the remedy.
        """
        if (keys is not None) != self.private:
            said = "does not belong to a private run, but this simulation is private"
            if not self.private:
                said = "belongs to a private run"
            raise JaxpflError(f"the state {said}: advance it with the simulation that started it")
        if keys is not None and keys is not self.last and not _digests(keys) <= self._digests:
            raise JaxpflError(
                "the state belongs to another private simulation, and this simulation's privacy claim would omit its "
                "rounds: advance it with the simulation that started it, or pass a stored state to adopt"
            )


def _digests(keys: Key) -> set[bytes]:
    return {hashlib.sha256(row.tobytes()).digest() for row in np.asarray(jax.random.key_data(keys))}


def without_key(state: RunState) -> RunState:
    """State with its noise key set to zero; it can be evaluated and exported, but not advanced."""
    assert state.noise is not None
    return state._replace(noise=jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(state.noise))))


def is_gone(state: RunState) -> bool:
    """True if the state's noise key was removed by `without_key`."""
    assert state.noise is not None
    return not np.any(jax.random.key_data(state.noise))
