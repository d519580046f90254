"""Noise multipliers and clipping norms that differ between the runs of one program."""

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl.privacy import Mechanism
from jaxpfl.support.errors import JaxpflError

SEEDS, NOISE, NORMS = (3, 4, 5), (0.0, 0.7, 2.0), (0.5, 0.05, 0.2)
SETTING = {"model": "linear", "rounds": 2, "local_steps": 2, "batch_size": 5}


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3, test_share=0.5)


def server(federation, mechanism, seeds):
    return jaxpfl.fit("fedavg", federation, **SETTING, seeds=seeds, privacy=mechanism).state.server.state


@pytest.mark.slow
def test_each_run_has_its_own(federation):
    together = server(federation, Mechanism(NOISE, NORMS), SEEDS)
    for i, (seed, z, limit) in enumerate(zip(SEEDS, NOISE, NORMS, strict=True)):
        alone = server(federation, Mechanism(z, limit), (seed,))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b[0], rtol=2e-5, atol=1e-6), together, alone)
    first, last = server(federation, Mechanism(NOISE, NORMS[::-1]), SEEDS), together
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)) > 1e-2


def test_adamix_takes_one(federation):
    with pytest.raises(JaxpflError, match="adamix takes one noise_multiplier and one clipping_norm"):
        jaxpfl.fit("adamix", federation, **SETTING, seeds=[0, 0], privacy=Mechanism((1.0, 2.0)))
