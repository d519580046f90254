"""A small ragged problem and how to run a method on it; shared by the conformance tests."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
from toys import CASES, Medians, availability, participation

from jaxpfl import Algorithm, ExecutionPlan, Federation, LocalWork, Method, Simulation, stack_clients
from jaxpfl.algorithms.cfl import State as CFLState
from jaxpfl.algorithms.fedamp import Models
from jaxpfl.algorithms.fedpac import State as FedPACState
from jaxpfl.algorithms.network_lasso import NetworkState
from jaxpfl.core.participation import Availability
from jaxpfl.core.types import Examples
from jaxpfl.engine.client_graph import graph_by_inputs
from jaxpfl.engine.streamed.simulation import StreamedSimulation
from jaxpfl.engine.tasks import make_task
from jaxpfl.runs.checkpoint import Checkpoints
from jaxpfl.similarity import graphs
from jaxpfl.similarity.admm import Warm

CLIENTS, CLASSES, FEATURES = 7, 3, 5
MODELS = {"fedbn": "mlp-ln:6"}
"""Models of the methods that ask for a part which ``mlp:6`` lacks."""


def ragged_federation() -> Federation:
    """Seven clients of 5 to 12 examples: no size divides another, some are smaller than a batch."""
    rng = np.random.default_rng(7)

    def client(size: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(size, FEATURES)), rng.integers(CLASSES, size=size)

    sizes = (5, 12, 7, 9, 6, 11, 8)
    return stack_clients(
        [client(n) for n in sizes],
        test=[client(n // 2) for n in sizes],
        validation=[client(2) for _ in sizes],
        client_ids=[4, 0, 9, 2, 11, 5, 3],
    )


def simulate(
    method: Method,
    federation: Federation,
    *,
    plan: ExecutionPlan | None = None,
    cohort: int | float | None = 4,
    model: Any = None,
    batch_size: int = 6,
    dtype: type = np.float32,
    wrap=lambda algorithm: algorithm,
    failures: Availability | None = None,
    make: Callable[..., Simulation] = Simulation,
    **hyper: float,
) -> Simulation:
    """A simulation of the method; ``wrap`` may change its algorithm, and ``failures`` take the place of its own.

    ``make`` builds it of what a `Simulation` takes.
    """
    federation = jax.tree.map(lambda a: a.astype(dtype) if np.issubdtype(a.dtype, np.floating) else a, federation)
    task = make_task(model or MODELS.get(method.name, "mlp:6"), federation, CLASSES)
    work = LocalWork(np.asarray(federation.train.size), 3, batch_size)
    # Made of the federation as it is given, so that padding and order must not matter to it either.
    work = dataclasses.replace(work, graph=graph_of(federation) if method.graph else None)
    return make(
        wrap(method.build(task, work)),
        task,
        federation,
        participation(method.name, federation.num_clients, cohort),
        method.hyper.replace(**hyper),
        availability=failures or availability(method.name),
        plan=plan or ExecutionPlan(rounds_per_call=8),
    )


WHOLE = ExecutionPlan(clients="map", runs="map", devices=1, rounds_per_call=8)
"""One client, one run after another, on one device."""


def numbers(
    method: Method, federation: Federation | None = None, *, plan: ExecutionPlan | None = WHOLE, **given
) -> dict:
    """Three rounds of two seeds of a method in float64."""
    with jax.enable_x64(True):
        simulation = simulate(method, federation or ragged_federation(), plan=plan, dtype=np.float64, **given)
        return outcome(simulation, 3, (1, 2))


@functools.cache
def reference(name: str, cohort: int | float | None = 4) -> dict:
    """Three rounds of two seeds of a case in float64, as `WHOLE` executes them.

    The numbers that every other way of execution must give, made once for all tests of a process that compare.
    """
    return numbers(CASES[name], cohort=cohort)


def streamed(name: str) -> Simulation:
    """The same case with its clients in host memory."""
    plan = dataclasses.replace(WHOLE, clients_in="host")
    make = functools.partial(StreamedSimulation, where="host")
    return simulate(CASES[name], ragged_federation(), plan=plan, dtype=np.float64, make=make)


def choose(method: Method, **choices: Any) -> Method:
    """The method with other choices of the local work."""

    def build(task, work, **options):
        return method.build(task, dataclasses.replace(work, **choices), **options)

    return method._replace(build=build)


def traced_once(algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose server's update can be traced once."""
    chex.clear_trace_counter()  # chex counts functions of one source together
    update = chex.assert_max_traces(algorithm.server.update, n=1)
    return algorithm._replace(server=algorithm.server._replace(update=update))


def assert_continues(simulation: Simulation, folder: Path) -> None:
    """Check that a state that went through a checkpoint continues to the bit, however its rounds are parted."""
    whole, history = simulation.advance(simulation.init([0, 1]), 5)
    state, _ = simulation.advance(simulation.init([0, 1]), 2)
    Checkpoints(folder).save(2, state, 1.5)
    given, seconds = Checkpoints(folder).restore(simulation.init([0, 1]), 2, print)
    assert seconds == 1.5
    again, _ = simulation.advance(given, 1)
    assert {leaf.is_deleted() for leaf in jax.tree.leaves((given.server, given.clients))} == {simulation.plan.donate}
    again, last = simulation.advance(again, 2)
    chex.assert_trees_all_equal(
        (whole._replace(key=(), noise=()), jax.tree.map(lambda a: a[:, 3:], history)),
        (again._replace(key=(), noise=()), last),
    )


