"""Robust aggregation keeps what the protocol promises, for every kind of upload that has a mean."""

from functools import partial

import jax
import numpy as np
import pytest
from problem import ORDER, assert_close, outcome, padded, reordered, simulate, spoiled
from toys import CASES

from jaxpfl import ExecutionPlan
from jaxpfl.uploads.compression import compressed
from jaxpfl.uploads.compression import resolve as compressor
from jaxpfl.uploads.robust import attack_of, attacked, resolve, robust

CASES_OF = {
    "fedavg": "trimmed-mean:fraction=0.3",
    "ifca": "median",
    "scaffold": "geometric-median",
    "adaped": "multi-krum:attackers=0,select=2",
    "toy clusters": "norm-bound",
}
"""Between them: several parts of an upload, weights for each model, idle clients, lost uploads, a server optimizer."""


def made(name: str, federation, **choices):
    """A simulation of the method with two attackers among its clients, aggregated robustly."""

    def wrap(algorithm):
        lying = attacked(algorithm, attack_of("noise:deviation=0.1"), np.array([9, 5]))
        return robust(lying, resolve(CASES_OF[name]))

    return simulate(CASES[name], federation, wrap=wrap, dtype=np.float64, **choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ifca", "toy clusters"])
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(name, federation):
    """Blocks of clients, runs and devices together, on padded data with garbage in the padding, in another order."""
    simulation = made(name, federation, plan=ExecutionPlan(clients="map", runs="map", devices=1))
    want = outcome(simulation, 3, (1, 2), scored=False)
    together = ExecutionPlan(clients="3", runs="vmap", devices=2)
    other = made(name, spoiled(padded(federation).rows(ORDER)), plan=together)
    assert_close(outcome(other, 3, (1, 2), scored=False), reordered(simulation, want), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_models_in_parts_give_the_same(federation):
    """Norms and distances are over all leaves, wherever they lie."""
    one_by_one = ExecutionPlan(clients="map", runs="map", devices=1)
    want = outcome(made("adaped", federation, plan=one_by_one), 2, scored=False)
    got = outcome(made("adaped", federation, plan=ExecutionPlan(model_shards=2, clients="3")), 2, scored=False)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_what_is_aggregated_is_what_arrives_decoded(federation):
    """Compressed without loss no number changes, and the bits are counted."""
    one = jax.eval_shape(lambda splits: splits.client(0), federation.splits)
    want = outcome(made("fedavg", federation), 2, scored=False)
    wrap = partial(compressed, compressor=compressor("lossless:feedback=false"), splits=one)

    def both(algorithm):
        lying = attacked(algorithm, attack_of("noise:deviation=0.1"), np.array([9, 5]))
        return wrap(robust(lying, resolve(CASES_OF["fedavg"])))

    got = outcome(simulate(CASES["fedavg"], federation, wrap=both, dtype=np.float64), 2, scored=False)
    assert (got["history"].pop("upload_bits") > 0).all()
    np.testing.assert_allclose(got["state"].server["dense0"]["kernel"], want["state"].server["dense0"]["kernel"])
