"""Clients' models in parts on several devices: the numbers of whole ones on four, and less on each device.

That two give the numbers of whole models is asked of eleven methods in the conformance tests.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from model_shards import CASES, ragged_federation, simulate

from jaxpfl import ExecutionPlan, JaxpflError, fit
from jaxpfl.engine.cohort import bytes_of_part
from jaxpfl.engine.execution_plan import explain

PARTS = ExecutionPlan(model_shards=2, clients="3", runs="vmap")
FOUR = ("adaped", "toy medians")


@pytest.mark.slow
def test_two_clients_of_two_parts_and_one_of_four():
    script = Path(__file__).with_name("model_shards.py")
    done = subprocess.run([sys.executable, script, *FOUR], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[2, 4], [1, 4]]


@pytest.mark.slow
def test_states_lie_in_parts():
    simulation = simulate(CASES["ditto"], ragged_federation(), plan=PARTS, model="mlp:64")
    state, _ = simulation.advance(simulation.init([0]), 1)
    for tree in (state.server, state.clients):
        whole = sum(a.nbytes for a in jax.tree.leaves(tree))
        on_each = [0, 0]
        for leaf in jax.tree.leaves(tree):
            for shard in leaf.addressable_shards:
                on_each[shard.device.id] += shard.data.nbytes
        # The bias of three classes alone is whole on both.
        assert on_each[0] == on_each[1]
        assert whole / 2 <= on_each[0] < 0.52 * whole


def test_the_layout_is_along_the_largest_dimension_that_divides():
    shapes = {"a": jax.ShapeDtypeStruct((6, 7), "float32"), "b": jax.ShapeDtypeStruct((5,), "float32")}
    assert bytes_of_part(shapes, 2) == 4 * (21 + 5)
    assert bytes_of_part(shapes, 3) == 4 * (14 + 5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_parts(tmp_path):
    from jaxpfl.runs.checkpoint import Checkpoints

    whole, parts = (
        simulate(CASES["adaped"], ragged_federation(), plan=ExecutionPlan(devices=n, model_shards=n)) for n in (1, 2)
    )
    state, _ = parts.advance(parts.init([0]), 2)
    Checkpoints(tmp_path).save(2, parts.checkpointed(state), 1.0)
    stayed, want = parts.advance(state, 2)
    kept, _ = Checkpoints(tmp_path).restore(whole.checkpointed(whole.init([0])), 2, print)
    moved, got = whole.advance(whole.adopt(kept), 2)
    np.testing.assert_allclose(got["train_loss"], want["train_loss"], rtol=1e-5)
    back, _ = parts.advance(parts.adopt(whole.trim(moved)), 1)
    assert not jax.tree.leaves(back.clients)[0].is_fully_replicated
    on, _ = parts.advance(stayed, 1)
    for a, b in zip(jax.tree.leaves(back.server), jax.tree.leaves(on.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"model_shards": 3}, r"plan.model_shards must be at most 2 \(the devices present\), got 3"),
        ({"model_shards": 2, "devices": 1}, "plan.devices must be a multiple of plan.model_shards = 2, got 1"),
        ({"model_shards": 2, "devices": 4}, r"plan.devices must be at most 2 \(the devices present\), got 4"),
    ],
)
def test_shards_that_cannot_be(plan, message):
    with pytest.raises(JaxpflError, match=message):
        simulate(CASES["local"], ragged_federation(), plan=ExecutionPlan(**plan))
    with pytest.raises(JaxpflError, match=r"plan.model_shards must be at least 1, got 0"):
        ExecutionPlan(model_shards=0)


def test_a_model_without_a_dimension_that_divides_is_refused():
    with pytest.raises(JaxpflError, match=r"plan.model_shards = 2: no array of the model has a dimension divisible by"):
        simulate(CASES["local"], ragged_federation(), plan=PARTS, model="linear")


def test_clients_in_host_memory_are_refused():
    with pytest.raises(JaxpflError, match=r"plan.clients_in = host .* plan.model_shards = 2 requires clients on"):
        fit("local", ragged_federation(), rounds=1, plan=ExecutionPlan(model_shards=2, clients_in="host"))


def test_the_plan_says_so():
    rows = explain(simulate(CASES["local"], ragged_federation(), plan=PARTS, model="mlp:64").execution)
    found = {what: (choice, why) for what, choice, why in rows}
    assert found["devices"][0] == "2"
    assert found["a client's model"][0] == "in parts on 2 devices"
    assert "KiB of it on each" in found["a client's model"][1]
