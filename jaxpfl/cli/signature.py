"""Flags of a command from its signature, used to check arguments and to print ``--help``."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
from tyro import MISSING
from tyro.conf import Positional, UseAppendAction, arg

from jaxpfl.cli.flags import fields_of
from jaxpfl.places import Place

REQUIRED: Any = MISSING
_PLAIN: Any = arg()  # without a name, metavar or help of its own


@dataclasses.dataclass(frozen=True, eq=False)
class Flag:
    """A flag or positional argument of a command.

    Attributes:
      name: as written, ``--plan.runs``; for a positional argument its name in the usage line, ``METHOD``.
      kind: type of one value: int, float, str or Path; bool for a switch, which takes none.
      text: of the help.
      default: the value if it is not given; REQUIRED if it must be.
      choices: the allowed values; empty if the kind is the only restriction.
      many: whether it takes any number of values.
      positional: whether it is given by position.
      place: requirement on an output path that is checked before the command runs.
      owner: the dataclass whose field it sets; None for a parameter of the command itself.
    """

    name: str
    kind: type
    text: str = ""
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    many: bool = False
    positional: bool = False
    place: Place | None = None
    owner: type | None = None

    @property
    def off(self) -> str:
        """Name of the flag that turns a switch off, ``--plan.no-donate``."""
        path, _, last = self.name.removeprefix("--").rpartition(".")
        return f"--{path}.no-{last}" if path else f"--no-{last}"


def flags_of(command: Callable[..., Any]) -> tuple[Flag, ...]:
    """Flags of a command, in the order of its parameters and of their dataclasses' fields."""
    hints = get_type_hints(command, include_extras=True)
    texts = _texts(command)
    found: list[Flag] = []
    for name, parameter in inspect.signature(command).parameters.items():
        default = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
        if dataclasses.is_dataclass(_bare(hints[name])):
            found += _fields(_bare(hints[name]), default, "--")
        else:
            found.append(_flag("--", name, hints[name], default, texts.get(name, "")))
    return tuple(found)


def _fields(settings: type, given: Any, prefix: str) -> list[Flag]:
    found: list[Flag] = []
    for field in fields_of(settings, None if given is REQUIRED else given):
        if dataclasses.is_dataclass(_bare(field.kind)):
            found += _fields(_bare(field.kind), field.default, f"{prefix}{_dashed(field.name)}.")
        else:
            flag = _flag(prefix, field.name, field.kind, field.default, field.text or "")
            found.append(dataclasses.replace(flag, owner=_owner(settings, field.name)))
    return found


def _owner(settings: type, field: str) -> type:
    """The first dataclass among those that it extends that has the field."""
    return next(cls for cls in reversed(settings.__mro__) if field in vars(cls).get("__annotations__", ()))


def _flag(prefix: str, name: str, hint: Any, default: Any, text: str) -> Flag:
    notes = _notes(hint)
    named: Any = next((note for note in notes if isinstance(note, type(_PLAIN))), _PLAIN)
    kind, many = _bare(hint), False
    if get_origin(kind) is tuple:
        kind, many = _bare(get_args(kind)[0]), UseAppendAction not in notes
    metavar = named.metavar or ""
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    if metavar.startswith("{"):
        choices = tuple(metavar.strip("{}").split(","))
    positional = Positional in notes
    shown = metavar or _dashed(name).upper()
    if not positional:
        shown = prefix + _dashed(named.name or name)
    return Flag(
        name=shown.strip("[]").split(" ")[0],
        kind=str if choices else kind,
        text=named.help or text,
        default=default,
        choices=choices,
        many=many,
        positional=positional,
        place=next((note for note in notes if isinstance(note, Place)), None),
    )


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _notes(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _bare(hint: Any) -> Any:
    """The type without annotations and None; text if it is a union with text."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else str
    return hint


def _texts(command: Callable[..., Any]) -> dict[str, str]:
    params = docstring_parser.parse(inspect.getdoc(command) or "").params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}
