"""Uploads and messages of every method, as its clients' functions are traced: bytes, kinds, increments, attacks."""

from collections import Counter
from functools import partial

import jax
import numpy as np
import pytest
from problem import MODELS, ragged_federation, simulate, watched
from toys import CASES

from jaxpfl import METHODS
from jaxpfl.engine.tasks import make_task
from jaxpfl.uploads.robust import attack_of, attacked

FEDAVG = METHODS["fedavg"]
TRACED = CASES | {"fednova": FEDAVG._replace(build=partial(FEDAVG.build, fednova=True))}
QUICK = ("feddbe", "fednova", "fedpac")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(TRACED)]
KINDS = {
    *("adamix", "adaped", "fedavg", "feddbe", "fedpac", "ifca", "network-lasso", "scaffold"),
    *("toy clusters", "toy medians", "adaped, idle", "adaped, private", "fedavg, private"),
}
"""One of each kind of upload: sums and stacks, trees of several parts, weights for each model, several groups, clients
that work outside the cohort, and private ones, which have no error feedback: of each `test_compressed_uploads` has one
like it."""


def increments_of(algorithm, tree) -> list[bool]:
    """For each number of an upload whether it is declared an increment."""
    return jax.tree.leaves(
        jax.tree.map(lambda acts, part: jax.tree.map(lambda _: acts, part), algorithm.increments, tree)
    )


def kind(algorithm, upload) -> tuple:
    """All that a compressor and the engine tell uploads apart by: how they are reduced, the number of groups, the axes
    of each weight (of the first group's), the kinds of numbers under it, if clients work outside the cohort, and if
    some numbers are no increments."""
    weights, parts = jax.tree.flatten(upload.weight)
    below = [
        frozenset(np.issubdtype(a.dtype, np.inexact) for a in jax.tree.leaves(part))
        for part in parts.flatten_up_to(upload.total)
    ]
    axes = tuple(weight.ndim for weight in weights)
    apart = not all(jax.tree.leaves(algorithm.increments))
    return algorithm.reduction, len(algorithm.clients), axes, tuple(below), algorithm.idle_cap > 0, apart


def traced(name: str, attack: str = "sign-flip"):
    """A simulation under attack, and the messages and uploads of honest clients and of those that may attack."""
    honest, sent = [], []

    def wrap(algorithm):
        return watched(attacked(watched(algorithm, honest), attack_of(attack), np.array([9, 5])), sent)

    simulation = simulate(TRACED[name], ragged_federation(), wrap=wrap)
    return simulation, simulation.bytes_per_client(), honest, sent


KNOWN: set[tuple] = set()


def known_kinds() -> set[tuple]:
    if not KNOWN:
        for name in KINDS:
            simulation, _, honest, _ = traced(name)
            KNOWN.add(kind(simulation.algorithm, honest[0][1]))
    return KNOWN


@pytest.mark.parametrize("name", NAMES)
def test_uploads_are_what_they_are_declared_to_be(name):
    """Increments have the shape of a part of their own of the message, or of the model, and are all that an attack
    changes: the very arrays of an honest client, of the trace, whose bits are the same whatever the numbers."""
    method = TRACED[name]
    simulation, sizes, honest, sent = traced(name)
    assert simulation.algorithm.pooled == method.pooled
    assert sizes == bytes_of(name)
    if not method.uploads or method.pooled:
        return
    model = jax.eval_shape(make_task(MODELS.get(name, "mlp:6"), ragged_federation(), 3).init, jax.random.key(0))
    for (message, before), (_, after) in zip(honest, sent, strict=True):
        declared = increments_of(simulation.algorithm, before.total)
        moved = [leaf for leaf, acts in zip(jax.tree.leaves(before.total), declared, strict=True) if acts]
        shapes, *parts = (Counter(leaf.shape for leaf in jax.tree.leaves(tree)) for tree in (moved, message, model))
        assert any(shapes <= of_part for of_part in parts)
        if "private" not in name:
            pairs = zip(*map(jax.tree.leaves, (before.total, after.total)), strict=True)
            assert [a is not b for a, b in pairs] == declared
            assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before.weight, after.weight)), strict=True))
    if name not in QUICK:
        assert kind(simulation.algorithm, honest[0][1]) in known_kinds()


def test_an_attack_on_labels_changes_no_upload():
    _, _, honest, sent = traced("fednova", "label-flip")
    for (_, before), (_, after) in zip(honest, sent, strict=True):
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before.total, after.total)), strict=True))


def bytes_of(name: str) -> tuple[int, int]:
    """Bytes up and down of a client in a round, by hand."""
    parameters = 4 * (5 * 6 + 6 + 6 * 3 + 3)
    body = 4 * (5 * 6 + 6)
    head = parameters - body
    psi = number = 4
    coin = 1
    prototypes = 4 * 3 * 6
    want = {
        "local": (0, 0),
        "pooled": (0, 0),
        "adaped": (parameters + psi, parameters + psi),
        "adaped-plus": (parameters + psi, parameters + psi),
        "adaped-plus, kept": (parameters + psi, parameters + psi),
        "adaped, idle": (parameters + psi, parameters + psi),
        "adaped, private": (parameters + psi + number, parameters + psi + number),
        "fedper": (body, body),
        "fedrep": (body, body),
        "fedbabu": (body, parameters),
        "lg-fedavg": (head, head),
        "ifca": (2 * parameters, 2 * parameters),
        "fedem": (2 * parameters, 2 * parameters),
        "map-gaussian": (parameters + number, parameters + number),
        "map-laplace": (parameters + number, parameters + number),
        "map-kd": (parameters + number, parameters + number),
        "adamix": (parameters, 2 * (parameters + number + number)),
        "toy medians": (parameters, parameters + number),
        "toy clusters": (2 * parameters, 2 * parameters),
        "fednova": (parameters + number, parameters),
        "scaffold": (2 * parameters, 2 * parameters),
        "l2gd": (parameters, parameters + coin),
        "feddbe": (parameters + 6 * number, parameters + 7 * number),
        "fedpac": (parameters + 2 * prototypes + number, parameters + prototypes + 3 * number),
        "fedproto": (prototypes, prototypes + 3 * number),
    }
    return want.get(name, (parameters, parameters))
