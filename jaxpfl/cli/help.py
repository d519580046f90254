"""Output of ``--help``, wrapped to the terminal's width: usage, flags in groups, and methods."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docstring_parser

from jaxpfl.cli.estimate import Output
from jaxpfl.cli.parsing import REQUIRED, Flag
from jaxpfl.cli.training import Session, WriteFlags
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import DataConfig, RunConfig
from jaxpfl.studies.study import Options
from jaxpfl.support import console

if TYPE_CHECKING:
    from jaxpfl.algorithms import Method

_GROUPS = {
    DataConfig: "data",
    RunConfig: "work",
    PrivacyConfig: "privacy",
    ExecutionPlan: "execution",
    Output: "output",
    WriteFlags: "output",
    Session: "output",
}
_SETTINGS, _OWN = "settings", "options"
_ORDER = ("arguments", _OWN, _SETTINGS, "data", "work", "privacy", "execution", "output")
_OUTPUT = {"--output", "--json", "--plot", "--export"}
_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_WIDEST, _COLUMN = 100, 26
_MOST_NEEDED = {
    *("--data", "--data-dir", "--clients", "--classes-per-client", "--model"),
    *("--cohort", "--rounds", "--lr", "--seeds", "--set", "--grid", "--budget"),
    *("--privacy.epsilon", "--privacy.delta", "--output", "--resume", "--config", "--json"),
}
"""Flags of a run that ``--help`` shows. ``--help-all`` shows all flags."""


def group_help(name: str, text: str, commands: dict[str, str]) -> str:
    """Return the help text for a command group.

    Args:
      name: name of the group, such as ``jaxpfl privacy``.
      text: description of the group.
      commands: name of each command -> its purpose.
    """
    ending = f"{name} COMMAND --help explains a command's flags."
    lines = [*filled(f"usage: {name} COMMAND [flags]"), "", *filled(text), "", "commands"]
    return "\n".join([*lines, *table(commands.items()), "", *filled(ending)])


def command_help(
    name: str, command: Callable[..., Any], flags: Sequence[Flag], more: str = "", *, whole: bool = False
) -> str:
    """Return the help of one command.

    Args:
      name: full name of the command, such as ``jaxpfl run``.
      command: function of the command; the help begins with the text of its docstring.
      flags: flags of the command.
      more: text after the docstring, such as a list of the methods.
      whole: whether to show all flags of a run, not only the most needed ones.
    """
    places = [flag for flag in flags if flag.positional]
    shown = [flag.name if flag.default is REQUIRED else f"[{flag.name}{' ...' * flag.many}]" for flag in places]
    lines = [*filled(" ".join([f"usage: {name}", *shown, "[flags]"])), ""]
    for paragraph in _paragraphs(command):
        lines += [*filled(paragraph), ""]
    if more:
        lines += [more, ""]
    groups: dict[str, list[tuple[str, str]]] = {}
    whole |= not any(flag.owner is RunConfig for flag in flags)
    for flag in flags if whole else [flag for flag in flags if flag.positional or flag.name in _MOST_NEEDED]:
        groups.setdefault(_group(flag), []).append((label(flag), flag_text(flag)))
    column = _column(row for rows in groups.values() for row in rows)
    for group in sorted(groups, key=_ORDER.index):
        lines += [group, *table(groups[group], column), ""]
    if not whole:
        lines += [*filled(f"{name} --help-all explains all {len(flags)} flags."), ""]
    return "\n".join(lines[:-1])


def summary(command: Callable[..., Any]) -> str:
    """Return the first paragraph of a command's docstring."""
    return _paragraphs(command)[0]


def table(rows: Iterable[tuple[str, str]], column: int | None = None, *, one_line: bool = False) -> list[str]:
    """Format names and their descriptions as lines in two columns; after a long name, the description begins below it.

    Args:
      rows: pairs (name, text).
      column: column at which the texts begin; by default, after the longest name.
      one_line: whether to cut the texts so that each fits on one line.
    """
    rows, lines = list(rows), []
    column = column or _column(rows)
    for name, text in rows:
        wide = min(_WIDEST, console.columns()) - column
        text = textwrap.shorten(text, wide, placeholder=" ...") if one_line else text
        head, *rest = filled(text, " " * column) or [""]
        if len(name) + 4 > column:
            lines += [f"  {name}", head, *rest]
        else:
            lines += [f"  {name}".ljust(column) + head.strip(), *rest]
    return lines


