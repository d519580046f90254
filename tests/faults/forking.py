"""Run commands of jaxpfl, each in a fork of this process, in which `faults.c` is preloaded and everything imported.

Reads a request, a JSON object, from each line of standard input, and answers with one. No backend of JAX starts here,
so that a fork is as a process of its own, without its seconds of imports.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parents[1]))

from forks import load

CALLS = ("open", "write", "sync", "rename", "remove", "folder", "size")
"""Kinds of calls that `faults.c` counts."""
TYPES = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_double, ctypes.c_int, ctypes.c_void_p)
"""Types of the arguments of its ``fault_arm``."""
PATIENCE = 900.0
"""Seconds after which a command that has not ended is killed."""


def run(request: dict[str, Any], shared: mmap.mmap) -> NoReturn:
    """Run a request in this process, which was forked for it."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    if request["memory"]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + request["memory"],) * 2)
    shared_at = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    arm = ctypes.CDLL(None).fault_arm
    arm.argtypes = TYPES
    arm(request["folder"].encode(), request["fault"], request["at"], request["seconds"], request["hidden"], shared_at)
    from jaxpfl.cli import main

    status = 0
    try:
        for argv in request["commands"]:
            sys.argv = ["jaxpfl", *argv]
            main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def waited(child: int) -> tuple[int, float]:
    """Exit status of a process, negative for a signal, and the seconds of a processor that it took."""
    timer = threading.Timer(PATIENCE, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status, used = os.wait4(child, 0)
    timer.cancel()
    timer.join()
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def main() -> None:
    load()
    shared = mmap.mmap(-1, 4096)
    for line in sys.stdin:
        request, shared[:] = json.loads(line), bytes(4096)
        began = time.monotonic()
        child = os.fork()
        if not child:
            run(request, shared)
        status, cpu = waited(child)
        seen, hit, *of = memoryview(shared).cast("l")[: 2 + len(CALLS)]
        calls = dict(zip(CALLS, of, strict=True))
        answer = {"status": status, "cpu": cpu, "seconds": time.monotonic() - began}
        print(json.dumps(answer | {"seen": seen, "hit": hit, "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
