"""Running statistics of batch normalisation do not depend on how the rounds are executed, on padding, or on order."""

import jax
import numpy as np
import pytest
from problem import ORDER, WHOLE, assert_close, disguised, outcome, reordered, simulate

from jaxpfl import METHODS, ExecutionPlan, LocalWork
from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.engine.build import build
from jaxpfl.engine.tasks import make_task
from jaxpfl.support.errors import JaxpflError

CARRYING = [name for name, method in METHODS.items() if method.statistics]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "batch_size"), [("fedbn", 100), ("ditto", 6)])
def test_everything_that_must_not_matter_at_once(federation, name, batch_size):
    more = {"model": "mlp-bn:6", "dtype": np.float64, "batch_size": batch_size}
    plain = simulate(METHODS[name], federation, plan=WHOLE, **more)
    plan = ExecutionPlan(clients="3", runs="vmap", devices=1)
    other = simulate(METHODS[name], disguised(federation.rows(ORDER)), plan=plan, **more)
    assert_close(outcome(other, 2, (1, 2)), reordered(plain, outcome(plain, 2, (1, 2))), 1e-9)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(CARRYING)))
def test_other_methods_say_that_they_do_not_carry_them(federation, name):

    task = make_task("mlp-bn:6", federation, 3)
    with pytest.raises(JaxpflError, match=f"{name} does not support models with running statistics") as error:
        build(METHODS[name], task, LocalWork(np.asarray(federation.train.size), 3, 6), {})
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CARRYING)
def test_they_approach_the_statistics_of_the_batches(federation, name):
    """The server averages them as they are: with momentum or another rate they would overshoot, and a variance become
    negative. As the parameters hardly move, each of a round's three steps goes a tenth of the way."""
    hyper = METHODS[name].hyper
    still = {"model": "mlp-bn:6", "weight_decay": 0.0} | dict.fromkeys(rates(hyper), 1e-12)
    if hasattr(hyper, "server_lr"):
        still["server_lr"] = 0.5
    simulation = simulate(METHODS[name], federation, dtype=np.float64, batch_size=100, cohort=None, **still)
    state, seen = simulation.init([0]), []
    for _ in range(3):
        leaves = jax.tree_util.tree_leaves_with_path((state.server, state.clients))
        seen.append([np.asarray(leaf) for path, leaf in leaves if "batch_stats" in jax.tree_util.keystr(path)])
        state, _ = simulation.advance(state, 1)
    for first, second, third in zip(*seen, strict=True):
        assert np.abs(second - first).max() > 0.01
        np.testing.assert_allclose(third - second, 0.9**3 * (second - first), rtol=1e-6, atol=1e-9)