def watched(algorithm: Algorithm, calls: list) -> Algorithm:
    """The algorithm, whose clients' messages and uploads are appended to ``calls`` when they are traced."""

    def watch(update):
        def changed(*args):
            state, upload, metrics = update(*args)
            calls.append((args[3], upload))
            return state, upload, metrics

        return changed

    clients = (client._replace(update=watch(client.update)) for client in algorithm.clients)
    return algorithm._replace(clients=tuple(clients))


ORDER = np.array([3, 0, 6, 2, 5, 1, 4])
"""Another order of the clients of the ragged problem."""


def reordered(simulation: Simulation, result: dict) -> dict:
    """The outcome of the same clients in that order."""
    scores = jax.tree.map(lambda a: a[:, ORDER], result["scores"])
    return result | {"state": moved(simulation, result["state"], ORDER), "scores": scores}


def disguised(federation: Federation) -> Federation:
    """The same clients with larger capacities; NaN and labels of no class between them in what a method may see."""

    def spoil(split):
        real, apart = split.flat(), 3 * np.arange(1, 1 + len(split.size), dtype=np.int32)
        places = np.arange(len(real.y)) + np.repeat(apart, split.size)
        x = np.full((places[-1] + 4, *real.x.shape[1:]), np.nan, real.x.dtype)
        y = np.full(len(x), 10**6, np.int32)
        x[places], y[places] = real
        start = (np.cumsum(split.size) - split.size).astype(np.int32) + apart
        return dataclasses.replace(split, examples=Examples(x, y), start=start)

    splits = zip(federation.all_splits, (7, 3, 3), strict=True)
    train, validation, test = (split.bounded(split.capacity + more) for split, more in splits)
    return federation._replace(train=spoil(train), validation=spoil(validation), test=test)


def graph_of(federation: Federation) -> graphs.Graph:
    """Neighbours by their data, for the methods that ask for them."""
    return graph_by_inputs("data", federation, neighbours=2)


def outcome(simulation: Simulation, rounds: int, seeds=(3,), scored: bool = True) -> dict:
    """State, history and scores (none unless ``scored``) after some rounds, as host arrays."""
    start = simulation.init(seeds)
    state, history = simulation.advance(start, rounds)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, start)
    scores = simulation.evaluate(state) if scored else {}
    state = simulation.trim(state)
    key, noise = jax.tree.map(jax.random.key_data, (state.key, state.noise))
    tree = {"state": state._replace(key=key, noise=noise), "history": history}
    return jax.tree.map(np.asarray, tree | {"scores": scores})


def lose_round(simulation: Simulation, state: Any) -> dict:
    """Check that nothing but noise moves the server in a round in which every client diverges, not even momentum.

    The state is taken, as by `Simulation.advance`; returns the round's history.
    """
    if simulation.algorithm.noise is not None:
        return {}
    real, before = simulation._inputs, jax.tree.map(np.array, state.server)
    spoil = jax.jit(lambda tree: jax.tree.map(lambda a: a + np.inf if a.dtype.kind == "f" else a, tree))
    simulation._inputs = spoil(real)
    after, history = simulation.advance(state, 1)
    simulation._inputs = real
    lost = history["diverged"][:, 0] > 0  # an aggregation of l2gd reads no data
    assert lost.any()
    chex.assert_trees_all_equal(*(jax.tree.map(lambda a: a[lost], tree) for tree in (after.server, before)))
    return history


def moved(simulation: Simulation, state: Any, order: np.ndarray) -> Any:
    """A trimmed state as it would be with the clients in another order: client i of it is client order[i] of before."""
    members = [group.members for group in simulation._groups]
    clients = []
    for own, rows in zip(state.clients, members, strict=True):
        places = np.searchsorted(rows, [row for row in order if row in rows])
        clients.append(jax.tree.map(lambda a, places=places: a[:, places], own))
    server = state.server
    if isinstance(server, Medians):
        server = server._replace(by_client=server.by_client[:, order])
    if isinstance(server, Models):
        server = jax.tree.map(lambda a: a[:, order], server)
    if isinstance(server, CFLState):
        server = server._replace(cluster=server.cluster[:, order])
    if isinstance(server, FedPACState):
        server = server._replace(heads=jax.tree.map(lambda a: a[:, order], server.heads))
    if isinstance(server, NetworkState):
        server = moved_network(server, graph_of(simulation.federations[0]), order)
    trained = [row for row in order if row < state.counts.table.shape[1]]  # of a pooled method, one client
    counts = jax.tree.map(lambda a: a[:, trained], state.counts)
    flights = state.in_flight
    if flights is not None:
        flights = flights._replace(rows=np.append(np.argsort(order), len(order))[flights.rows])
    return state._replace(server=server, clients=tuple(clients), counts=counts, in_flight=flights)


def moved_network(server: NetworkState, graph: graphs.Graph, order: np.ndarray) -> NetworkState:
    """Rows of z by client, and rows of w and omega by edge: in another order, and turned where its ends are."""
    place = np.argsort(order)
    ends = np.stack([place[graph.first], place[graph.second]], axis=1)
    edges = np.lexsort(np.sort(ends, axis=1).T[::-1])
    signs = np.where(ends[:, 0] < ends[:, 1], 1, -1)[edges, None]
    w, omega, rho = server.warm
    return server._replace(z=server.z[:, order], warm=Warm(w[:, edges] * signs, omega[:, edges] * signs, rho))


def assert_close(got: dict, want: dict, rtol: float) -> None:
    """Floats to ``rtol`` (relative to the largest entry of their array), everything else exactly."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        if np.issubdtype(a.dtype, np.floating):
            atol = rtol * np.abs(b).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
