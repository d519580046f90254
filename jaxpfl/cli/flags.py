"""Flags from the fields of dataclasses of settings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple, get_type_hints

import docstring_parser
from tyro import MISSING
from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

REGISTRY = ConstructorRegistry()


class SettingsField(NamedTuple):
    """A field of a dataclass of settings: its annotation, default (MISSING where it has none) and text."""

    name: str
    kind: Any
    default: Any
    text: str | None


def fields_of(settings: type, given: Any) -> list[SettingsField]:
    """The fields of a dataclass as text gives them, with the defaults of an instance where one is given."""
    types, texts = _types(settings), _texts(settings)
    found = [field for field in dataclasses.fields(settings) if field.init]
    return [
        SettingsField(
            f.name,
            f.metadata.get("text") or _kind(f, types[f.name]),
            _default(f, given),
            f.metadata.get("help") or texts.get(f.name),
        )
        for f in found
    ]


@REGISTRY.struct_rule
def _settings(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The fields of a dataclass in their form as text; tyro itself would read their annotations."""
    if not (dataclasses.is_dataclass(info.type) and info.type.__module__.startswith("jaxpfl.")):  # not tyro's own
        return None
    given = info.default if isinstance(info.default, info.type) else None

    flags = tuple(StructFieldSpec(*field) for field in fields_of(info.type, given))
    return StructConstructorSpec(info.type, flags)


def _kind(field: dataclasses.Field[Any], kind: Any) -> Any:
    """The annotation of a field, of one by place where its metadata say so."""
    by_place = field.metadata.get("by_place", False)
    return Annotated[Positional[kind], arg(metavar=field.name.upper())] if by_place else kind


def _default(field: dataclasses.Field[Any], given: Any) -> Any:
    if given is not None:
        return getattr(given, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


@functools.cache
def _types(settings: type) -> dict[str, Any]:
    """The annotations of the fields of a dataclass."""
    return get_type_hints(settings, include_extras=True)


@functools.cache  # a docstring is found by parsing the source of its class
def _texts(settings: Any) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if dataclasses.is_dataclass(kind):
            params = docstring_parser.parse_from_object(kind).params
            found |= {param.arg_name: " ".join(param.description.split()) for param in params if param.description}
    return found
