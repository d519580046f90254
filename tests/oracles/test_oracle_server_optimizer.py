r"""A server's optimizer against the papers' updates in NumPy, and against optax by hand, on recorded mean increments.

The increment of round t is what plain averaging adds to the same server in the same round. Then, from Hsu et al. 2019
and from Algorithm 2 of Reddi et al. 2021 (m from 0, v from tau^2, no correction of a bias):
``v = 0.9 v + d, x += eta v``; and ``m = b1 m + (1 - b1) d, x += eta m / (sqrt(v) + tau)`` with three rules for v.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import SEED, SETTINGS, Run, assert_same, distance, run, simulation

from jaxpfl import JaxpflError
from jaxpfl.algorithms.parts.servers import WithOptState, with_server_optimizer
from jaxpfl.core.protocol import Reduced, Reduction, ServerContext

ROUNDS, RATE = 4, 0.3
TAU, B1, B2 = 1e-3, 0.9, 0.99


def fedavgm(momentum):
    def run(x, increments):
        v = 0.0
        for d in increments:
            v = momentum * v + d
            x = x + RATE * v
        return x

    return run


def adaptive(b1, second):
    def run(x, increments):
        m, v = 0.0, TAU**2
        for d in increments:
            m, v = b1 * m + (1 - b1) * d, second(v, d**2)
            x = x + RATE * m / (np.sqrt(v) + TAU)
        return x

    return run


def adam(b1, b2, eps):
    def run(x, increments):
        m, v = 0.0, 0.0
        for t, d in enumerate(increments, start=1):
            m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
            x = x + RATE * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        return x

    return run


NUMPY = {
    "sgd": fedavgm(0.0),
    "sgd:momentum=0.6": fedavgm(0.6),
    "fedavgm": fedavgm(0.9),
    "fedadagrad": adaptive(0.0, lambda v, square: v + square),
    "fedadam": adaptive(B1, lambda v, square: B2 * v + (1 - B2) * square),
    "fedyogi": adaptive(B1, lambda v, square: v - (1 - B2) * square * np.sign(v - square)),
    "adam:b1=0.9,b2=0.99,eps=1e-3": adam(0.9, 0.99, 1e-3),
}
OPTAX = {
    "yogi": optax.yogi(RATE),
    "adagrad": optax.adagrad(RATE),
    "lamb:weight_decay=0.1": optax.lamb(RATE, weight_decay=0.1),
    "sgd:momentum=0.9,nesterov=true": optax.sgd(RATE, momentum=0.9, nesterov=True),
}


def made(method: str, optimizer: str, rate: float = RATE, problem=None):
    hp, choices = {"lr": 0.4, "server_lr": rate}, {"server_optimizer": optimizer}
    return simulation(method, hp, problem=problem, cohort=SETTINGS["reliable"].cohort, batch_size=6, choices=choices)


@cache
def engine(method: str, optimizer: str) -> Run:
    return run(made(method, optimizer), ROUNDS)


def model(method: str, server):
    """The parameters that the optimizer acts on, from the server's state with or without its memory."""
    return inner(server).mu if method == "adaped" else inner(server)


@cache
def averaging(method: str):
    return made(method, "sgd", rate=1.0)


def inner(server):
    """The server's state without an optimizer's memory."""
    return server.state if isinstance(server, WithOptState) else server


def averaged(method: str, got: Run) -> list:
    """Server state after each round under plain averaging."""
    steps = []
    for r, state in enumerate(got.states[:-1]):
        start = run_state(averaging(method), got, r)
        server = jax.tree.map(lambda a: jnp.asarray(a)[None], inner(state.server))
        end, _ = averaging(method).advance(start._replace(server=server), 1)
        steps.append(jax.tree.map(lambda a: np.asarray(a)[0], end.server))
    return steps


def run_state(simulation, got: Run, r: int):
    """The recorded state of a round, for another simulation."""
    rows = jax.tree.map(lambda a: jnp.asarray(a)[None], got.states[r]._replace(key=()))
    return simulation.adopt(rows._replace(key=jnp.stack([jax.random.key(SEED)])))


