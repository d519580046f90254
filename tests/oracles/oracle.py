"""One set-up for all oracles: small ragged problems in float64, the engine's rounds, their formulas, the comparison.

Two settings: everyone with full batches, and cohorts of three on mini-batches with stragglers. The clients are unequal,
one smaller than a batch, the rate decays inside the run, and weight decay is on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Batch, Hyper, Params, Round, World, cross_entropy, forward

from jaxpfl import METHODS, ExecutionPlan, Federation, LocalWork, Model, Simulation, Task, classification
from jaxpfl.algorithms.parts import optimizers
from jaxpfl.core.participation import RELIABLE, Availability, Participation, full, uniform
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.data import draw_batches, plan_batches
from jaxpfl.engine.client_graph import graph_by_inputs
from jaxpfl.privacy import Mechanism, privatize
from jaxpfl.uploads.compression import compressed, resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import problem as conformance

FEATURES, HIDDEN, CLASSES, STEPS, ROUNDS, SEED = 4, 5, 3, 3, 4, 17
HEAD = ("w2", "b2")
SIZES = (6, 9, 14, 4, 11)
M = len(SIZES)
IDS = (3, 11, 0, 7, 42)
NEWCOMERS = ((8, 13, 3), (100, 101, 55))
"""Sizes and ids of clients that are never trained."""
SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
ADAPED = SGD | {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}


# --- problems -------------------------------------------------------------------------------------


def stack(
    train: Sequence[Batch], test: Sequence[Batch], ids: Iterable[int], validation: Sequence[Batch] | None = None
) -> Federation:
    """The clients' arrays as they are (float64 stays); no validation examples unless given."""

    def split(clients: Sequence[Batch]) -> ClientData:
        x, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
        return ClientData.stacked(Examples(x, y), [len(y) for _, y in clients])

    nothing = [(x[:0], y[:0]) for x, y in train]
    return Federation(np.asarray(list(ids), np.int32), split(train), split(validation or nothing), split(test))


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


def train_data() -> list[Batch]:
    """Training examples of the problem's clients."""
    return clients(classification_problem().train)


def scored_data() -> list[Batch]:
    """Test examples of the problem's clients."""
    return clients(classification_problem().test)


def spoiled(bad: int) -> Federation:
    """The problem with one infinite number among the inputs of one client."""
    problem = classification_problem()
    problem.train.examples.x[problem.train.start[bad] + 2, 1] = np.inf
    return problem


def without(bad: int) -> Federation:
    """The problem with one client left out."""
    problem = classification_problem()
    kept = [i for i in range(M) if i != bad]
    train, test, validation = (
        [clients(split)[i] for i in kept] for split in (problem.train, problem.test, problem.validation)
    )
    return stack(train, test, [IDS[i] for i in kept], validation)


def without_last_class() -> Federation:
    """The problem, in whose training examples nobody has the last class."""
    problem = classification_problem()
    return problem._replace(train=problem.train.with_examples(y=np.minimum(problem.train.examples.y, CLASSES - 2)))


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


class Setting(NamedTuple):
    """Who takes part in a round, on how large batches, and how reliably."""

    cohort: Participation
    batch_size: int
    availability: Availability = RELIABLE


SETTINGS = {
    "full": Setting(full(M), 100),
    "uniform": Setting(uniform(M, 3), 6, Availability(stragglers=0.5)),
    "reliable": Setting(uniform(M, 3), 6),
    "everyone": Setting(full(M), 6),
    "four": Setting(uniform(M, 4), 6),
}


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
    hp: Hyper | None = None,
    *,
    problem: Federation | None = None,
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
    task, problem = task or perceptron(), problem or classification_problem()
    entry, choices = METHODS[method], choices or {}
    if entry.graph:
        choices = {"graph": graph_by_inputs("data", problem, neighbours=2)} | choices
    work = LocalWork(np.asarray(problem.train.size), steps, batch_size, **choices)
    algorithm, hyper = entry.build(task, work, **options), entry.hyper.replace(**hp or {})
    if privacy is not None:
        algorithm, hyper = privatize(algorithm, hyper, privacy)
    if compress is not None:
        one = jax.eval_shape(lambda splits: splits.client(0), problem.splits)
        algorithm = compressed(algorithm, resolve(compress), one)
    cohort, plan = cohort or full(problem.num_clients), plan or ExecutionPlan(rounds_per_call=1)
    return Simulation(algorithm, task, problem, cohort, hyper, plan=plan, **engine or {})


def on_host(tree: Any) -> Any:
    """Copies of the first run's leaves as NumPy arrays; typed keys as their data."""

    def leaf(a):
        return np.array(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)[0]

    return jax.tree.map(leaf, tree)


