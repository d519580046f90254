"""Asynchronous rounds refuse what they cannot do, and warn where they would change nothing."""

from typing import Any

import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, ExecutionPlan, JaxpflError, JaxpflWarning, Message
from jaxpfl.engine import in_flight
from jaxpfl.engine.build import build
from jaxpfl.engine.spec import RunSpec, check_settings
from jaxpfl.engine.tasks import make_task

RNG = np.random.default_rng(0)
PARTS = [(RNG.normal(size=(6, 3)), RNG.integers(2, size=6)) for _ in range(4)]
FEDERATION = jaxpfl.stack_clients(PARTS, test=PARTS)
FEDBUFF = METHODS["fedbuff"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plan": ExecutionPlan(clients_in="host")}, "clients_in = host .* as its rounds are asynchronous"),
        ({"options": {"in_flight": 1}}, r"in_flight must be 0 or between 2 \(clients in a round\) and 4 \(all"),
    ],
)
def test_what_is_not_served_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(JaxpflError, match=said):
        jaxpfl.fit("fedbuff", FEDERATION, model="linear", cohort=2, rounds=1, **given)


def test_rounds_of_all_clients_are_warned_of():
    with pytest.warns(JaxpflWarning, match="fedbuff with all clients in the cohort waits for the slowest"):
        check_settings([RunSpec(method=FEDBUFF)], newcomers=False)
    check_settings([RunSpec(method=FEDBUFF, cohort=2)], newcomers=False)


def test_a_method_says_that_it_is_asynchronous():
    work, task = jaxpfl.LocalWork(np.array([6, 6]), 1, 2), make_task("linear", FEDERATION, 2)
    with pytest.raises(JaxpflError, match=r"Method.asynchronous = False, but Algorithm.in_flight = 0"):
        build(FEDBUFF._replace(asynchronous=False), task, work, {})


def test_a_method_of_ones_own_is_refused_where_its_rounds_cannot_be_foreseen():
    shared = {"w": np.zeros(3, np.float32)}
    in_flight.check(Message(shared), 12)
    with pytest.raises(JaxpflError, match=r"send only a shared message: Message.per_client must be None"):
        in_flight.check(Message(shared, np.zeros(4)), 12)
    with pytest.raises(JaxpflError, match=r"require uploads as large as Message.shared \(12 bytes\), got 24"):
        in_flight.check(Message(shared), 24)
