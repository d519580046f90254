"""Properties of every method's compiled round: one trace, no host callback, portable, blind to the test examples."""

import re

import chex
import jax
import numpy as np
import pytest
from problem import outcome, simulate

from jaxpfl import ExecutionPlan
from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.privacy import PrivateHyper


def test_one_trace_serves_calls_of_every_length_and_takes_the_state(method, federation):
    chex.clear_trace_counter()  # chex counts functions of one source together

    def once(algorithm):
        update = chex.assert_max_traces(algorithm.server.update, n=1)
        return algorithm._replace(server=algorithm.server._replace(update=update))

    simulation = simulate(method, federation, wrap=once, plan=ExecutionPlan(runs="vmap", rounds_per_call=4))
    state = simulation.init([0, 1])
    for rounds in (1, 3, 7):
        given, (state, _) = state, simulation.advance(state, rounds)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given.server, given.clients)))
    assert int(state.round[0]) == 11


def test_lowers_for_other_platforms_without_a_callback(method, federation):
    platform = "tpu" if method.name == "toy medians" else "cuda"
    exported = simulate(method, federation, plan=ExecutionPlan(clients="3")).export(platform, seeds=2)
    assert exported.platforms == (platform,)
    called = set(re.findall(r"custom_call @(\w+)", exported.mlir_module()))
    assert not {name for name in called if "callback" in name}


@pytest.mark.slow
def test_test_examples_reach_nothing_but_scores(method, federation):
    test = federation.test
    nothing = test.with_examples(x=np.full_like(test.examples.x, np.nan), y=2 - test.examples.y)
    other = federation._replace(test=nothing)
    want, got = (outcome(simulate(method, f), 3) for f in (federation, other))
    chex.assert_trees_all_equal((got["state"], got["history"]), (want["state"], want["history"]))
    assert not np.array_equal(got["scores"]["after"]["loss"], want["scores"]["after"]["loss"])


@pytest.mark.slow
def test_a_diverging_rate_is_counted_and_survived(method, federation):
    # At 1e38 uploads may be finite and their sum not. A run for each rate, in one program.
    too_high = np.array([1e30, 1e36, 1e38])
    inside = isinstance(method.hyper, PrivateHyper)
    own = method.hyper.method if inside else method.hyper
    hyper = own.replace(**dict.fromkeys(rates(own), too_high))
    hot = method._replace(hyper=method.hyper.replace(method=hyper) if inside else hyper)
    result = outcome(simulate(hot, federation, cohort=None), 3, (0, 1, 2), scored=False)
    assert (result["state"].diverged > 0).any(axis=1).all()
    for leaf in jax.tree.leaves((result["state"].server, result["state"].clients)):
        assert np.isfinite(leaf).all()