def filled(text: str, indent: str = "") -> list[str]:
    """Wrap a paragraph into lines; each begins with the indent."""
    return console.filled(text, indent, _WIDEST)


def _paragraphs(command: Callable[..., Any]) -> list[str]:
    doc = docstring_parser.parse(inspect.getdoc(command) or "")
    text = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _group(flag: Flag) -> str:
    if flag.positional:
        return "arguments"
    if flag.name in _OUTPUT:
        return "output"
    if flag.owner is None or issubclass(flag.owner, Options):
        return _OWN
    owner: type = flag.owner  # the owner may be a base class of a class in `_GROUPS`
    return next((group for settings, group in _GROUPS.items() if issubclass(settings, owner)), _SETTINGS)


def label(flag: Flag) -> str:
    """Return a flag as it is typed, with a placeholder for its value, such as ``--rounds INT``."""
    if flag.positional:
        return flag.name
    if flag.kind is bool:
        return flag.off if flag.default is True else flag.name
    value = "CHOICE" if flag.choices else _KINDS.get(flag.kind, "TEXT")
    return f"{flag.name} {value if flag.place is None else flag.place.metavar}{' ...' * flag.many}"


def flag_text(flag: Flag) -> str:
    """Return the help text of a flag, with its choices and its default."""
    text = flag.text
    if flag.choices and not all(choice in text for choice in flag.choices):
        text = f"{text} One of {', '.join(flag.choices)}."
    if flag.default is REQUIRED:
        return f"{text} (required)"
    if flag.default is None or isinstance(flag.default, bool):  # the default is empty, or the text already describes it
        return text
    default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
    return f"{text} (default: {default})" if default else text


def _column(rows: Iterable[tuple[str, str]]) -> int:
    """Return the column at which texts begin: after the longest name, but at most `_COLUMN`."""
    return min(_COLUMN, max(len(name) for name, _ in rows) + 4)


def describe(args: Sequence[str]) -> str:
    """Describe the methods named in the arguments of a command; if none is named, list all methods."""
    from jaxpfl.algorithms import METHODS, get
    from jaxpfl.support.own_code import is_reference

    settings = {"--model", "--task", "--loss"}  # FILE.py:NAME after these flags is not a method
    places = [name for before, name in zip(["", *args], args, strict=False) if before not in settings]
    named = [get(name) for name in places if name in METHODS or is_reference(name)]
    if named:
        return "\n\n".join(map(_one, named))
    rows = [(method.name, _summary_of(method)) for method in METHODS.values()]
    heading = filled("methods (METHOD --help explains one, and its settings: --set METHOD.name=value)")
    return "\n".join([*heading, *table(rows, one_line=True)])


def _one(method: Method) -> str:
    texts = {field.name: _explained(field) for field in dataclasses.fields(method.hyper)}
    for param in docstring_parser.parse(method.build.__doc__ or "").params:
        texts |= dict.fromkeys(param.arg_name.split(", "), " ".join((param.description or "").split()))
    values = {field.name: f"{getattr(method.hyper, field.name):g}" for field in dataclasses.fields(method.hyper)}
    values |= {name: str(value) for name, value in method.options.items()}
    rows = [(f"{name}={value}", _plain(texts.get(name, ""))) for name, value in values.items()]
    heading = filled(f"{method.name}: {_summary_of(method)}")
    return "\n".join([*heading, "", f"settings of {method.name}, --set {method.name}.name=value", *table(rows)])


def _summary_of(method: Method) -> str:
    return _plain(docstring_parser.parse(method.build.__doc__ or "").short_description or "")


def _explained(field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    said = "set by --lr" if meta["is_rate"] else "not set by --lr" if meta["is_step"] else ""
    notes = [said] if said else []
    if meta["paper"] is not None:
        from jaxpfl.algorithms.parts.hyper import PAPER

        notes.append(f"{PAPER}: {meta['paper']:g}")
    return meta["doc"] + (f" ({'; '.join(notes)})" if notes else "")


def _plain(text: str) -> str:
    return text.replace("``", "").replace("`", "")
