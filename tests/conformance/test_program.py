"""Properties of every method's compiled round: one trace, no host callback, portable; and its server."""

import re

import jax
import numpy as np
import pytest
from problem import assert_continues, choose, lose_round, outcome, simulate, traced_once
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan
from jaxpfl.algorithms.parts.hyper import rates


def test_one_trace_serves_calls_of_every_length_and_takes_the_state(federation, tmp_path):
    """Others are in `test_same_numbers`."""
    plan = ExecutionPlan(runs="vmap", rounds_per_call=4)
    assert_continues(simulate(CASES["adaped"], federation, wrap=traced_once, plan=plan), tmp_path)


def test_lowers_for_other_platforms_without_a_callback(method, federation):
    platform = "tpu" if method.name == "toy medians" else "cuda"
    exported = simulate(method, federation, plan=ExecutionPlan(clients="3")).export(platform, seeds=2)
    assert exported.platforms == (platform,)
    called = set(re.findall(r"custom_call @(\w+)", exported.mlir_module()))
    assert not {name for name in called if "callback" in name}


@pytest.mark.slow
def test_a_diverging_rate_is_counted_and_survived(method, federation):
    # At 1e38 uploads may be finite and their sum not. A run for each rate, in one program.
    too_high = np.array([1e30, 1e36, 1e38])
    hot = method._replace(hyper=method.hyper.replace(**dict.fromkeys(rates(method.hyper), too_high)))
    result = outcome(simulate(hot, federation, cohort=None), 3, (0, 1, 2), scored=False)
    assert (result["state"].diverged > 0).any(axis=1).all()
    for leaf in jax.tree.leaves((result["state"].server, result["state"].clients)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_a_server_rate_apply_it(federation, name):
    algorithm = simulate(METHODS[name], federation).algorithm
    assert algorithm.has_server_optimizer == hasattr(METHODS[name].hyper, "server_lr")


@pytest.mark.slow
def test_a_round_without_weight_leaves_the_memory(method, federation):
    chosen = choose(method, optimizer="adam", server_optimizer="fedavgm")
    good = simulate(chosen, federation, cohort=None)
    state, _ = good.advance(good.init([0]), 2)
    memory = jax.tree.leaves(getattr(state.server, "memory", ()))
    assert hasattr(method.hyper, "server_lr") == any(np.any(leaf) for leaf in memory)
    assert lose_round(good, state)["diverged"].tolist() == [[federation.num_clients]]
