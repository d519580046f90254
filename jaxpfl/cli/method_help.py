"""Methods in ``--help``: a line each, or the named ones with every setting explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import docstring_parser

from jaxpfl.algorithms import METHODS, Method
from jaxpfl.algorithms.parts.hyper import PAPER
from jaxpfl.cli.help import filled, table


def describe(args: Sequence[str]) -> str:
    """Describe the methods among the arguments of a command, or else all."""
    named = [METHODS[name] for name in args if name in METHODS]
    return "\n\n".join(map(_one, named)) if named else _all()


def _all() -> str:
    rows = [(method.name, _summary(method).replace(". Models: ", ": ")) for method in METHODS.values()]
    heading = filled("methods (METHOD --help explains one, and its settings: --set METHOD.name=value)")
    return "\n".join([*heading, *table(rows, one_line=True)])


def _one(method: Method) -> str:
    texts = {field.name: _explained(field) for field in dataclasses.fields(method.hyper)}
    for param in docstring_parser.parse(method.build.__doc__ or "").params:
        texts |= dict.fromkeys(param.arg_name.split(", "), " ".join((param.description or "").split()))
    rows = [(f"{name}={value}", _plain(texts[name])) for name, value in _settings(method).items()]
    heading = filled(f"{method.name}: {_summary(method)}")
    return "\n".join([*heading, "", f"settings of {method.name}, --set {method.name}.name=value", *table(rows)])


def _summary(method: Method) -> str:
    return _plain(docstring_parser.parse(method.build.__doc__ or "").short_description or "")


def _explained(field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    said = "set by --lr" if meta["is_rate"] else "not set by --lr" if meta["is_step"] else ""
    notes = [said] if said else []
    if meta["paper"] is not None:
        notes.append(f"{PAPER}: {meta['paper']:g}")
    return meta["doc"] + (f" ({'; '.join(notes)})" if notes else "")


def _plain(text: str) -> str:
    return text.replace("``", "").replace("`", "")


def _settings(method: Method) -> dict[str, str]:
    return _values(method.hyper) | {name: str(value) for name, value in method.options.items()}


def _values(hyper: Any) -> dict[str, str]:
    return {field.name: f"{getattr(hyper, field.name):g}" for field in dataclasses.fields(hyper)}