def after_increments(optimizer: str, start, increments):
    """The parameters by NumPy, or by optax itself."""
    if optimizer in NUMPY:
        return jax.tree.map(lambda x, *ds: NUMPY[optimizer](x, ds), start, *increments)
    want, tx = start, OPTAX[optimizer]
    memory = tx.init(want)
    for increment in increments:
        steps, memory = tx.update(jax.tree.map(np.negative, increment), memory, want)
        want = jax.tree.map(np.asarray, optax.apply_updates(want, steps))
    return want


@pytest.mark.slow
def test_steps_of_every_optimizer():
    """On made-up uploads; no two optimizers agree."""
    ctx, key, ends = ServerContext(jnp.int32(0), 5, 3.0), jax.random.key(0), []
    for optimizer in (*NUMPY, *OPTAX):
        one, rng = made("fedavg", optimizer), np.random.default_rng(0)
        server, hp = one.algorithm.server, one.hp
        state = server.init(key, hp, ctx)
        start = jax.tree.map(np.asarray, inner(state))
        increments = [{k: 0.1 * rng.normal(size=a.shape) for k, a in start.items()} for _ in range(ROUNDS)]
        for increment in increments:
            total = {k: jnp.asarray(2 * d) for k, d in increment.items()}
            state, _ = server.update(key, hp, ctx, state, Reduced(total, jnp.float64(2), jnp.int32(3)))
        end = jax.tree.map(np.asarray, inner(state))
        assert_same(end, after_increments(optimizer, start, increments))
        assert all(distance(end, other) > 1e-3 for other in ends)
        ends.append(end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer"), [("fedavg", "fedavgm"), ("fedavg", "fedadam"), ("adaped", "sgd"), ("adaped", "fedadam")]
)
def test_server_steps(method, optimizer):
    """The increment of round t is what plain averaging adds to the same server in the same round."""
    got = engine(method, optimizer)
    after = averaged(method, got)
    before = [model(method, state.server) for state in got.states]
    increments = [jax.tree.map(np.subtract, model(method, a), b) for a, b in zip(after, before[:-1], strict=True)]
    assert_same(before[-1], after_increments(optimizer, before[0], increments))
    if method == "adaped":  # psi is averaged, whatever the optimizer and its rate
        for state, expected in zip(got.states[1:], after, strict=True):
            np.testing.assert_allclose(inner(state.server).psi, expected.psi, rtol=1e-9)


@pytest.mark.slow
def test_global_and_personal_models_are_those_of_the_inner_state():
    """Scores do not see the optimizer's memory: those of a plain server with the same parameters."""
    got = engine("fedavg", "fedadam")
    plain = averaging("fedavg")
    start = run_state(plain, got, ROUNDS)
    start = start._replace(server=jax.tree.map(lambda a: jnp.asarray(a)[None], got.states[-1].server.state))
    want, have = plain.evaluate(start), got.simulation.evaluate(got.state)
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_what_an_optimizer_cannot_serve_is_refused():
    algorithm = made("fedavg", "fedadam").algorithm
    with pytest.raises(JaxpflError, match="requires summed uploads"):
        with_server_optimizer(algorithm._replace(reduction=Reduction.STACK), "sgd")

    with pytest.raises(JaxpflError, match="a second would apply server_lr twice"):
        with_server_optimizer(algorithm, "sgd")

    plain = made("fedavg", "sgd")
    bare = plain.algorithm._replace(has_server_optimizer=False)
    server = with_server_optimizer(bare, "fedadam").server
    ctx = ServerContext(jnp.int32(0), 5, 3.0)
    key = jax.random.key(0)
    state = server.init(key, plain.hp, ctx)
    total = jax.tree.map(jnp.ones_like, state.state)
    for reduced in (
        Reduced(total | {"more": jnp.ones(2)}, jnp.ones(()), jnp.int32(1)),
        Reduced(total, dict.fromkeys(total, jnp.ones(())), jnp.int32(1)),
    ):
        with pytest.raises(JaxpflError, match="uploads with a single weight and the tree structure"):
            server.update(key, plain.hp, ctx, state, reduced)
