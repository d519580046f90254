"""Derivation of a command's flags from its signature, and checks of its arguments. Only this file calls tyro."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import io
import math
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro import MISSING
from tyro.conf import DisallowNone, Positional, UseAppendAction, arg, subcommand
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from jaxpfl.core.settings import LARGEST
from jaxpfl.runs.names_elsewhere import NAME_NOTES, NAMES_ELSEWHERE
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.output_paths import Place

REGISTRY = ConstructorRegistry()


def fields_of(settings: type, given: Any) -> list[StructFieldSpec]:
    """Return the fields of a settings dataclass for tyro, with types whose values can be typed on the command line.

    Args:
      settings: dataclass.
      given: instance with the defaults; None to use the dataclass's defaults.
    """
    types, texts = _types(settings), _texts(settings)
    found = []
    for f in dataclasses.fields(settings):
        if not f.init:
            continue
        default = MISSING if f.default is dataclasses.MISSING else f.default
        if given is not None:
            default = getattr(given, f.name)
        elif f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        form, text = f.metadata.get("text") or types[f.name], f.metadata.get("help") or texts.get(f.name)
        found.append(StructFieldSpec(f.name, form, default, text))
    return found


@REGISTRY.struct_rule
def _settings(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Make tyro use `fields_of` for the dataclasses of this package, instead of the fields' annotations."""
    if not (dataclasses.is_dataclass(info.type) and info.type.__module__.startswith("jaxpfl.")):  # tyro's dataclasses
        return None
    given = info.default if isinstance(info.default, info.type) else None
    return StructConstructorSpec(info.type, tuple(fields_of(info.type, given)))


_types = functools.cache(functools.partial(get_type_hints, include_extras=True))
"""Function that returns the annotations of a dataclass's fields."""


@functools.cache  # slow, because the docstrings are found by parsing the source code
def _texts(settings: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its base classes."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if dataclasses.is_dataclass(kind):
            params = docstring_parser.parse_from_object(kind).params
            found |= {param.arg_name: " ".join(param.description.split()) for param in params if param.description}
    return found


REQUIRED: Any = MISSING
_PLAIN: Any = arg()  # has no name, metavar or help


@dataclasses.dataclass(frozen=True, eq=False)
class Flag:
    """A flag or positional argument of a command.

    Attributes:
      name: name as it is typed, such as ``--plan.runs``; for a positional argument, its name in the usage line, such as
        ``METHOD``.
      kind: type of a value: int, float, str or Path; bool for a switch, which takes no value.
      text: help text.
      default: value if the flag is omitted; REQUIRED if it must not be omitted.
      choices: allowed values; empty if all values of the type are allowed.
      many: whether the flag takes any number of values.
      positional: whether this is a positional argument.
      place: requirement on an output path, which is checked before the command runs; None for other values.
      owner: dataclass whose field the flag sets; None for a parameter of the command itself.
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
        """Name of the flag that turns this switch off, such as ``--plan.no-donate``."""
        path, _, last = self.name.removeprefix("--").rpartition(".")
        return f"--{path}.no-{last}" if path else f"--no-{last}"


def flags_of(command: Callable[..., Any]) -> tuple[Flag, ...]:
    """Return a command's flags, in the order of its parameters; a dataclass parameter gives a flag for each field."""
    hints = get_type_hints(command, include_extras=True)
    params = docstring_parser.parse(inspect.getdoc(command) or "").params
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in params}
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
        if dataclasses.is_dataclass(_bare(field.type)):
            found += _fields(_bare(field.type), field.default, f"{prefix}{field.name.replace('_', '-')}.")
        else:
            flag = _flag(prefix, field.name, field.type, field.default, str(field.helptext or ""))
            # The owner is the first base class that declares the field.
            declares = (cls for cls in reversed(settings.__mro__) if field.name in vars(cls).get("__annotations__", ()))
            found.append(dataclasses.replace(flag, owner=next(declares)))
    return found


def _flag(prefix: str, name: str, hint: Any, default: Any, text: str) -> Flag:
    notes = hint.__metadata__ if get_origin(hint) is Annotated else ()
    named: Any = next((note for note in notes if isinstance(note, type(_PLAIN))), _PLAIN)
    kind, many = _bare(hint), False
    if get_origin(kind) is tuple:
        kind, many = _bare(get_args(kind)[0]), UseAppendAction not in notes
    metavar = named.metavar or ""
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    if metavar.startswith("{"):
        choices = tuple(metavar.strip("{}").split(","))
    positional = Positional in notes
    shown = metavar or name.replace("_", "-").upper()
    if not positional:
        shown = prefix + (named.name or name).replace("_", "-")
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


