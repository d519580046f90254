"""LG-FedAvg against NumPy: heads are averaged by n_i, bodies stay with the clients."""

from functools import cache

import pytest
from numpy_reference import Round, sgd
from oracle_methods import KINDS, SGD, difference, engine, own_states, run_averaging
from oracle_setup import HEAD, SIZES, Run, assert_same, client_row, filled

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str) -> Run:
    return engine("lg-fedavg", SGD, kind)


def reference(kind: str, defect: str = "") -> list[Round]:
    first = got(kind)
    own = [filled(state) for state in own_states(first)]

    def work(head, body, batches, factor):
        start = filled(first.states[0].server) if defect == "heads restart" else head
        end, loss = sgd(body | start, batches, SGD["lr"] * factor, SGD["weight_decay"])
        kept = body if defect == "head alone steps" else {k: end[k] for k in body}
        return kept, {k: end[k] for k in HEAD}, {"train_loss": loss}

    weights = (1.0,) * len(SIZES) if defect == "uniform mean" else SIZES
    return run_averaging(kind, SGD, filled(first.states[0].server), own, work, weights=weights)


def of_engine(kind: str) -> Run:
    """The run without the places of missing parts."""
    states = [
        state._replace(server=filled(state.server), clients=(filled(state.clients[0]),)) for state in got(kind).states
    ]
    return got(kind)._replace(states=states)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    for state, want in zip(of_engine(kind).states[1:], reference(kind), strict=True):
        assert_same(state.server, want.server)
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0], i), want.clients[i])


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["heads restart", "uniform mean", "head alone steps"])
def test_a_defect_would_be_seen(defect):
    assert difference(of_engine("uniform"), reference("uniform", defect)) > 1e-3
