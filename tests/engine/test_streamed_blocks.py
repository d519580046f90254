"""Blocks of clients on the host: their size, several devices, and the memory that is told of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from test_streamed_clients import SETTINGS, federation, plan

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.engine.streamed import rounds
from jaxpfl.engine.streamed.simulation import StreamedSimulation
from jaxpfl.privacy import Mechanism

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("fitting", "step", "want"), [(7.5, 1, 7), (7.5, 3, 6), (1, 1, 1), (0.5, 3, 3), (19.9, 1, 19), (20.1, 3, 20)]
)
def test_a_block_has_as_many_clients_as_fit_with_their_data(
    monkeypatch: pytest.MonkeyPatch, fitting: float, step: int, want: int
) -> None:
    """In steps of the clients that are scored at once; all clients need no such steps."""
    made, states = streamed()._blocks, {"weights": np.zeros((2, 20, 650), np.float32)}
    splits = (federation().train, federation().validation, federation().test)
    of_data = sum(leaf.nbytes for split in splits for leaf in split.examples) / 20
    monkeypatch.setattr(rounds, "_BYTES", fitting * (4 * 650 + of_data))
    assert made._rows(step, states) == want


@functools.cache
def streamed() -> StreamedSimulation:
    return jaxpfl.fit("local", federation(), **SETTINGS | {"rounds": 1}, plan=plan("host")).simulation


def test_blocks_on_two_devices_give_the_numbers_of_one(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_BYTES", 1)
    one, two = (
        jaxpfl.fit("local", federation(), **SETTINGS, plan=ExecutionPlan(devices=n, clients=3, clients_in="host"))
        for n in (1, 2)
    )
    assert two.simulation._blocks.placement.rows == 6
    np.testing.assert_array_equal(one.state.participations, two.state.participations)
    seen = [(fit.simulation.personal_models(fit.state), fit.scores, fit.history) for fit in (one, two)]
    for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("more", [{}, {"privacy": Mechanism(1.0, 0.5)}], ids=["public", "private"])
def test_memory_is_that_of_the_program_that_runs(more: dict[str, Any]) -> None:
    """A round that is asked for its memory first is not compiled twice, and takes one run at a time."""
    given = SETTINGS | {"rounds": 1, "seeds": 2} | more
    fit = jaxpfl.fit("local" if not more else "adaped", federation(), **given, plan=plan("host"))
    fresh = jaxpfl.fit("local" if not more else "adaped", federation(), **given, plan=plan("host")).simulation
    fresh._rounds._programs.clear()
    told = [fresh.memory(runs) for runs in (1, 2)]
    assert told[1] == told[0] | {"states": 2 * told[0]["states"]}
    assert told[0]["states"] == sum(leaf[0].nbytes for leaf in jax.tree.leaves(fit.state.clients))
    state, _ = fresh.advance(fresh.init([0, 1]), 1)
    for a, b in zip(jax.tree.leaves(state.server), jax.tree.leaves(fit.state.server), strict=True):
        np.testing.assert_array_equal(a, b)
