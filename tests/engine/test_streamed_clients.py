"""Clients in host memory or in files: the numbers of clients on the device to the bit, and what is refused."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError, JaxpflWarning
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.engine.build import Assembled
from jaxpfl.engine.build import assemble as assemble_run
from jaxpfl.engine.execution_plan import explain
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.streamed import rounds, simulation
from jaxpfl.engine.streamed.rows import length_for, most, packed
from jaxpfl.engine.streamed.simulation import StreamedSimulation
from jaxpfl.privacy import Mechanism

SETTINGS: dict[str, Any] = {
    "cohort": 7,
    "rounds": 6,
    "eval_every": 4,
    "local_steps": 3,
    "batch_size": 8,
    "model": "linear",
}
ON_DEVICE = ExecutionPlan(devices=1, runs="map")


@functools.lru_cache
def federation() -> jaxpfl.Federation:
    whole = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3, test_share=0.3)
    keep = np.random.default_rng(0).integers(5, 40, 20)  # ragged
    return whole._replace(train=cut(whole.train, keep))


def cut(split: ClientData, most: np.ndarray) -> ClientData:
    sizes = np.minimum(np.asarray(split.size), most)
    places = np.concatenate([np.arange(n) + start for n, start in zip(sizes, np.asarray(split.start), strict=True)])
    return ClientData.stacked(jax.tree.map(lambda leaf: np.asarray(leaf)[places], split.examples), sizes)


def plan(where: str) -> ExecutionPlan:
    return ExecutionPlan(clients_in=where, devices=1)


def assert_same(one: jaxpfl.Fit, other: jaxpfl.Fit) -> None:
    def seen(fit: jaxpfl.Fit) -> Any:
        state = fit.simulation.trim(fit.state)
        parts = (state.server, state.clients, state.counts, state.round)
        return parts, fit.history, fit.scores, fit.simulation.personal_models(fit.state)

    for a, b in zip(jax.tree.leaves(seen(one)), jax.tree.leaves(seen(other)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("scaffold", {"dropout": 0.3, "stragglers": 0.5, "seeds": 2, "cohort": 16, "privacy": Mechanism(1.0, 0.5)}),
        slow("ditto", {"compress": "sign", "participation": "poisson", "cohort_cap": 9}),
        slow("adaped", {"lr_schedule": "cosine", "client_optimizer": "momentum", "keep_optimizer": True}),
        slow("fedavg", {"aggregate": "median", "attack": "sign-flip", "attackers": 0.2}),
    ],
)
def test_the_numbers_are_those_of_clients_on_the_device(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """AdaPeD's data on disk are memory-mapped."""
    given, mapped = SETTINGS | more, federation()
    resident = jaxpfl.fit(method, federation(), **given, plan=ON_DEVICE)
    assert_same(resident, jaxpfl.fit(method, federation(), **given, plan=plan("host")))
    if method == "adaped":
        np.save(tmp_path / "x.npy", np.asarray(mapped.train.examples.x))
        in_file = mapped.train.with_examples(np.load(tmp_path / "x.npy", mmap_mode="r"))
        mapped = mapped._replace(train=in_file)
    on_disk = jaxpfl.fit(method, mapped, **given, plan=plan("disk"))
    assert isinstance(on_disk.simulation.federations[0].train.examples.x, np.memmap) == (method == "adaped")
    assert_same(resident, on_disk)
    on_disk.simulation.advance(on_disk.state, 1)
    assert on_disk.simulation.rounds_run == given["rounds"] + 1


