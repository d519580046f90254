"""Memory is asked for before it is taken: in a process whose address space ends soon, and of made-up machines."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jaxpfl.data import stack_clients
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError


def clients(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.zeros((n, 100), np.float32), np.zeros(n, np.int32)) for n in sizes]


def test_the_largest_client_is_named_before_examples_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given = clients([30] * 20 + [500])
    need = (20 * 30 + 500) * (400 + 4)
    monkeypatch.setattr(host_memory, "_SMALL", 0)
    monkeypatch.setattr(host_memory, "free", lambda: need)
    assert stack_clients(given).num_clients == 21
    monkeypatch.setattr(host_memory, "free", lambda: need - 1)
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(
        JaxpflError,
        match=r"^1100 examples of 21 clients \(client 20 has 500 of them\) need 434 KiB of memory, "
        r"but only 434 KiB is free: use fewer examples or fewer clients$",
    ):
        stack_clients(given)


@pytest.mark.slow
def test_two_thousand_clients_and_a_large_one_in_a_small_process() -> None:
    """2000 clients of 30 images and one of 20,000: the store has the size of the data, 240 MB, not 120 GB."""
    code = """
import resource, numpy as np
from jaxpfl.data import stack_clients
sizes = [30] * 2000 + [20_000]
given = [(np.zeros((n, 28, 28, 1), np.float32), np.zeros(n, np.int32)) for n in sizes]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
print(stack_clients(given).train.examples.x.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == (2000 * 30 + 20_000) * 28 * 28 * 4


def test_unknown_memory_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free", lambda: None)
    host_memory.check(2**60, "this needs", "nothing")


def test_the_least_of_what_is_known_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_machine", lambda: 2000)
    monkeypatch.setattr(host_memory, "_container", lambda: 1000)
    monkeypatch.setattr(host_memory, "_process", lambda: None)
    assert host_memory.free() == 900
    monkeypatch.setattr(host_memory, "_process", lambda: -5)
    assert host_memory.free() == 0
