"""Settings: fields of frozen dataclasses that carry their help, type, range and unit.

A setting is declared once. Flags, config files, ``config.json``, Python keywords and their documentation are derived
from the declaration. `check` refuses a value of a wrong type or outside its range, whether the value was given as a
flag, in a file or in Python. `parse_choice` parses choices that are given as text, ``NAME`` or
``NAME:argument=value,argument=value``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from numbers import Integral, Real
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import numpy as np

from jaxpfl.support.errors import JaxpflError, shown, unknown_name

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

LARGEST = 2**31 - 1
"""Largest value of an integer setting, because compiled programs use int32."""


class Kind(NamedTuple):
    """Type of a setting's values: its name in error messages, and a predicate that accepts these values."""

    words: str
    holds: Callable[[Any], bool]


class Range(NamedTuple):
    """Interval of numbers; an open end is excluded."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: Any) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return bool(above and (value < self.high if self.open_high else value <= self.high))

    @property
    def words(self) -> str:
        """The interval in words, for error messages and help."""
        low = "" if self.low == -math.inf else f"{'>' if self.open_low else '>='} {_digits(self.low)}"
        if self.high == math.inf:
            high = "finite" if self.open_high else ""
        else:
            high = f"{'<' if self.open_high else '<='} {_digits(self.high)}"
        return " and ".join(part for part in (low, high) if part)


COUNT = Range(1)
POSITIVE = Range(0, math.inf, True, True)
SHARE = Range(0, 1, False, True)
PROBABILITY = Range(0, 1)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool | np.bool_)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def one_or_more(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Extend the predicate ``of`` for one value to lists and arrays [S] of values."""

    def holds(value: Any) -> bool:
        if isinstance(value, np.ndarray) or hasattr(value, "__jax_array__") or hasattr(value, "aval"):
            value = np.asarray(value)[()]
        several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
        return all(map(of, value)) if several else of(value)

    return holds


def instance_of(words: str, *types: type) -> Kind:
    """Make a kind that accepts instances of the given types; ``words`` is its name in error messages."""
    return Kind(words, lambda value: isinstance(value, types))


WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a number", _is_number)
NAME = Kind("a name", lambda value: isinstance(value, str))
SWITCH = Kind("True or False", lambda value: isinstance(value, bool | np.bool_))
RATE = Kind("a number, or one for each run", one_or_more(_is_number))
_WHOLE_ONES = one_or_more(_is_whole)
SEEDS = Kind(
    "a number of runs, or a list of whole numbers", lambda value: isinstance(value, range) or _WHOLE_ONES(value)
)
BY_NAME = Kind(
    "a dictionary of values by name",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
)

_KINDS = {"int": WHOLE, "float": NUMBER, "str": NAME, "bool": SWITCH}
"""Annotation -> kind. A setting with another annotation must declare its kind."""


def about(
    help: str = "",
    *,
    unless_given: str = "",
    range: Range | None = None,
    unit: str = "",
    kind: Kind | None = None,
    text: Any = None,
) -> dict[str, Any]:
    """Make the metadata of a setting.

    `setting` uses this metadata for a setting with a default. Declare a required setting as
    ``name: kind = field(metadata=about(...))``.

    Args:
      help: one sentence for ``--help`` and the documentation of the Python keyword; by default the docstring below the
        field; see `read_help`.
      unless_given: text that says what the default None means.
      range: allowed values of a number.
      unit: unit of a number, such as "clients".
      kind: type of the values; by default derived from the annotation (int, float, str or bool).
      text: annotation for flags and config files, if they accept fewer types than Python. For a setting that may also
        be a function in Python, for example, the annotation is ``str | None``.
    """
    more: dict[str, Any] = {
        "unless_given": unless_given,
        "range": range,
        "unit": unit,
        "kind": kind,
        "text": text,
    }
    return {"help": _sentence(help, unless_given), "plain": help, **more}


def setting(default: Any, help: str = "", **more: Any) -> Any:
    """Declare a dataclass field as a setting, with a default value and the arguments of `about`."""
    return dataclasses.field(default=default, metadata=about(help, **more))