@pytest.mark.slow
def test_unseen_clients_and_stored_states() -> None:
    trained, unseen = jaxpfl.set_apart(federation(), 4)
    given = SETTINGS | {"rounds": 2, "eval_every": None}
    resident = jaxpfl.fit("adaped", trained, unseen=unseen, **given, plan=ON_DEVICE)
    streamed = jaxpfl.fit("adaped", trained, unseen=unseen, **given, plan=plan("host"))
    np.testing.assert_array_equal(resident.unseen_accuracy, streamed.unseen_accuracy)
    # A state of clients on the device goes on with clients on the host.
    there = streamed.simulation.adopt(resident.simulation.trim(resident.state))
    there, _ = streamed.simulation.advance(there, 2)
    here, _ = resident.simulation.advance(resident.state, 2)
    for a, b in zip(jax.tree.leaves(here.clients), jax.tree.leaves(there.clients), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_on_disk_are_announced_and_have_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_ANNOUNCED", 1)
    plan = ExecutionPlan(clients_in="disk", devices=1, folder=str(tmp_path))
    made = assembled("local", {"model": "linear", "rounds": 1}, plan).simulation()
    with pytest.warns(JaxpflWarning, match=rf"clients' states, 50\.8 KiB, are written to temporary .* {tmp_path}"):
        state = made.init([0])
    assert not list(tmp_path.iterdir())
    with pytest.raises(JaxpflError, match="were in temporary files, which no longer contain round 0"):
        made.adopt(made.checkpointed(state))


def test_large_states_on_disk_need_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_UNNAMED", 2**15)
    why = "states need 50.8 KiB on disk, but temporary files may take at most 32 KiB: set plan.folder"
    none = ExecutionPlan(clients_in="disk", devices=1, folder=str(tmp_path / "none"))
    for one, said in (plan("disk"), why), (none, f"cannot write to {tmp_path / 'none'}: No such file"):
        with pytest.raises(JaxpflError, match=said):
            assembled("local", {"model": "linear", "rounds": 1}, one).simulation().init([0])
    with pytest.raises(JaxpflError, match=r"plan.folder = here requires plan.clients_in = disk, got host"):
        ExecutionPlan(clients_in="host", folder="here")


TRAINS = """
import time
import numpy as np, jaxpfl
x, y = np.zeros((4, 6, 8), np.float32), np.tile(np.arange(6) % 2, (4, 1))
clients = jaxpfl.stack_clients(list(zip(x, y)), list(zip(x, y)))
found = jaxpfl.fit("adaped", clients, rounds=1, local_steps=1, cohort=2, batch_size=2, model="linear",
                   plan=jaxpfl.ExecutionPlan(clients_in="disk", devices=1))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", TRAINS], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_state_that_was_written_over_is_refused() -> None:
    simulation = jaxpfl.fit("local", federation(), **SETTINGS | {"rounds": 1}, plan=plan("host")).simulation
    first = simulation.init([0])
    second, _ = simulation.advance(first, 2)
    with pytest.raises(JaxpflError, match="state of round 0 was advanced to round 2, and its clients' states were"):
        simulation.evaluate(first)
    simulation.evaluate(second)


def test_without_donation_the_old_state_stays() -> None:
    kept = ExecutionPlan(clients_in="host", devices=1, donate=False)
    simulation = jaxpfl.fit("local", federation(), **SETTINGS | {"rounds": 1}, plan=kept).simulation
    first = simulation.init([0])
    before = jax.tree.map(np.copy, first.clients)
    simulation.advance(first, 2)
    for a, b in zip(jax.tree.leaves(first.clients), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)
    again, _ = simulation.advance(first, 2)
    assert int(again.round[0]) == 2


@pytest.mark.parametrize(
    ("method", "more", "why"),
    [
        ("network-lasso", {}, "its server uses individual uploads, and all clients take part in every round"),
        ("adaped", {"options": {"idle_rounds": 2}}, "its clients train outside the cohort too"),
        ("local", {"plan": ExecutionPlan(clients_in="disk", devices=1, donate=False)}, "requires plan.donate = true"),
    ],
)
def test_what_cannot_be_served_is_refused(method: str, more: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = SETTINGS | {"plan": plan("host")} | more
    if method == "network-lasso":
        given["cohort"] = None
    with pytest.raises(JaxpflError, match=f"plan.clients_in = .*{why}.*use plan.clients_in = device"):
        jaxpfl.fit(method, federation(), **given)


def test_clients_without_examples_start_within_the_store():
    data = ClientData.stacked(Examples(np.arange(3.0), np.arange(3)), [2, 1, 0])
    found = packed(data, np.array([1, 2, 0, 3]), 3)
    assert np.asarray(found.start).tolist() == [0, 0, 1, 0]
    assert np.asarray(found.examples.y).tolist() == [2, 0, 1]


def test_buffers_have_few_lengths() -> None:
    sizes = np.random.default_rng(0).lognormal(3, 1.5, 500).astype(int) + 1
    store = ClientData.stacked(Examples(np.zeros((sizes.sum(), 1)), np.zeros(sizes.sum())), sizes)
    bound = most(store, 20)
    cohorts = [np.random.default_rng(s).choice(500, 20, replace=False) for s in range(200)]
    lengths = [length_for(store, rows, bound) for rows in cohorts]
    assert all(sizes[rows].sum() <= length <= bound for rows, length in zip(cohorts, lengths, strict=True))
    assert len(set(lengths)) <= math.log2(bound / min(lengths)) + 2


@pytest.mark.parametrize(("backend", "home"), [("cpu", "in files"), ("gpu", "in the host's memory")])
def test_clients_that_do_not_fit_live_elsewhere(backend: str, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpfl.engine import build, placement

    monkeypatch.setattr(placement, "free_bytes", lambda devices: 1000)
    monkeypatch.setattr(placement, "_SMALL", 0)
    monkeypatch.setattr(build.jax, "default_backend", lambda: backend)
    spec = {"local_steps": 1, "model": "linear", "rounds": 1}
    with pytest.raises(JaxpflError, match=r"the data need .* of memory"):
        jaxpfl.fit("local", federation(), **spec, plan=ExecutionPlan(clients_in="device", devices=1))
    with pytest.raises(JaxpflError, match=r"the data need .* of memory"):  # nor can it live elsewhere
        jaxpfl.fit("network-lasso", federation(), **spec, plan=ExecutionPlan(devices=1))
    made = assembled("local", spec).simulation()
    assert made.execution.home == home
    assert ("clients' storage", home, "they do not fit where they would be faster") in explain(made.execution)


def assembled(method: str, settings: dict[str, Any], plan: ExecutionPlan | None = None) -> Assembled:
    spec = RunSpec(method=jaxpfl.METHODS[method], plan=plan or ExecutionPlan(devices=1), **settings)
    return assemble_run(spec, federation())


@pytest.mark.slow
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


@pytest.mark.slow
def test_blocks_on_two_devices_give_the_numbers_of_one(two_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_BYTES", 1)
    one, two = (
        jaxpfl.fit("local", federation(), **SETTINGS, plan=ExecutionPlan(devices=n, clients=3, clients_in=where))
        for n, where in ((1, "device"), (2, "host"))
    )
    assert isinstance(two.simulation, StreamedSimulation)
    assert two.simulation._blocks.placement.rows == 6  # of 20 clients: the last block is not full
    np.testing.assert_array_equal(one.state.participations, two.state.participations)
    seen = [(fit.simulation.personal_models(fit.state), fit.scores, fit.history) for fit in (one, two)]
    for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_memory_is_that_of_the_program_that_runs() -> None:
    """A round that is asked for its memory first is not compiled twice, and takes one run at a time."""
    given: dict[str, Any] = SETTINGS | {"rounds": 1, "seeds": 2, "privacy": Mechanism(1.0, 0.5)}
    fit = jaxpfl.fit("adaped", federation(), **given, plan=plan("host"))
    fresh = jaxpfl.fit("adaped", federation(), **given, plan=plan("host")).simulation
    assert isinstance(fresh, StreamedSimulation)
    fresh._rounds._programs.clear()
    told = [fresh.memory(runs) for runs in (1, 2)]
    assert told[1] == told[0] | {"states": 2 * told[0]["states"]}
    assert told[0]["states"] == sum(leaf[0].nbytes for leaf in jax.tree.leaves(fit.state.clients))
    state, _ = fresh.advance(fresh.init([0, 1]), 1)
    for a, b in zip(jax.tree.leaves(state.server), jax.tree.leaves(fit.state.server), strict=True):
        np.testing.assert_array_equal(a, b)
