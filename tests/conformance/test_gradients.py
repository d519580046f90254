"""The gradients that methods say they evaluate are those that they evaluate.

They are counted where they happen: in the backward pass of a model, by the client whose examples it saw.
"""

from collections import Counter
from functools import partial

import jax
import numpy as np
import pytest
from problem import CLASSES, CLIENTS, MODELS, graph_of, ragged_federation
from toys import EVERYBODY, participation

from jaxpfl import METHODS, LocalWork, Simulation, data
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability, of
from jaxpfl.engine import ExecutionPlan
from jaxpfl.engine.tasks import make_task

ROUNDS, STEPS = 4, 3
OPTIONS = {
    "fedavg-ft": {"fine_tune_steps": 4},
    "fedala": {"weight_steps": 2},
    "fedbabu": {"fine_tune_steps": 4},
    "adaped": {"idle_rounds": 2},
    "adaped-plus": {"fine_tune_steps": 4},
    "fedem": {"components": 3},
    "fedrep": {"head_steps": 1, "body_steps": 4},
    "persfl": {"distill_steps": 2, "temperatures": (1.0, 5.0), "imitations": (0.0, 0.5)},
    "persfl-gd": {"distill_steps": 2, "temperatures": (1.0, 5.0), "imitations": (0.0, 0.5)},
    "ditto": {"personal_steps": 2},
    "perfedavg": {"adapt_steps": 2},
    "pooled": {"steps": 5},
}
"""Options with which steps, models and phases differ in number, so that none can stand for another."""
MORE = {
    "adaped-plus, kept": ("adaped-plus", {"keep": True, "fine_tune_steps": 4, "idle_rounds": 2, "own_psi": True}),
    "perfedavg, exact": ("perfedavg", {"hessian": True}),
    "map-kd, square": ("map-kd", {"distance": "square"}),
}
ELSEWHERE = ("fedpac",)
"""Cut before the head like those below, and steps on the head alone: its oracle counts both kinds of steps."""
CASES = {name: (name, OPTIONS.get(name, {})) for name in METHODS if name not in ELSEWHERE} | MORE
BY_FEATURES = ("fedproto", "knn-per", "moon", "feddbe")
"""Methods that read features: their models are cut before the head."""
WITH_HEADS = (*BY_FEATURES, "fedala", "fedbabu", "fedper", "fedrep", "fedrod", "lg-fedavg", "network-lasso")
"""Methods whose models have more than a head."""


class Tally:
    """Count of the backward passes through a task's model, by the first number of the first example."""

    def __init__(self, task, by_features: bool = False):
        self.passes = Counter()
        apply, is_head = task.model.apply, task.model.head
        watched = self._watch_body(apply, is_head) if by_features else self._watch(apply)
        self.task = task._replace(model=task.model._replace(apply=watched))

    def taken(self) -> np.ndarray:
        """Passes of each client since the last call, [m]."""
        jax.effects_barrier()
        found, self.passes = self.passes, Counter()
        return np.array([found[client] for client in range(CLIENTS)])

    def _pass(self, client, *_) -> None:
        self.passes[round(float(client))] += 1

    def _watch_body(self, apply, is_head):
        """For methods that cut the model before its head: an opaque one would show them no features."""

        @jax.custom_vjp
        def watched(body, x):
            return body

        def backward(x, ct):
            jax.debug.callback(self._pass, x.reshape(-1)[0], sum(leaf.sum() for leaf in jax.tree.leaves(ct)))
            return ct, None

        watched.defvjp(lambda body, x: (body, x), backward)

        def seen(params, x, key=None, train=False):
            head, body = trees.split_by_path(params, is_head)
            return apply(trees.merge(head, watched(body, x)), x, key=key, train=train)

        return seen

    def _watch(self, apply):
        # An axis of models is one of `ct`: the callback runs once for each of them.
        def say(x, ct):
            jax.debug.callback(self._pass, x.reshape(-1)[0], ct.sum())

        @partial(jax.custom_vjp, nondiff_argnums=(4,))
        def backward(params, x, key, ct, train):
            say(x, ct)
            return jax.vjp(lambda p: apply(p, x, key=key, train=train), params)[1](ct)[0]

        def again(params, x, key, ct, train):
            return backward(params, x, key, ct, train), (params, x, key, ct)

        def through(train, given, direction):  # the backward pass of a backward pass
            params, x, key, ct = given
            say(x, ct)

            def plain(params, ct):
                return jax.vjp(lambda p: apply(p, x, key=key, train=train), params)[1](ct)[0]

            of_params, of_ct = jax.vjp(plain, params, ct)[1](direction)
            return of_params, None, None, of_ct

        backward.defvjp(again, through)

        @partial(jax.custom_vjp, nondiff_argnums=(3,))
        def watched(params, x, key, train):
            return apply(params, x, key=key, train=train)

        def forward(params, x, key, train):
            return watched(params, x, key, train), (params, x, key)

        watched.defvjp(forward, lambda train, given, ct: (backward(*given, ct, train), None, None))
        return lambda params, x, key=None, train=False: watched(params, x, key, train)


