r"""Attacks by clients, for ``--attack`` and ``jaxpfl.fit(attack=)``.

- ``sign-flip:factor=1``: the attacker uploads its negated increment, multiplied by the factor.
- ``scale:factor=10``: the attacker uploads its increment, multiplied by the factor.
- ``noise:deviation=1``: the increment is replaced by independent normal numbers with this standard deviation.
- ``label-flip``: the attacker trains on wrong labels and otherwise follows the protocol. With K classes, K - 1 - y
  replaces the label y; 1 - y replaces a binary label.

In all other respects an attacker follows the protocol: it trains, keeps its state, and uploads its true weight, numbers
of steps, moments and running statistics (`Algorithm.increments`). The attack changes an increment before compression.
Labels of test examples do not change.

References: Li et al. 2020, "Learning to Detect Malicious Clients for Robust Federated Learning",
https://arxiv.org/abs/2002.00211 (sign flipping, noise); Bagdasaryan et al. 2020, "How To Backdoor Federated Learning",
https://arxiv.org/abs/1807.00459 (scaling); Fang et al. 2020, "Local Model Poisoning Attacks to Byzantine-Robust
Federated Learning", https://arxiv.org/abs/1911.11815 (label flipping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.core import checks, settings, trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload, wrapped_client
from jaxpfl.core.randomness import Purpose, client_scores, stream
from jaxpfl.core.types import ClientData, Federation, Key, Metrics, PyTree, Splits
from jaxpfl.support.errors import JaxpflError


class Attack(NamedTuple):
    """Change that attackers make to their uploads or labels.

    Attributes:
      name: name and arguments, as a string.
      change: function from a random key and a client's increment to the increment that the attacker uploads; None for
        an attack on the labels.
    """

    name: str
    change: Callable[[Key, PyTree], PyTree] | None = None


def attack_of(attack: str) -> Attack:
    """Parse an attack such as ``scale:factor=10``.

    Raises:
      JaxpflError: if the name or an argument is unknown, or a value is out of range.
    """
    name, values = settings.parse_choice("attack", attack, ATTACKS)
    return ATTACKS[name](**values)._replace(name=attack)


def drawn(client_ids: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Draw the attackers, [m] bool: the given share of the clients, rounded to the nearest integer.

    Attackers are the clients with the largest random scores. A score depends only on the seed and the client's id.

    Raises:
      JaxpflError: if no client or every client would be an attacker.
    """
    clients = len(client_ids)
    count = math.floor(share * clients + 0.5)
    if not 0 < count < clients:
        raise JaxpflError(
            f"attackers = {share:g} selects {count} of {clients} clients, but must select at least one and not all"
        )
    ids = np.asarray(client_ids)
    scores = np.asarray(client_scores(stream(jax.random.key(seed), Purpose.ATTACKERS), jnp.asarray(ids)))
    chosen = np.zeros(clients, bool)
    chosen[np.lexsort((ids, -scores))[:count]] = True
    return chosen


def attacked(algorithm: Algorithm, attack: Attack, attackers: np.ndarray) -> Algorithm:
    """Wrap an algorithm so that the attackers change their uploads.

    Args:
      algorithm: any method.
      attack: attack on uploads. For an attack on labels, the algorithm is returned unchanged; see `poisoned`.
      attackers: ids of the attackers.
    """
    if attack.change is None:
        return algorithm
    ids = np.sort(np.asarray(attackers, np.int32))
    given = attack.change, ids, algorithm.increments
    return algorithm._replace(clients=tuple(_client(client, *given) for client in algorithm.clients))


def _client(inner: Client, change: Callable[[Key, PyTree], PyTree], ids: np.ndarray, increments: PyTree) -> Client:
    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        new, upload, metrics = inner.update(key, hp, ctx, message, state, splits)
        increment = trees.prefix_divide(upload.total, upload.weight)
        lie = trees.prefix_multiply(change(stream(key, Purpose.ATTACK_NOISE), increment), upload.weight)
        place = jnp.minimum(jnp.searchsorted(jnp.asarray(ids), ctx.client_id), len(ids) - 1)
        attacks = jnp.asarray(ids)[place] == ctx.client_id

        def sent(changes: bool, lie: PyTree, honest: PyTree) -> PyTree:
            return trees.where(attacks, lie, honest) if changes else honest

        return new, upload._replace(total=jax.tree.map(sent, increments, lie, upload.total)), metrics

    return wrapped_client(inner, update=update)


def poisoned(federation: Federation, attackers: np.ndarray, classes: int) -> Federation:
    """Replace each label y of the attackers' training and validation examples by ``classes - 1 - y``.

    Args:
      federation: federation on the host.
      attackers: mask of the attackers, [m] bool.
      classes: number K of classes; 2 for binary labels, even if an example has several labels.
    """

    def flipped(split: ClientData) -> ClientData:
        y = np.array(split.examples.y)
        for start, size in zip(np.asarray(split.start)[attackers], np.asarray(split.size)[attackers], strict=True):
            y[start : start + size] = classes - 1 - y[start : start + size]
        return split.with_examples(y=y)

    return federation._replace(train=flipped(federation.train), validation=flipped(federation.validation))


def _sign_flip(factor: float = 1.0) -> Attack:
    checks.positive("sign-flip:factor", factor)
    return Attack("sign-flip", lambda key, increment: optax.tree.scale(-factor, increment))


def _scale(factor: float = 10.0) -> Attack:
    checks.positive("scale:factor", factor)
    return Attack("scale", lambda key, increment: optax.tree.scale(factor, increment))


def _noise(deviation: float = 1.0) -> Attack:
    checks.positive("noise:deviation", deviation)

    def change(key: Key, increment: PyTree) -> PyTree:
        return optax.tree.scale(deviation, optax.tree.random_like(key, increment, jax.random.normal))

    return Attack("noise", change)


ATTACKS: Mapping[str, Callable[..., Attack]] = {
    "sign-flip": _sign_flip,
    "scale": _scale,
    "noise": _noise,
    "label-flip": lambda: Attack("label-flip"),
}
"""Factory functions of the attacks by name; their arguments are keywords."""
