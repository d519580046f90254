"""Small algorithms that together use every part of the protocol; they face the invariants beside the real methods."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpfl import METHODS, Algorithm, Client, Message, Method, Reduction, Server, SgdHyper, Stacked, Upload
from jaxpfl.algorithms import sgd
from jaxpfl.core.participation import RELIABLE, Availability, Participation, of, poisson
from jaxpfl.privacy import Mechanism, PrivateHyper, privatize


class Medians(NamedTuple):
    """A server's state: a model, and one number for each client, in the order of the stack."""

    model: Any
    by_client: jax.Array


def medians(task, work):
    """STACK, a message for each client, two kinds of client.

    The server takes the coordinatewise median of the uploads and remembers how long each client's last one was; a
    client is sent its own number, which scales its rate. Every second client also keeps its last change.
    """

    def update(key, hp, ctx, message, state, splits, keeps):
        rate = hp.lr / (1 + message.per_client)
        theta, metrics = sgd(
            work, task, key, ctx, splits.train, message.shared, rate=rate, weight_decay=hp.weight_decay
        )
        change = optax.tree.sub(theta, message.shared)
        return ((theta, change) if keeps else (theta,)), Upload(change, jnp.ones(())), metrics

    def init(key, hp, ctx, message, keeps):
        theta = task.init(key)
        return (theta, jax.tree.map(jnp.zeros_like, theta)) if keeps else (theta,)

    clients = tuple(
        Client(
            init=partial(init, keeps=keeps),
            update=partial(update, keeps=keeps),
            personalize=lambda key, hp, ctx, message, state, splits: state[0],
            predict=lambda hp, theta, x: task.model.apply(theta, x),
        )
        for keeps in (False, True)
    )

    def server_update(key, hp, ctx, state, uploads: Stacked):
        def median(leaf):
            valid = uploads.valid.reshape(-1, *[1] * (leaf.ndim - 1))
            middle = jnp.nanmedian(jnp.where(valid, leaf, jnp.nan), axis=0)
            return jnp.where(uploads.valid.any(), middle, 0)

        lengths = jax.vmap(optax.tree.norm)(uploads.total)
        model = optax.apply_updates(state.model, jax.tree.map(median, uploads.total))
        return Medians(model, state.by_client.at[uploads.rows].set(lengths, mode="drop")), {}

    server = Server(
        init=lambda key, hp, ctx: Medians(task.init(key), jnp.zeros(ctx.num_clients)),
        broadcast=lambda key, hp, ctx, state: Message(state.model, state.by_client),
        update=server_update,
        predict_global=lambda hp, state, x: task.model.apply(state.model, x),
    )
    return Algorithm(clients, server, work.steps, Reduction.STACK)


def clusters(task, work):
    """SUM with weights of a prefix, work outside the cohort.

    Two models, each averaged over the clients that chose it (as IFCA does); a client also has one of its own, which it
    trains when it is left out.
    """

    def choose(hp, models, data):
        def loss(model):
            losses = task.loss(task.model.apply(model, jnp.where(data.mask[:, None], data.x, 0)), data.y)
            return jnp.where(data.mask, losses, 0).sum() / data.mask.sum()

        return jnp.argmin(jax.vmap(loss)(models))

    def update(key, hp, ctx, message, state, splits):
        chosen = choose(hp, message.shared, splits.train)
        start = jax.tree.map(lambda a: a[chosen], message.shared)
        new, metrics = sgd(work, task, key, ctx, splits.train, start, rate=hp.lr, weight_decay=hp.weight_decay)
        weight = jax.nn.one_hot(chosen, 2, dtype=jnp.result_type(float))
        total = jax.tree.map(lambda new, old: jnp.multiply.outer(weight, new - old), new, start)
        return new, Upload(total, weight), metrics

    def idle(key, hp, ctx, own, splits):
        return sgd(work, task, key, ctx, splits.train, own, rate=hp.lr, weight_decay=hp.weight_decay)

    client = Client(
        init=lambda key, hp, ctx, message: task.init(jax.random.fold_in(key, ctx.client_id)),
        update=update,
        personalize=lambda key, hp, ctx, message, own, splits: own,
        predict=lambda hp, own, x: task.model.apply(own, x),
        idle=idle,
    )
    server = Server(
        init=lambda key, hp, ctx: jax.vmap(task.init)(jax.random.split(key, 2)),
        broadcast=lambda key, hp, ctx, models: Message(models),
        update=lambda key, hp, ctx, models, reduced: (optax.apply_updates(models, reduced.mean()), {}),
    )
    return Algorithm((client,), server, work.steps, idle_cap=2)


def private(name: str, method: Method, mechanism: Mechanism) -> Method:
    """The method behind a mechanism, as a method."""

    def build(task, work):
        return privatize(method.build(task, work), method.hyper, mechanism)[0]

    z, limit = float(mechanism.noise_multiplier_of_sum), mechanism.clipping_norm
    return Method(name, build, PrivateHyper(method.hyper, z, limit))


_ADAPED, _PLUS = METHODS["adaped"], METHODS["adaped-plus"]
_KEPT = {"keep": True, "fine_tune_steps": 4, "own_psi": True, "idle_rounds": 2}

CASES: dict[str, Method] = dict(METHODS) | {
    "toy medians": Method("toy medians", medians, SgdHyper()),
    "toy clusters": Method("toy clusters", clusters, SgdHyper()),
    "adaped, idle": _ADAPED._replace(name="adaped, idle", build=partial(_ADAPED.build, idle_rounds=2)),
    "adaped-plus, kept": _PLUS._replace(name="adaped-plus, kept", build=partial(_PLUS.build, **_KEPT)),
    "adaped, private": private("adaped, private", _ADAPED, Mechanism(0.5, 0.1, quantile=0.5, count_stddev=1.0)),
    "fedavg, private": private("fedavg, private", METHODS["fedavg"], Mechanism(0.5, 0.1, "distributed", 3)),
}
"""Methods that the invariants must hold for: every registered one, and toys for every part of the protocol."""

CORE = ("adaped", "toy medians", "toy clusters")
"""Those that between them use nearly every part of the engine: states and none, sums and stacks, groups, idle clients,
lost uploads. What is left, such as clients that upload nothing, is in what every method is asked at once."""

QUICK = ("adaped",)
"""Those of them that the default run takes: clients with states, an upload of several parts."""

EVERYBODY = ("cfl",)
"""Cases whose rounds are of all clients; all others' cohorts are as a test asks."""

AVAILABILITY: dict[str, Availability] = {
    "toy medians": Availability(dropout=0.3, stragglers=0.5),
    "toy clusters": Availability(dropout=0.3, stragglers=0.5),
}
"""Cases whose clients fail; all others' are reliable."""


def participation(name: str, num_clients: int, cohort: int | float | None) -> Participation:
    """Cohort sampling of a case: Poisson with a cap that cuts cohorts for one, a fixed size for the others.

    A cohort that is a share, below one, is that of Poisson cohorts without a cap.
    """
    if name in EVERYBODY:
        return of(num_clients, None)
    if isinstance(cohort, float):
        return poisson(num_clients, cohort, num_clients)
    if name == "adaped, private" and cohort is not None:
        return poisson(num_clients, cohort / num_clients, cohort)
    return of(num_clients, cohort)


def availability(name: str) -> Availability:
    """Reliability of the clients of a case."""
    return AVAILABILITY.get(name, RELIABLE)
