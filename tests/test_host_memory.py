"""Memory is asked for before it is taken: in a process whose address space ends soon, and of made-up machines."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jaxpfl import host_memory
from jaxpfl.data import stack_clients
from jaxpfl.errors import JaxpflError


def clients(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.zeros((n, 100), np.float32), np.zeros(n, np.int32)) for n in sizes]


def test_the_largest_client_is_named_before_all_are_padded_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given, capacity = clients([30] * 20 + [500]), 500
    need = 21 * capacity * (400 + 4 + 1)
    monkeypatch.setattr(host_memory, "free", lambda: need)
    assert stack_clients(given).num_clients == 21
    monkeypatch.setattr(host_memory, "free", lambda: need - 1)
    monkeypatch.setattr(np, "zeros", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(
        JaxpflError,
        match=r"^21 clients stacked as long as the largest, client 20 with 500 train examples \(the median has 30\), "
        r"need 4\.06 MiB of memory, 4\.06 MiB are free: take fewer of its examples, or leave it out$",
    ):
        stack_clients(given)


def test_two_thousand_clients_and_a_large_one_in_a_small_process() -> None:
    """2000 clients of 30 images and one of 20,000 would be 120 GB; the kernel would end the process."""
    code = """
import resource, numpy as np
from jaxpfl.data import stack_clients
from jaxpfl.errors import JaxpflError
sizes = [30] * 2000 + [20_000]
given = [(np.zeros((n, 28, 28, 1), np.float32), np.zeros(n, np.int32)) for n in sizes]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
try:
    stack_clients(given)
except JaxpflError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "client 2000 with 20000 train examples" in done.stdout
    assert "need 117 GiB of memory" in done.stdout


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
