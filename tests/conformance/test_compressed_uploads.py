"""Compressed uploads keep what the protocol promises, for every kind of upload that a registered method makes.

Of a method the wrapper sees its uploads alone, so methods of the same kind of upload stand for each other: a method
whose uploads are of another kind than those that are tried here fails `test_uploads`.
"""

from functools import partial

import jax
import numpy as np
import pytest
from problem import ORDER, WHOLE, assert_close, assert_continues, disguised, outcome, reordered, simulate
from toys import CASES

from jaxpfl import ExecutionPlan
from jaxpfl.uploads.compression import compressed, resolve

OWN = {"fedavg": "tv:gamma=0.01,codebook=3", "toy medians": "qsgd:levels=2"}
"""Between them: uploads that are summed and that are not, groups, lost uploads, draws and none. Memories, weights for
parts of an upload and idle clients are in `test_robust_aggregation`."""


def made(name: str, federation, compress: str, **choices):
    """A simulation of the method with its uploads compressed; private ones have no error feedback."""
    one = jax.eval_shape(lambda splits: splits.client(0), federation.splits)
    feedback = {"feedback": False} if "private" in name else {}
    wrap = partial(compressed, compressor=resolve(compress), splits=one, **feedback)
    return simulate(CASES[name], federation, wrap=wrap, **choices)


# In the default run numbers of compressed rounds are those of the oracles.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamix", "adaped, private", *OWN])
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(name, federation, tmp_path):
    """Blocks of clients, runs and devices together, on padded data with garbage in the padding, in another order; and
    a checkpoint."""
    compress = OWN.get(name, "tv:gamma=0.01")
    simulation = made(name, federation, compress, plan=WHOLE, dtype=np.float64)
    want = outcome(simulation, 3, (1, 2), scored=False)
    assert_continues(simulation, tmp_path)
    together = ExecutionPlan(clients="3", runs="vmap", devices=2)
    permuted = disguised(federation.rows(ORDER))
    other = made(name, permuted, compress, plan=together, dtype=np.float64)
    assert_close(outcome(other, 3, (1, 2), scored=False), reordered(simulation, want), 1e-9)
    bits = want["history"]["upload_bits"]
    assert (bits > 0).all()
    np.testing.assert_array_equal(want["state"].counts.upload_bits.sum(axis=1), bits.sum(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feddbe", "network-lasso"])
@pytest.mark.usefixtures("x64")
def test_without_loss_no_number_changes(name, federation):
    """The memory stays zero, and no key of training is touched; what differs is how XLA rounds another program."""
    want = outcome(simulate(CASES[name], federation, dtype=np.float64), 3, scored=False)
    got = outcome(made(name, federation, "lossless:feedback=true", dtype=np.float64), 3, scored=False)
    bits, counts = got["history"].pop("upload_bits"), got["state"].counts
    assert not any(np.any(leaf) for group in got["state"].clients for leaf in jax.tree.leaves(group.memory))
    np.testing.assert_array_equal(counts.table[..., :8], want["state"].counts.table[..., :8])
    own = tuple(group.own for group in got["state"].clients)
    got["state"] = got["state"]._replace(clients=own, counts=want["state"].counts)
    assert_close(got, want, 1e-11)
    assert bits.sum() == counts.upload_bits.sum() > 0
