"""Start of a run with several processes, on one or many hosts, with JAX's distributed runtime.

Each process calls `start` before any other use of JAX. The devices of all processes then form one mesh, over which
clients are spread. CPU devices exchange sums with Gloo, GPUs with NCCL, and TPUs over their interconnect.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from jaxpfl.support import files, processes
from jaxpfl.support.errors import JaxpflError, shown

HEARTBEAT_SECONDS = 30
"""Seconds without a heartbeat after which a process counts as lost. A process that ends is noticed at once, because its
connections close."""
START_SECONDS = 300
"""Number of seconds within which the processes must find each other."""
WAIT_SAID_SECONDS = 5
"""Number of seconds to wait for the other processes before the user is notified."""
AUTOMATIC = "auto"
"""Value of ``address`` that selects the address announced by Slurm, Open MPI, Kubernetes or a Cloud TPU."""
TOKEN_VARIABLE = "JAXPFL_DISTRIBUTED_TOKEN"
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
_LEAST_TOKEN = 16

_LOST = ("gloo", "nccl", "connection reset", "connection closed", "socket closed", "coordination service", "heartbeat")
"""Words in XLA's errors which mean that a process cannot be reached."""


class _Peer(NamedTuple):
    """A process of this run, identified by the name of its host and its process id on this host."""

    host: str
    pid: int


_peers: list[_Peer] = []
_begun = False
_abandoned: list[Any] = []
_terminate: Any = None  # keeps the callback alive for the C++ runtime


class LostProcessError(JaxpflError):
    """Another process of the run has ended, or cannot be reached."""


def start(
    address: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    token: str | None = None,
    cpu_devices: int = 1,
    timeout: int = START_SECONDS,
    on_wait: Callable[[str], None] | None = None,
) -> None:
    """Join the processes of a run, before any other use of JAX.

    Under Slurm, Open MPI, Kubernetes and on a Cloud TPU, the address, the number of processes and the number of this
    process are found automatically. Elsewhere they must be given::

        from jaxpfl.support import distributed

        distributed.start("10.0.0.1:1234", processes=2, process=0, token=secret)  # in the other: process=1
        result = jaxpfl.fit("adaped", federation, rounds=50, cohort=10)

    Every process must then make the same calls with the same arguments and data.

    Args:
      address: ``HOST:PORT`` with a free port of process 0; None or ``auto`` to find all three values automatically.
      processes: number of processes; None if the address is found automatically.
      process: number of this process, from 0; None if the address is found automatically.
      token: secret of at least 16 characters, the same in every process; by default, the environment variable
        JAXPFL_DISTRIBUTED_TOKEN. A token is needed unless the address is the loopback (localhost).
      cpu_devices: number of devices of this process if JAX runs on the CPU, the same number in every process.
      timeout: seconds to wait for the other processes.
      on_wait: function that is called once, from a thread, with a line for the user if the other processes do not join
        within a few seconds.

    Raises:
      JaxpflError: if arguments are inconsistent, the port is in use, the other processes do not join, or JAX is already
        running.
    """
    from jax._src import xla_bridge

    given = _checked(address, processes, process)
    token = _checked_token(os.environ.get(TOKEN_VARIABLE) if token is None else token, given)
    if jax.distributed.is_initialized():
        raise JaxpflError("the processes of this run have already joined: call jaxpfl.support.distributed.start once")
    if xla_bridge.backends_are_initialized():
        raise JaxpflError("JAX is already running: call distributed.start before any other use of JAX")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hides XLA's log: a lost process is reported in one line
    for name, value in (("jax_cpu_collectives_implementation", "gloo"), ("jax_num_cpu_devices", cpu_devices)):
        jax.config.update(name, value)
    try:
        with _loss_reported(), _announce_wait(on_wait, given, WAIT_SAID_SECONDS):
            if given and process == 0:
                given["coordinator_bind_address"] = _bind_address(given["coordinator_address"], timeout)
            jax.distributed.initialize(
                **given, initialization_timeout=timeout, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
            )
    except (RuntimeError, ValueError) as error:
        _abandon()
        raise JaxpflError(f"cannot join the processes of the run: {_reason(error, address, timeout)}") from None
    # By default, Gloo listens at the address of the host's name, but a run on the loopback must listen on the loopback
    # only.
    place = {"hostname": _host(address)} if address and _is_loopback(address) else {}
    with _quiet(), _replaced("make_gloo_tcp_collectives", **place):
        _meet(processes, token)


