"""Noise of a banded factorisation in the engine: z = C^-1 Z with the rounds' own normals, by the matrix in NumPy."""

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import Mechanism, descriptions, noise

pytestmark = pytest.mark.usefixtures("float64")

SETTING = {"model": "linear", "local_steps": 2, "batch_size": 5, "cohort": 2, "participation": "cyclic"}


def test_noise_of_the_engine_is_that_of_the_matrix():
    """Clients that do not move: the server's steps are z / D, with C z the rounds' own normals.

    The lattice's half step, 2^-25 deviations, is all that they may differ by.
    """
    rounds, bands = 7, 3
    plan = ExecutionPlan(rounds_per_call=1)
    mechanism = Mechanism(1.5, 0.3, noise="banded", bands=bands)
    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=7, classes_per_client=3, test_share=0.5)
    given = SETTING | {"rounds": rounds, "lr": 1e-30, "plan": plan}
    result = jaxpfl.fit("fedavg", federation, **given, privacy=mechanism)
    state, models = result.simulation.init([0]), []
    released = jax.tree.map(lambda a: a[0], state.released)
    for _ in range(rounds + 1):
        models.append([np.asarray(a[0]) for a in jax.tree.leaves(result.simulation.trim(state).server.state)])
        like = jax.tree.map(lambda a: a[0], result.simulation.trim(state).server.state)
        state, _ = result.simulation.advance(state, 1)
    c, stddev = descriptions.banded_coefficients(bands, rounds), 1.5 * 0.3
    z = [np.diff(np.stack(leaves), axis=0) * (7 / 4) for leaves in zip(*models, strict=True)]
    for r in range(rounds):
        key = stream(stream(released, Purpose.SERVER_UPDATE, r), Purpose.RELEASE_NOISE)
        normals = jax.tree.leaves(noise.gaussian(jax.random.split(key)[0], like, stddev))
        for leaf, want in zip(z, normals, strict=True):
            white = sum(c[j] * leaf[r - j] for j in range(min(bands, r + 1)))
            np.testing.assert_allclose(white, np.asarray(want), atol=1e-7)
