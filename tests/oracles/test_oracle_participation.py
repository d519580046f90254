"""Who takes part, against NumPy: stragglers and lost uploads, asynchronous rounds (FedBuff), clients that diverge."""

import heapq
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import Round, average, decay, sgd, subtract
from oracle import IDS, SEED, SGD, SIZES, STEPS, M, Run, Setting, assert_same, assert_scores, classification_problem

from jaxpfl import ExecutionPlan
from jaxpfl.algorithms import FEDERATED
from jaxpfl.core import participation
from jaxpfl.core.participation import RELIABLE, Availability, FailureRates, full, uniform
from jaxpfl.core.protocol import ALL_STEPS
from jaxpfl.core.randomness import Purpose, client_scores, stream

# --- stragglers and lost uploads ------------------------------------------------------------------

CONSTANT = {"lr": 0.3, "lr_decay": 1.0, "decay_every": 60.0, "weight_decay": 0.02}


def test_stragglers_and_lost_uploads():
    """``mu + sum n_i (w_i - mu) / sum n_i`` over the uploads that arrived, w_i after as many steps as i took."""
    given, key, rounds = Availability(dropout=0.4, stragglers=0.6, same_stragglers=True), jax.random.key(SEED), 6
    got = oracle.run_method("fedavg", CONSTANT, rounds=rounds, engine={"availability": given})
    mu, taken, lost_so_far = got.states[0].server, np.zeros(M, int), np.zeros(M, int)
    for r, state in enumerate(got.states[1:]):
        steps = [min(int(given.step_limit(key, r, i, STEPS)), STEPS) for i in IDS]
        lost = [bool(given.drops_out(key, r, i)) for i in IDS]
        pairs = zip(oracle.train_data(), steps, strict=True)
        ends = [sgd(mu, [batch] * number, CONSTANT["lr"], CONSTANT["weight_decay"])[0] for batch, number in pairs]
        heard = [i for i in range(M) if not lost[i]]
        if heard:
            mu = average(mu, [subtract(ends[i], mu) for i in heard], [SIZES[i] for i in heard])
        taken, lost_so_far = taken + steps, lost_so_far + lost
        assert_same(state.server, mu)
        np.testing.assert_array_equal(state.counts.steps, taken)
        np.testing.assert_array_equal(state.counts.dropped, lost_so_far)
        np.testing.assert_array_equal(state.counts.uploads + state.counts.dropped, r + 1)
    assert 0 < lost_so_far.sum() < rounds * M
    assert taken.min() < rounds * STEPS


@pytest.mark.slow
def test_a_client_whose_upload_is_lost_keeps_its_work():
    """``local`` uploads nothing that matters: dropout must not change a client's model."""
    plain, lossy = (
        oracle.run_method("local", CONSTANT, engine={"availability": Availability(dropout=share)})
        for share in (0.0, 0.5)
    )
    assert_same(plain.states[-1].clients, lossy.states[-1].clients)


@pytest.mark.slow
def test_a_round_in_which_everything_is_lost_leaves_the_server():
    got = oracle.run_method("adaped", rounds=2, engine={"availability": Availability(dropout=1 - 1e-9)})
    assert_same(got.states[-1].server, got.states[0].server, rtol=0)
    np.testing.assert_array_equal(got.history["dropped"], M)


