"""Workers of a sweep as tasks of a Ray cluster, all of whose machines see the sweep's folder.

Ray places the workers and tells of their end. Each is the worker of `worker.work`, in a process of its own, and takes
groups by the same claims, so that workers of other kinds may join, and Ray need not run a task twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpfl.support import signals
from jaxpfl.support.errors import JaxpflError
from jaxpfl.runs.sweep.claims import LEASE
from jaxpfl.runs.sweep.execute import Reporter
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.runs.sweep.worker import LOGS, THREADS, cpu_devices, new_name, work
from jaxpfl.runs.sweep.workers import Watched, died

LOCAL = "local"
_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0  # for the workers to end by themselves


def run(
    sweep: Sweep,
    count: int,
    ray: Any,
    reporter: Reporter,
    *,
    stopped: Callable[[], int | None] = lambda: None,
    lease: float = LEASE,
) -> None:
    """Run all that a sweep's folder lacks in workers of a Ray cluster.

    Args:
      sweep: the sweep, in a folder that all machines of the cluster see under this path.
      count: number of workers; Ray spreads them over the machines, with an equal share of the CPUs each.
      ray: the package, connected to the cluster (see `cluster`).
      reporter: receives the progress, and a line for each worker that died.
      stopped: the signal by which the user asked to stop; None as long as there is none.
      lease: seconds after which the group of a worker that shows no life is taken over.

    Raises:
      JaxpflError: if all workers died; what is done is kept.
    """
    watched = Watched(sweep, reporter)
    if not watched.missing():
        return
    tasks, ends = _submitted(ray, sweep.folder.resolve(), count, lease), []
    while tasks and watched.missing():
        if stopped() is not None:
            break
        ended, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=_LOOK_SECONDS)
        for task in ended:
            name = tasks.pop(task)
            if (reason := _failure(ray, task)) is not None:
                ends.append(f"{name} failed: {reason}")
                reporter.say(ends[-1] + "; the others do its group" * bool(tasks))
    if stopped() is None and tasks:
        ray.wait(list(tasks), num_returns=len(tasks), timeout=_END_SECONDS)
    for task in tasks:
        ray.cancel(task, force=True)
    if stopped() is None and watched.missing():
        raise died(sweep.folder, ends)


@contextlib.contextmanager
def cluster(address: str, count: int) -> Iterator[Any]:
    """Ray, connected to a cluster while the block runs; to be entered before JAX starts, as Ray forks.

    Args:
      address: of the cluster, as ``ray.init`` takes it; ``local`` starts one on this machine and ends it.
      count: number of workers, for which a cluster of this machine has room.

    Raises:
      JaxpflError: if Ray is not installed, and for an address without a cluster.
    """
    ray = _ray()
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Bound to this machine alone: nobody else is to join.
        options |= {"num_cpus": max(count, cores), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        _check_listens(address)
    handlers = {number: signal.getsignal(number) for number in signals.NUMBERS}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise JaxpflError(f"--ray {address}: {' '.join(str(error).split())[:200]}") from None
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray has one of its own, which raises
    try:
        yield ray
    finally:
        ray.shutdown()


def _ray() -> Any:
    """The ray package.

    Raises:
      JaxpflError: if it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        import ray
    except ImportError:
        raise JaxpflError("--ray needs the package ray: pip install 'jaxpfl[ray]'") from None
    return ray


def _check_listens(address: str) -> None:
    """Refuse an address HOST:PORT at which nobody listens, for which Ray would wait for minutes.

    Raises:
      JaxpflError: with the reason.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise JaxpflError(f"--ray {address}: no cluster there ({error})") from None


def _submitted(ray: Any, folder: Path, count: int, lease: float) -> dict[Any, str]:
    """The workers as tasks, and the name of each."""
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)) // count)
    devices = cpu_devices(folder)
    env = {} if devices is None else {THREADS: str(devices)}
    options = {"num_cpus": cpus, "max_retries": 0, "max_calls": 1, "runtime_env": {"env_vars": env}}
    task = ray.remote(**options, scheduling_strategy="SPREAD")(_work)
    names = [new_name(folder) for _ in range(count)]
    return {task.remote(str(folder), name, lease): name for name in names}


def _work(folder: str, name: str, lease: float) -> None:
    """The worker, in a process of Ray's; what it says goes to its log."""
    with (Path(folder) / LOGS / f"{name}.log").open("w") as log, contextlib.redirect_stderr(log):
        try:
            work(Path(folder), name, lease)
        except BaseException:
            traceback.print_exc()
            raise


def _failure(ray: Any, task: Any) -> str | None:
    """The reason why a task failed, in a line; None if it did not."""
    try:
        ray.get(task)
    except Exception as error:  # Ray's own, or the worker's within it
        lines = str(getattr(error, "cause", None) or error).strip().splitlines()
        return lines[-1].strip() if lines else type(error).__name__
    return None
