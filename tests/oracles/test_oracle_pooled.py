"""``pooled`` against NumPy: SGD on the union of all clients' training examples, its memory kept from round to round.

``w <- w - rate(r) (grad CE + wd w)`` over the documented batches of one client of id 0 that holds the examples of all,
in the order of the clients' ids; scored on each client's own test examples.
"""

import numpy as np
import optax
import oracle
import pytest
from numpy_reference import backward, cross_entropy, decay, forward
from oracle import ROUNDS, SEED, SGD, SIZES, STEPS, M, assert_same, classification_problem, clients, draws, on_host

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, LocalWork, Simulation
from jaxpfl.core import participation
from jaxpfl.core.randomness import Purpose
from jaxpfl.engine.build import Assembled
from jaxpfl.engine.spec import RunSpec


def made(problem, batch_size: int, *, steps: int = 0, optimizer: str = "sgd", plan: ExecutionPlan | None = None):
    entry, task = METHODS["pooled"], oracle.perceptron()
    work = LocalWork(np.asarray(problem.train.size), STEPS, batch_size, optimizer=optimizer)
    algorithm, hp = entry.build(task, work, steps=steps), entry.hyper.replace(**SGD)
    everyone = participation.full(problem.num_clients)
    return Simulation(algorithm, task, problem, everyone, hp, plan=plan or ExecutionPlan(rounds_per_call=1))


def reference(params, batch_size: int, steps: int, momentum: float) -> tuple[list, list]:
    """The parameters and the mean loss after each round."""
    union = classification_problem().pooled()
    v, ends, losses = dict.fromkeys(params, 0.0), [], []
    for r in range(ROUNDS):
        rate, round_losses = SGD["lr"] * decay(SGD, r, steps), []
        for x, y in draws(union, 0, Purpose.BATCHES, batch_size, steps, r):
            loss, d_logits = cross_entropy(forward(params, x), y)
            gradient = backward(params, x, d_logits)
            v = {k: momentum * v[k] + gradient[k] + SGD["weight_decay"] * params[k] for k in params}
            params = {k: params[k] - rate * v[k] for k in params}
            round_losses.append(loss)
        ends.append(params)
        losses.append(np.mean(round_losses))
    return ends, losses


def test_the_union_is_everybody_s_examples_in_the_order_of_their_ids():
    problem = classification_problem()
    own = clients(problem.train)
    order = np.argsort(problem.client_ids)
    [(x, y)] = clients(problem.pooled().train)
    np.testing.assert_array_equal(x, np.concatenate([own[i][0] for i in order]))
    np.testing.assert_array_equal(y, np.concatenate([own[i][1] for i in order]))
    assert problem.pooled().test.mask.size == problem.pooled().validation.mask.size == 0
    again = problem.pooled()
    assert again.pooled().train.examples.x is again.train.examples.x  # stored in that order, they are not copied


@pytest.mark.parametrize(
    ("batch_size", "steps", "optimizer", "momentum"),
    [
        (6, 0, "sgd", 0.0),
        pytest.param(100, 0, "sgd", 0.0, marks=pytest.mark.slow),
        pytest.param(6, 7, "sgd:momentum=0.8", 0.8, marks=pytest.mark.slow),
    ],
    ids=["mini-batches", "full batches", "more steps, momentum"],
)
def test_rounds(batch_size, steps, optimizer, momentum):
    got = oracle.run(made(classification_problem(), batch_size, steps=steps, optimizer=optimizer))
    ends, losses = reference(got.states[0].server, batch_size, steps or STEPS, momentum)
    for state, want in zip(got.states[1:], ends, strict=True):
        assert_same(state.server, want)
    np.testing.assert_allclose(got.history["train_loss"], losses, rtol=1e-9)
    found, want = on_host(got.simulation.evaluate(got.state)), oracle.scores([ends[-1]] * M)
    for which in ("before", "after", "global"):
        assert_same({name: found[which][name] for name in want}, want)
    models = on_host(got.simulation.personal_models(got.state))
    assert_same(models, {k: np.broadcast_to(end, (M, *end.shape)) for k, end in ends[-1].items()})


def test_it_starts_where_fedavg_starts():
    problem = classification_problem()
    pooled, fedavg = made(problem, 6).init([SEED]), oracle.simulation("fedavg").init([SEED])
    assert_same(pooled.server, fedavg.server, rtol=0)


