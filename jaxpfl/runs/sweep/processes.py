"""Identity of a process on its machine, so that a dead one is known although its number is used again."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NUMBERS = Path("/proc/self/ns/pid")
_DEAD = ("Z", "X", "x")  # ended, and perhaps not yet waited for by the parent


@functools.cache
def machine() -> str:
    """Name of the running system and of its table of processes; empty where the system does not say (no Linux).

    Two containers of one machine have process numbers of their own, and two machines may have one host name.
    """
    try:
        return f"{socket.gethostname()} {_BOOT.read_text().strip()} {os.readlink(_NUMBERS)}"
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """Start of a process of this machine, in ticks since the machine's own; None if it does not run or is hidden."""
    state, start = _stat(pid)
    return None if state in _DEAD else start


def is_alive(pid: int, start: int | None) -> bool:
    """True if the process of this number that began at ``start`` runs on this machine, or may do so.

    Args:
      pid: its number.
      start: its start, as `started` gives it; None if that is unknown.
    """
    state, now = _stat(pid)
    if now is not None:
        return state not in _DEAD and start in (None, now)
    try:
        os.kill(pid, 0)  # tells whether there is one, and does nothing to it
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's, whose entry may be hidden
    return True


def _stat(pid: int) -> tuple[str, int | None]:
    """The letter of a process's state and its start; empty and None if there is none, or it is hidden."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return after_name[0], int(after_name[19])
    except (OSError, ValueError, IndexError):
        return "", None
