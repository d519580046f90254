"""Files of a run's config: TOML, YAML, or the ``config.json`` of a run folder."""

from __future__ import annotations

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxpfl.core.settings import text_words
from jaxpfl.data.sources.base import one_line
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, shown, unknown_name
from jaxpfl.support.files import contents

_MEMORY = 50  # memory of a text while it is parsed, in multiples of its length
_MOST_PARTS = 100_000

_TABLES = {"plan": ExecutionPlan, "privacy": PrivacyConfig}


_OF_A_RUN = ("config", "methods", "hyper", "data", "warm_start", "graph", "noise", "orders", "versions")
"""Entries of ``config.json`` in a run folder; those beside the config identify the run."""


class ConfigFile(NamedTuple):
    """A config file's content.

    Attributes:
      config: the config.
      methods: the methods that it names; none if the command line names them.
      hyper: method -> hyper-parameter -> value, as a run folder's ``config.json`` records them beside the config;
        `check_recorded` says whether they are still what the config gives.
      data: checksum of the clients of that run; None in other files.
    """

    config: RunConfig = RunConfig()
    methods: tuple[str, ...] = ()
    hyper: Mapping[str, Mapping[str, float | None]] = MappingProxyType({})
    data: int | None = None


def read(path: str | Path) -> ConfigFile:
    """A config file, or the ``config.json`` of a run folder.

    Raises:
      JaxpflError: as `read_file` and `from_mapping`, and for methods that are not a list of names.
    """
    values = read_file(path)
    hyper: dict[str, Any] = {}
    checksum = None
    if {"config", "methods"} <= values.keys():  # of a run folder: the config is one of its entries
        for name in values:
            if name not in _OF_A_RUN:
                raise unknown_name(f"entry of {path}", str(name), _OF_A_RUN)
        hyper, checksum = values.get("hyper", {}), values.get("data")
        if not isinstance(hyper, dict) or not all(isinstance(own, dict) for own in hyper.values()):
            raise JaxpflError(f"hyper in {path} must be a table of tables, got {shown(hyper)}")
        if not isinstance(values["config"], dict):
            raise JaxpflError(f"config in {path} must be a table, got {shown(values['config'])}")
        values = values["config"] | {"methods": values["methods"]}
    methods = values.pop("methods", [])
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise JaxpflError(f"methods in {path} must be a list of names, got {shown(methods)}")
    known = checksum if isinstance(checksum, int) else None
    return ConfigFile(from_mapping(values, str(path)), tuple(methods), hyper, known)


def read_file(path: str | Path) -> dict[str, Any]:
    """Parse a TOML or YAML config file, or the ``config.json`` of a run folder: names -> values, methods among them.

    Raises:
      JaxpflError: for a missing file, another suffix, or text that does not parse.
    """
    path = Path(path)
    try:
        text = contents(path, _MEMORY).decode()
    except UnicodeDecodeError as error:
        raise JaxpflError(f"cannot read {path}: {error}") from None
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = _yaml(text) or {}
        elif path.suffix == ".json":
            values = files.parse_json(text)
        else:
            raise JaxpflError(f"config {path} must end in .toml, .yaml, .yml or .json")
    except JaxpflError:
        raise
    except Exception as error:
        raise JaxpflError(f"config {path} does not parse: {one_line(error)}") from None
    _check_parts(values, path)
    if not isinstance(values, dict):
        raise JaxpflError(f"config {path} must be a table of names and values")
    return values


def _yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
      Exception: for text that does not parse, and for two values of one name in a mapping (PyYAML keeps the last).
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # before a merge (<<) adds what may be overridden
            names = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for (_, name), times in names.items():
                if times > 1:
                    raise ValueError(f"{shown(name)} stands twice in one mapping")
            return node

    return yaml.load(text, Loader)


def _check_parts(value: Any, path: Path) -> None:
    """Refuse YAML with aliases nested so deeply that no message could print it."""
    rest, parts = [value], 0
    while rest:
        part = rest.pop()
        parts += 1
        if parts > _MOST_PARTS:
            raise JaxpflError(f"config {path} holds more than {_MOST_PARTS} values, or one that holds itself")
        rest += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def from_mapping(values: dict[str, Any], where: str) -> RunConfig:
    """A config from a mapping of field names (dashes or underscores), such as a parsed file.

    Raises:
      JaxpflError: for an unknown field or a value of the wrong type.
    """
    fields = {f.name: text_words(f) for f in dataclasses.fields(RunConfig)}
    changes: dict[str, Any] = {}
    for raw, value in values.items():
        name = str(raw).replace("-", "_")
        if name not in fields:
            raise unknown_name(f"field in {where}", str(raw), fields)
        if name in changes:
            raise JaxpflError(f"{raw} in {where} stands twice, with a dash and with an underscore")
        if name in _TABLES:
            changes[name] = _table(name, value, where)
        elif name == "set":
            changes[name] = _settings(value, where)
        else:
            changes[name] = _typed(value, fields[name], f"{raw} in {where}")
    return RunConfig(**changes)


def _table(table: str, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise JaxpflError(f"{table} in {where} must be a table, got {shown(value)}")
    fields = {f.name: text_words(f) for f in dataclasses.fields(_TABLES[table])}
    changes = {}
    for raw, item in value.items():
        name = str(raw).replace("-", "_")
        if name not in fields:
            raise unknown_name(f"field of {table} in {where}", str(raw), fields)
        if name in changes:
            raise JaxpflError(f"{table}.{raw} in {where} stands twice, with a dash and with an underscore")
        changes[name] = _typed(item, fields[name], f"{table}.{raw} in {where}")
    return _TABLES[table](**changes)


def _settings(value: Any, where: str) -> tuple[str, ...]:
    """``set`` as a list of METHOD.name=value, or as a table (of tables)."""
    if isinstance(value, dict):
        entries = []
        for target, items in value.items():
            if isinstance(items, dict):
                entries += [f"{target}.{name}={_text(item)}" for name, item in items.items()]
            else:
                entries.append(f"{target}={_text(items)}")
        return tuple(entries)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise JaxpflError(f"set in {where} must be a list of METHOD.name=value or a table, got {shown(value)}")


def _text(value: Any) -> str:
    """A value as ``--set`` takes it: a list with commas between."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _typed(value: Any, annotation: str, what: str) -> Any:
    allowed = annotation.split(" | ")
    if value is None and "None" in allowed:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and "float" in allowed:
        try:
            return float(value)
        except OverflowError:
            raise JaxpflError(f"{what} must be {annotation}, got a whole number that no float holds") from None
    if isinstance(value, str) and "float" in allowed:  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    if type(value).__name__ in allowed or (isinstance(value, str) and annotation.startswith("Literal")):
        return value
    raise JaxpflError(f"{what} must be {annotation}, got {shown(value)}")
