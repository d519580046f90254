"""Clients on two devices give the numbers of one: every method, in float64, and sums over devices, to the bit."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, Model, stack_clients
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability, resolve_time_model
from jaxpfl.engine.cohort import all_summed
from jaxpfl.engine.execution_plan import resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from problem import assert_close, outcome, ragged_federation, reference, simulate
from toys import CASES

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def clients():
    """Seven clients: two devices hold four and three."""
    return ragged_federation()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "cohort"), [("toy medians", 4), ("toy clusters", None)])
def test_two_devices_give_the_numbers_of_one(clients, method, cohort):
    """Side by side; in blocks `test_same_numbers` and the oracles have the other methods."""
    assert_same_on_two_devices(clients, method, "vmap", cohort)


def test_only_a_small_part_of_the_clients_is_distributed_evenly():
    """Moving states costs more than an uneven cohort saves if all clients take part, or many of them."""
    cohorts = ((4, 8), (8, 8), (200, 400))
    plans = [resolve(ExecutionPlan(), cohort=k, num_clients=m, model_bytes=1000, platform="cpu") for k, m in cohorts]
    assert [plan.even for plan in plans] == [True, False, False]


@pytest.mark.slow
def test_a_cohort_that_is_not_dealt_out_gives_the_same(clients, monkeypatch):
    monkeypatch.setattr("jaxpfl.engine.execution_plan._MOST_DEALT", 0)
    assert_same_on_two_devices(clients, "adaped", "2", 5, "map")


@pytest.fixture
def apart(monkeypatch):
    """Devices that do not share memory, as accelerators: each holds its clients' data only."""
    monkeypatch.setattr("jaxpfl.engine.execution_plan._MOST_DEALT", 0)
    monkeypatch.setattr("jaxpfl.engine.placement._shares_memory", lambda device: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "cohort", "blocks"),
    [
        ("adaped, idle", 4, "2"),
        ("toy medians", None, "vmap"),  # single uploads of all clients, side by side on two devices
        ("fedbuff", 4, "2"),
    ],
)
def test_data_of_their_own_give_the_same(clients, apart, method, cohort, blocks):
    assert_same_on_two_devices(clients, method, blocks, cohort)


