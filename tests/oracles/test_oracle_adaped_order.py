"""Every mistake that one can make in Algorithm 2, planted in the reference: the comparison must see it."""

from functools import cache

import jax
import pytest
from numpy_reference import ADAPED_DEFECTS, run_adaped
from oracle_setup import (
    SIZES,
    Run,
    classification_problem,
    client_row,
    distance,
    participation,
    run,
    simulation,
    world,
)

HP = {"lr": 0.4, "lr_global": 0.3, "lr_psi": 0.1, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
HP |= {"psi_init": 0.6, "psi_floor": 0.55, "c": 5.0}
ROUNDS = 3


@cache
def engine() -> Run:
    with jax.enable_x64(True):
        return run(simulation("adaped", classification_problem(), HP), ROUNDS)


def off_by(defect: str) -> float:
    """The largest relative difference of any state or metric in any round."""
    got = engine()
    start = got.states[0]
    given = world(classification_problem(), participation("full"), 100, ROUNDS)
    own = [client_row(start.clients[0], i) for i in range(len(SIZES))]
    want = run_adaped(given, HP, start.server.mu, own, defect)
    differences = [
        distance(
            (state.server._asdict(), [client_row(state.clients[0], i) for i in range(len(SIZES))]),
            (expected.server, expected.clients),
        )
        for state, expected in zip(got.states[1:], want, strict=True)
    ]
    return max(differences)


def test_without_a_defect():
    assert off_by("") < 1e-9


@pytest.mark.parametrize("defect", ADAPED_DEFECTS)
def test_a_planted_defect_is_seen(defect):
    assert off_by(defect) > 1e-5
