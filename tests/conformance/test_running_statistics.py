"""Running statistics of batch normalisation do not depend on how the rounds are executed, on padding, or on order."""

import numpy as np
import pytest
from problem import ORDER, assert_close, outcome, padded, reordered, simulate, spoiled

from jaxpfl import METHODS, ExecutionPlan, LocalWork
from jaxpfl.engine.build import build
from jaxpfl.engine.tasks import make_task
from jaxpfl.support.errors import JaxpflError

CARRYING = [name for name, method in METHODS.items() if method.statistics]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "batch_size"), [("fedbn", 100), ("ditto", 6)])
def test_everything_that_must_not_matter_at_once(federation, name, batch_size):
    more = {"model": "mlp-bn:6", "dtype": np.float64, "batch_size": batch_size}
    plain = simulate(METHODS[name], federation, plan=ExecutionPlan(clients="map", runs="map", devices=1), **more)
    plan = ExecutionPlan(clients="3", runs="vmap", devices=1)
    other = simulate(METHODS[name], spoiled(padded(federation).rows(ORDER)), plan=plan, **more)
    assert_close(outcome(other, 2, (1, 2)), reordered(plain, outcome(plain, 2, (1, 2))), 1e-9)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(CARRYING)))
def test_other_methods_say_that_they_do_not_carry_them(federation, name):

    task = make_task("mlp-bn:6", federation, 3)
    with pytest.raises(JaxpflError, match=f"{name} does not support models with running statistics") as error:
        build(METHODS[name], task, LocalWork(np.asarray(federation.train.size), 3, 6), {})
    assert "\n" not in str(error.value)
