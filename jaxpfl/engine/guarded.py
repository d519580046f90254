"""Example-level privacy of a run: how a method uses its clients' examples, and the mechanism that protects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import exclusions
from jaxpfl.core.participation import Participation
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, ClientContext, Message
from jaxpfl.core.settings import is_given
from jaxpfl.core.types import Federation
from jaxpfl.engine.client_graph import SPACES
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.state import server_context
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.privacy.guarded import Ledger, guard_examples
from jaxpfl.privacy.silos import SiloMechanism, mechanism_of
from jaxpfl.support.errors import JaxpflError


def uses_of(
    algorithm: Algorithm, method: str, hp: Any, federation: Federation, participation: Participation
) -> list[Ledger]:
    """Trace every client function in every group once, and return one `Ledger` for each call.

    A ledger lists how the call uses the client's examples. Nothing is computed.

    Args:
      algorithm: algorithm of the method, without a privacy mechanism.
      method: name of the method.
      hp: hyper-parameters of the method, leaves [] or [S].
      federation: data of the clients.
      participation: sampling of the cohorts.

    Raises:
      JaxpflError: if the method uses an example for anything but private gradients.
    """
    ledgers: list[Ledger] = []
    least: Any = {"batch_size": 1, "per_round": int, "once": int, "releases": 1, "rounds": 1, "clipping_norm": 1.0}
    one = np.array([1])
    some = mechanism_of(one, **least, persons=None if federation.train.persons is None else (one, 1))
    guarded = guard_examples(algorithm, method, some, ledgers)
    key, zero = jax.random.key(0), jnp.int32(0)

    def call(hp: Any, federation: Federation) -> Any:
        at_server = server_context(participation, zero)
        state = algorithm.server.init(key, hp, at_server)
        message = algorithm.server.broadcast(key, hp, at_server, state)
        splits, per_client = federation.splits.client(0), jax.tree.map(lambda a: a[0], message.per_client)
        received, ctx = Message(message.shared, per_client), ClientContext(zero, zero, zero, ALL_STEPS, key)
        found = []
        for client in guarded.clients:
            own = client.init(key, hp, ctx, received)
            found.append(client.update(key, hp, ctx, received, own, splits)[:2])
            found.append(client.personalize(key, hp, ctx, received, own, splits))
            if client.idle is not None and algorithm.idle_cap:
                found.append(client.idle(key, hp, ctx, own, splits)[0])
            if client.cluster is not None:
                found.append(client.cluster(hp, received, own, splits))
        return found

    numbers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), jnp.result_type(float)), hp)
    try:
        jax.eval_shape(call, numbers, federation)
    except (TypeError, AttributeError) as error:
        if "Guarded" not in str(error):
            raise
        raise JaxpflError(
            f"{method} cannot protect individual examples (privacy.unit = example): it uses them outside private "
            "gradients"
        ) from error
    return ledgers


def mechanism_for(
    spec: RunSpec,
    sizes: np.ndarray,
    build: Callable[[], Algorithm],
    hp: Any,
    federation: Federation,
    participation: Participation,
) -> SiloMechanism:
    """Mechanism that protects the examples of a run's clients (silos), calibrated to the privacy budget if one is
    given.

    Args:
      spec: run whose `PrivacyConfig` has the unit example.
      sizes: the clients' numbers of training examples, [m].
      build: function that makes the method's algorithm, without a mechanism.
      hp: hyper-parameters of the method.
      federation: data of the clients.
      participation: sampling of the cohorts.

    Raises:
      JaxpflError: if the method uses an example for anything but private gradients, if the accounting does not cover a
        setting, or if no noise can meet the budget.
    """
    config, method = spec.privacy, spec.method.name
    assert isinstance(config, PrivacyConfig)
    graph = "data" if spec.graph is None else spec.graph
    of_data = spec.method.graph and isinstance(graph, str) and graph in SPACES
    exclusions.check(
        {
            "unit": "example",
            "graph of the data": of_data and graph,
            "draw": spec.draw if is_given(spec, "draw") else None,
        }
    )
    known = federation.preparation
    if known is not None and known.persons and federation.train.persons is None:
        raise JaxpflError(
            "privacy.unit = example must protect all examples of a person, but the federation no longer has the person "
            "of each example: make it again from the data set"
        )
    ledgers = uses_of(build(), method, hp, federation, participation)
    rounds = [ledger for ledger in ledgers if ledger.call in ("update", "idle")]
    after = [ledger for ledger in ledgers if ledger.call == "personalize"]
    again = config.noise_seed == "secret" and any(ledger.accesses for ledger in after)
    exclusions.check({"unit": "example", "noise_seed = secret and training after the last round": again and method})

    def most(of: list[Ledger]) -> Callable[[int], int]:
        """Build the function ``examples -> batches``: the largest number of batches that a call in the ledgers ``of``
        draws.

        Only one of the calls counts, because a client is either inside or outside the cohort in a round.
        """
        return lambda n: max((sum(access.gradients(n) for access in ledger.accesses) for ledger in of), default=0)

    releases = max((access.releases for ledger in ledgers for access in ledger.accesses), default=0)
    if not releases:
        raise JaxpflError(f"{method} computes no gradients, so privacy.unit = example has nothing to protect")
    found = mechanism_of(
        sizes,
        batch_size=spec.batch_size,
        per_round=most(rounds),
        once=most(after),
        releases=releases,
        rounds=spec.rounds,
        clipping_norm=float(np.asarray(config.clipping_norm)),
        noise_multiplier=1.0 if config.noise_multiplier is None else float(np.asarray(config.noise_multiplier)),
        noise_seed=config.noise_seed,
        cuts=config.accountant == "pld",
        persons=None if federation.train.persons is None else federation.train.count_persons(),
    )
    if config.epsilon is None:
        return found
    assert config.delta is not None
    return found.calibrated(config.epsilon, config.delta, config.accountant)