def loss_of(error: BaseException) -> LostProcessError | None:
    """Return a `LostProcessError` if an error from XLA means that a process cannot be reached, otherwise None."""
    if len(_peers) < 2 or isinstance(error, JaxpflError):
        return None
    text = str(error).lower()
    return LostProcessError(f"{_loss()}{_note}") if any(word in text for word in _LOST) else None


def has_started() -> bool:
    """Return True once `start` has met other processes or failed; JAX may then wait for them when this process ends."""
    return _begun


def on_this_host() -> int:
    """Return the number of the run's processes on this host, which share its memory."""
    here = socket.gethostname()
    return sum(peer.host == here for peer in _peers) or 1


def leave(status: int) -> NoReturn:
    """End this process at once: a normal exit would wait for other processes that may never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _checked(address: str | None, number: int | None, own: int | None) -> dict[str, Any]:
    """Check the arguments of `start`, and return the arguments of `jax.distributed.initialize`."""
    if address is None or address == AUTOMATIC:
        if number is not None or own is not None:
            raise JaxpflError(f"processes and process require an address, got {number}, {own}")
        return {}
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise JaxpflError(f"the address must be HOST:PORT of process 0, or {AUTOMATIC}, got {shown(address)}")
    if number is None or own is None:
        raise JaxpflError(f"the address {address} requires the number of processes and the number of this process")
    if number < 1 or not 0 <= own < number:
        raise JaxpflError(f"process must be from 0 to processes - 1, got process {own} of {number}")
    return {"coordinator_address": address, "num_processes": number, "process_id": own}


@contextmanager
def _announce_wait(on_wait: Callable[[str], None] | None, given: dict[str, Any], seconds: float) -> Iterator[None]:
    """Call ``on_wait`` with a line about the missing processes if the block runs longer than ``seconds``."""
    if on_wait is None:
        yield
        return
    others, where = "the other processes", "the address of process 0"
    if given:
        number, where = given["num_processes"], given["coordinator_address"]
        others = "process 0" if given["process_id"] else f"{number - 1} of {number} processes"
    timer = threading.Timer(seconds, on_wait, [f"waiting for {others} at {where}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _checked_token(token: str | None, given: dict[str, Any]) -> str:
    """Check the token for the run's messages; it may be empty if only this host can reach the run."""
    addresses = [given.get("coordinator_address", ""), os.environ.get(_BIND_VARIABLE, "localhost:0")]
    if token is None and not all(map(_is_loopback, addresses)):
        raise JaxpflError(
            f"processes at {addresses[0] or AUTOMATIC} communicate over a network: give all of them one secret with "
            f"--distributed-token FILE or the variable {TOKEN_VARIABLE}"
        )
    if token is not None and len(token.strip()) < _LEAST_TOKEN:
        raise JaxpflError(
            f"the processes' token must have at least {_LEAST_TOKEN} characters, got {len(token.strip())}"
        )
    return (token or "").strip()


def read_token(path: Path) -> str:
    """Read the token from a file, which must be accessible only to its owner.

    Raises:
      JaxpflError: if the file cannot be read, if it belongs to another user (except root), or if others have any access
        to it.
    """
    try:
        with files.opened(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(2**16)
    except OSError as error:
        raise JaxpflError(f"cannot read {path}: {error.strerror or error}") from None
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise JaxpflError(f"the token file {path} must belong to you and be closed to others: chmod 600 {path}")
    return os.fsdecode(text)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]").lower()


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(_host(address)).is_loopback
    return _host(address) == "localhost"


def _bind_address(address: str, timeout: int) -> str:
    """Return a numeric address at which process 0 can listen; JAX would crash if it could not listen there.

    Raises:
      JaxpflError: if the host is unknown, or if process 0 cannot listen there, for example because the port is in use
        or the address does not belong to this host.
    """
    bind = os.environ.get(_BIND_VARIABLE, address)
    why, until = "", time.monotonic() + timeout
    while not (places := _places(bind)):
        if time.monotonic() > until:
            raise JaxpflError(f"cannot join the processes of the run: the host of {bind} is unknown here")
        time.sleep(1)  # the name of a Kubernetes pod is registered a moment after the pod starts
    for family, place in places:
        try:
            with socket.socket(family) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
                tried.bind(place)
            return f"[{place[0]}]:{place[1]}" if family == socket.AF_INET6 else f"{place[0]}:{place[1]}"
        except OSError as error:
            why = f"process 0 cannot listen on {bind} ({error.strerror}): use another address or port"
            if error.errno == errno.EADDRINUSE:
                why = f"the port of {bind} is in use on this host: use another port"
            elif error.errno == errno.EADDRNOTAVAIL:
                why = f"{bind} is not an address of this host: use one of its addresses, or set {_BIND_VARIABLE}"
    raise JaxpflError(f"cannot join the processes of the run: {why}")


