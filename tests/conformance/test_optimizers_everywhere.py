"""Client and server optimizers keep what the protocol promises, and no method ignores the server's rate."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from problem import assert_close, outcome, simulate

from jaxpfl import METHODS, Method
from jaxpfl.algorithms.parts.servers import WithOptState


def choose(method: Method, **choices) -> Method:
    """The method with other choices of the local work."""

    def build(task, work, **options):
        return method.build(task, dataclasses.replace(work, **choices), **options)

    return method._replace(build=build)


@pytest.mark.parametrize("name", METHODS)
def test_methods_with_a_server_rate_apply_it(federation, name):
    algorithm = simulate(METHODS[name], federation).algorithm
    assert algorithm.has_server_optimizer == hasattr(METHODS[name].hyper, "server_lr")


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_sgd_by_name_and_as_a_factory_are_one(method, federation):
    """At the server the factory takes the general way, with its memory, and arrives where averaging does."""
    want = outcome(simulate(method, federation, dtype=np.float64), 3, scored=False)
    chosen = choose(method, optimizer=optax.sgd, server_optimizer=optax.sgd)
    simulation = simulate(chosen, federation, dtype=np.float64)
    assert isinstance(simulation.init([0]).server, WithOptState) == hasattr(method.hyper, "server_lr")
    got = outcome(simulation, 3, scored=False)
    if hasattr(method.hyper, "server_lr"):
        got["state"] = got["state"]._replace(server=got["state"].server.state)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
def test_a_round_without_weight_leaves_the_memory(method, federation):
    chosen = choose(method, optimizer="adam", server_optimizer="fedavgm")
    good = simulate(chosen, federation, cohort=None)
    state, _ = good.advance(good.init([0]), 2)
    before = jax.tree.map(np.asarray, state.server)
    memory = jax.tree.leaves(getattr(before, "memory", ()))
    assert hasattr(method.hyper, "server_lr") == any(np.any(leaf) for leaf in memory)
    x = np.full_like(federation.train.examples.x, np.inf)
    broken = simulate(chosen, federation._replace(train=federation.train.with_examples(x=x)), cohort=None)
    state, history = broken.advance(broken.adopt(state), 1)  # where it is private, it is of another name
    assert history["diverged"].tolist() == [[federation.num_clients]]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.server), before)
