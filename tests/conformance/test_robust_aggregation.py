"""Robust aggregation keeps what the protocol promises, for every kind of upload that has a mean."""

from collections import Counter
from functools import partial

import jax
import numpy as np
import pytest
from problem import (
    MODELS,
    ORDER,
    assert_close,
    outcome,
    padded,
    ragged_federation,
    reordered,
    simulate,
    spoiled,
    watched,
)
from toys import CASES

from jaxpfl import METHODS, ExecutionPlan, data
from jaxpfl.engine.tasks import make_task
from jaxpfl.uploads.compression import compressed
from jaxpfl.uploads.compression import resolve as compressor
from jaxpfl.uploads.robust import ATTACKS, attack_of, attacked, resolve, robust

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
@pytest.mark.parametrize("name", [name for name in CASES_OF if name != "adaped"])
@pytest.mark.usefixtures("x64")
def test_everything_that_must_not_matter_at_once(name, federation):
    """Blocks of clients, runs and devices together, on padded data with garbage in the padding, in another order."""
    simulation = made(name, federation, plan=ExecutionPlan(clients="map", runs="map", devices=1))
    want = outcome(simulation, 3, (1, 2))
    together = ExecutionPlan(clients="3", runs="vmap", devices=2)
    other = made(name, spoiled(data.permute(padded(federation), ORDER)), plan=together)
    assert_close(outcome(other, 3, (1, 2)), reordered(simulation, want), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_models_in_parts_give_the_same(federation):
    """Norms and distances are over all leaves, wherever they lie."""
    one_by_one = ExecutionPlan(clients="map", runs="map", devices=1)
    want = outcome(made("adaped", federation, plan=one_by_one), 2)
    got = outcome(made("adaped", federation, plan=ExecutionPlan(model_shards=2, clients="3")), 2)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_what_is_aggregated_is_what_arrives_decoded(federation):
    """Compressed without loss no number changes, and the bits are counted."""
    one = jax.eval_shape(lambda splits: splits.client(0), federation.splits)
    want = outcome(made("fedavg", federation), 2)
    wrap = partial(compressed, compressor=compressor("lossless:feedback=false"), splits=one)

    def both(algorithm):
        lying = attacked(algorithm, attack_of("noise:deviation=0.1"), np.array([9, 5]))
        return wrap(robust(lying, resolve(CASES_OF["fedavg"])))

    got = outcome(simulate(CASES["fedavg"], federation, wrap=both, dtype=np.float64), 2)
    assert (got["history"].pop("upload_bits") > 0).all()
    np.testing.assert_allclose(got["state"].server["dense0"]["kernel"], want["state"].server["dense0"]["kernel"])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_an_untrimmed_estimate_is_the_uniform_mean(federation):
    """A bound beyond all norms bounds nothing: FedProx, whose mean is uniform, keeps its numbers."""
    want = outcome(simulate(CASES["fedprox"], federation, dtype=np.float64), 3)
    loose = simulate(
        CASES["fedprox"],
        federation,
        wrap=lambda algorithm: robust(algorithm, resolve("norm-bound:bound=1e9")),
        dtype=np.float64,
    )
    assert_close(outcome(loose, 3), want, 1e-9)


FEDAVG = METHODS["fedavg"]
ATTACKED = CASES | {"fednova": FEDAVG._replace(build=partial(FEDAVG.build, fednova=True))}
UPLOADING = sorted(name for name, case in ATTACKED.items() if case.uploads and not case.pooled)
WITHOUT_PRIVACY = [name for name in UPLOADING if "private" not in name]
AT_ONCE = ("feddbe", "fednova", "fedpac")


def often(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.slow) for name in names]


def increments_of(algorithm, tree) -> list[bool]:
    """For each number of an upload whether it is declared an increment."""
    return jax.tree.leaves(
        jax.tree.map(lambda acts, part: jax.tree.map(lambda _: acts, part), algorithm.increments, tree)
    )


@pytest.mark.parametrize("name", often(WITHOUT_PRIVACY))
def test_an_attack_changes_increments_and_nothing_else(name):
    """The very arrays of an honest client, of the trace: their bits are the same whatever the numbers."""
    for attack in sorted(ATTACKS):
        honest, sent = [], []

        def wrap(algorithm, attack=attack, honest=honest, sent=sent):
            lying = attacked(watched(algorithm, honest), attack_of(attack), np.array([9, 5]))
            return watched(lying, sent)

        simulation = simulate(ATTACKED[name], ragged_federation(), wrap=wrap)
        simulation.bytes_per_client()
        for (_, before), (_, after) in zip(honest, sent, strict=True):
            assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before.weight, after.weight)), strict=True))
            declared = increments_of(simulation.algorithm, before.total)
            pairs = zip(*map(jax.tree.leaves, (before.total, after.total)), strict=True)
            changed = [a is not b for a, b in pairs]
            assert changed == (declared if attack_of(attack).change else [False] * len(declared))


@pytest.mark.parametrize("name", often(UPLOADING))
def test_increments_are_of_something_that_was_sent(name):
    """Each has the shape of a part of its own of the message, or of the model."""
    calls = []
    simulation = simulate(ATTACKED[name], ragged_federation(), wrap=partial(watched, calls=calls))
    simulation.bytes_per_client()
    task = make_task(MODELS.get(name, "mlp:6"), ragged_federation(), 3)
    model = jax.eval_shape(task.init, jax.random.key(0))
    for message, upload in calls:
        declared = increments_of(simulation.algorithm, upload.total)
        moved = [leaf for leaf, acts in zip(jax.tree.leaves(upload.total), declared, strict=True) if acts]
        shapes, *known = (Counter(leaf.shape for leaf in jax.tree.leaves(tree)) for tree in (moved, message, model))
        assert any(shapes <= of_known for of_known in known)
