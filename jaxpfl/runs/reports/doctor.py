"""State of an installation: versions, devices, memory, caches and data sets, and a self-check of a few seconds."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxpfl import __version__
from jaxpfl.support import host_memory
from jaxpfl.support.console import new_table
from jaxpfl.support.errors import JaxpflError

CORE = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "orbax-checkpoint", "dp-accounting", "scikit-learn")
MORE = ("matplotlib", "tensorflow-datasets", "pandas", "pyarrow", "ray", "equinox")


def examine(data_dir: str | None, cache: Path | None) -> dict[str, Any]:
    """Facts about the installation, and the outcome of its self-check.

    Args:
      data_dir: folder of the data sets; as for runs, unless given.
      cache: folder of compiled programs; None without one.

    Returns:
      ``{"versions", "machine", "devices", "memory_free", "cache", "data", "checks": {NAME: {"ok", "says",
      "seconds"}}, "ok"}``, JSON-able.
    """
    import jax

    from jaxpfl import data

    devices = [f"{one.platform} {one.id}: {one.device_kind}" for one in jax.devices()]
    checks = {name: _outcome(run) for name, run in _CHECKS.items()}
    held = [path for path in cache.rglob("*") if path.is_file()] if cache is not None else []
    return {
        "versions": {"jaxpfl": __version__, "python": platform.python_version(), **_versions()},
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "devices": devices,
        "memory_free": host_memory.free(),
        "cache": None
        if cache is None
        else {"folder": str(cache), "programs": len(held), "bytes": sum(path.stat().st_size for path in held)},
        "data": {entry.name: "ready" if entry.present else "missing" for entry in data.available(data_dir)},
        "checks": checks,
        "ok": all(one["ok"] for one in checks.values()),
    }


def print_examination(console: Any, found: dict[str, Any]) -> None:
    """Print the facts and the outcome."""
    table = new_table("installation")
    table.add_column("part", style="bold", no_wrap=True)
    table.add_column("state", overflow="fold")
    table.add_row("versions", ", ".join(f"{name} {version or '-'}" for name, version in found["versions"].items()))
    table.add_row("machine", f"{found['machine']['system']}, {found['machine']['cores']} cores")
    table.add_row("devices", "; ".join(found["devices"]))
    free, cache = found["memory_free"], found["cache"]
    table.add_row("memory", "unknown" if free is None else f"{host_memory.readable(free)} free")
    kept = "none" if cache is None else f"{cache['programs']} files, {host_memory.readable(cache['bytes'])}"
    table.add_row("compiled programs", kept if cache is None else f"{kept} in {cache['folder']}")
    for state in ("ready", "missing"):
        names = [name for name, own in found["data"].items() if own == state]
        table.add_row(f"data {state}", ", ".join(names) or "-")
    console.print(table)
    outcome = new_table("self-check")
    for name in ("check", "outcome", "seconds"):
        outcome.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for name, one in found["checks"].items():
        outcome.add_row(
            name,
            f"[green]ok[/]: {one['says']}" if one["ok"] else f"[red]failed[/]: {one['says']}",
            f"{one['seconds']:.1f}",
        )
    console.print(outcome)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in (*CORE, *MORE):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _outcome(run: Callable[[], str]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        says, ok = run(), True
    except Exception as error:  # a broken installation fails in any way
        says, ok = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", False
    return {"ok": ok, "says": says, "seconds": time.perf_counter() - began}


def _trains() -> str:
    """AdaPeD learns on the embedded digits, and gives the same numbers again."""
    from jaxpfl import data
    from jaxpfl.engine.fit import fit

    federation = data.federate(data.load("digits"), clients=6, classes_per_client=3, split_seed=0)
    given = {"rounds": 5, "cohort": 3, "local_steps": 5, "model": "linear"}
    first, second = (fit("adaped", federation, **given).personalized_accuracy for _ in range(2))
    if not np.array_equal(first, second):
        raise JaxpflError("two runs of the same seed differ")
    accuracy = float(np.mean(first))
    if not accuracy > 0.6:  # .92 where all is well; one of three classes is .33
        raise JaxpflError(f"AdaPeD reaches an accuracy of {accuracy:.3f} on digits, and should exceed .6")
    return f"AdaPeD trains on digits to {100 * accuracy:.1f} %, twice the same"


def _accounts() -> str:
    """Epsilon of one Gaussian release by the accountant lies on the exact curve (Balle and Wang 2018)."""
    from jaxpfl.privacy import CentralNoise, Full, PrivacyPlan

    sigma, delta = 2.0, 1e-5
    epsilon = PrivacyPlan(CentralNoise(sigma), Full(), rounds=1).epsilon(delta)
    normal = NormalDist()
    exact = normal.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * normal.cdf(-0.5 / sigma - epsilon * sigma)
    if not 0.9 * delta < exact <= delta:
        raise JaxpflError(f"epsilon {epsilon:.4f} has delta {exact:.3g}, and should have {delta:g}")
    return f"one Gaussian release of z = {sigma:g}: epsilon {epsilon:.4f} at delta {delta:g}, as its closed form"


_CHECKS = {"training": _trains, "privacy": _accounts}