@pytest.mark.slow
def test_clients_with_data_of_their_own_are_dealt_by_their_examples(clients, apart):
    """Results stay at their places, devices hold hardly more than the examples, and a round is one exchange."""
    simulation = assert_same_on_two_devices(clients, "adaped", "2", 4)
    (held,), (group,) = simulation.federations, simulation._groups
    assert group.places is not None
    np.testing.assert_array_equal(np.asarray(held.client_ids)[group.places], clients.client_ids)
    splits = (held.train, held.validation, held.test), (clients.train, clients.validation, clients.test)
    for here, there in zip(*splits, strict=True):
        np.testing.assert_array_equal(np.asarray(here.size)[group.places], there.size)
    stored, own = (sum(len(split.examples.y) for split in side) for side in splits)
    assert own < stored <= 1.1 * own
    for leaf in (held.client_ids, held.train.start, held.train.size):
        assert [s.data.shape[0] for s in leaf.addressable_shards] == [4, 4]
    longest = len(held.train.examples.y) // 2
    for leaf in jax.tree.leaves(held.train.examples):
        assert [s.data.shape[0] for s in leaf.addressable_shards] == [longest, longest]
    round = simulation._program("advance", 2).as_text()
    exchanges = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)\(", round)
    assert exchanges == ["all-reduce"]


def test_seconds_of_a_round_are_those_of_its_clients_wherever_they_are_dealt(clients, apart):
    clock = "lognormal:step=1,sigma=1"
    simulation = simulate(METHODS["local"], clients, cohort=2, model="linear", failures=Availability(time_model=clock))
    assert simulation._groups[0].places is not None
    state, before = simulation.init([0]), 0
    for _ in range(4):
        state, metrics = simulation.advance(state, 1)
        after = np.asarray(simulation.counts(state).gradients)[0]
        each = resolve_time_model(clock).seconds(clients.client_ids, after - before, 0 * after, 0)
        np.testing.assert_allclose(metrics["round_seconds"], each.max(), rtol=1e-6)
        before = after


def test_equal_clients_stay_where_they_are(apart):
    rng = np.random.default_rng(0)
    equal = stack_clients([(rng.normal(size=(5, 3)), rng.integers(3, size=5)) for _ in range(7)])
    (group,) = simulate(METHODS["fedavg"], equal)._groups
    assert group.places is None


def assert_same_on_two_devices(clients, method, blocks, cohort, runs="auto"):
    plan = ExecutionPlan(clients=blocks, devices=2, runs=runs)
    with jax.enable_x64(True):
        simulation = simulate(CASES[method], clients, plan=plan, cohort=cohort, dtype=np.float64)
        got = outcome(simulation, 3, (1, 2))
    assert_close(got, reference(method, cohort), 1e-9)
    return simulation


@pytest.mark.slow
def test_states_lie_on_the_devices_and_data_are_not_copied(clients):
    simulation = simulate(METHODS["adaped"], clients)
    state, _ = simulation.advance(simulation.init([0]), 2)
    for leaf in jax.tree.leaves((state.clients, state.participations)):
        assert [s.data.shape[1] for s in leaf.addressable_shards] == [4, 4]
    for leaf in jax.tree.leaves(simulation.federations[0].train):
        first, second = (s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards)
        assert first == second


@pytest.mark.parametrize(("cohort", "crosses"), [(None, False), (3, True)])
def test_what_crosses_devices(clients, cohort, crosses):
    """Sums always; states only where the cohort is dealt out."""
    simulation = simulate(METHODS["adaped"], clients, plan=ExecutionPlan(clients="map"), cohort=cohort)
    module = simulation.export("cpu").mlir_module()
    assert "all_reduce" in module
    assert "all_to_all" not in module
    assert ("reduce_scatter" in module) == crosses
    assert ("all_gather" in module) == crosses


@pytest.mark.slow
def test_a_model_that_scans_over_its_input(clients):
    """A client's message must not be closed over by the devices' programs: otherwise this gradient fails."""

    def apply(params, x, key=None, train=False):
        def read(state, column):
            return jnp.tanh(state * params["decay"] + column[:, None] * params["into"]), ()

        state, _ = jax.lax.scan(read, jnp.zeros((x.shape[0], 4)), x.T)
        return state @ params["out"]

    def init(key, x):
        return {"decay": jnp.ones(4), "into": jnp.ones(4), "out": jax.random.normal(key, (4, 3))}

    losses = []
    with jax.enable_x64(True):
        for devices in (1, 2):
            one = simulate(METHODS["fedavg"], clients, model=Model(init, apply), plan=ExecutionPlan(devices=devices))
            losses.append(one.advance(one.init([0]), 2)[1]["train_loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.slow
def test_a_trimmed_state_goes_on_with_other_devices(clients, apart):
    one, two = (simulate(METHODS["adaped"], clients, plan=ExecutionPlan(devices=d)) for d in (1, 2))
    trimmed = two.trim(two.advance(two.init([0]), 2)[0])
    assert {a.shape[1] for a in jax.tree.leaves((trimmed.clients, trimmed.diverged))} == {clients.num_clients}
    moved, _ = one.advance(one.adopt(trimmed), 2)
    stayed, _ = two.advance(two.init([0]), 4)
    back, _ = two.advance(two.adopt(one.trim(one.advance(one.init([0]), 2)[0])), 2)
    ends = (moved, two.trim(back), two.trim(stayed))
    *got, want = (jax.tree.map(np.asarray, state._replace(key=(), noise=())) for state in ends)
    for found in got:
        assert_close(found, want, 1e-4)


@pytest.mark.parametrize(
    ("devices", "cohort", "message"),
    [(3, None, r"at most 2 \(the devices present\)"), (2, 1, r"at most 1 \(the clients of a round\)")],
)
def test_devices_that_cannot_be(clients, devices, cohort, message):
    with pytest.raises(JaxpflError, match=message):
        simulate(METHODS["local"], clients, cohort=cohort, plan=ExecutionPlan(devices=devices))


def test_a_cohort_of_one_takes_one_device(clients):
    assert simulate(METHODS["local"], clients, cohort=1).execution.devices == 1


LARGE = np.array([[2**31 - 1, -(2**31), 2**24 + 1, -1, 0, 2**22], [1, -1, 2**24 + 1, 2**30 + 7, -5, 2**22]], np.int32)
"""Numbers that no float32 holds, also beyond int32 together."""


def summed(how, tree):
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    spread = jax.shard_map(lambda t: how(t, "clients"), mesh=mesh, in_specs=P("clients"), out_specs=P())
    program = jax.jit(spread)
    return program(tree), str(jax.make_jaxpr(spread)(tree)).count("psum")


@pytest.mark.parametrize("doubles", [False, True])
def test_one_vector_gives_the_sums_of_all_arrays(doubles):
    rng = np.random.default_rng(0)
    with jax.enable_x64(doubles):
        tree = {
            "counts": jnp.asarray(LARGE),
            "upload": jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float64 if doubles else jnp.float32),
            "count": jnp.array([3, 4], jnp.int32),
            "not a number": jnp.array([np.nan, np.inf], jnp.float32),
        }
        got, vectors = summed(all_summed, tree)
        want, _ = summed(jax.lax.psum, tree)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert vectors == 1 + doubles  # one of each type


def test_leaves_in_parts_and_whole_numbers_alone_are_not_joined():
    counts = {"counts": jnp.asarray(LARGE), "count": jnp.array([3, 4], jnp.int32)}
    np.testing.assert_array_equal(
        summed(all_summed, counts)[0]["counts"], LARGE.sum(axis=0, keepdims=True, dtype=np.int32)
    )
    with trees.leaves_apart(True):
        found, _ = summed(all_summed, counts | {"upload": jnp.ones((2, 3))})
    np.testing.assert_array_equal(found["upload"], 2 * np.ones((1, 3)))
