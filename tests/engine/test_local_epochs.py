"""Local work in epochs: each client takes the steps of passes over its own examples, in every method alike."""

import functools

import chex
import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.core.participation import Availability
from jaxpfl.core.protocol import LocalEpochs
from jaxpfl.data.batching import draw_batches, plan_batches
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec

SIZES = (3, 8, 17, 24)
BATCH = 5
STEPS = [1, 2, 4, 5]  # of a pass: a client with fewer examples than a batch has slots takes them all


def federation(sizes=SIZES, first=0):
    rng = np.random.default_rng(0)

    def client(n):
        return rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32)

    ids = range(first, first + len(sizes))
    return jaxpfl.stack_clients([client(n) for n in sizes], test=[client(6) for _ in sizes], client_ids=list(ids))


def trained(method="fedavg", sizes=SIZES, rounds=2, **more):
    """State, history, and gradients in training and in personalization."""
    given = {"model": "linear", "batch_size": BATCH, "num_classes": 3} | more
    simulation = simulation_of(RunSpec(method=jaxpfl.METHODS[method], **given), federation(sizes))
    state, history = simulation.advance(simulation.init([0]), rounds)
    return state, history, simulation.gradients(state)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_round_is_so_many_passes(epochs):
    own = LocalEpochs(epochs, BATCH)
    steps = own.on_host(np.array(SIZES))
    assert steps.tolist() == [int(own.steps(np.int32(n))) for n in SIZES]
    if epochs == 1:
        assert steps.tolist() == STEPS
    plan = plan_batches(np.array(SIZES), int(steps.max()), BATCH, own=own)
    draw = jax.jit(functools.partial(draw_batches, plan))

    for n, count in zip(SIZES, steps, strict=True):
        seen = []
        for participations in range(6):
            places, valid = draw(jax.random.key(n), np.int32(participations), np.int32(n))
            seen += np.asarray(places)[:count][np.asarray(valid)[:count]].tolist()
        whole = len(seen) // n * n  # rounds continue the epoch, so that every pass has every example once
        for start in range(0, whole, n):
            assert sorted(seen[start : start + n]) == list(range(n))


@pytest.mark.slow
def test_clients_of_one_size_are_those_of_as_many_steps():
    sizes = (20, 20, 20)
    epochs, steps = (trained(sizes=sizes, **work) for work in ({"local_epochs": 1}, {"local_steps": 4}))
    chex.assert_trees_all_equal(epochs[0].server, steps[0].server)
    assert np.array_equal(epochs[1]["train_loss"], steps[1]["train_loss"])


@pytest.mark.slow
def test_each_clients_gradients_are_those_of_its_own_steps():
    for method, each in (("fedavg", 1), ("fedem", 3)):
        options = {"components": 3} if method == "fedem" else {}
        *_, gradients = trained(method, local_epochs=1, options=options)
        assert gradients.training[0].tolist() == [2 * each * count for count in STEPS]


@pytest.mark.slow
def test_fine_tuning_takes_passes_of_its_own():
    given = {"model": "linear", "batch_size": BATCH, "num_classes": 3, "rounds": 2, "local_steps": 2}
    found = jaxpfl.fit("fedavg-ft", federation(), options={"fine_tune_epochs": 2}, **given)
    assert found.gradients.training[0].tolist() == [4] * 4
    assert found.gradients.personalization.tolist() == LocalEpochs(2, BATCH).on_host(np.array(SIZES)).tolist()


@pytest.mark.slow
def test_head_and_body_share_a_clients_own_steps():
    given = {"method": "fedrep", "model": "mlp:4"}
    # A proportion, not a number of steps: the larger client has eight in a round.
    options = {}, {"head_steps": 4}, {"head_steps": 2}, {"head_steps": 1, "body_steps": 3}, {"body_steps": 6}
    found = [trained(sizes=(10, 40), local_epochs=1, options=of, **given) for of in options]
    assert [gradients.training[0].tolist() for *_, gradients in found] == [[4, 16]] * 5
    default, half, *quarters = (history["train_loss"] for _, history, _ in found)
    assert np.array_equal(half, default)
    assert not np.array_equal(half, quarters[0])
    assert all(np.array_equal(same, quarters[0]) for same in quarters)
    # Two steps, the first on the head: were the head's share that of the larger client, the body would never move.
    alone, pair = (trained(sizes=(10, 10), **given, **work)[1] for work in ({"local_epochs": 1}, {"local_steps": 2}))
    assert np.array_equal(alone["train_loss"], pair["train_loss"])


@pytest.mark.slow
def test_slow_clients_take_fewer_of_their_own_steps():
    found = trained(local_epochs=1, stragglers=1.0, rounds=8)[2].training[0]
    key, own = jax.random.key(0), np.array(STEPS)
    draw = jax.jit(jax.vmap(functools.partial(Availability(stragglers=1.0).step_limit, key), in_axes=(None, 0, 0)))
    taken = sum(np.asarray(draw(r, np.arange(len(own)), own)) for r in range(8))
    assert found.tolist() == taken.tolist()
    assert (taken[1:] < 8 * own[1:]).all()


@pytest.mark.parametrize("method", ["l2gd", "network-lasso"])
def test_methods_whose_update_has_tau_refuse_epochs(method):
    with pytest.raises(JaxpflError, match="set local_steps, not local_epochs"):
        trained(method, local_epochs=1)


@pytest.mark.slow
def test_numbers_are_the_same_under_any_plan():
    found = [trained("ditto", local_epochs=1, plan=jaxpfl.ExecutionPlan(clients=how)) for how in ("map", "vmap", 2)]
    for state, _, gradients in found:
        assert gradients.training[0].tolist() == [2 * 2 * count for count in STEPS]
        chex.assert_trees_all_close(state.clients, found[0][0].clients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_new_clients_adapt_by_passes_over_their_own_examples():
    given = {"model": "linear", "rounds": 1, "batch_size": BATCH, "num_classes": 3, "local_epochs": 1}
    found = jaxpfl.fit("local", federation((24,)), unseen=federation((3, 17), first=1), adapt_rounds=2, **given)
    assert found.unseen["after"]["gradients"][0].tolist() == [2, 8]
