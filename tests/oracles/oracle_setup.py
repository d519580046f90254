"""Small ragged problems in float64, the engine run on them round by round, and the documented draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy_reference import Batch, World

from jaxpfl import METHODS, ExecutionPlan, Federation, LocalWork, Model, Simulation, Task, classification
from jaxpfl.core.participation import Participation, full, uniform
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.data import draw_batches, plan_batches
from jaxpfl.engine.client_graph import graph_by_inputs
from jaxpfl.privacy import Mechanism, privatize
from jaxpfl.uploads.compression import compressed, resolve

FEATURES, HIDDEN, CLASSES, STEPS, SEED = 4, 5, 3, 3, 17
HEAD = ("w2", "b2")
SIZES = (6, 9, 14, 4, 11)
IDS = (3, 11, 0, 7, 42)


# --- problems -------------------------------------------------------------------------------------


def stack(
    train: Sequence[Batch], test: Sequence[Batch], ids: Sequence[int], validation: Sequence[Batch] | None = None
) -> Federation:
    """The clients' arrays as they are (float64 stays); no validation examples unless given."""

    def split(clients: Sequence[Batch]) -> ClientData:
        x, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
        return ClientData.stacked(Examples(x, y), [len(y) for _, y in clients])

    nothing = [(x[:0], y[:0]) for x, y in train]
    return Federation(np.asarray(ids, np.int32), split(train), split(validation or nothing), split(test))


def clients(data: ClientData) -> list[Batch]:
    """The clients' real examples, without padding."""
    ends, (x, y) = np.cumsum(data.size), data.flat()
    return [(x[end - size : end], y[end - size : end]) for end, size in zip(ends, np.asarray(data.size), strict=True)]


def classification_problem(sizes: Sequence[int] = SIZES, ids: Sequence[int] = IDS) -> Federation:
    """Clients of unequal sizes, each with its own linear rule, so that they differ; 3 to 7 validation examples."""
    rng = np.random.default_rng(5)

    def examples(n: int, rule: np.ndarray) -> Batch:
        x = rng.normal(size=(n, FEATURES))
        return x, (x @ rule + 0.5 * rng.normal(size=(n, CLASSES))).argmax(1).astype(np.int32)

    rules = rng.normal(size=(len(sizes), FEATURES, CLASSES))
    pairs = [(examples(n, rule), examples(8, rule)) for n, rule in zip(sizes, rules, strict=True)]
    validation = [examples(3 + i % 5, rule) for i, rule in enumerate(rules)]
    return stack([train for train, _ in pairs], [test for _, test in pairs], ids, validation)


def perceptron() -> Task:
    """The model of `numpy_reference`, in JAX: any (init, apply) pair is a model."""

    def init(key, x):
        k1, k2, k3 = jax.random.split(key, 3)
        return {
            "w1": jax.random.normal(k1, (FEATURES, HIDDEN)) / 2,
            "b1": jax.random.normal(k3, (HIDDEN,)) / 4,
            "w2": jax.random.normal(k2, (HIDDEN, CLASSES)) / 2,
            "b2": jnp.zeros(CLASSES),
        }

    def apply(params, x, key=None, train=False):
        return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    # FedBN keeps normalisation parameters with the clients; where any part will do, b1 is that part.
    model = Model(init, apply, head=lambda path: path[0] in HEAD, norm=lambda path: path == ("b1",))
    return classification(model, (FEATURES,), CLASSES)


def least_squares(features: int) -> Task:
    """A user's own task, quadratic in its parameters: loss ``(x w - y)^2 / 2``, start at zero."""

    def loss(predictions, y):
        return (predictions[:, 0] - y) ** 2 / 2

    model = Model(lambda key, x: jnp.zeros(features), lambda w, x, key=None, train=False: (x @ w)[:, None])
    return Task(model, (features,), 1, loss, {"loss": loss})


def three_quadratics() -> tuple[list[Batch], np.ndarray]:
    """Least-squares clients of unequal sizes and curvatures, and the minimiser of the uniform mean of their losses."""
    rng, parts = np.random.default_rng(2), []
    for n in (8, 12, 25):
        x = rng.normal(size=(n, 3)) * rng.uniform(0.6, 1.4, size=3)
        parts.append((x, x @ rng.normal(size=3) + 0.3 * rng.normal(size=n)))
    curvature = sum(x.T @ x / len(y) for x, y in parts)
    return parts, np.linalg.solve(curvature, sum(x.T @ y / len(y) for x, y in parts))


# --- the engine -----------------------------------------------------------------------------------


class Run(NamedTuple):
    """One run: its states on the host (the first before round 0), its metrics [rounds] and its simulation.

    ``state`` is the last one as the simulation left it, with the axis of runs.
    """

    states: list[Any]
    history: dict[str, np.ndarray]
    simulation: Simulation
    state: Any