def read_help(settings: type[T]) -> type[T]:
    """Decorate a dataclass so that the docstring below each field becomes the help of that setting.

    The first paragraph is the help. The second paragraph, if there is one, describes the values that only Python, not a
    flag, can set. Editors and documentation tools read the same docstrings.
    """
    for field, text in itertools.pairwise(_class_bodies(inspect.getmodule(settings))[settings.__name__]):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                help, _, python = (" ".join(part.split()) for part in said.partition("\n\n"))
                own = _fields(settings)[name]
                texts = {"help": _sentence(help, own.metadata["unless_given"]), "plain": help, "python": python}
                own.metadata = MappingProxyType({**own.metadata, **texts})
    return settings


@cache
def _class_bodies(module: ModuleType | None) -> dict[str, list[ast.stmt]]:
    """Statements of each class in a module; cached, so that a module is parsed only once."""
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def restated(settings: type, name: str, default: Any, unless_given: str = "") -> Any:
    """Redeclare a setting of another dataclass, with the same name but a different default.

    Args:
      settings: dataclass that declares the setting.
      name: name of the field.
      default: the new default.
      unless_given: text that says what the default None means.
    """
    field = _fields(settings)[name]
    text = text_type(settings, field)
    said = {"help": _sentence(field.metadata["plain"], unless_given), "unless_given": unless_given}
    metadata = dict(field.metadata) | said | {"kind": _kind(field), "text": text | None if default is None else text}
    return dataclasses.field(default=default, metadata=metadata)


def _sentence(help: str, unless_given: str) -> str:
    return f"{help} (default: {unless_given})" if unless_given else help


def text_type(settings: type, field: dataclasses.Field[Any]) -> Any:
    """Annotation of a field for flags and files."""
    return field.metadata.get("text") or get_type_hints(settings, include_extras=True)[field.name]


def text_words(field: dataclasses.Field[Any]) -> str:
    """Annotation of a field for flags and files, as text such as ``int | None``."""
    text = field.metadata.get("text") or field.type
    return text.__name__ if isinstance(text, type) else str(text)


def check(settings: Any, *names: str, prefix: str = "") -> None:
    """Refuse settings of the wrong type or outside their range, and integers above `LARGEST`.

    None is accepted if it is the default or if the annotation allows it.

    Args:
      settings: instance of a dataclass; fields that are not settings are ignored.
      names: fields to check; all fields by default.
      prefix: prefix of the names in messages, such as "plan.".

    Raises:
      JaxpflError: if a setting is refused; the error gives its name, its value and the allowed values.
    """
    for field in dataclasses.fields(settings):
        if "help" not in field.metadata or (names and field.name not in names):
            continue
        name, given = prefix + field.name, getattr(settings, field.name)
        if given is None and (field.default is None or "None" in str(field.type).split(" | ")):
            continue
        kind, within, value = _kind(field), field.metadata["range"], cast(Any, given)  # else None is inferred
        if kind is not None:
            check_kind(name, value, kind)
        if kind is WHOLE:
            low, high = (-math.inf, math.inf) if within is None else (within.low, within.high)
            if value < low:
                raise JaxpflError(f"{name} must be at least {_digits(low)}, got {value}")
            if value > (most := LARGEST if high == math.inf else high):
                raise JaxpflError(f"{name} must be at most {_digits(most)}, got {value}")
        elif within is not None and not isinstance(value, str):
            for one in np.ravel(np.asarray(value, float)):
                if one not in within:
                    raise JaxpflError(f"{name} must be {within.words}, got {value if np.ndim(value) == 0 else one}")


def check_kind(name: str, value: Any, kind: Kind) -> None:
    """Refuse a value that is not of the given kind.

    Raises:
      JaxpflError: if the value is not of this kind; the error gives the name, the value and the kind.
    """
    if not kind.holds(value):
        raise JaxpflError(f"{name} must be {kind.words}, got {_shown(value)}")


def is_default(settings: Any, name: str) -> bool:
    """True if a setting has its default value."""
    value, default = getattr(settings, name), _fields(type(settings))[name].default
    return value is default or (type(value) is type(default) and value == default)


_NAMED: ContextVar[Set[str]] = ContextVar("named", default=frozenset())