def test_frequencies():
    """20000 draws: steps uniform on 1..tau for stragglers, at four standard errors (false alarm below 1e-3 in all)."""
    given, tau, n = Availability(dropout=0.3, stragglers=0.4), 5, 20000
    ids = np.arange(n)
    draw = jax.jit(jax.vmap(lambda i: given.step_limit(jax.random.key(3), 7, i, tau)))
    steps = np.asarray(draw(ids))
    lost = np.asarray(jax.vmap(lambda i: given.drops_out(jax.random.key(3), 7, i))(ids))
    # Who is not slow has no limit: a method may ask for more steps than tau.
    for value in (*range(1, tau + 1), ALL_STEPS):
        p = 0.6 if value == ALL_STEPS else 0.4 / tau
        assert abs((steps == value).mean() - p) < 4 * np.sqrt(p * (1 - p) / n), value
    assert abs(lost.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / n)
    assert abs(np.corrcoef(lost, steps == ALL_STEPS)[0, 1]) < 4 / np.sqrt(n)
    for same in (False, True):
        given = Availability(dropout=0.0, stragglers=0.5, same_stragglers=same)
        first, second = ([int(given.step_limit(jax.random.key(0), r, i, 100)) for i in range(20)] for r in (0, 1))
        assert (first == second) is same


@pytest.mark.slow
def test_who_is_not_slow_takes_all_steps_that_the_method_asks_for():
    """Ditto's personal steps may be more than tau. Of these clients none is slow, at a probability of 1e-9."""
    plain, unreliable = (
        oracle.run_method("ditto", CONSTANT, rounds=2, personal_steps=3 * STEPS, engine=engine).states[-1]
        for engine in ({}, {"availability": Availability(dropout=0.0, stragglers=1e-9)})
    )
    assert_same(unreliable.clients, plain.clients, rtol=0)


def test_an_availability_of_another_kind_keeps_it_where_rates_are_traced():
    """An audit's canaries stay away by a `drops_out` of their own, which a program without rates must have."""

    class Missing(Availability):
        pass

    given = Missing(dropout=0.1, stragglers=0.2, same_stragglers=True)
    again = given.replace_rates(FailureRates()).replace_rates(given.rates)
    assert type(again) is Missing
    assert again.same_stragglers
    assert (float(again.dropout), float(again.stragglers)) == pytest.approx((0.1, 0.2))


# --- FedBuff --------------------------------------------------------------------------------------

BUFF = SGD | {"server_lr": 0.7, "staleness": 0.8}
ARRIVALS, EVENTS, BATCH = 2, 7, 6
COHORT = uniform(M, ARRIVALS)
UNEQUAL = "lognormal:step=0.5,up=900,down=2000,sigma=0.8,seed=1"
CASES = {
    "unequal speeds": (Availability(time_model=UNEQUAL), 4),
    "stragglers, everyone at work": (Availability(time_model="equal:step=0.5,up=512", stragglers=0.5), 5),
    "no time model": (Availability(), 4),
}
"""Availability and clients at work; equal times are exact, and have ties."""


@cache
def asynchronous(name: str) -> Run:
    availability, number = CASES[name]
    return oracle.run_setting("fedbuff", BUFF, Setting(COHORT, BATCH, availability), EVENTS, in_flight=number)


def queue_of_events(name: str, defect: str = "") -> tuple[list[Round], list[float]]:
    """The rounds, and the seconds of each."""
    (availability, number), key = CASES[name], jax.random.key(SEED)
    given, mu = oracle.world(Setting(COHORT, BATCH, RELIABLE)), asynchronous(name).states[0].server
    received, seen, queue, history, ends = {}, [0] * M, [], [], [0.0]
    for r in range(EVENTS):
        drawn = np.asarray(client_scores(stream(key, Purpose.PARTICIPATION, r), jnp.array(IDS)))
        idle = sorted(set(range(M)) - {event[-1] for event in queue}, key=lambda i: -drawn[i])
        for turn, i in enumerate(idle[: number - len(queue)]):
            steps = min(int(availability.step_limit(key, r, IDS[i], STEPS)), STEPS)
            heapq.heappush(queue, (ends[-1] + duration(availability, i, steps, mu), r, turn, i))
            received[i] = mu
        arrived = [heapq.heappop(queue) for _ in range(ARRIVALS)]
        total, measured = {k: np.zeros_like(a) for k, a in mu.items()}, []
        for _, began, _, i in sorted(arrived, key=lambda event: event[-1]):
            begins = r if defect == "rate and steps of the round" else began
            start = mu if defect == "from the newest model" else received[i]
            steps = min(int(availability.step_limit(key, begins, IDS[i], STEPS)), STEPS)
            batches = given.batches(i, seen[i], r, STEPS)[:steps]
            w, loss = sgd(start, batches, BUFF["lr"] * decay(BUFF, begins, STEPS), BUFF["weight_decay"])
            weight = SIZES[i] * (1.0 if defect == "all weigh alike" else (1 + r - began) ** -BUFF["staleness"])
            total = {k: total[k] + weight * change for k, change in subtract(w, start).items()}
            measured.append((SIZES[i], weight, loss, r - began))
            seen[i] += 1
        sizes, weights, losses, late = np.array(measured, float).T
        divisor = (weights if defect == "weights divided out" else sizes).sum()
        mu = {k: mu[k] + BUFF["server_lr"] * total[k] / divisor for k in mu}
        history.append(Round(mu, [()] * M, list(seen), {"train_loss": losses.mean(), "staleness": late.mean()}))
        ends.append(arrived[-1][0])
    return history, np.diff(ends).tolist()


