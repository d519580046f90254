"""CPU cores as devices: made before jax starts, with patience, and never against the caller."""

import subprocess
import sys

import jax
import pytest

from jaxpfl import use_cpu_cores

SCRIPT = """
import os
os.environ["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=7"
import jax, jaxpfl
assert jaxpfl.use_cpu_cores(3)
assert len(jax.devices()) == 3
flags = os.environ["XLA_FLAGS"].split()
assert flags[0] == "--xla_cpu_collective_call_terminate_timeout_seconds=7", flags  # the caller's own
assert flags[1:] == ["--xla_cpu_collective_call_warn_stuck_timeout_seconds=600"], flags
"""


@pytest.mark.slow
def test_devices_and_patience():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_nothing_changes_where_jax_runs_already(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    devices = jax.devices()
    assert not use_cpu_cores(5)
    assert jax.devices() == devices
