"""Refusals of `distributed.start` and of the flags, before any other process is needed."""

import json
import os
import pickle
import socket
import time

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.cli import main
from jaxpfl.support import distributed, processes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nowhere", 2, 0), "the address must be HOST:PORT of process 0, or auto, got 'nowhere'"),
        (("localhost:0", 2, 0), "HOST:PORT"),
        ((":12", 2, 0), "HOST:PORT"),
        (("localhost:12", 2), "the address localhost:12 requires the number of processes and the number of this"),
        (("localhost:12", 2, 2), "process must be from 0 to processes - 1, got process 2 of 2"),
        ((None, 2), "processes and process require an address, got 2, None"),
        (
            ("10.0.0.1:12", 2, 0),
            "processes at 10.0.0.1:12 communicate over a network: give all of them one secret with --dist",
        ),
        (("localhost.example:12", 2, 0), "communicate over a network"),
        ((), "processes at auto communicate over a network"),
        (("localhost:12", 2, 0, "short"), "the processes' token must have at least 16 characters, got 5"),
        (("10.0.0.1:12", 2, 0, "0123456789abcdef"), "JAX is already running"),
        (("[::1]:12", 2, 0), "JAX is already running"),
        (("localhost:12", 2, 0), "JAX is already running: call distributed.start before any other use of JAX"),
    ],
)
def test_a_start_that_cannot_be(given, message):
    with pytest.raises(JaxpflError, match=message):
        distributed.start(*given[:3], token=given[3] if len(given) > 3 else None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--processes", "2"), "require --distributed HOST:PORT"),
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
    with distributed._announce_wait(said.append, own, 0.0):
        until = time.monotonic() + 10
        while not said and time.monotonic() < until:
            time.sleep(0.001)
    with distributed._announce_wait(said.append, own, 60.0):
        pass
    assert said == ["waiting for 3 of 4 processes at host:12"]


def test_one_process_agrees_with_itself():
    assert not processes.several()
    assert (processes.count(), processes.index(), processes.is_first()) == (1, 0, True)
    assert processes.exchange("a") == ["a"]
    assert processes.on_first(lambda: "b") == processes.together(lambda: "b") == "b"
    processes.agree("anything", {"a": np.nan})
    assert processes._equal({"a": np.float64("nan")}, {"a": np.float64("nan")})
    assert distributed.loss_of(ValueError("Gloo all-reduce failed")) is None


def test_process_0_listens_at_the_named_address_alone():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JaxpflError, match=f"the port of {used} is in use on this host"):
            distributed._bind_address(used, 0)
    assert distributed._bind_address(used, 0) == used
    for at, why in (("192.0.2.1:1", "not an address of"), ("[fe80::1]:1", "cannot listen"), ("a.invalid:1", "unknown")):
        with pytest.raises(JaxpflError, match=why):
            distributed._bind_address(at, 0)


def test_a_token_file_is_ones_own(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(JaxpflError, match="must belong to you and be closed to others: chmod 600"):
            distributed.read_token(path)
    path.chmod(0o600)
    assert distributed._checked_token(distributed.read_token(path), {}) == "0123456789abcdef"
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(JaxpflError, match="must belong to you"):
            distributed.read_token(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(JaxpflError, match="not a regular file"):
        distributed.read_token(tmp_path / "pipe")


def beside(monkeypatch, stranger):
    """Make this process the first of two; ``stranger`` makes the other's bytes of each gathering from this one's."""
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "index", lambda: 0)
    monkeypatch.setattr(
        processes.multihost_utils,
        "process_allgather",
        lambda sent: np.stack([sent, np.frombuffer(stranger(sent.tobytes()), np.uint8)]),
    )
    processes.secure("the secret of this run")


def sealed(content: bytes) -> bytes:
    """What process 1 of this run would send."""
    return content + processes._code(1, content)


def head(message: bytes, length: int | None = None) -> bytes:
    return (len(message) if length is None else length).to_bytes(8, "little") + message.ljust(2048, b"\0")


def test_messages_of_the_run_are_read(monkeypatch):
    beside(monkeypatch, lambda own: own if len(own) == 32 else sealed(own[:-32]))
    for value in ("a", "b" * 5000, {"c": [1, None, float("inf")]}):
        assert processes.exchange(value) == [value, value]


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        (lambda own: own, "process 1 has a different token, or none"),  # ours, sent back
        (lambda own: own[:-32] + bytes(32), "process 1 has a different token"),
        (lambda own: (seal := sealed(own[:-32]))[:-1] + bytes([seal[-1] ^ 1]), "process 1 has a different token"),
        (
            lambda own: sealed(head(b"1", 2**62)),
            "a message between processes has 4611686018427387904 bytes, but at most",
        ),
        (lambda own: sealed(head(pickle.dumps("x"))), "the message of process 1 is damaged or is not JSON of this run"),
        (lambda own: sealed(head(json.dumps([1]).encode())), "the message of process 1 is damaged"),
        (lambda own: sealed(head(b'{"refused": [1]}')), "the message of process 1 is damaged"),
        (lambda own: sealed(head(b"[" * 2000)), "the message of process 1 is damaged"),
    ],
)
def test_messages_of_others_are_not_read(monkeypatch, forged, message):
    beside(monkeypatch, lambda own: own if len(own) == 32 else forged(own))
    with pytest.raises(JaxpflError, match=message):
        processes.exchange("a")


@pytest.mark.parametrize("run", ["this one", "an earlier one"])
def test_messages_pass_once(monkeypatch, run):
    """A recorded message of process 1 says nothing a second time, nor in another run with the same token."""
    recorded = []

    def replayed(own: bytes) -> bytes:
        if len(own) == 32:
            return own
        recorded.append(sealed(own[:-32]))
        return recorded[0]

    beside(monkeypatch, replayed)
    processes.exchange("a")
    if run == "an earlier one":
        processes.secure("the secret of this run")
    with pytest.raises(JaxpflError, match="process 1 has a different token"):
        processes.exchange("a")
