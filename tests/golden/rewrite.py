"""Writes `golden.json`: the numbers of all runs, and how far they are apart under other instructions and devices.

    python tests/golden/rewrite.py [NAME...]

With names, only those runs; the others stay. Each environment is a process of its own. The tolerance of a run is ten
times the largest difference, at least 2e-5, rounded up to one digit. When to run it: CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from golden_runs import FILE, RUNS, Numbers, apart

MARGIN, LEAST = 10, 2e-5
LATTICE = 1e-3
"""Least tolerance of noisy sums: they are rounded to multiples of 2^-9 of the noise, and the last bits choose."""
UNOPTIMISED = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
ENVIRONMENTS: dict[str, tuple[int, str]] = {
    "AVX2": (1, "--xla_cpu_max_isa=AVX2"),
    "all instructions, fast math": (1, "--xla_cpu_enable_fast_math=true"),
    "not optimised": (1, UNOPTIMISED),
    "two devices": (2, UNOPTIMISED),
    "SSE4.2": (1, "--xla_cpu_max_isa=SSE4_2"),
}
"""Name -> CPU devices and XLA's flags; the first gives the numbers of the file."""


def tolerance(name: str, spread: dict[str, float]) -> float:
    """Tolerance of a run from its differences in the environments."""
    least = max(LATTICE if name == "private sum" else LEAST, MARGIN * max(spread.values()))
    digit = 10.0 ** math.floor(math.log10(least))
    return float(f"{math.ceil(least / digit * (1 - 1e-12)) * digit:.0e}")


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in RUNS]:
        raise SystemExit(f"error: no run {unknown[0]!r}; there are {', '.join(RUNS)}")
    old: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    asked = names or list(RUNS)
    found = {place: _numbers(*environment, asked) for place, environment in ENVIRONMENTS.items()}
    runs = {}
    for name in RUNS:
        if name not in asked:
            runs[name] = old["runs"][name]
            continue
        numbers = {what: [float(f"{v:.9g}") for v in values] for what, values in found["AVX2"][name].items()}
        spread = {place: float(f"{apart(of[name], numbers):.1e}") for place, of in found.items()}
        if not all(map(math.isfinite, spread.values())):
            raise SystemExit(f"error: {name} has other quantities, or numbers that are not finite: {spread}")
        runs[name] = {"tolerance": tolerance(name, spread), "spread": spread, "numbers": numbers}
        before = old["runs"].get(name)
        moved = "new" if before is None else f"moved by {apart(numbers, before['numbers']):.1e}"
        print(f"{name}: {moved}, tolerance {runs[name]['tolerance']:g}")
    FILE.write_text(
        json.dumps(
            {"versions": {"jax": jax.__version__, "numpy": np.__version__}, "machine": machine(), "runs": runs},
            indent=1,
        )
        + "\n"
    )


def machine() -> str:
    """The processor's name, family and model, as Linux says; elsewhere its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return ", ".join(f"{name} {told[name]}" for name in ("model name", "cpu family", "model") if name in told)


def _numbers(devices: int, flags: str, names: list[str]) -> dict[str, Numbers]:
    program = [sys.executable, str(Path(__file__).with_name("golden_runs.py")), str(devices), *names]
    given = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(program, env=given, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