@pytest.mark.slow
def test_padding_order_and_devices_leave_no_trace():
    problem, order = classification_problem(), [3, 0, 4, 1, 2]
    want = oracle.run(made(problem, 6))
    expected = want.simulation.evaluate(want.state)["after"]["loss"][:, order]
    other = problem._replace(train=problem.train.bounded(20), test=problem.test.bounded(11)).rows(order)
    got = oracle.run(made(other, 6, plan=ExecutionPlan(devices=2, clients="vmap")))
    assert_same(got.states[-1].server, want.states[-1].server)
    np.testing.assert_allclose(got.simulation.evaluate(got.state)["after"]["loss"], expected, rtol=1e-9)


@pytest.mark.slow
def test_unseen_clients_are_scored_and_not_pooled():
    problem = classification_problem()
    seen, unseen = (problem.rows(rows) for rows in ([0, 1, 2], [3, 4]))
    entry, task = METHODS["pooled"], oracle.perceptron()
    work = LocalWork(np.asarray(problem.train.size), STEPS, 35, unseen=2)  # more than the 29 examples of the seen
    hp, everyone = entry.hyper.replace(**SGD), participation.full(3)
    plan = ExecutionPlan(rounds_per_call=1)
    spec = RunSpec(method=entry, plan=plan)
    simulation = Assembled(spec, task, seen, unseen, hp, everyone, None, work).simulation()
    got, want = oracle.run(simulation, ROUNDS), oracle.run(made(seen, 35), ROUNDS)
    assert_same(got.states[-1].server, want.states[-1].server, rtol=0)
    losses = [cross_entropy(forward(got.states[-1].server, x), y)[0] for x, y in clients(unseen.test)]
    for which in ("before", "after", "global"):
        scores = simulation.evaluate_unseen(got.state)[which]["loss"]
        np.testing.assert_allclose(scores, [losses], rtol=1e-9)


@pytest.mark.slow
def test_every_client_is_scored_with_the_state_of_the_one_that_trains():
    """A pooled method of one's own, whose client keeps the model that the server is about to have; new ones too."""

    def keeping(task, work):
        algorithm = METHODS["pooled"].build(task, work)
        (client,) = algorithm.clients

        def update(key, hp, ctx, message, state, splits):
            memory, upload, metrics = client.update(key, hp, ctx, message, state[1], splits)
            return (optax.apply_updates(message.shared, upload.total), memory), upload, metrics

        kept = client._replace(
            init=lambda key, hp, ctx, message: (message.shared, client.init(key, hp, ctx, message)),
            update=update,
            personalize=lambda key, hp, ctx, message, state, splits: state[0],
        )
        return algorithm._replace(clients=(kept,))

    problem = classification_problem()
    seen, unseen = (problem.rows(rows) for rows in ([0, 1, 2], [3, 4]))
    work = LocalWork(np.asarray(problem.train.size), STEPS, 6, unseen=2)
    method = METHODS["pooled"]._replace(name="mine", build=keeping)
    given = (oracle.perceptron(), seen, unseen, method.hyper.replace(**SGD), participation.of(3, 2), None, work)
    simulation = Assembled(RunSpec(method=method), *given).simulation()
    state, _ = simulation.advance(simulation.init([SEED]), ROUNDS)
    for found in (simulation.evaluate(state), simulation.evaluate_unseen(state, rounds=3)):
        np.testing.assert_allclose(found["after"]["loss"], found["global"]["loss"], rtol=1e-9)
        np.testing.assert_array_equal(found["before"]["loss"], found["after"]["loss"])
    with pytest.raises(JaxpflError, match=r"^mine: Method\.pooled = False, but Algorithm\.pooled = True$"):
        Assembled(RunSpec(method=method._replace(pooled=False)), *given).simulation()


def test_the_examples_are_held_once():
    """The training examples pooled, without padding; the validation and test examples by client."""
    problem = classification_problem()
    simulation = made(problem, 6)
    example = problem.train.x[0, 0].nbytes + problem.train.y[0, 0].nbytes
    held = (sum(SIZES) + problem.validation.size.sum() + problem.test.size.sum()) * example
    ids = 4 * 7 * (1 + len(SIZES))  # the id, and in each split where the examples begin and how many they are
    assert simulation.memory()["data"] == held + ids
    assert simulation.bytes_per_client() == (0, 0)


@pytest.mark.slow
def test_the_test_examples_reach_nothing_but_scores():
    problem = classification_problem()
    other = problem._replace(test=problem.test.with_examples(x=np.full_like(problem.test.examples.x, np.nan)))
    want, got = (oracle.run(made(f, 6), 2) for f in (problem, other))
    assert_same(got.states[-1].server, want.states[-1].server, rtol=0)
