"""Mutants of a module: one small change of its syntax tree each, of a kind that a careful test should notice.

Left out, as no test should pin them: annotations, docstrings, f-strings, what is raised or warned with its message,
settings of dataclasses, and the types that `isinstance` is given.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SHOWN = 100
"""Characters of a change."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Mutant(NamedTuple):
    """One change of a module.

    Attributes:
      place: number of the changed node among those of the module's tree.
      choice: number of the change among those of the node.
      line: first line of the node.
      function: dotted name of the function or class that it is in; empty at the module's level.
      kind: kind of the change, for sampling within kinds.
      change: source before and after.
    """

    place: int
    choice: int
    line: int
    function: str
    kind: str
    change: str

    @property
    def name(self) -> str:
        return f"{self.line}:{self.place}:{self.choice}"


class _Place(NamedTuple):
    node: ast.AST
    parent: ast.AST
    field: str
    at: int | None
    function: str


def all_of(source: str) -> list[Mutant]:
    """Mutants of a module's source, in the order of its tree."""
    found = []
    for number, place in enumerate(_places(ast.parse(source))):
        for choice, (kind, node) in enumerate(_changes(place.node)):
            before, after = (" ".join(ast.unparse(one).split()) for one in (place.node, node))
            line = getattr(place.node, "lineno", 0)
            found.append(Mutant(number, choice, line, place.function, kind, _told(before, after)))
    return found


def _told(before: str, after: str) -> str:
    """Both texts, of long ones what is about the first character at which they differ."""
    first = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    start = max(0, first - SHOWN // 2) if max(len(before), len(after)) > SHOWN else 0
    return f"{before[start:][:SHOWN]} -> {after[start:][:SHOWN]}"


def tree(source: str, mutant: Mutant | None) -> ast.Module:
    """The module's tree with the mutant's change; as it is with none."""
    module = ast.parse(source)
    if mutant is not None:
        place = list(_places(module))[mutant.place]
        _, node = list(_changes(place.node))[mutant.choice]
        if place.at is None:
            setattr(place.parent, place.field, node)
        else:
            getattr(place.parent, place.field)[place.at] = node
    return ast.fix_missing_locations(module)


def _places(node: ast.AST, function: str = "") -> Iterator[_Place]:
    """Every node below one that may be changed, depth first."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _left_out(child, node, field, index):
                continue
            inner = (
                f"{function}.{child.name}".lstrip(".") if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else function
            )
            yield _Place(child, node, field, index if isinstance(value, list) else None, inner)
            yield from _places(child, inner)


def _left_out(node: ast.AST, parent: ast.AST, field: str, index: int) -> bool:
    if isinstance(node, ast.Expr):  # a docstring
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called.endswith(("Error", "warn", "dataclass"))
    types = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "isinstance" and field == "args" and index == 1
    typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.JoinedStr | ast.Raise) or types or typing


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each change of a node, with its kind."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        if type(node.op) in BINARY and not _text(node):
            yield "binary operator", _with(node, op=BINARY[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in COMPARED[type(op)]:
                yield "comparison", _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield "boolean operator", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub | ast.Not):
            yield "unary operator", node.operand
    elif isinstance(node, ast.Constant):
        yield from (("number", ast.Constant(value)) for value in _other(node.value))
    elif isinstance(node, ast.Return):
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return value", _with(node, value=ast.Constant(None))
    elif isinstance(node, ast.Call):
        for index, one in enumerate(node.keywords):
            if one.arg is not None:
                yield "keyword", _with(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]])
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not _negated_elsewhere(node.test):
        yield "condition", _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _negated_elsewhere(test: ast.expr) -> bool:
    """True if a comparison or a unary operator has the condition's negation among its own changes."""
    return (isinstance(test, ast.Compare) and len(test.ops) == 1) or isinstance(test, ast.UnaryOp)


def _text(node: ast.BinOp | ast.AugAssign) -> bool:
    """True if texts are joined."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in sides
    )


def _other(value: Any) -> tuple[Any, ...]:
    """Another constant of the kind."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1,)
    if isinstance(value, float):
        return (2 * value or 1.0,)
    return ()