def run(simulation: Simulation, rounds: int = ROUNDS, seeds: Sequence[int] = (SEED,)) -> Run:
    """Rounds one by one, every state of the first run kept."""
    state = simulation.init(seeds)
    states, histories = [on_host(simulation.trim(state))], []
    for _ in range(rounds):
        state, metrics = simulation.advance(state, 1)
        states.append(on_host(simulation.trim(state)))
        histories.append(metrics)
    history = {name: np.concatenate([h[name][0] for h in histories]) for name in histories[0]}
    return Run(states, history, simulation, state)


def run_method(method: str, hp: Hyper | None = None, *, rounds: int = ROUNDS, **given: Any) -> Run:
    """Rounds of `simulation` with these arguments."""
    return run(simulation(method, hp, **given), rounds)


def run_setting(
    method: str, hp: Hyper, setting: Setting, rounds: int = ROUNDS, seeds: Sequence[int] = (SEED,), **given: Any
) -> Run:
    """Rounds in a setting."""
    engine = {"availability": setting.availability} | given.pop("engine", {})
    made = simulation(method, hp, cohort=setting.cohort, batch_size=setting.batch_size, engine=engine, **given)
    return run(made, rounds, seeds)


def client_row(stacked: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], stacked)


def plain(state: Any) -> Any:
    """Named tuples as dictionaries, as the reference has them, without the places of parts that lie elsewhere."""
    if hasattr(state, "_asdict"):
        state = state._asdict()
    if isinstance(state, dict):
        return {name: plain(leaf) for name, leaf in state.items() if leaf is not None}
    return state


def plain_clients(state: Any) -> list[Any]:
    """The clients' states of a method with one kind of client."""
    return [plain(client_row(state.clients[0], i)) for i in range(M)]


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


def tuning_batches(i: int, batch_size: int, steps: int, federation: Federation | None = None) -> list[Batch]:
    """The batches on which client i's model is personalised."""
    return draws(federation or classification_problem(), i, Purpose.PERSONALIZE_BATCHES, batch_size, steps, 0)


def world(setting: Setting, rounds: int = ROUNDS, steps: int = STEPS, each: int = 1) -> World:
    """Inputs of the reference: cohorts and batches by their documented keys; a straggler has the first ones only."""
    problem, root = classification_problem(), jax.random.key(SEED)
    ids, sample = jnp.asarray(IDS), jax.jit(setting.cohort.sample)
    cohorts = [np.asarray(sample(stream(root, Purpose.PARTICIPATION, r), ids)).tolist() for r in range(rounds)]

    @cache
    def batches(i: int, seen: int, r: int, number: int) -> list[Batch]:
        drawn = draws(problem, i, Purpose.BATCHES, setting.batch_size, number, seen)
        return drawn[: int(setting.availability.step_limit(root, r, IDS[i], steps)) * each]

    return World(SIZES, steps, [[i for i in cohort if i < M] for cohort in cohorts], batches, each)


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


Scored = Params | Callable[[np.ndarray], np.ndarray]
"""Parameters of the perceptron, or a function from inputs to logits."""


def scores(models: Sequence[Scored], tests: Sequence[Batch] | None = None) -> dict[str, np.ndarray]:
    """Accuracy and cross-entropy of each client's model on its test examples."""
    pairs = zip(models, scored_data() if tests is None else tests, strict=True)
    logits = [(model(x) if callable(model) else forward(model, x), y) for model, (x, y) in pairs]
    return {
        "accuracy": np.array([np.mean(a.argmax(1) == y) for a, y in logits]),
        "loss": np.array([cross_entropy(a, y)[0] for a, y in logits]),
    }


def assert_scores(
    got: Run,
    after: Sequence[Scored],
    mu: Scored | None = None,
    before: Sequence[Scored] | None = None,
    rtol: float = 1e-9,
) -> dict[str, Any]:
    """The engine scores these personalized models (``before`` adaptation: the same) and this global one, or none."""
    measured = on_host(got.simulation.evaluate(got.state))
    assert not measured["after"].pop("diverged").any()
    expected = {"before": scores(after if before is None else before), "after": scores(after)}
    if mu is not None:
        expected["global"] = scores([mu] * M)
    assert_same(measured, expected, rtol)
    return measured


# --- a method and its formula ---------------------------------------------------------------------


def own_and_global(last: Round) -> dict[str, Any]:
    """Scored models of a method whose clients keep their personalized models and whose server has a global one."""
    return {"after": last.clients, "mu": last.server}


def global_alone(last: Round) -> dict[str, Any]:
    """Scored models of a method without personalisation."""
    return {"after": [last.server] * M, "mu": last.server}


