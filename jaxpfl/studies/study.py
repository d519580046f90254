"""Interface of an estimation study: settings, and a run that returns tables, plots, series and a JSON summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.core import checks
from jaxpfl.support.errors import JaxpflError

Block: TypeAlias = Any
"""A printed part of the results: a rich table, or a line of plain text."""


NOT_PRIVATE = "requires epsilon"
"""Reason for refusing a privacy setting without epsilon."""


def within(default: Any, check: Callable[[str, Any], object], *, empty: bool = False) -> Any:
    """Define a field of a study's settings with a check of its value; None is not checked.

    Args:
      default: default of the field. If it is a tuple, every value of the field is checked.
      check: ``(name, value) -> anything``; raises a JaxpflError for a value that is not allowed.
      empty: whether a tuple may be empty.
    """
    return dataclasses.field(default=default, metadata={"check": check, "empty": empty})


def minimum(least: float) -> Callable[[str, float], None]:
    """Return a check that a number is finite and at least ``least``."""

    def check(name: str, value: float) -> None:
        if not (math.isfinite(value) and value >= least):
            raise JaxpflError(f"{name} must be at least {least:g} and finite, got {value}")

    return check


def refuse_given(settings: Any, names: Iterable[str], why: str) -> None:
    """Refuse fields of a dataclass that differ from their defaults, because they would have no effect.

    Raises:
      JaxpflError: naming the field, the reason and its value.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise JaxpflError(f"{name} {why}, got {value}")


def check_uploads(uploads: int | None, clients: int) -> None:
    """Check that the number of uploading clients, if given, is between 2 and the number of clients.

    Raises:
      JaxpflError: naming the allowed range.
    """
    if uploads is not None and not 2 <= uploads <= clients:
        raise JaxpflError(f"uploads must be between 2 and the number of clients ({clients}), got {uploads}")


class Settings:
    """Base of a study's settings: a frozen dataclass whose fields have checks (`within`)."""

    def check(self) -> Any:
        """Check the settings.

        Raises:
          JaxpflError: naming the setting, its value and the allowed values.
        """
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if "check" not in field.metadata or value is None:
                continue
            if value == () and not field.metadata["empty"]:
                raise JaxpflError(f"{field.name} must have at least one value, got none")
            for one in value if isinstance(value, tuple) else (value,):
                field.metadata["check"](field.name, one)


class Options:
    """Base class for a study's options: a dataclass of choices that are not simulation settings."""


class Results(NamedTuple):
    """Results of one run.

    Attributes:
      json: the summary; ``study`` is the registered name, and ``settings`` are the run's settings.
      tables: function that returns the printed tables and lines, in order.
      plots: ``folder -> paths``; draws the plots into the folder, and writes other files into its parent folder.
      series: errors of every repetition by name, leaves [repetitions, ...]. Repetition r does not depend on the number
        of repetitions, so a longer run begins with the series of a shorter one. Empty if nothing is repeated.
      files: contents of the output folder, as printed.
      hint: last line of the output if no output folder was given.
    """

    json: dict[str, Any]
    tables: Callable[[], Iterable[Block]]
    plots: Callable[[Path], list[Path]]
    series: Mapping[str, np.ndarray] = {}
    files: str = "summary.json, plots/"
    hint: str | None = None


class Read(NamedTuple):
    """Data that a study has read.

    Attributes:
      data: the data, as an argument of the study's ``results``.
      arrays: arrays on which the results depend; None if the settings say to draw the data.
    """

    data: Any
    arrays: Any


@dataclass(frozen=True)
class Study:
    """A registered study.

    Attributes:
      settings: a frozen dataclass. Its fields are the flags, with their docstrings as help; its ``check`` raises a
        JaxpflError for values that are not allowed.
      results: ``settings -> Results``. With ``options``, the options are a further argument; with ``reads``, the data.
      options: a frozen dataclass of `Options`, whose fields are flags too; None for a study without options.
      reads: ``settings -> Read``, the data on which the results depend; None for a study that draws its data.
    """

    settings: type[Any]
    results: Callable[..., Results]
    options: type[Options] | None = None
    reads: Callable[[Any], Read] | None = None

    def run(self, settings: Any = None, options: Options | None = None, read: Read | None = None) -> Results:
        """Run the study.

        Args:
          settings: the settings; by default the settings' defaults.
          options: the options; by default their defaults. None for a study without options.
          read: data of a study that reads data; by default they are read here.

        Raises:
          JaxpflError: as in the settings' ``check``; also for a seed outside 32 bits.
        """
        given = self.settings() if settings is None else settings
        if hasattr(given, "seed"):
            checks.seed("seed", given.seed)
        more: list[Any] = []
        if self.options is not None:
            more.append(self.options() if options is None else options)
        if self.reads is not None:
            more.append((self.reads(given) if read is None else read).data)
        from jaxpfl.core import full_precision  # imports jax, which settings and help do not need

        return full_precision.products(self.results)(given, *more)

    def arguments(self, settings: Any, options: Options | None = None) -> Iterator[str]:
        """Arguments of ``jaxpfl estimate`` for settings and options that differ from their defaults.

        Paths are absolute, so that the command works the same from another folder.
        """
        yield from _flags(settings, self.settings())
        if options is not None and self.options is not None:
            yield from _flags(options, self.options())


def _flags(given: Any, usual: Any) -> Iterator[str]:
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