def simulation(
    method: str,
    federation: Federation,
    hp: dict[str, float],
    *,
    task: Task | None = None,
    cohort: Participation | None = None,
    batch_size: int = 100,
    steps: int = STEPS,
    plan: ExecutionPlan | None = None,
    choices: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    privacy: Mechanism | None = None,
    compress: str | None = None,
    **options: Any,
) -> Simulation:
    """A simulation of a registered method; by default the perceptron, everyone, full batches.

    ``options`` are the method's, ``choices`` the local work's (optimizers), ``engine`` the simulation's own;
    ``privacy`` stands between the clients and the server, and then what codes the uploads, ``compress``.
    """
    task = task or perceptron()
    entry, choices = METHODS[method], choices or {}
    if entry.graph:
        choices = {"graph": graph_by_inputs("data", federation, neighbours=2)} | choices
    work = LocalWork(np.asarray(federation.train.size), steps, batch_size, **choices)
    algorithm, hyper = entry.build(task, work, **options), entry.hyper.replace(**hp)
    if privacy is not None:
        algorithm, hyper = privatize(algorithm, hyper, privacy)
    if compress is not None:
        one = jax.eval_shape(lambda splits: splits.client(0), federation.splits)
        algorithm = compressed(algorithm, resolve(compress), one)
    return Simulation(
        algorithm,
        task,
        federation,
        cohort or full(federation.num_clients),
        hyper,
        plan=plan or ExecutionPlan(rounds_per_call=1),
        **(engine or {}),
    )


def on_host(tree: Any) -> Any:
    """Copies of the first run's leaves as NumPy arrays; typed keys as their data."""

    def leaf(a):
        return np.array(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)[0]

    return jax.tree.map(leaf, tree)


def run(simulation: Simulation, rounds: int, seed: int = SEED) -> Run:
    """Rounds one by one, every state kept."""
    state = simulation.init([seed])
    states, histories = [on_host(simulation.trim(state))], []
    for _ in range(rounds):
        state, metrics = simulation.advance(state, 1)
        states.append(on_host(simulation.trim(state)))
        histories.append(metrics)
    history = {name: np.concatenate([h[name][0] for h in histories]) for name in histories[0]}
    return Run(states, history, simulation, state)


def client_row(stacked: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], stacked)


def filled(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a model without the places of the other."""
    return {name: leaf for name, leaf in part.items() if leaf is not None}


# --- the documented draws -------------------------------------------------------------------------

_draw = jax.jit(draw_batches, static_argnums=0)


def draws(
    federation: Federation, i: int, purpose: Purpose, batch_size: int, steps: int, seen: int, seed: int = SEED
) -> list[Batch]:
    """The batches of client i's round: all of its examples, or what its stream of that purpose draws."""
    sizes = np.asarray(federation.train.size)
    x, y = clients(federation.train)[i]
    if batch_size >= sizes.max():
        return [(x, y)] * steps
    key = stream(jax.random.key(seed), purpose, int(federation.client_ids[i]))
    indices, valid = _draw(plan_batches(sizes, steps, batch_size), key, jnp.int32(seen), sizes[i])
    rows = zip(np.asarray(indices), np.asarray(valid), strict=True)
    return [(x[index[ok]], y[index[ok]]) for index, ok in rows]


def world(federation: Federation, cohort: Participation, batch_size: int, rounds: int) -> World:
    """Inputs of the reference: cohorts and batches by their documented keys."""
    root, ids, sample = jax.random.key(SEED), jnp.asarray(federation.client_ids), jax.jit(cohort.sample)
    cohorts = [np.asarray(sample(stream(root, Purpose.PARTICIPATION, r), ids)).tolist() for r in range(rounds)]

    def batches(i: int, seen: int) -> list[Batch]:
        return draws(federation, i, Purpose.BATCHES, batch_size, STEPS, seen)

    return World([len(y) for _, y in clients(federation.train)], STEPS, cohorts, batches)


def participation(kind: str) -> Participation:
    return full(len(SIZES)) if kind == "full" else uniform(len(SIZES), 3)


# --- comparison -----------------------------------------------------------------------------------


def distance(got: Any, want: Any) -> float:
    """The largest difference of any entry, relative to the largest entry of its array."""
    pairs = map(_arrays, zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)) for a, b in pairs if b.size)


def assert_same(got: Any, want: Any, rtol: float = 1e-9) -> None:
    """Equal structure, and all entries equal to ``rtol`` of the largest one of their array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = _arrays((a, b))
        assert a.dtype == b.dtype == np.float64
        atol = rtol * np.abs(b).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def _arrays(pair: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(pair[0]), np.asarray(pair[1])
