"""Releases draw their noise from one module: every other draw of the package is listed, with why it is no release."""

import ast
from collections.abc import Iterator
from pathlib import Path

from noise_sites import OTHERS, RELEASES

import jaxpfl

ROOT = Path(jaxpfl.__file__).parent
MAKE_KEYS = {"key", "split", "fold_in", "key_data", "wrap_key_data"}
NOISE = ("privacy.noise", "privacy.local_dp", "privacy.discrete_gaussian")
"""The modules whose draws are releases, or become one."""


def places() -> Iterator[tuple[str, str]]:
    """Each function that draws, and what it calls for it."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "benchmarks"):  # installed beside the package, not of it
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        names = drawing_names(module, tree)
        yield from found(tree, module, names)


def drawing_names(module: str, tree: ast.Module) -> set[str]:
    """Names in a module that draw noise: functions imported or defined there, and attributes of modules."""
    functions = {
        "privacy.noise": {
            *("gaussian", "add_gaussian", "add_banded", "add_laplace"),
            *("standard_normal", "exponential", "bits", "uniform"),
        },
        "privacy.local_dp": {"gaussian", "_positive"},
        "privacy.discrete_gaussian": {"sample"},
    }
    names = set(functions[module]) if module == "privacy.noise" else set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            name, inner = alias.asname or alias.name, f"{node.module}.{alias.name}".removeprefix("jaxpfl.")
            if inner in functions:
                names |= {f"{name}.{function}" for function in functions[inner]}
            elif alias.name in functions.get(node.module.removeprefix("jaxpfl."), ()):
                names.add(name)
    return names


def found(node: ast.AST, where: str, names: set[str]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = f"{where}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else where
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == "jax.random":
            if child.attr not in MAKE_KEYS:
                yield where, f"jax.random.{child.attr}"
        elif isinstance(child, ast.Call) and ast.unparse(child.func) in names:
            yield where, ast.unparse(child.func)
        yield from found(child, inside, names)


def test_every_draw_is_listed():
    drawing = {}
    for where, what in places():
        drawing.setdefault(where, set()).add(what)
    assert set(drawing) == set(RELEASES) | set(OTHERS)
    assert not set(RELEASES) & set(OTHERS)
    # Of a release nothing is drawn but by the three modules: no call of jax.random in it.
    direct = {where for where, what in drawing.items() if any(each.startswith("jax.random.") for each in what)}
    assert direct & set(RELEASES) == {"privacy.noise.bits", "privacy.noise.uniform"}


def test_a_draw_that_is_added_is_seen():
    """In a function within a method, imported under another name."""
    tree = ast.parse(
        "from jaxpfl.privacy.noise import add_gaussian as hide\n"
        "class A:\n  def f(self, key):\n    def g(x):\n      return hide(key, x, 1.0)\n"
        "    return jax.random.laplace(key, ())\n"
    )
    assert list(found(tree, "m", drawing_names("m", tree))) == [("m.A.f.g", "hide"), ("m.A.f", "jax.random.laplace")]