def numbered(federation):
    """The clients' examples with the client's row as their first number."""

    def number(split):
        x = np.array(split.examples.x)
        x[:, 0] = np.repeat(np.arange(len(split.size)), split.size)
        return split.with_examples(x=x)

    return federation._replace(**{name: number(getattr(federation, name)) for name in ("train", "validation", "test")})


def made(name: str, federation, unseen=None):
    method, options = METHODS[CASES[name][0]], CASES[name][1]
    task = make_task(MODELS.get(method.name, "mlp:6" if method.name in WITH_HEADS else "linear"), federation, CLASSES)
    tally = Tally(task, by_features=method.name in BY_FEATURES)
    parts = [federation] if unseen is None else [federation, unseen]
    sizes = np.concatenate([np.asarray(part.train.size) for part in parts])
    work = LocalWork(sizes, STEPS, 4, unseen=0 if len(parts) == 1 else unseen.num_clients)
    work = LocalWork(**vars(work) | {"graph": graph_of(federation) if method.graph else None})
    algorithm, hp = method.build(tally.task, work, **options), method.hyper
    plan = ExecutionPlan(clients="map", runs="map", devices=1)
    who = participation(method.name, federation.num_clients, 3)
    fails = Availability(dropout=0.3, stragglers=0.6)
    made = Simulation(
        algorithm, tally.task, federation, who, hp, availability=fails, plan=plan, unseen=unseen, adapt_rounds=2
    )
    return tally, made


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_said_is_what_is_evaluated(name):
    """With stragglers, lost uploads and a part of the clients in each round: by each client, in training and apart
    from it."""
    tally, simulation = made(name, numbered(ragged_federation()))
    state = simulation.init([5])
    assert not tally.taken().any()
    state, history = simulation.advance(state, ROUNDS)
    seen = tally.taken()
    counted = simulation.gradients(state)
    assert counted is not None
    if METHODS[CASES[name][0]].pooled:
        assert seen.sum() == counted.training.sum() == ROUNDS * 5
        return
    np.testing.assert_array_equal(seen, counted.training[0])
    assert seen.sum() > 0
    assert (history["participants"] == (CLIENTS if name in EVERYBODY else 3)).all()
    simulation.evaluate(state)
    np.testing.assert_array_equal(tally.taken(), counted.personalization)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg-ft", "adaped", "l2gd"])
def test_unseen_clients_gradients_are_counted_too(name):
    federation, unseen = data.set_apart(numbered(ragged_federation()), 2)
    tally, simulation = made(name, federation, unseen)
    state = simulation.init([5])
    scores = simulation.evaluate_unseen(state)
    after = simulation.gradients(state).personalization[0]
    total = np.asarray(scores["after"]["gradients"]).sum()
    assert tally.taken().sum() == total
    more = simulation.evaluate_unseen(state, rounds=5)
    again = np.asarray(more["after"]["gradients"]).sum()
    assert tally.taken().sum() == again
    assert 2 * (again - 2 * after) == 5 * (total - 2 * after) > 0


def test_what_is_not_said_is_not_reported():
    method = METHODS["fedavg"]

    def build(task, work):
        algorithm = method.build(task, work)
        return algorithm._replace(clients=(algorithm.clients[0]._replace(gradients=None),))

    federation = ragged_federation()
    task = make_task("mlp:6", federation, CLASSES)
    work = LocalWork(np.asarray(federation.train.size), STEPS, 4)
    simulation = Simulation(build(task, work), task, federation, of(CLIENTS, 3), method.hyper)
    assert simulation.gradients(simulation.init([0])) is None