def duration(availability: Availability, i: int, steps: int, mu: dict[str, np.ndarray]) -> float:
    if availability.time_model is None:
        return 1.0
    clock = participation.resolve_time_model(availability.time_model)
    compute, down, up = np.asarray(clock.factors(np.int32(IDS[i])), float)
    size = sum(a.nbytes for a in mu.values())
    return steps * clock.step * compute + size / (clock.down * down) + size / (clock.up * up)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fedbuff(name):
    """A queue of events: who arrives when, from which model, and what the server adds."""
    got, (want, seconds) = asynchronous(name), queue_of_events(name)
    for state, expected in zip(got.states[1:], want, strict=True):
        assert_same((oracle.plain(state.server), oracle.plain_clients(state)), (expected.server, expected.clients))
        np.testing.assert_array_equal(state.participations, expected.participations)
        np.testing.assert_array_equal(state.diverged, 0)
    for metric in want[0].metrics:
        values = [one.metrics[metric] for one in want]
        np.testing.assert_allclose(got.history[metric], values, rtol=1e-9, err_msg=metric)
    assert_scores(got, [want[-1].server] * M, want[-1].server)
    # What the cases are for: arrivals of several ages in one round.
    late = got.history["staleness"]
    assert late.any()
    assert (late % 1 > 0).any() == (name != "no time model")
    if CASES[name][0].time_model is not None:
        np.testing.assert_allclose(got.history["round_seconds"], seconds, rtol=1e-5, atol=1e-6)
    if CASES[name][0].stragglers:
        for defect in (
            "rate and steps of the round",
            "from the newest model",
            "all weigh alike",
            "weights divided out",
        ):
            assert oracle.distance(got.states[-1].server, queue_of_events(name, defect)[0][-1].server) > 1e-3, defect


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [COHORT, full(M)])
def test_with_nobody_else_at_work_fedbuff_is_fedavg(cohort):
    """The same cohorts, models and times, whatever the times are: rounds wait for everybody."""
    setting = Setting(cohort, BATCH, Availability(time_model=UNEQUAL, stragglers=0.5, dropout=0.3))
    fedavg = oracle.run_setting("fedavg", SGD | {"server_lr": 0.7}, setting)
    fedbuff = oracle.run_setting("fedbuff", BUFF, setting, in_flight=cohort.capacity)
    for state, want in zip(fedbuff.states, fedavg.states, strict=True):
        assert_same(state.server, want.server)
        np.testing.assert_array_equal(state.counts.table, want.counts.table)
    for name, values in fedavg.history.items():
        np.testing.assert_allclose(fedbuff.history[name], values, rtol=1e-6, err_msg=name)


# --- clients whose update is not finite -----------------------------------------------------------

