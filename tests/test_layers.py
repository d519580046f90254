"""Imports run strictly downward: a module may import its own package and lower levels, never a package beside it."""

import ast
from pathlib import Path

import pytest

import jaxpfl

LEVELS = {
    "errors": 0,
    "headline": 0,
    "checks": 0,
    "checksums": 0,
    "files": 0,
    "mapped": 0,
    "parquet": 0,
    "partial": 0,
    "sealed": 0,
    "places": 0,
    "signals": 0,
    "choices": 0,
    "console": 0,
    "presentation": 0,
    "full_precision": 0,
    "types": 0,
    "trees": 0,
    "host_memory": 0,
    "strict_json": 0,
    "randomness": 0,
    "settings": 0,
    "protocol": 0,
    "local_epochs": 0,
    "contract": 0,
    "wrapping": 0,
    "cohort_draws": 0,
    "client_times": 0,
    "participation": 0,
    "records": 0,
    "running_sum": 0,
    "processes": 0,
    "distributed": 0,
    "data": 1,
    "models": 1,
    "priors": 2,
    "compression": 2,
    "similarity": 2,
    "privacy": 2,
    "robust": 2,
    "algorithms": 3,
    "estimators": 3,
    "engine": 4,
    "public": 5,
    "experiment": 5,
    "studies": 5,
    "sweep": 6,
    "reports": 7,
    "cli": 8,
}
ROOT = Path(jaxpfl.__file__).parent
# An installed copy also holds the benchmarks, which stand beside the package in a checkout and above it in any case.
OUTSIDE = {"__init__.py", "benchmarks"}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in OUTSIDE)


def unit(path: Path) -> str:
    """The package of level 1 and above, or the single module, that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The jaxpfl units that a file imports, at its top or inside a function."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert "jaxpfl" not in names, f"{path} imports all of jaxpfl: name what it needs"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        units |= {n.split(".")[1] for n in names if n.startswith("jaxpfl.")}
    return units


def module_graph() -> dict[str, set[str]]:
    """Import graph of the level-0 modules."""
    return {unit(p): imported(p) for p in MODULES if LEVELS.get(unit(p)) == 0}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path: Path):
    own = unit(path)
    assert own in LEVELS, f"{own} has no level: give it one"
    for other in imported(path) - {own, "__version__"}:
        lower = LEVELS[other] < LEVELS[own]
        beside = LEVELS[other] == LEVELS[own] == 0
        assert lower or beside, f"{own} (level {LEVELS[own]}) imports {other} (level {LEVELS[other]})"


def test_modules_of_the_lowest_level_import_each_other_without_a_circle():
    graph = module_graph()
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"circular imports among {sorted(graph)}"


def test_only_the_command_line_knows_tyro():
    knowing = [p for p in MODULES if "tyro" in p.read_text() and unit(p) != "cli"]
    assert not knowing
