"""FedBuff against a queue of events in NumPy: who arrives when, from which model, and what the server adds."""

import heapq
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Round, decay, sgd, subtract
from oracle_methods import SGD, assert_rounds, assert_scores, difference
from oracle_setup import IDS, SEED, SIZES, STEPS, Run, assert_same, classification_problem, draws, run, simulation

from jaxpfl import JaxpflError
from jaxpfl.core import participation
from jaxpfl.core.participation import Availability, Participation, full, poisson, uniform
from jaxpfl.core.randomness import Purpose, client_scores, stream

HYPER = SGD | {"server_lr": 0.7, "staleness": 0.8}
M, ROUNDS, BATCH = 2, 7, 6
UNEQUAL = "lognormal:step=0.5,up=900,down=2000,sigma=0.8,seed=1"
CASES = {
    "unequal speeds": (Availability(time_model=UNEQUAL), 4),
    "stragglers, everyone at work": (Availability(time_model="equal:step=0.5,up=512", stragglers=0.5), 5),
    "no time model": (Availability(), 4),
    "as many as a round has": (Availability(time_model=UNEQUAL), 2),
}
"""Availability and clients at work; equal times are exact, and have ties."""
KINDS = [pytest.param(name, marks=() if name == "unequal speeds" else pytest.mark.slow) for name in CASES]

pytestmark = pytest.mark.usefixtures("float64")


def engine(method: str, availability: Availability, hp: dict[str, float], cohort: Participation, **options: Any) -> Run:
    made = {"cohort": cohort, "batch_size": BATCH, "engine": {"availability": availability}}
    return run(simulation(method, classification_problem(), hp, **made, **options), ROUNDS)


@cache
def got(name: str) -> Run:
    availability, number = CASES[name]
    return engine("fedbuff", availability, HYPER, uniform(len(SIZES), M), in_flight=number)


def reference(name: str, defect: str = "") -> tuple[list[Round], list[float]]:
    """The rounds, and the seconds of each."""
    (availability, number), federation, key = CASES[name], classification_problem(), jax.random.key(SEED)
    mu = got(name).states[0].server
    received, seen, queue, history, ends = {}, [0] * len(SIZES), [], [], [0.0]
    for r in range(ROUNDS):
        drawn = np.asarray(client_scores(stream(key, Purpose.PARTICIPATION, r), jnp.array(IDS)))
        idle = sorted(set(range(len(SIZES))) - {event[-1] for event in queue}, key=lambda i: -drawn[i])
        for turn, i in enumerate(idle[: number - len(queue)]):
            steps = min(int(availability.step_limit(key, r, IDS[i], STEPS)), STEPS)
            heapq.heappush(queue, (ends[-1] + duration(availability, i, steps, mu), r, turn, i))
            received[i] = mu
        arrived = [heapq.heappop(queue) for _ in range(M)]
        total, measured = {k: np.zeros_like(a) for k, a in mu.items()}, []
        for _, began, _, i in sorted(arrived, key=lambda event: event[-1]):
            begins = r if defect == "rate and steps of the round" else began
            start = mu if defect == "from the newest model" else received[i]
            steps = min(int(availability.step_limit(key, begins, IDS[i], STEPS)), STEPS)
            batches = draws(federation, i, Purpose.BATCHES, BATCH, STEPS, seen[i])[:steps]
            w, loss = sgd(start, batches, HYPER["lr"] * decay(HYPER, begins, STEPS), HYPER["weight_decay"])
            weight = SIZES[i] * (1.0 if defect == "all weigh alike" else (1 + r - began) ** -HYPER["staleness"])
            total = {k: total[k] + weight * change for k, change in subtract(w, start).items()}
            measured.append((SIZES[i], weight, loss, r - began))
            seen[i] += 1
        sizes, weights, losses, late = np.array(measured, float).T
        divisor = (weights if defect == "weights divided out" else sizes).sum()
        mu = {k: mu[k] + HYPER["server_lr"] * total[k] / divisor for k in mu}
        history.append(
            Round(mu, [()] * len(SIZES), list(seen), {"train_loss": losses.mean(), "staleness": late.mean()})
        )
        ends.append(arrived[-1][0])
    return history, np.diff(ends).tolist()


def duration(availability: Availability, i: int, steps: int, mu: dict[str, np.ndarray]) -> float:
    if availability.time_model is None:
        return 1.0
    clock = participation.resolve_time_model(availability.time_model)
    compute, down, up = np.asarray(clock.factors(np.int32(IDS[i])), float)
    size = sum(a.nbytes for a in mu.values())
    return steps * clock.step * compute + size / (clock.down * down) + size / (clock.up * up)


@pytest.mark.parametrize("name", KINDS)
def test_rounds(name):
    want, seconds = reference(name)
    assert_rounds(got(name), want)
    assert_scores(got(name), [want[-1].server] * len(SIZES), want[-1].server)
    if name != "no time model":
        np.testing.assert_allclose(got(name).history["round_seconds"], seconds, rtol=1e-5, atol=1e-6)
    # What the cases are for: arrivals of several ages in one round.
    late = got(name).history["staleness"]
    assert (late % 1 > 0).any() == (name in ("unequal speeds", "stragglers, everyone at work"))
    assert late.any() == (name != "as many as a round has")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defect", ["rate and steps of the round", "from the newest model", "all weigh alike", "weights divided out"]
)
def test_a_defect_would_be_seen(defect):
    want, _ = reference("stragglers, everyone at work", defect)
    assert difference(got("stragglers, everyone at work"), want) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [uniform(len(SIZES), M), full(len(SIZES))])
def test_with_nobody_else_at_work_it_is_fedavg(cohort):
    """The same cohorts, models and times, whatever the times are: rounds wait for everybody."""
    availability = Availability(time_model=UNEQUAL, stragglers=0.5, dropout=0.3)
    hp = {name: value for name, value in HYPER.items() if name != "staleness"}
    fedavg = engine("fedavg", availability, hp, cohort)
    fedbuff = engine("fedbuff", availability, HYPER, cohort, in_flight=cohort.capacity)
    for state, want in zip(fedbuff.states, fedavg.states, strict=True):
        assert_same(state.server, want.server)
        np.testing.assert_array_equal(state.counts.table, want.counts.table)
    for name, values in fedavg.history.items():
        np.testing.assert_allclose(fedbuff.history[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("cohort", "in_flight", "said"),
    [
        (uniform(5, 3), 2, r"in_flight must be 0 or between 3, the clients in a round, and all 5 clients, got 2"),
        (uniform(5, 3), 6, r"in_flight must be 0 or between 3, the clients in a round, and all 5 clients, got 6"),
        (poisson(5, 0.5), 0, "participation = poisson: asynchronous rounds are all of as many clients"),
    ],
)
def test_numbers_that_no_round_can_have_are_refused(cohort, in_flight, said):
    with pytest.raises(JaxpflError, match=said):
        simulation("fedbuff", classification_problem(), SGD, cohort=cohort, in_flight=in_flight)
