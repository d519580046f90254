"""Predicted cost of a round: a client's operations by hand, and the sum over blocks, devices and runs."""

from collections.abc import Mapping

import numpy as np
import pytest

import jaxpfl
from jaxpfl.benchmarks.cost_model.count import Product, Work
from jaxpfl.benchmarks.cost_model.machine import Core, Parts
from jaxpfl.benchmarks.cost_model.rounds import cost, cost_of
from jaxpfl.core import participation
from jaxpfl.engine.execution_plan import Resolved
from jaxpfl.engine.tasks import make_task


def products(counted: Mapping[Product, float], clients: int, devices: int) -> float:
    """A billion operations a second of one client, a tenth of that of several; half as fast beside another device."""
    return clients * devices * sum(p.flops * n for p, n in counted.items()) / (1e9 if clients == 1 else 1e8)


CORE = Core(elements=1e7, operation=1e-3, products=products, shares=Parts(1, 3, 2))
WORK = Work({Product(1, 10, 10, 50): 2.0}, elements=1000, operations=5)  # 20,000 operations of products


def plan(block: int, devices: int = 1, vmap_runs: bool = False) -> Resolved:
    return Resolved(block, devices, False, vmap_runs, ())


def test_clients_one_after_the_other() -> None:
    one = 2e4 / 1e9 + 3 * 1000 / 1e7 + 2 * 5e-3
    assert cost_of((WORK,), [7], plan(1), core=CORE).seconds == pytest.approx(7 * one)
    assert cost_of((WORK,), [7], plan(1, devices=2), core=CORE).seconds == pytest.approx(4 * (one + 2e4 / 1e9))
    assert cost_of((WORK,), [7], plan(1), runs=3, core=CORE).seconds == pytest.approx(21 * one)
    assert cost_of((WORK, WORK), [7, 2], plan(1), core=CORE).seconds == pytest.approx(9 * one)


def test_clients_in_blocks_share_operations_and_take_the_rate_of_batched_products() -> None:
    block = 4 * (2e4 / 1e8 + 3 * 1000 / 1e7) + 2 * 5e-3
    assert cost_of((WORK,), [7], plan(4), core=CORE).seconds == pytest.approx(2 * block)
    wide = 12 * (2e4 / 1e8 + 3 * 1000 / 1e7) + 2 * 5e-3
    assert cost_of((WORK,), [7], plan(4, vmap_runs=True), runs=3, core=CORE).seconds == pytest.approx(2 * wide)


@pytest.mark.slow
def test_a_simulation_counts_its_local_steps() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((12, 6)), rng.integers(0, 3, 12)) for _ in range(5)]
    federation = jaxpfl.stack_clients(clients, test=clients)
    task = make_task("linear", federation, 3)

    def flops(method: str, steps: int) -> float:
        work = jaxpfl.LocalWork(np.asarray(federation.train.size), steps, 4)
        registered = jaxpfl.METHODS[method]
        simulation = jaxpfl.Simulation(
            registered.build(task, work), task, federation, participation.of(5, 2), registered.hyper
        )
        found = cost(simulation)
        assert found.seconds > 0
        return found.flops

    forward = weights = 2 * 4 * 6 * 3  # batch, features, classes; the inputs need no gradient
    assert flops("fedavg", 7) == 7 * (forward + weights)
    assert flops("ditto", 7) == 2 * 7 * (forward + weights)
