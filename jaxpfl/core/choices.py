"""Parsing of choices that are given as text: ``NAME`` or ``NAME:argument=value,argument=value``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpfl.support.errors import JaxpflError, shown, unknown_name


def parse(kind: str, text: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Split the choice ``text`` into one of the ``known`` names and its arguments, whose values remain strings.

    Examples:
      >>> parse("optimizer", "adam:b1=0.8", ["adam", "sgd"])
      ('adam', {'b1': '0.8'})

    Raises:
      JaxpflError: if the name is unknown, the text is not ``NAME`` or ``NAME:argument=value,argument=value``, or an
        argument is given twice.
    """
    name, colon, rest = text.partition(":")
    known = list(known)
    if name not in known:
        raise unknown_name(kind, name, known)
    given: dict[str, str] = {}
    for entry in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key and equals and value) or key in given:
            raise JaxpflError(
                f"the {kind} must be NAME or NAME:argument=value,..., with each argument once, got {shown(text)}"
            )
        given[key] = value
    return name, given


def arguments(
    kind: str, text: str, makers: Mapping[str, Callable[..., Any]], **more: type
) -> tuple[str, dict[str, Any]]:
    """Split a choice into its name and its arguments, with each value converted to the type of its parameter.

    Args:
      kind: name for these choices in error messages.
      text: the choice, as ``NAME`` or ``NAME:argument=value,...``.
      makers: factory function of every choice, by name.
      more: types, by name, of the arguments that every choice accepts in addition to its factory function's parameters.

    Raises:
      JaxpflError: if the name or an argument is unknown, a required argument is missing, or a value does not have its
        parameter's type.
    """
    name, given = parse(kind, text, makers)
    known = inspect.signature(makers[name], eval_str=True).parameters
    for key in given:
        if key not in (*known, *more):
            raise unknown_name(f"argument of {kind} {name}", key, (*known, *more))
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise JaxpflError(f"{kind} {name} requires {key}: write {name}:{key}=...")
    kinds = {key: parameter.annotation for key, parameter in known.items()} | more
    return name, {key: typed(f"{name}:{key}", value, kinds[key]) for key, value in given.items()}


def literal(text: str) -> Any:
    """Parse a Python literal (such as a number), ``true`` or ``false``; return any other string unchanged."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # deeply nested brackets raise the last two
        return text


_FORMS = {int: "an int", tuple: "values separated by commas, such as 1.0,5.0"}


def typed(what: str, text: str, kind: type) -> Any:
    """Parse a string as a value of type ``kind``; ``what`` is the value's name in the error message.

    Integers and inf are accepted as floats. A single number is accepted as a tuple of length one.

    Raises:
      JaxpflError: if the string cannot be parsed as this type, or is NaN.
    """
    try:
        value = float(text) if kind is float else literal(text)  # literal does not parse "inf"
    except ValueError:
        value = text
    if kind is tuple and type(value) in (int, float):
        value = (value,)
    if type(value) is not kind or value != value:  # only NaN differs from itself
        raise JaxpflError(f"{what} must be {_FORMS.get(kind, f'a {kind.__name__}')}, got {shown(text)}")
    return value
