"""Every method once over several processes, against one: a run of its own, as its compiling takes long.

    python tests/multiprocess/every_method.py 4 benchmarks/results/processes_methods_cpu2.json

Participation rotates over the methods (everyone, cohorts of four, Poisson). Writes, after each few methods, the largest
difference from one process in float64, relative to the largest entry of its array, and the seconds that these took.
"""

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import jax
import numpy as np
from problem import reference
from process_cases import ROTATED
from process_group import run_cases

AT_ONCE = 6
"""Methods of one start of the processes."""


def difference(got: Any, want: Any) -> float:
    """Largest difference of floats; infinite where anything else is not the same."""
    largest = 0.0
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        if not np.issubdtype(b.dtype, np.floating):
            same = np.array_equal(a, b)
        else:
            same = a.shape == b.shape and np.array_equal(np.isfinite(a), np.isfinite(b))
        if not same:
            return np.inf
        if np.issubdtype(b.dtype, np.floating) and b.size:
            scale = np.abs(b[np.isfinite(b)]).max(initial=0) or 1.0
            largest = max(largest, float(np.abs(np.where(np.isfinite(b), a - b, 0)).max() / scale))
    return largest


def main() -> None:
    processes, *rest = sys.argv[1:]
    names, found, seconds = list(ROTATED), {}, []
    for start in range(0, len(names), AT_ONCE):
        some, began = names[start : start + AT_ONCE], time.perf_counter()
        ran = run_cases([f"{name}, rotated" for name in some], processes=int(processes), seconds=7200)
        seconds.append(round(time.perf_counter() - began, 1))
        for name in some:
            cohort, got = ROTATED[name], ran[f"{name}, rotated"]
            kind = {type(None): "everyone", int: "uniform", float: "poisson"}[type(cohort)]
            found[name] = {"participation": kind}
            if isinstance(got, str):
                found[name]["failed"] = got.strip().splitlines()[-1]
            else:
                found[name]["difference"] = difference(got, reference(name, cohort))
            print(name, found[name], flush=True)
        within = [row.get("difference", np.inf) <= 1e-9 for row in found.values()]
        told = {
            "command": f"python tests/multiprocess/every_method.py {processes}",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("jaxpfl", "jax", "jaxlib")},
            "processes": int(processes),
            "methods": len(names),
            "ran": len(found),
            "within": sum(within),
            "tolerance": 1e-9,
            "seconds": seconds,
            "results": found,
        }
        if rest:
            Path(rest[0]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
