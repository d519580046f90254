"""What ``--help`` says of the methods: all of them in a list, or the one that is named with every setting explained."""

from __future__ import annotations

import dataclasses
from typing import Any

import docstring_parser

from jaxpfl.algorithms import METHODS, Method
from jaxpfl.algorithms.hyper import AveragingHyper


def describe(args: list[str]) -> str:
    """The methods among the arguments of a command, or else all."""
    named = [METHODS[name] for name in args if name in METHODS]
    return "\n\n".join(map(_one, named)) if named else _all()


def _all() -> str:
    common = _values(AveragingHyper())
    server = common["server_lr"]
    said = ", ".join(_pairs({name: value for name, value in common.items() if name != "server_lr"}))
    lines = [
        f"Methods, and their settings (--set METHOD.name=value). Each has {said}, and where its server has an "
        f"optimizer server_lr={server}, unless another value is said here; METHOD --help explains them:"
    ]
    for method in METHODS.values():
        own = {name: value for name, value in _settings(method).items() if common.get(name) != value}
        lines.append(f"- {method.name}{': ' if own else ''}{', '.join(_pairs(own))}")
    return "\n".join(lines)


def _one(method: Method) -> str:
    doc = docstring_parser.parse(method.build.__doc__ or "")
    texts = {field.name: field.metadata["doc"] for field in dataclasses.fields(method.hyper)}
    for param in doc.params:
        texts |= dict.fromkeys(param.arg_name.split(", "), " ".join((param.description or "").split()))
    what = _plain(doc.short_description or "")
    lines = [f"{method.name}: {what}", "", f"Its settings, --set {method.name}.name=value:"]
    for name, value in _settings(method).items():
        lines.append(f"- {name}={value}: {_plain(texts[name])}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("``", "").replace("`", "")


def _settings(method: Method) -> dict[str, str]:
    return _values(method.hyper) | {name: str(value) for name, value in method.options.items()}


def _values(hyper: Any) -> dict[str, str]:
    return {field.name: f"{getattr(hyper, field.name):g}" for field in dataclasses.fields(hyper)}


def _pairs(values: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]