def _bare(hint: Any) -> Any:
    """Return the type without Annotated and without None; str if several types remain."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else str
    return hint


_MOST_LISTED = 12
_SIMILAR = 0.75
"""Minimum similarity of a suggested name: low enough to allow two wrong letters in ten, but not a different word."""
_METHOD_FLAGS = ("method", "methods", "algorithm", "algorithms", "algo", "strategy")
_LARGEST_SEED = 2**32 - 1
_NUMBERS: dict[type, tuple[str, Callable[[str], float]]] = {
    int: ("a whole number, in digits", int),
    float: ("a number", float),
}


def check_arguments(flags: Sequence[Flag], args: Sequence[str], command: str) -> list[str]:
    """Check the arguments of a command, and return them in standard order: flags, ``--``, positional arguments.

    Args:
      flags: flags of the command.
      args: arguments as they were typed.
      command: name of the command, such as ``jaxpfl run``.

    Raises:
      JaxpflError: if a flag is unknown (the message suggests the nearest), a flag does not accept its value, a required
        flag or argument is missing, or there are too many arguments.
    """
    named = {flag.name: flag for flag in flags if not flag.positional} | {
        flag.off: flag for flag in flags if flag.kind is bool
    }
    places = [flag for flag in flags if flag.positional]
    most = math.inf if any(place.many for place in places) else len(places)
    queue, given, canonical = deque(args), set[Flag](), list[str]()
    loose: list[str] = []
    switch = None  # name of the last argument if it was a switch; a switch must not be followed by a value
    while queue:
        token = queue.popleft()
        if token == "--":
            loose += queue
            break
        if not _is_flag(token):
            if switch is not None and len(loose) >= most:
                raise JaxpflError(f"{switch} takes no value, got {shown(token)}")
            loose.append(token)
            switch = None
            continue
        name, equals, value = token.partition("=")
        name = name.replace("_", "-")
        if name not in named:
            raise _unknown(name, named, places, command)
        flag = named[name]
        given.add(flag)
        switch = name if flag.kind is bool else None
        if flag.kind is bool:
            if equals:
                raise JaxpflError(f"{name} takes no value, got {shown(value)}")
            canonical.append(name)
            continue
        values = [value] if equals else []
        reserved = sum(place.default is REQUIRED for place in places[len(loose) :]) if flag.many else 0
        while len(queue) > reserved and (flag.many or not values) and not _is_flag(queue[0]) and queue[0] != "--":
            values.append(queue.popleft())
        if not values and not flag.many:
            raise JaxpflError(f"{name} requires a value: {_value_words(flag)}")
        for text in values:
            _check(flag, text)
        canonical += [f"{name}={values[0]}", *values[1:]] if values else [name]
    if len(loose) > most:
        takes = " ".join(place.name for place in places) or "flags"
        raise JaxpflError(f"{command} takes only {takes}, but also got {shown(loose[len(places)])}")
    for i, text in enumerate(loose):
        _check(places[min(i, len(places) - 1)], text)
    lacking = [flag for flag in flags if flag.default is REQUIRED and flag not in given and flag not in places]
    lacking = [*(place for place in places[len(loose) :] if place.default is REQUIRED), *lacking]
    if lacking:
        names = [f"{one.name} ({_listed(one.choices, 'or')})" if one.choices else one.name for one in lacking]
        raise JaxpflError(f"{command} requires {_listed(names, 'and')}: see {command} --help")
    return [*canonical, "--", *loose] if loose else canonical


def _is_flag(token: str) -> bool:
    """Return whether an argument is written like a flag; -0.1 and -inf are numbers."""
    number = token[1:].strip().lower() in ("inf", "infinity", "nan")
    return token.startswith("-") and token.lstrip("-")[:1].isalpha() and not number


def _check(flag: Flag, text: str) -> None:
    wrong = not text.strip() or (flag.choices and text not in flag.choices) or (flag.kind is Path and "\0" in text)
    value = 0.0
    if flag.kind in _NUMBERS:
        try:
            value = _NUMBERS[flag.kind][1](text)
        except ValueError:
            value = math.nan
    if wrong or math.isnan(value):
        wanted, suggested = _value_words(flag), _suggestion(text, flag.choices, 0.6)
        raise JaxpflError(f"{flag.name} must be {wanted}, got {_short(text)}{suggested}")
    most = _LARGEST_SEED if flag.name.endswith("seed") else LARGEST
    if flag.kind is int and not -most <= value <= most:
        limit = f"at most {most}" if value > 0 else f"at least {-most}"
        raise JaxpflError(f"{flag.name} must be {limit}, got {_short(text)}")
    try:
        trouble = flag.place.trouble(Path(text)) if flag.place is not None else None
    except OSError as error:
        raise JaxpflError(f"{flag.name} must be a valid path ({error.strerror}), got {_short(text)}") from None
    if trouble is not None:
        raise JaxpflError(f"{flag.name} must be {trouble}: {shown(text)}")


def _value_words(flag: Flag) -> str:
    if flag.choices:
        return _listed(flag.choices, "or")
    if flag.kind in _NUMBERS:
        return _NUMBERS[flag.kind][0]
    return "a path" if flag.kind is Path else "some text"


def _unknown(name: str, named: Iterable[str], places: Sequence[Flag], command: str) -> JaxpflError:
    names = sorted(named)
    bare = name.strip("-").replace("-", "_")
    meant = f"--{NAMES_ELSEWHERE.get(bare, bare).replace('_', '-')}"
    if meant in names:  # suggests a flag too if only the dashes are wrong, as in -lr
        note = NAME_NOTES.get(NAMES_ELSEWHERE.get(bare, ""), "")
        hint = f": did you mean {meant}{f' ({note})' if note else ''}?"
    elif bare in _METHOD_FLAGS and any(place.name in ("METHOD", "METHODS") for place in places):
        hint = f": give methods without a flag, such as {command} fedavg"
    elif not (hint := _suggestion(name, names, _SIMILAR)):
        few = len(names) <= _MOST_LISTED
        hint = f" (known: {', '.join(names)})" if few else f": {command} --help-all lists all flags"
    return JaxpflError(f"unknown flag {name} of {command}{hint}")


def _suggestion(text: str, names: Iterable[str], least: float) -> str:
    """Return the end of an error message, which suggests the most similar name; empty if none is similar enough.

    Args:
      text: unknown name.
      names: known names.
      least: minimum similarity of a suggestion, in [0, 1].
    """
    names = list(names)
    whole = {name.lstrip("-"): name for name in names}
    parts = {name.rpartition(".")[2]: name for name in names if "." in name}  # --epsilon for --privacy.epsilon
    known = parts | whole
    near = difflib.get_close_matches(text.lstrip("-"), known, n=1, cutoff=least)
    return f": did you mean {known[near[0]]}?" if near else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)")


def _listed(names: Sequence[str], last: str) -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else names[0]


HELP, HELP_ALL = ("-h", "--help"), "--help-all"


def bind_arguments(command: Callable[..., None], name: str, args: Sequence[str]) -> Callable[[], None]:
    """Return a function that calls a command with the given arguments, which `check_arguments` has returned.

    Raises:
      JaxpflError: if tyro cannot parse the arguments.
    """

    @functools.wraps(command)
    def later(*values: Any, **named: Any) -> Callable[[], None]:
        return functools.partial(command, *values, **named)

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            call = tyro.cli(later, prog=name, args=args, config=(DisallowNone,), registry=REGISTRY)
    except SystemExit:  # an error that `check_arguments` did not find; tyro prints it in a box of line characters
        text = "".join(" " if char in "│╭╮╰╯─|+" else char for char in said.getvalue())
        raise JaxpflError(f"{name}: {' '.join(text.split())}") from None
    print(said.getvalue(), end="", file=sys.stderr)
    return call


def print_completion(commands: Mapping[str, Callable[..., None]], shell: str) -> None:
    """Print tyro's completion script for a shell.

    Args:
      commands: full name of each command, such as ``jaxpfl papers run``, -> its function.
      shell: name of the shell, such as bash.
    """
    kinds: dict[str, list[Any]] = {}
    for name, command in commands.items():
        *group, own = name.split()[1:]
        kinds.setdefault(" ".join(group), []).append(Annotated[command, subcommand(name=own)])
    top = kinds.pop("")
    top += [Annotated[functools.reduce(operator.or_, inner), subcommand(name=group)] for group, inner in kinds.items()]
    with suppress(SystemExit):  # raised by tyro after it has printed the script
        tyro.cli(
            functools.reduce(operator.or_, top),
            prog="jaxpfl",
            args=["--tyro-print-completion", shell],
            registry=REGISTRY,
        )
