"""Chosen settings as config files, which ``jaxpfl run`` takes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.runs.config import RunConfig, to_json
from jaxpfl.runs.records import Value
from jaxpfl.runs.sweep.axes import applied
from jaxpfl.support.errors import JaxpflError, printable, unknown_name, writing
from jaxpfl.support.files import whole

_TABLES = ("privacy", "plan")


def best_config(
    base: RunConfig, method: str, settings: Mapping[str, Value], rounds: int | None = None, note: str = ""
) -> str:
    """The run of a method with a setting of a sweep, as the text of a TOML file: what differs from the defaults.

    Args:
      base: the run that all settings of the sweep share, its fields as given.
      method: name of the method.
      settings: the values on the axes, by field (``lr``, ``privacy.epsilon``) or hyper-parameter
        (``adaped.psi_init``); counts are numbers, not shares of the clients.
      rounds: of the run, where the sweep set them.
      note: a line of comment at the top.

    Raises:
      JaxpflError: for a setting that is neither a field of a run nor the method's.
    """
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    for axis, value in settings.items():
        owner, dot, _ = axis.partition(".")
        if (owner not in (*_TABLES, method)) if dot else (axis not in fields or axis in _TABLES):
            raise unknown_name(f"setting of {method}", axis, [*fields, f"{method}.NAME"])
        if axis == "cohort" and isinstance(value, str):
            raise JaxpflError(f"cohort must be a number of clients, got {value}: resolve the share first")
    config = applied(base, settings)
    values: dict[str, Any] = to_json(config if rounds is None else dataclasses.replace(config, rounds=rounds))
    values["set"] = [f"{method}.{name}={text}" for name, text in _entries(config.set, method).items()]
    default = to_json(RunConfig())
    changed = {name: value for name, value in values.items() if name not in _TABLES and value != default[name]}
    lines = [f"# {printable(note, 300)}"] * bool(note)
    lines += [f"{name} = {_toml(name, value)}" for name, value in {"methods": [method], **changed}.items()]
    for table in _TABLES:
        changed = {name: value for name, value in values[table].items() if value != default[table][name]}
        if changed:
            lines += ["", f"[{table}]", *(f"{name} = {_toml(name, value)}" for name, value in changed.items())]
    return "\n".join(lines) + "\n"


def write_best(folder: Path, method: str, text: str) -> Path:
    """Write ``folder/METHOD.toml``; a missing folder is created in the one above it.

    Raises:
      UnwritableError: if it cannot be written.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
    path = folder / f"{method}.toml"
    with whole(path) as file:
        file.write(text)
    return path


def _entries(given: tuple[str, ...], method: str) -> dict[str, str]:
    """The values of ``--set`` that are a method's, by name; one without a method's name is of the only method."""
    found = {}
    for entry in given:
        target, _, text = entry.partition("=")
        owner, dot, name = target.partition(".")
        if not dot or owner == method:
            found[name if dot else target] = text
    return found


def _toml(name: str, value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(name, one) for one in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if value is None:
        raise JaxpflError(f"{name} cannot be unset in a config file")
    return repr(value)
