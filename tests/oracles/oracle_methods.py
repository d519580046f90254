"""Common parts of the methods' oracles: the engine's run, the reference's loop over rounds, and the comparison.

Two settings: everyone with full batches, and cohorts of three on mini-batches with stragglers. The clients are unequal,
the rate decays inside the run, and weight decay is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from numpy_reference import Batch, Hyper, Params, Round, average, cross_entropy, decay, forward, subtract
from oracle_setup import (
    IDS,
    SEED,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    draws,
    on_host,
    participation,
    run,
    simulation,
    world,
)

from jaxpfl.core.participation import RELIABLE, Availability
from jaxpfl.core.randomness import Purpose

ROUNDS = 4
SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
BATCH_SIZES = {"full": 100, "uniform": 6}
AVAILABILITY = {"full": RELIABLE, "uniform": Availability(stragglers=0.5)}
KINDS = (pytest.param("full", marks=pytest.mark.slow), "uniform")
"""Cohorts on mini-batches use more of the engine; everyone with full batches is in the slow run."""

Work = Callable[[Any, Any, list[Batch], float], tuple[Any, Any, dict[str, float]]]
"""``(server, own state, batches, factor on the rates) -> (own state, what becomes of the server's, metrics)``."""


def engine(method: str, hp: Hyper, kind: str, **options: Any) -> Run:
    """The method's rounds by the engine."""
    made = simulation(
        method,
        classification_problem(),
        hp,
        cohort=participation(kind),
        batch_size=BATCH_SIZES[kind],
        engine={"availability": AVAILABILITY[kind]},
        **options,
    )
    return run(made, ROUNDS)


def own_states(got: Run) -> list[Any]:
    """The clients' states before the first round."""
    return [plain(client_row(got.states[0].clients[0], i)) for i in range(len(SIZES))]


def plain(state: Any) -> Any:
    """Named tuples as dictionaries, as the reference has them."""
    return state._asdict() if hasattr(state, "_asdict") else state


def cohorts(kind: str) -> Sequence[Sequence[int]]:
    return world(classification_problem(), participation(kind), BATCH_SIZES[kind], ROUNDS).cohorts


def batches(kind: str, i: int, seen: int, round: int, each: int = 1) -> list[Batch]:
    """Client i's batches of a round, ``each`` for a step; a straggler does not reach the last ones."""
    drawn = draws(classification_problem(), i, Purpose.BATCHES, BATCH_SIZES[kind], STEPS * each, seen)
    limit = AVAILABILITY[kind].step_limit(jax.random.key(SEED), round, IDS[i], STEPS)
    return drawn[: min(int(limit), STEPS) * each]


def run_averaging(
    kind: str,
    hp: Hyper,
    server: Params,
    own: Sequence[Any],
    work: Work,
    *,
    weights: Sequence[float] = (1.0,) * len(SIZES),
    each: int = 1,
) -> list[Round]:
    """Rounds of a server that averages what the cohort makes of its model: ``mu + sum w_i (mu_i - mu) / sum w_i``."""
    own, seen, history = list(own), [0] * len(SIZES), []
    for r, cohort in enumerate(cohorts(kind)):
        changes, measured = [], []
        for i in cohort:
            given = batches(kind, i, seen[i], r, each)
            own[i], copy, metrics = work(server, own[i], given, decay(hp, r, STEPS))
            changes.append(subtract(copy, server))
            measured.append(metrics)
            seen[i] += 1
        server = average(server, changes, [weights[i] for i in cohort])
        means = {name: float(np.mean([m[name] for m in measured])) for name in measured[0]}
        history.append(Round(server, list(own), list(seen), means))
    return history


def combine(a: Params, b: Params, share: float = 1.0) -> Params:
    """``a + share b``."""
    return {k: a[k] + share * b[k] for k in a}


def assert_rounds(got: Run, want: Sequence[Round]) -> None:
    """The server's and all clients' states after every round, and the metrics."""
    for state, expected in zip(got.states[1:], want, strict=True):
        assert_same(plain(state.server), expected.server)
        for i in range(len(SIZES)):
            assert_same(plain(client_row(state.clients[0], i)), expected.clients[i])
        np.testing.assert_array_equal(state.participations, expected.participations)
        np.testing.assert_array_equal(state.diverged, 0)
    for name in want[0].metrics:
        np.testing.assert_allclose(got.history[name], [r.metrics[name] for r in want], rtol=1e-9, err_msg=name)


def difference(got: Run, want: Sequence[Round]) -> float:
    """Distance of the last round's states from the reference's, relative to their largest entries."""
    last, expected = got.states[-1], want[-1]
    own = [plain(client_row(last.clients[0], i)) for i in range(len(SIZES))]
    return distance((plain(last.server), own), (expected.server, expected.clients))


def scores(models: Sequence[Params]) -> dict[str, np.ndarray]:
    """Accuracy and cross-entropy of each client's model on its test examples."""
    tests = clients(classification_problem().test)
    logits = [(forward(model, x), y) for model, (x, y) in zip(models, tests, strict=True)]
    return {
        "accuracy": np.array([np.mean(a.argmax(1) == y) for a, y in logits]),
        "loss": np.array([cross_entropy(a, y)[0] for a, y in logits]),
    }


def assert_scores(
    got: Run, after: Sequence[Params], mu: Params, before: Sequence[Params] | None = None
) -> dict[str, Any]:
    """The engine scores these personalised models (``before`` adaptation: the same) and this global one."""
    measured = on_host(got.simulation.evaluate(got.state))
    assert not measured["after"].pop("diverged").any()
    expected = {"before": scores(after if before is None else before), "after": scores(after)}
    assert_same(measured, expected | {"global": scores([mu] * len(SIZES))})
    return measured
