"""Identity of a private run's noise stream, distinct for any two runs on the same users.

If two runs shared noise, the difference of their models would be free of it. A run's cohorts and noise are therefore
drawn from a key derived from its seed and from everything that its releases depend on: method, settings, mechanism,
hyper-parameters, model, initial parameters, participation, and the data. The order of the clients, padding and plan do
not count. The index among equal runs of one program does.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.core.participation import Availability, Participation
from jaxpfl.core.protocol import Algorithm, NoiseStream
from jaxpfl.core.randomness import Purpose, stream, words_of
from jaxpfl.core.types import ClientData, Federation, Key, PyTree
from jaxpfl.engine import compiled
from jaxpfl.engine.code_fingerprint import checksum, without_addresses
from jaxpfl.engine.program_key import key_of
from jaxpfl.models import Task
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import Compressor

_NEWER = (("fednova", False),)
"""Options that methods have had since later, at the values of before: they do not change a run's noise."""


def of_method(
    algorithm: Algorithm, method: Method, options: dict[str, Any], work: LocalWork, compressor: Compressor | None
) -> Algorithm:
    """A private algorithm whose noise stream also depends on the method and the settings that it was built with."""
    assert algorithm.noise is not None
    told = (
        *(method.name, [one for one in sorted((method.options | options).items()) if one not in _NEWER]),
        *(work.steps, work.batch_size, work.draw, work.weighting),
        *(() if work.epochs is None else (work.epochs,)),
        *(() if work.clip is None else ("clip", work.clip)),
        *(("keeps optimizer",) if work.keeps_optimizer else ()),
        *(() if work.augment is None else work.augment.parts),
        [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(work.graph)],
        checksum(method.build, work.optimizer, work.server_optimizer, compressor),
    )
    name = f"{algorithm.noise.name} {words_of(*told).tolist()}"
    return algorithm._replace(noise=algorithm.noise._replace(name=name))


def names_of(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    participation: Participation,
    availability: Availability,
) -> tuple[str, ...]:
    """Texts that identify the runs of a simulation: one, or one for each run whose failures have rates of their own.

    Empty texts for an algorithm that is not private.
    """
    each = availability.by_run
    if algorithm.noise is None:
        return ("",) * len(each)
    part = (participation.name, participation.num_clients, participation.capacity, participation.rate)
    part += () if participation.cycle is None else (participation.cycle,)
    common = (algorithm.noise, algorithm.local_steps, part)
    model, data = _of_model(task, federation.train), _of_data(federation)
    # Not the time model, on which nothing that is released depends.
    failures = ((own.dropout, own.stragglers, own.same_stragglers) for own in each)
    return tuple(repr(((*common, own), model, data)) for own in failures)


def keys(noise: NoiseStream | None, names: Sequence[str], seeds: Sequence[int], hp: PyTree) -> Key | None:
    """Noise key of each run, [S]; None for an algorithm that is not private.

    Args:
      noise: the algorithm's.
      names: `names_of`.
      seeds: of the runs, [S].
      hp: the runs' hyper-parameters, leaves [S].
    """
    if noise is None:
        return None
    if noise.secret:
        shape = (len(seeds), *jax.random.key_data(jax.random.key(0)).shape)
        own = processes.on_first(lambda: os.urandom(4 * int(np.prod(shape))).hex())
        drawn = np.frombuffer(bytes.fromhex(own), np.uint32).reshape(shape)
        return jax.random.wrap_key_data(jnp.asarray(drawn))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(hp)]
    told, seen = [], Counter()
    for run, seed in enumerate(seeds):
        name = names[run if len(names) > 1 else 0]
        own = (int(seed), name, str(jax.tree.structure(hp)), [leaf[run].item() for leaf in leaves])
        told.append(words_of(own, seen[repr(own)]))
        seen[repr(own)] += 1

    def one(seed: jax.Array, words: jax.Array) -> Key:
        return stream(jax.random.key(seed), Purpose.NOISE, *words)

    return jax.vmap(one)(jnp.asarray(seeds, jnp.uint32), jnp.asarray(np.stack(told)))


class Ours:
    """Noise keys of a simulation's own runs, stored as digests: a secret key is held by its state alone."""

    def __init__(self, noise: NoiseStream | None):
        self._private = noise is not None
        self._digests: set[bytes] = set()
        self._last: Key | None = None

    def add(self, keys: Key | None) -> None:
        """Add the runs' keys, [S]; None if they are not private."""
        self._digests |= _digests(keys)

    def passed(self, keys: Key | None) -> None:
        """Remember the array that the last call returned, so that it need not be checked again."""
        self._last = keys

    def check(self, keys: Key | None) -> None:
        """Refuse keys of other simulations' runs: no claim would count their rounds, and their noise might be reused.

        Raises:
          JaxpflError: with the remedy.
        """
        if (keys is None and not self._private) or (keys is not None and keys is self._last):
            return
        if (keys is None) == self._private:
            said = "is not of a private run, and this simulation is private" if self._private else "is of a private run"
            raise JaxpflError(f"the state {said}: advance it by the simulation that started it")
        if not _digests(keys) <= self._digests:
            raise JaxpflError(
                "the state's noise is not of this simulation, whose claim would leave its rounds out: advance it by "
                "the simulation that started it, or give adopt one that was stored"
            )


def _digests(keys: Key | None) -> set[bytes]:
    rows = [] if keys is None else np.asarray(jax.random.key_data(keys))
    return {hashlib.sha256(row.tobytes()).digest() for row in rows}


def _of_model(task: Task, train: ClientData) -> str:
    """Text of the program that initialises a model and scores one example, with its code and arrays, including given
    parameters.
    """

    def forward(key: Key, x: PyTree, y: jax.Array) -> jax.Array:
        return task.loss(task.model.apply(task.init(key), x), y)

    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), tuple(train.examples))

    def checksum_of_program() -> str:
        program = jax.make_jaxpr(forward)(jax.random.key(0), *one)
        return checksum(without_addresses(str(program.jaxpr)), program.consts, task.model, task.loss)

    return compiled.found(key_of("model", forward, one), checksum_of_program)


def _of_data(federation: Federation) -> int:
    """Checksum of the clients' examples, invariant to the clients' order."""
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
