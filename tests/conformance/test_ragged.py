"""Memory of clients of which one is much larger than the others: that of the examples, not of padding."""

import numpy as np
import pytest

import jaxpfl
from jaxpfl.engine.placement import program_bytes

SMALL, FEW, LARGEST, FEATURES = 200, 3, 2000, 20


@pytest.fixture(scope="module")
def ragged():
    rng = np.random.default_rng(0)
    given = [(rng.normal(size=(n, FEATURES)), rng.integers(3, size=n)) for n in [FEW] * SMALL + [LARGEST]]
    return jaxpfl.stack_clients(given, test=given)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch_size"), [("fedavg", LARGEST), ("fedem", 2)])
def test_one_large_client_costs_its_own_examples(ragged, name, batch_size):
    """Padded, the data would be 67 MB and a block of 128 clients 21 MB; the examples are 0.4 MB."""
    plan = jaxpfl.ExecutionPlan(devices=1)
    settings = {"model": "linear", "rounds": 2, "local_steps": 2, "batch_size": batch_size, "plan": plan}
    fit = jaxpfl.fit(name, ragged, **settings)
    own = 2 * (SMALL * FEW + LARGEST) * 4 * (FEATURES + 1)
    held = fit.simulation.memory()
    assert own <= held["data"] <= 1.1 * own
    devices = fit.simulation.placement.devices
    working = {name: program_bytes(program, devices) for (name, _), program in fit.simulation._programs.made.items()}
    most = (6 if name == "fedem" else 2) * 2**20  # its responsibilities are padded in a block
    assert max(working["advance"], working["scores"]) < most
    assert np.isfinite(fit.personalized_accuracy).all()


@pytest.mark.slow
def test_the_large_client_is_scored_as_alone(ragged):
    """Its chunks and those of a block of small clients are one list."""
    fit = jaxpfl.fit("fedavg", ragged, model="linear", rounds=1, local_steps=1, batch_size=2)
    kernel, bias = (np.asarray(fit.state.server["head"][name])[0] for name in ("kernel", "bias"))
    x, y = ragged.test.flat()
    right = (x @ kernel + bias).argmax(axis=-1) == y
    want = np.add.reduceat(right, ragged.test.start) / ragged.test.size
    np.testing.assert_allclose(fit.scores["global"]["accuracy"][-1, 0], want, rtol=1e-6)
