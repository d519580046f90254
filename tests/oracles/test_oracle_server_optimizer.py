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
from oracle_setup import SEED, Run, assert_same, classification_problem, distance, participation, run, simulation

from jaxpfl import JaxpflError
from jaxpfl.algorithms.parts.servers import Served, with_server_optimizer
from jaxpfl.core.protocol import Reduced, Reduction, ServerContext

ROUNDS, RATE = 4, 0.3
TAU, B1, B2 = 1e-3, 0.9, 0.99


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


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
    return simulation(
        method,
        classification_problem() if problem is None else problem,
        {"lr": 0.4, "server_lr": rate},
        cohort=participation("uniform"),
        batch_size=6,
        choices={"server_optimizer": optimizer},
    )


@cache
def engine(method: str, optimizer: str) -> Run:
    return run(made(method, optimizer), ROUNDS)


def model(method: str, server):
    """The parameters that the optimizer acts on, from the server's state with or without its memory."""
    server = server.state if isinstance(server, Served) else server
    return server.mu if method == "adaped" else server


@cache
def averaging(method: str):
    return made(method, "sgd", rate=1.0)


def averaged(method: str, got: Run) -> list:
    """Server state after each round under plain averaging."""
    simulation = averaging(method)
    steps = []
    for r, state in enumerate(got.states[:-1]):
        start = run_state(simulation, got, r)
        server = state.server.state if isinstance(state.server, Served) else state.server
        start = start._replace(server=jax.tree.map(lambda a: jnp.asarray(a)[None], server))
        end, _ = simulation.advance(start, 1)
        steps.append(jax.tree.map(lambda a: np.asarray(a)[0], end.server))
    return steps


def run_state(simulation, got: Run, r: int):
    """The recorded state of a round, for another simulation."""
    rows = jax.tree.map(lambda a: jnp.asarray(a)[None], got.states[r]._replace(key=()))
    return simulation.adopt(rows._replace(key=jnp.stack([jax.random.key(SEED)])))


EVERY_TIME = {("fedavg", "fedavgm"), ("adaped", "fedadam")}
"""One without and one with a memory of squares; the others are in the slow run."""
PAIRS = [("fedavg", name) for name in (*NUMPY, *OPTAX)] + [("adaped", name) for name in ("sgd", "fedavgm", "fedadam")]
CASES = [pytest.param(*pair, marks=() if pair in EVERY_TIME else pytest.mark.slow) for pair in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer"), CASES)
def test_server_steps(method, optimizer):
    got = engine(method, optimizer)
    after = averaged(method, got)
    before = [model(method, state.server) for state in got.states]
    increments = [jax.tree.map(np.subtract, model(method, a), b) for a, b in zip(after, before[:-1], strict=True)]
    if optimizer in NUMPY:
        want = jax.tree.map(lambda x, *ds: NUMPY[optimizer](x, ds), before[0], *increments)
    else:
        want, tx = before[0], OPTAX[optimizer]
        memory = tx.init(want)
        for increment in increments:
            steps, memory = tx.update(jax.tree.map(np.negative, increment), memory, want)
            want = jax.tree.map(np.asarray, optax.apply_updates(want, steps))
    assert_same(before[-1], want)
    if method == "adaped":  # psi is averaged, whatever the optimizer and its rate
        for state, expected in zip(got.states[1:], after, strict=True):
            server = state.server.state if isinstance(state.server, Served) else state.server
            np.testing.assert_allclose(server.psi, expected.psi, rtol=1e-9)


@pytest.mark.slow
def test_no_two_optimizers_agree():
    ends = [model("fedavg", engine("fedavg", name).states[-1].server) for name in (*NUMPY, *OPTAX)]
    for i, a in enumerate(ends):
        assert all(distance(a, b) > 1e-3 for b in ends[:i])


@pytest.mark.slow
def test_global_and_personal_models_are_those_of_the_inner_state():
    """Scores do not see the optimizer's memory: those of a plain server with the same parameters."""
    got = engine("fedavg", "fedadam")
    plain = averaging("fedavg")
    start = run_state(plain, got, ROUNDS)
    start = start._replace(server=jax.tree.map(lambda a: jnp.asarray(a)[None], got.states[-1].server.state))
    want, have = plain.evaluate(start), got.simulation.evaluate(got.state)
    jax.tree.map(np.testing.assert_array_equal, have, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        ("fedavg", "fedavgm"),
        *(
            pytest.param(method, optimizer, marks=pytest.mark.slow)
            for method, optimizer in [
                ("fedavg", "sgd"),
                ("fedavg", "yogi"),
                ("adaped", "fedavgm"),
                ("adaped", "fedadam"),
            ]
        ),
    ],
)
def test_a_round_without_weight_changes_neither_server_nor_memory(method, optimizer):
    """Two sound rounds, then one in which every client diverges: not even momentum moves the server."""
    problem = classification_problem()
    bad = problem._replace(train=problem.train.with_examples(x=np.full_like(problem.train.examples.x, np.inf)))
    got = engine(method, optimizer)
    broken = made(method, optimizer, problem=bad)
    before = got.states[2]
    after, history = broken.advance(run_state(broken, got, 2), 1)
    assert history["diverged"].tolist() == [[3]]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[0], b), after.server, before.server)


@pytest.mark.slow
def test_what_an_optimizer_cannot_serve_is_refused():
    algorithm = engine("fedavg", "fedadam").simulation.algorithm
    with pytest.raises(JaxpflError, match="keeps them apart"):
        with_server_optimizer(algorithm._replace(reduction=Reduction.STACK), "sgd")

    plain = engine("fedavg", "sgd").simulation
    server = with_server_optimizer(plain.algorithm, "fedadam").server
    ctx = ServerContext(jnp.int32(0), 5, 3.0)
    key = jax.random.key(0)
    state = server.init(key, plain.hp, ctx)
    total = jax.tree.map(jnp.ones_like, state.state)
    for reduced in (
        Reduced(total | {"more": jnp.ones(2)}, jnp.ones(()), jnp.int32(1)),
        Reduced(total, dict.fromkeys(total, jnp.ones(())), jnp.int32(1)),
    ):
        with pytest.raises(JaxpflError, match="with one weight, like what the server sends"):
            server.update(key, plain.hp, ctx, state, reduced)
