"""Arguments of ``jaxpfl estimate`` that give a study's settings and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpfl.studies.study import Options, Study


def arguments(study: Study, settings: Any, options: Options | None = None) -> Iterator[str]:
    """Arguments that give settings and options; those that a study has by itself are left out.

    Paths are absolute, so that the command means the same from another folder.

    Args:
      study: of the settings.
      settings: of one run.
      options: of one run; None for a study without.
    """
    yield from _of(settings, study.settings())
    if options is not None and study.options is not None:
        yield from _of(options, study.options())


def _of(given: Any, usual: Any) -> Iterator[str]:
    for field in dataclasses.fields(given):
        value, flag = getattr(given, field.name), f"--{field.name.replace('_', '-')}"
        if value == getattr(usual, field.name):
            continue
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        elif isinstance(value, tuple):
            yield from (flag, *map(_word, value))
        else:
            word = _word(value)
            yield from [f"{flag}={word}"] if word.startswith("-") else [flag, word]


def _word(value: Any) -> str:
    return str(value.absolute()) if isinstance(value, Path) else str(value)
