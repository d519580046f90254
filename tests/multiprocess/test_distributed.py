"""Refusals of `distributed.start` and of the flags, before any other process is needed."""

import time

import numpy as np
import pytest

from jaxpfl import JaxpflError, distributed, processes
from jaxpfl.cli import main


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nowhere", 2, 0), "the address must be HOST:PORT of process 0, or auto, got 'nowhere'"),
        (("localhost:0", 2, 0), "HOST:PORT"),
        ((":12", 2, 0), "HOST:PORT"),
        (("localhost:12", 2), "with the address localhost:12 the number of processes and this process's own must be"),
        (("localhost:12", 2, 2), "process must be from 0 to processes - 1, got process 2 of 2"),
        (("localhost:12", 0, 0), "from 0 to processes - 1"),
        ((None, 2), "found with the address or given with it, got 2, None"),
        (("localhost:12", 2, 0), "JAX is running already: call jaxpfl.distributed.start before any other use of it"),
    ],
)
def test_a_start_that_cannot_be(given, message):
    with pytest.raises(JaxpflError, match=message):
        distributed.start(*given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--processes", "2"), "give --distributed HOST:PORT too"),
        (("--distributed", "localhost:12", "--processes", "2", "--process", "0", "--profile"), "--profile"),
        (("--distributed", "nowhere", "--processes", "2", "--process", "0"), "HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "local", *flags])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_long_wait_is_said_once():
    said: list[str] = []
    own = {"coordinator_address": "host:12", "num_processes": 4, "process_id": 0}
    with distributed._said_if_long(said.append, own, 0.0):
        until = time.monotonic() + 10
        while not said and time.monotonic() < until:
            time.sleep(0.001)
    with distributed._said_if_long(said.append, own, 60.0):
        pass
    assert said == ["waiting for 3 of 4 processes at host:12"]


def test_one_process_agrees_with_itself():
    assert not processes.several()
    assert (processes.count(), processes.index(), processes.is_first()) == (1, 0, True)
    assert processes.exchange("a") == ["a"]
    assert processes.on_first(lambda: "b") == processes.together(lambda: "b") == "b"
    processes.agree("anything", {"a": np.nan})
    assert processes._equal({"a": np.float64("nan")}, {"a": np.float64("nan")})
    assert distributed.lost(ValueError("Gloo all-reduce failed")) is None
