"""Mutants differ from their module in one place each, leave out what no test should pin, and are what is imported."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import mutants
import pytest
from mutation_child import Mutated

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A module's text, 1 + 1."""
from dataclasses import dataclass

LIMIT: "tuple[1 + 1]" = 3


@dataclass(frozen=True)
class Pair:
    """Text."""

    a: int = 1


def scaled(x, *, by: "1 < 2" = 2.0) -> "1 + 1":
    """Text."""
    if x < 0 and not isinstance(x, int | float):
        raise ValueError(f"{x - 1} is below {0 + 0}")
    name = f"{x + 1}"
    return sorted([-x * by], reverse=True)
'''


def changes(source: str) -> list[str]:
    return [f"{one.kind}: {one.change}" for one in mutants.all_of(source)]


def test_the_changes_of_a_module():
    called = "sorted([-x * by], reverse=True)"
    before = "if x < 0 and (not isinstance(x, int | float)): raise ValueError(f'{x - 1} is below {0 + 0}')"[:100]
    after = "if not (x < 0 and (not isinstance(x, int | float))): raise ValueError(f'{x - 1} is below {0 + 0}')"[:100]
    assert sorted(changes(SOURCE)) == sorted(
        [
            "number: 3 -> 4",
            "number: 1 -> 2",
            "number: 2.0 -> 4.0",
            f"condition: {before} -> {after}",
            "boolean operator: x < 0 and (not isinstance(x, int | float)) -> x < 0 or not isinstance(x, int | float)",
            "comparison: x < 0 -> x <= 0",
            "comparison: x < 0 -> x >= 0",
            "number: 0 -> 1",
            "unary operator: not isinstance(x, int | float) -> isinstance(x, int | float)",
            f"return value: return {called} -> return None",
            f"keyword: {called} -> sorted([-x * by])",
            "binary operator: -x * by -> -x / by",
            "unary operator: -x -> x",
            "number: True -> False",
        ]
    )


@pytest.mark.parametrize(
    "file", ["jaxpfl/privacy/accounting.py", "jaxpfl/privacy/clipping.py", "jaxpfl/engine/groups.py"]
)
def test_each_mutant_compiles_and_differs_in_its_line(file: str):
    source = (ROOT / file).read_text(encoding="utf-8")
    whole = ast.dump(mutants.tree(source, None))
    found = mutants.all_of(source)
    assert len({one.name for one in found}) == len(found) > 20
    trees = set()
    for one in found:
        changed = mutants.tree(source, one)
        compile(changed, file, "exec")
        trees.add(ast.dump(changed))
        assert one.change.partition(" -> ")[0] != one.change.partition(" -> ")[2]
    assert whole not in trees
    assert len(trees) == len(found)


def test_the_mutated_module_is_what_is_imported(tmp_path: Path):
    path = tmp_path / "planted_module.py"
    path.write_text(SOURCE)
    (mutant,) = [one for one in mutants.all_of(SOURCE) if one.change == "-x * by -> -x / by"]
    assert mutant.function == "scaled"
    finder = Mutated("planted_module", path, mutant)
    sys.meta_path.insert(0, finder)
    try:
        found = importlib.import_module("planted_module")
        assert found.scaled(3.0) == [-1.5]
        assert "-x / by" in finder.get_source("planted_module")
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("planted_module", None)
    assert path.read_text() == SOURCE
    assert list(tmp_path.iterdir()) == [path]