@contextmanager
def named(names: Set[str]) -> Iterator[None]:
    """Make `is_given` true for these settings in the ``with`` block: the user named them, perhaps with the default."""
    token = _NAMED.set(names)
    try:
        yield
    finally:
        _NAMED.reset(token)


def is_given(settings: Any, name: str) -> bool:
    """True if the user named a setting (`named`), or if it does not have its default value."""
    return name in _NAMED.get() or not is_default(settings, name)


def part_of(part: type[T], flat: Any) -> T:
    """Build the settings dataclass ``part`` from an object that has attributes with the names of its fields."""
    return part(**{name: getattr(flat, name) for name in _fields(part)})


def keywords_of(settings: type) -> Callable[[F], F]:
    """Decorate a function that takes ``**kwargs`` so that its signature and documentation list a dataclass's fields.

    A keyword that is not a field raises Python's usual TypeError.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        parameters = {name: one for name, one in own.parameters.items() if one.kind is not one.VAR_KEYWORD}
        for name, one in inspect.signature(settings).parameters.items():
            parameters.setdefault(name, one.replace(kind=one.KEYWORD_ONLY))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - parameters.keys():
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
            return function(*args, **kwargs)

        call.__signature__ = own.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        call.__doc__ = documented(function.__doc__ or "", settings)
        return cast(F, call)

    return decorate


def documents_itself(settings: type[T]) -> type[T]:
    """Add the settings' documentation to a dataclass that users build in Python."""
    read_help(settings)
    settings.__doc__ = documented(settings.__doc__ or "", settings)
    return settings


def documented(doc: str, settings: type) -> str:
    """Add a description of each setting to a docstring's section ``Args``, unless the setting is described already.

    If the docstring has no section ``Args``, one is added, before the section ``Raises`` if there is one.
    """
    doc, fields = inspect.cleandoc(doc), _fields(settings)
    lines = [] if "\nArgs:\n" in doc else ["", "Args:"]
    for name in inspect.signature(settings).parameters:
        if "help" in fields[name].metadata and f"\n  {name}: " not in doc:
            text = f"{name}: {described(fields[name])}"
            lines += textwrap.wrap(text, 120, initial_indent=" " * 2, subsequent_indent=" " * 4)
    said = "\n".join(lines)
    head, raises, tail = doc.partition("\nRaises:")
    return f"{head.rstrip()}\n{said}\n{raises}{tail}\n"


def described(field: dataclasses.Field[Any]) -> str:
    """Documentation of a setting as a Python keyword, with its range and unit."""
    said, within = [field.metadata["help"], field.metadata.get("python")], field.metadata["range"]
    if within is not None and within.words:
        unit = field.metadata["unit"]
        said.append(f"Allowed: {within.words}{f' ({unit})' if unit else ''}.")
    return " ".join(filter(None, said))


def _fields(settings: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(settings)}


def _kind(field: dataclasses.Field[Any]) -> Kind | None:
    return field.metadata["kind"] or _KINDS.get(str(field.type).removesuffix(" | None"))


def _digits(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _shown(value: Any) -> str:
    """The ``repr`` of a value, or only its type if the ``repr`` is long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def split_choice(kind: str, text: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Split the choice ``text`` into one of the ``known`` names and its arguments, whose values remain strings.

    Examples:
      >>> split_choice("optimizer", "adam:b1=0.8", ["adam", "sgd"])
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


def parse_choice(
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
    name, given = split_choice(kind, text, makers)
    known = inspect.signature(makers[name], eval_str=True).parameters
    for key in given:
        if key not in (*known, *more):
            raise unknown_name(f"argument of {kind} {name}", key, (*known, *more))
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise JaxpflError(f"{kind} {name} requires {key}: write {name}:{key}=...")
    kinds = {key: parameter.annotation for key, parameter in known.items()} | more
    return name, {key: parse_value(f"{name}:{key}", value, kinds[key]) for key, value in given.items()}


def literal(text: str) -> Any:
    """Parse a Python literal (such as a number), ``true`` or ``false``; return any other string unchanged."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # deeply nested brackets raise the last two
        return text


_FORMS = {int: "an int", tuple: "values separated by commas, such as 1.0,5.0"}


def parse_value(what: str, text: str, kind: type) -> Any:
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
