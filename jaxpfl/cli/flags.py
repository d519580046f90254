"""How the fields of settings become flags of ``--help``: texts as paragraphs, and defaults where they say more."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_type_hints

import docstring_parser
from tyro import MISSING
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

REGISTRY = ConstructorRegistry()


def _hint(default: str) -> str:
    """What follows a flag's text. Texts say what happens unless a flag is given, and so do switches."""
    return "" if default in ("None", "False", "True", "") else f"(default: {default})"


UNSAID = arg(help_behavior_hint=_hint)
"""Of a flag without which nothing happens, or what its text says."""


@REGISTRY.struct_rule
def _settings(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The fields of a dataclass; tyro itself keeps the line breaks of a text that is indented in its source."""
    if not (dataclasses.is_dataclass(info.type) and info.type.__module__.startswith("jaxpfl.")):  # not tyro's own
        return None
    types, texts = get_type_hints(info.type, include_extras=True), _texts(info.type)
    given = info.default if isinstance(info.default, info.type) else None

    def flag(field: dataclasses.Field[Any]) -> StructFieldSpec:
        kind: Any = types[field.name]
        kind = kind if dataclasses.is_dataclass(kind) else Annotated[kind, UNSAID]
        return StructFieldSpec(field.name, kind, _default(field, given), texts.get(field.name))

    return StructConstructorSpec(info.type, tuple(map(flag, dataclasses.fields(info.type))))


def _default(field: dataclasses.Field[Any], given: Any) -> Any:
    if given is not None:
        return getattr(given, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _texts(settings: Any) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if dataclasses.is_dataclass(kind):
            params = docstring_parser.parse_from_object(kind).params
            found |= {param.arg_name: " ".join(param.description.split()) for param in params if param.description}
    return found