def _places(address: str) -> list[tuple[int, Any]]:
    port = int(address.rpartition(":")[2])
    with suppress(socket.gaierror):
        return [(each[0], each[4]) for each in socket.getaddrinfo(_host(address), port, type=socket.SOCK_STREAM)]
    return []


def _reason(error: Exception, address: str | None, timeout: int) -> str:
    text = " ".join(str(error).split())
    low = text.lower()
    if any(word in low for word in ("deadline", "timed out", "timeout", "unavailable", "bad_cast")):
        return f"not all processes reached {address or 'their address'} within {timeout} s"
    if "should be defined" in low or "must be defined" in low:
        return "no Slurm, Open MPI, Kubernetes or Cloud TPU was found: give address, processes and process"
    return text


def _abandon() -> None:
    """Reset JAX's distributed runtime after a start that failed.

    Without the reset, JAX would wait for the other processes when this process ends, and log errors.
    """
    from jax._src.distributed import global_state as state

    global _begun
    _begun = True
    _abandoned.append((state.client, state.service))
    state.client = state.service = None


def _meet(number: int | None, token: str) -> None:
    """Exchange all hosts and pids, and check that all processes have the same process count and number of devices.

    The first exchange also opens the connections for collective operations.
    """
    if not processes.several():
        return
    global _begun
    _begun = True
    locals_ = [len([d for d in jax.devices() if d.process_index == i]) for i in range(jax.process_count())]
    if len(set(locals_)) > 1:
        raise JaxpflError(f"every process must have the same number of devices, got {locals_}")
    processes.secure(token)
    _peers[:] = [_Peer(*own) for own in processes.exchange(_Peer(socket.gethostname(), os.getpid()))]
    processes.agree("the number of", {"processes": number})


def _loss() -> str:
    """Return the message for a lost process, with its number if it ran on this host."""
    here = socket.gethostname()
    own = {number: peer.pid for number, peer in enumerate(_peers) if peer.host == here}
    until = time.monotonic() + 1  # an ending process closes its connections before its pid disappears
    while not (gone := [f"{number}" for number, pid in own.items() if not _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    if not gone:
        return "another process of the run has ended or cannot be reached"
    return f"process{'es' * (len(gone) > 1)} {', '.join(gone)} of {len(_peers)} ended before the run did"


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # a killed process stays as a zombie until its parent waits for it
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


_note = ""


def note(text: str) -> None:
    """Set the text that is appended to the line that reports a lost process."""
    global _note
    _note = text


def _end_lost(*_: Any) -> None:
    """End this process with one line about the lost process, from any of its threads."""
    with suppress(OSError):
        os.write(2, f"error: {_loss()}{_note}\n".encode())
    os._exit(2)


def _end_terminated() -> None:
    """End this process with one line if the C++ runtime aborts, most likely because a process is lost."""
    with suppress(OSError):
        known = "ended before" in _loss()
        os.write(2, f"error: {_loss()}{'' if known else ', or the C++ runtime failed'}{_note}\n".encode())
    os._exit(2)


@contextmanager
def _loss_reported() -> Iterator[None]:
    """Make JAX's runtime client report a lost process in one line; the client must be started in this block.

    The client gets a callback for this case, because it would otherwise abort with a C++ trace. In this version of JAX,
    the client fails when it calls a Python callback (the bindings cannot convert the argument), and C++ then terminates
    the process. The terminate handler is therefore replaced too.
    """
    with _replaced("get_distributed_runtime_client", missed_heartbeat_callback=_end_lost):
        try:
            yield
        finally:
            _set_terminate_handler()


@contextmanager
def _replaced(name: str, **more: Any) -> Iterator[None]:
    """Bind additional arguments to a function of JAX's bindings while the block runs."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    made = getattr(_jax, name)
    setattr(_jax, name, partial(made, **more))
    try:
        yield
    finally:
        setattr(_jax, name, made)


def _set_terminate_handler() -> None:
    global _terminate
    with suppress(OSError, AttributeError):  # JAX uses another C++ library than libstdc++
        setting = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        setting.restype, setting.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        _terminate = ctypes.CFUNCTYPE(None)(_end_terminated)
        setting(ctypes.cast(_terminate, ctypes.c_void_p))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages that Gloo prints to standard output when it connects."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