BAD, TWO = 1, 2
KEPT = [i for i in range(M) if i != BAD]
WITH_MEANS = {"l2gd": {"p": 1e-3}, "scaffold": {}, "fedamp": {}}
"""Methods whose server keeps a mean over all m clients, or models of all; hyper-parameters with which every round takes
local steps."""


@cache
def undisturbed(method: str) -> Run:
    return oracle.run_method(method, rounds=TWO, problem=oracle.without(BAD))


def check(got: Run, others: Run) -> None:
    """It uploads zero weight, keeps its state, is counted, touches nobody.

    The others' round is that of the federation without it: ``mu + sum_{i != bad} w_i d_i / sum_{i != bad} w_i``.
    """
    start = got.states[0]
    for state, other in zip(got.states[1:], others.states[1:], strict=True):
        assert_same(state.server, other.server)
        for place, i in enumerate(KEPT):
            assert_same(oracle.client_row(state.clients, i), oracle.client_row(other.clients, place))
        assert_same(oracle.client_row(state.clients, BAD), oracle.client_row(start.clients, BAD), rtol=0)
    assert got.states[-1].diverged.tolist() == [TWO if i == BAD else 0 for i in range(M)]
    assert got.states[-1].participations.tolist() == [TWO] * M
    assert got.history["diverged"].tolist() == [1] * TWO
    assert got.history["participants"].tolist() == [M] * TWO
    assert others.history["diverged"].tolist() == [0] * TWO
    means = others.history.keys() - {"participants", "diverged"}
    assert_same({k: got.history[k] for k in means}, {k: others.history[k] for k in means})


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adaped", "ifca", "persfl"))]
)
def test_a_client_that_diverges(method):
    """Each kind of state and of upload."""
    plan = ExecutionPlan(clients="vmap" if method == "adaped" else "auto", rounds_per_call=1)
    check(oracle.run_method(method, rounds=TWO, problem=oracle.spoiled(BAD), plan=plan), undisturbed(method))


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(WITH_MEANS))
def test_methods_whose_server_keeps_a_mean_over_all(method):
    """The diverged client is one of the m of that mean, so there is no run without it to compare; it stands still."""
    got = oracle.run_method(method, WITH_MEANS[method], rounds=TWO, problem=oracle.spoiled(BAD))
    first, last = got.states[0], got.states[-1]
    assert_same(oracle.client_row(last.clients, BAD), oracle.client_row(first.clients, BAD), rtol=0)
    assert last.diverged.tolist() == [TWO if i == BAD else 0 for i in range(M)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((last.server, last.clients)))
    for i in KEPT:
        assert oracle.distance(oracle.client_row(last.clients, i), oracle.client_row(first.clients, i)) > 1e-3


@pytest.mark.slow
def test_it_is_scored_with_the_state_that_it_keeps():
    got, others = oracle.run_method("local", rounds=TWO, problem=oracle.spoiled(BAD)), undisturbed("local")
    before, after = (got.simulation.evaluate(state) for state in (got.simulation.init([SEED]), got.state))
    expected = others.simulation.evaluate(others.state)
    for name, score in after["after"].items():
        assert score[0, BAD] == before["after"][name][0, BAD]
        np.testing.assert_allclose(score[0, KEPT], expected["after"][name][0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ifca", "scaffold"])
def test_all_diverge(method):
    """Nobody has weight: server and clients stand still. Each kind of state and of upload."""
    assert method in FEDERATED
    bad = classification_problem()
    bad.train.examples.x[bad.train.start, 0] = np.inf
    got = oracle.run_method(method, WITH_MEANS.get(method, {}), rounds=1, problem=bad)
    start, end = got.states
    jax.tree.map(np.testing.assert_array_equal, (end.server, end.clients), (start.server, start.clients))
    assert end.diverged.tolist() == [1] * M
    assert got.history["diverged"].tolist() == [M]
