"""Imports run strictly downward: a module may import its own package and lower levels, never a package beside it."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxpfl

LEVELS = {
    "support": 0,
    "core": 1,
    "data": 2,
    "models": 2,
    "priors": 3,
    "uploads": 3,
    "similarity": 3,
    "privacy": 3,
    "algorithms": 4,
    "estimators": 4,
    "engine": 5,
    "audit": 6,
    "deploy": 6,
    "studies": 6,
    "runs": 7,
    "public": 8,
    "cli": 8,
}
ROOT = Path(jaxpfl.__file__).parent
# An installed copy also holds the benchmarks, which stand beside the package in a checkout and above it in any case.
OUTSIDE = {"__init__.py", "benchmarks"}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in OUTSIDE)


@functools.cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports of a file, at its top or inside a function, and whether type checkers alone read them."""

    def below(node: ast.AST, typed: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, typed
            elif not isinstance(child, ast.expr):
                guard = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from below(child, typed or guard)

    return list(below(ast.parse(path.read_text()), False))


def unit(path: Path) -> str:
    """The package, or the single module, that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The jaxpfl units that a file imports, at its top or inside a function."""
    units = set()
    for node, _ in imports(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert "jaxpfl" not in names, f"{path} imports all of jaxpfl: name what it needs"
        else:
            assert node.level == 0, f"relative import in {path}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        units |= {n.split(".")[1] for n in names if n.startswith("jaxpfl.")}
    return units


@pytest.mark.parametrize("own", sorted({unit(path) for path in MODULES}))
def test_imports_run_downward(own: str):
    assert own in LEVELS, f"{own} has no level: give it one"
    for path in MODULES:
        for other in imported(path) - {own, "__version__"} if unit(path) == own else ():
            assert LEVELS[other] < LEVELS[own], f"{path} (level {LEVELS[own]}) imports {other} (level {LEVELS[other]})"


def test_no_module_imports_itself_through_others():
    """Imports inside functions count, those for type checkers do not."""
    parts = [path.relative_to(ROOT.parent).with_suffix("").parts for path in MODULES]
    names = {".".join(part).removesuffix(".__init__") for part in parts}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path in MODULES:
        own = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for node, typed in imports(path):
            if isinstance(node, ast.ImportFrom) and node.module and not typed:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    target = full if full in names else node.module
                    if target in names and not own.endswith("__init__"):
                        graph[own].add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a circle


def test_empirical_bayes_is_an_annex_with_one_door():
    """It imports core, support and privacy beside itself, and all others import it from its front, studies alone."""
    annex = ROOT / "estimators" / "empirical_bayes"
    for path in MODULES:
        for node, _ in imports(path):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("jaxpfl"):
                continue
            inside = node.module.startswith("jaxpfl.estimators.empirical_bayes")
            if annex in path.parents:
                assert inside or node.module.split(".")[1] in ("core", "support", "privacy"), f"{path}: {node.module}"
            elif inside:
                assert node.module == "jaxpfl.estimators.empirical_bayes", f"{path} imports {node.module}"
                assert unit(path) == "studies", f"{path} imports the annex"


def test_only_the_command_line_knows_tyro():
    knowing = [p for p in MODULES if "tyro" in p.read_text() and unit(p) != "cli"]
    assert not knowing
