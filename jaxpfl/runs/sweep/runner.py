"""Runners of a sweep: groups run one after the other in this process, or as tasks on a Ray cluster.

A runner repeatedly asks the sweep for its missing runs, runs them and appends their records to the journal, until no
run is missing. Only the runner's process appends to the journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxpfl.engine import use_cpu_cores
from jaxpfl.runs import compile_cache, run_folder
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Record
from jaxpfl.runs.run_folder import CODE
from jaxpfl.runs.sweep.definition import UNFINISHED
from jaxpfl.runs.sweep.execute import Data, Prepared, States, prepare_group, run_group
from jaxpfl.runs.sweep.plan import Group
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support import signals
from jaxpfl.support.errors import JaxpflError, missing_extra

LOCAL = "local"
_THREADS = "NPROC"
"""Environment variable with XLA's number of CPU threads, which XLA reads when the first device is created."""
_LOOK_SECONDS = 0.5
_RETRIES = 2  # number of times that Ray repeats a task whose process dies


def run_missing(sweep: Sweep, reporter: Reporter, *, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run the missing runs of a sweep in this process, and repeat the runs that failed in an earlier process.

    Args:
      sweep: sweep whose folder this process has locked.
      reporter: object whose methods are called with the progress.
      stopped: function that returns True once the runner should stop.
    """
    journal = sweep.journal
    states = States() if sweep.definition.search.halving else None
    again = sweep.failed()
    while groups := sweep.missing(journal.read(), again):
        if states is not None:
            states.only(run for group in groups for run in group.runs)
        for group, ready in _prepare_ahead(groups, sweep.data):
            if stopped():
                return
            more = {"ready": ready, "states": states, "unfinished": sweep.folder / UNFINISHED / group.name}
            run_group(group, sweep.data, journal.append, reporter, stopped=stopped, **more)
            again -= {run.id for run in group.runs}
        if stopped():
            return
    shutil.rmtree(sweep.folder / UNFINISHED, ignore_errors=True)


def _prepare_ahead(groups: Sequence[Group], loaded: Data) -> Iterator[tuple[Group, Prepared | None]]:
    """Yield each group with its prepared data, or None if preparing failed.

    While the caller runs a group, a thread prepares and compiles the next group.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
        compiling: Future[Prepared] | None = None
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            ready = None
            with contextlib.suppress(Exception):  # the error recurs in `run_group`, which records it
                ready = prepare_group(group, loaded) if compiling is None else compiling.result()
            compiling = None
            with contextlib.suppress(RuntimeError):  # raised if there is no memory for a thread
                compiling = None if following is None else thread.submit(_compile_group, following, loaded)
            yield group, ready


def _compile_group(group: Group, loaded: Data) -> Prepared:
    """Prepare a group, and compile its programs, which the process then caches."""
    ready = prepare_group(group, loaded)
    with contextlib.suppress(Exception):
        ready.simulation(slice(None)).compile([run.seed for run in group.runs], "scores")
    return ready


def run_on_ray(sweep: Sweep, reporter: Reporter, ray: Any, *, stopped: Callable[[], bool] = lambda: False) -> None:
    """Run the missing runs of a sweep on a Ray cluster, with one task for each group.

    Ray repeats a task whose process dies; after several failures, the group is lost.

    Args:
      sweep: sweep whose folder has the same path on all machines of the cluster.
      reporter: object whose methods are called with the progress, and with a message about each lost group.
      ray: package ``ray``, connected to the cluster (see `ray_cluster`).
      stopped: function that returns True once the runner should stop.

    Raises:
      JaxpflError: if a group was lost; the records of the other groups are kept.
    """
    journal, submit = sweep.journal, _submission(ray, sweep)
    again = sweep.failed()
    tasks: dict[Any, Group] = {}
    begun: set[tuple[str, int | None]] = set()
    lost: list[str] = []
    changed = True
    while not stopped():
        for group in sweep.missing(journal.read(), again) if changed else ():
            runs = {(run.id, group.until) for run in group.runs}
            if not runs & begun:
                begun |= runs
                tasks[submit(group)] = group
        if not tasks:
            break
        ended, _ = ray.wait(list(tasks), timeout=_LOOK_SECONDS)
        changed = bool(ended)
        for task in ended:
            group = tasks.pop(task)
            try:
                records = ray.get(task)
            except Exception as error:  # an error of Ray, or Ray's wrapper (with `cause`) of an error in the task
                lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
                lost.append(f"{group.name} is lost: {lines[-1].strip()}")
                reporter.say(lost[-1])
                continue
            journal.append(records)
            reporter.finish(len(records))
            again -= {record.id for record in records}
    for task in tasks:
        ray.cancel(task, force=True)
    if lost:
        more = f" (and {len(lost) - 1} more)" * (len(lost) > 1)
        raise JaxpflError(f"{lost[0]}{more}; --resume runs what is missing")
    if not stopped():
        shutil.rmtree(sweep.folder / UNFINISHED, ignore_errors=True)


def _submission(ray: Any, sweep: Sweep) -> Callable[[Group], Any]:
    """Return a function that submits a group as a task.

    The task uses one GPU if the sweep began on a GPU or TPU. Otherwise it uses a CPU for each of the plan's devices.
    """
    folder, devices = str(sweep.folder.resolve()), sweep.cpu_devices()
    options: dict[str, Any] = {"max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
    if devices is None:
        task = ray.remote(**options, num_gpus=1)(_run_there)
        return lambda group: task.remote(folder, group, None)
    options |= {"runtime_env": {"env_vars": {_THREADS: str(devices)}}}
    most = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes())

    def submit(group: Group) -> Any:
        asked = group.config.plan.devices
        cpus = min(asked if isinstance(asked, int) else devices, most)
        return ray.remote(**options, num_cpus=cpus)(_run_there).remote(folder, group, devices)

    return submit


def _run_there(folder: str, group: Group, devices: int | None) -> list[Record]:
    """Run a group in a Ray worker process, and return its records.

    The process uses the numbers of devices and of XLA threads with which the sweep began, even if the machine has more
    or fewer cores. Both numbers affect the order of floating-point additions, and therefore the last bits of the
    results.
    """
    use_cpu_cores(devices)
    compile_cache.enable()
    sweep, records = _sweep_there(folder), list[Record]()
    group = dataclasses.replace(group, config=run_folder.located(group.config, sweep.folder / CODE))
    run_group(group, sweep.data, records.extend, Reporter(), unfinished=sweep.folder / UNFINISHED / group.name)
    return records


@functools.cache
def _sweep_there(folder: str) -> Sweep:
    """Open the sweep in a folder. The result is cached, so that groups in the same process share loaded data."""
    return Sweep.read(Path(folder))


@contextlib.contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Context manager that connects to a Ray cluster and yields the package ``ray``.

    It must be entered before JAX starts, because Ray forks the process.

    Args:
      address: address of the cluster, as in ``ray.init``; ``local`` starts a cluster on this machine for the duration
        of the block.

    Raises:
      JaxpflError: if Ray is not installed, or there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    # This process trains nothing, and tasks on the same machine need the accelerator's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import ray
    except ImportError:
        raise missing_extra("--ray", "ray", "ray") from None
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # The cluster listens on this machine's loopback address only, so that no other machine can join.
        options |= {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        _check_listens(address)
    handlers = {number: signal.getsignal(number) for number in signals.NUMBERS}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise JaxpflError(f"--ray {address}: {' '.join(str(error).split())[:200]}") from None
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Ray has replaced the handlers with its own, which raise an error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Refuse an address HOST:PORT at which no process listens, because Ray would wait there for minutes.

    Raises:
      JaxpflError: if the connection fails; the message gives the reason.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise JaxpflError(f"--ray {address}: no cluster answers ({error})") from None
