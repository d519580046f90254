"""Modules of the benchmarks, imported by their files: in a checkout the benchmarks are no package of the tests."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def benchmark_module(name: str) -> ModuleType:
    """``benchmarks/NAME.py``, which imports nothing of its package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