@dataclass(frozen=True, eq=False)
class Oracle:
    """A method by the engine and by its formula.

    Attributes:
      method: registered name.
      hp: hyper-parameters.
      formula: ``(world, hyper-parameters, server, own states, defect) -> rounds``, from the states before the first.
      defects: mistakes that must be seen when they are planted in the formula.
      options: arguments of `simulation`.
      models: ``last round -> arguments of assert_scores``.
      view: ``engine state -> (server, own states)`` as the formula has them.
      steps: tau.
      each: batches of one step.
      rounds: number of rounds.
      rtol: tolerance.
      seen: least distance of a planted defect.
      kinds: settings, the first in the default run where ``quick``.
      quick: whether the default run has it.
      plain: whether clients are trained one run at a time on one device, as other settings than the first are. If not,
        what must not matter is together: blocks of clients, two runs and devices at once, larger capacities, garbage in
        the padding, and parameters in one vector.
    """

    method: str
    hp: Hyper
    formula: Callable[..., list[Round]]
    defects: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    models: Callable[[Round], dict[str, Any]] = own_and_global
    view: Callable[[Any], tuple[Any, list[Any]]] = lambda state: (plain(state.server), plain_clients(state))
    steps: int = STEPS
    each: int = 1
    rounds: int = ROUNDS
    rtol: float = 1e-9
    seen: float = 1e-3
    kinds: tuple[str, ...] = ("uniform",)
    quick: bool = False
    plain: bool = False

    def got(self, kind: str = "uniform") -> Run:
        """The engine's rounds."""
        return _run(self, kind)

    def want(self, kind: str = "uniform", defect: str = "") -> list[Round]:
        """The formula's rounds."""
        return self.formula(_world(self, kind), self.hp, *self.view(self.got(kind).states[0]), defect)

    def off_by(self, defect: str, kind: str = "uniform") -> float:
        """Distance of the last round's states from those of the formula with a defect."""
        last = self.want(kind, defect)[-1]
        return distance(self.view(self.got(kind).states[-1]), (last.server, last.clients))

    def check(self, kind: str = "uniform") -> None:
        """All states after every round, the metrics, the scores, and that no planted defect is overlooked."""
        got, want = self.got(kind), self.want(kind)
        for state, expected in zip(got.states[1:], want, strict=True):
            assert_same(self.view(state), (expected.server, expected.clients), self.rtol)
            np.testing.assert_array_equal(state.participations, expected.participations)
            np.testing.assert_array_equal(state.diverged, 0)
        np.testing.assert_array_equal(got.history["participants"], SETTINGS[kind].cohort.capacity)
        for name in want[0].metrics:
            values = [one.metrics[name] for one in want]
            np.testing.assert_allclose(got.history[name], values, rtol=self.rtol, atol=1e-15, err_msg=name)
        with optimizers.one_vector(True):
            assert_scores(got, **self.models(want[-1]), rtol=self.rtol)
            conformance.lose_round(got.simulation, jax.tree.map(jnp.copy, got.state))
        if kind == self.kinds[0]:
            assert not [defect for defect in self.defects if self.off_by(defect, kind) < self.seen]


ALIKE = (
    *("adaped-plus", "apfl", "fedavg-ft", "fedbabu", "feddyn", "fedprox", "fedrep", "fedrod", "fml", "lg-fedavg"),
    *("map-gaussian", "map-laplace", "moon", "mr-mtl", "perfedavg", "pfedme", "quped"),
)
"""Methods whose states, uploads and messages are of the kinds of others', which stand for them on two devices."""


@cache
def _run(oracle: Oracle, kind: str) -> Run:
    given = {"rounds": oracle.rounds, "steps": oracle.steps} | oracle.options
    if oracle.plain or kind != oracle.kinds[0]:
        return run_setting(oracle.method, oracle.hp, SETTINGS[kind], **given)
    plan = ExecutionPlan(clients="2", runs="vmap", devices=1 if oracle.method in ALIKE else 2, rounds_per_call=1)
    problem = conformance.disguised(classification_problem())
    given |= {"problem": problem, "plan": plan, "seeds": (SEED, 1)}
    with optimizers.one_vector(True):
        return run_setting(oracle.method, oracle.hp, SETTINGS[kind], **given)


@cache
def _world(oracle: Oracle, kind: str) -> World:
    """The draws, made once for the formula and all of its defects."""
    return world(SETTINGS[kind], oracle.rounds, oracle.steps, oracle.each)


def cases(oracles: Mapping[str, Oracle]) -> list[Any]:
    """Every oracle in its settings; in the default run the quick ones in their first."""
    return [
        pytest.param(name, kind, marks=() if oracle.quick and kind == oracle.kinds[0] else pytest.mark.slow)
        for name, oracle in oracles.items()
        for kind in oracle.kinds
    ]


def check_rounds(oracles: Mapping[str, Oracle]) -> Callable[[str, str], None]:
    """The test that compares the rounds of every oracle with its formula's."""

    @pytest.mark.parametrize(("name", "kind"), cases(oracles))
    def test(name: str, kind: str) -> None:
        oracles[name].check(kind)

    return test
