"""Robust aggregation keeps what the protocol promises, for every kind of upload that has a mean."""

import jax
import numpy as np
import pytest
from problem import ORDER, WHOLE, assert_close, assert_continues, disguised, outcome, reordered, simulate
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


def made(name: str, federation, compress: str | None = None, **choices):
    """A simulation of the method with two attackers among its clients, aggregated robustly from compressed uploads."""
    one = jax.eval_shape(lambda splits: splits.client(0), federation.splits)

    def wrap(algorithm):
        lying = attacked(algorithm, attack_of("noise:deviation=0.1"), np.array([9, 5]))
        whole = robust(lying, resolve(CASES_OF[name]))
        return whole if compress is None else compressed(whole, compressor(compress), splits=one)

    return simulate(CASES[name], federation, wrap=wrap, dtype=np.float64, **choices)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compress"), [("ifca", None), ("toy clusters", "top-k:share=0.2")])
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(name, compress, federation, tmp_path):
    """Blocks of clients, runs and devices together, on padded data with garbage in the padding, in another order; and
    a checkpoint."""
    simulation = made(name, federation, compress, plan=WHOLE)
    want = outcome(simulation, 3, (1, 2), scored=False)
    assert_continues(simulation, tmp_path)
    assert compress is None or any(map(np.any, jax.tree.leaves([group.memory for group in want["state"].clients])))
    together = ExecutionPlan(clients="3", runs="vmap", devices=2)
    other = made(name, disguised(federation.rows(ORDER)), compress, plan=together)
    assert_close(outcome(other, 3, (1, 2), scored=False), reordered(simulation, want), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_models_in_parts_give_the_same(federation):
    """Norms and distances are over all leaves, wherever they lie."""
    want = outcome(made("adaped", federation, plan=WHOLE), 2, scored=False)
    got = outcome(made("adaped", federation, plan=ExecutionPlan(model_shards=2, clients="3")), 2, scored=False)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_what_is_aggregated_is_what_arrives_decoded(federation):
    """Compressed without loss no number changes, and the bits are counted."""
    want = outcome(made("fedavg", federation), 2, scored=False)
    got = outcome(made("fedavg", federation, "lossless:feedback=false"), 2, scored=False)
    assert (got["history"].pop("upload_bits") > 0).all()
    np.testing.assert_allclose(got["state"].server["dense0"]["kernel"], want["state"].server["dense0"]["kernel"])
