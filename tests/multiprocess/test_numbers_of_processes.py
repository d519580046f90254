"""Clients spread over processes give the numbers of one process, in float64."""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from problem import CLIENTS, assert_close, reference
from process_cases import CASES, COHORTS, METHODS
from process_group import run_cases

from jaxpfl import save_federation, stack_clients
from jaxpfl.engine import execution_plan

pytestmark = pytest.mark.slow

OF_FOUR = ("adaped, private", "toy medians", "toy clusters", "stored")
"""Cases of four processes: Poisson cohorts and noise, single uploads to the server, idle clients, checkpoints."""
SAME = (*(name for name in METHODS if name not in ("adaped", *OF_FOUR)), "trained", "persons")
OF_TWO = (*SAME, "shares", "refused")
"""Cases of two processes of one device; `adaped` has two devices in each, and also its idle rounds. The last two are
the rows of each process, and what is refused."""


@functools.cache
def of(processes: int, names: tuple[str, ...], devices: int = 1) -> dict[str, Any]:
    return run_cases(names, processes=processes, devices=devices)


def assert_equal(got: Any, want: Any) -> None:
    assert not isinstance(want, str), want
    assert not isinstance(got, str), got
    assert_close(got, want, 1e-9)


def of_one(name: str) -> Any:
    """Result of a case in this process."""
    return reference(name, COHORTS[name]) if name in METHODS else CASES[name]()


def test_each_process_holds_the_states_of_its_clients(monkeypatch):
    monkeypatch.setattr(execution_plan, "_MOST_DEVICES", 1)
    assert CASES["shares"]() == {"states": [CLIENTS]}
    assert of(2, OF_TWO)["shares"] == {"states": [4]}


def test_each_process_reads_its_own_clients_of_a_federation_in_files(tmp_path, monkeypatch):
    """Eight clients of 128 examples of 128 KiB. To read another process's, beside the checksum, ends in a fault."""
    rng, sizes = np.random.default_rng(0), (40, 12, 9, 30, 7, 16, 4, 10)
    examples = [(rng.normal(size=(n, 256, 128)).astype(np.float32), rng.integers(3, size=n)) for n in sizes]
    clients = stack_clients(examples, test=[(x[:1], y[:1]) for x, y in examples])
    save_federation(clients, tmp_path / "files")
    monkeypatch.setenv("JAXPFL_CASE_FOLDER", str(tmp_path / "files"))
    found = run_cases(["opened"], processes=2)["opened"]
    assert not isinstance(found, str), found
    whole = clients.train.examples.x.nbytes
    assert sum(one["read"] for one in found["each"]) == whole
    for one in found["each"]:
        assert one["read"] <= one["held"] <= 1.1 * whole / 2
    want = CASES["opened"]()["scores"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found["scores"], want)


def test_an_error_of_one_process_is_everyones():
    found = of(2, OF_TWO)["refused"]
    assert found["alone"] == "process 1: 1 failed"  # as process 0 says it
    assert found["others"] == "1 failed"  # and process 1 itself
    assert found["first"] == "0 failed"
    assert found["all"] == "0 failed"
    assert found["value"] == "the rounds b must be the same in every process: process 0 has 0, process 1 1"
    assert found["long"] == "20000"


def test_calls_that_differ_between_the_processes_are_refused():
    for name, message in (
        ("data", "the clients' data must be the same in every process"),
        ("seeds", "the runs' seeds must be the same in every process: process 0 has [1, 2], process 1 [1, 3]"),
        ("place", "plan.clients_in = host supports one process only"),
        ("rounds", "fit's rounds must be the same in every process: process 0 has 2, process 1 3"),
    ):
        assert of(2, OF_TWO)["refused"][name].startswith(message)


@pytest.mark.parametrize("name", SAME)
def test_two_processes_give_the_numbers_of_one(name):
    assert_equal(of(2, OF_TWO)[name], of_one(name))


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_processes_give_the_numbers_of_one(name):
    assert_equal(of(4, OF_FOUR)[name], of_one(name))


def test_processes_of_two_devices_give_the_same():
    assert_equal(of(2, ("adaped",), 2)["adaped"], of_one("adaped"))
