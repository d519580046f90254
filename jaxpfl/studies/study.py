"""Interface of an estimation study: its settings, and its results as tables, plots, series and a JSON summary."""

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
"""One item of the printed results: a rich table, or a line of plain text."""


NOT_PRIVATE = "requires epsilon"
"""Reason for refusing a privacy setting without epsilon."""


def within(default: Any, check: Callable[[str, Any], object], *, empty: bool = False) -> Any:
    """Define a field of a study's settings whose value is checked, unless it is None.

    Args:
      default: default of the field. If it is a tuple, every value of the field is checked.
      check: function ``(name, value)`` that raises a JaxpflError for a value that is not allowed; its result is
        ignored.
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
    """Refuse fields of a dataclass that would have no effect, if they differ from their defaults.

    Args:
      settings: the dataclass.
      names: names of the fields.
      why: reason for the error message, such as "requires --csv".

    Raises:
      JaxpflError: if such a field differs from its default; the message names it, the reason and the value.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise JaxpflError(f"{name} {why}: leave out {name} = {value}")


def check_uploads(uploads: int | None, clients: int) -> None:
    """Check that the number of uploading clients, if given, is between 2 and the number of clients.

    Raises:
      JaxpflError: if the number is out of range; the message gives the allowed range.
    """
    if uploads is not None and not 2 <= uploads <= clients:
        raise JaxpflError(f"uploads must be between 2 and the number of clients ({clients}), got {uploads}")


class Settings:
    """Base class for a study's settings: a frozen dataclass whose fields have checks (see `within`)."""

    def check(self) -> Any:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
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
    """Results of one run of a study.

    Attributes:
      json: the summary; ``study`` is the name in the registry, and ``settings`` are the run's settings.
      tables: function that returns the tables and lines to print, in this order.
      plots: function ``folder -> paths`` that draws the plots into the folder, and writes other files into its parent
        folder.
      series: errors in every repetition by name, leaves [repetitions, ...]; empty for a study without repetitions.
        Repetition r does not depend on the number of repetitions, so the series of a longer run begins with the series
        of a shorter run.
      files: text that lists the output folder's contents, printed after the run, such as ``summary.json, plots/``.
      hint: line that is printed last if the user gives no output folder.
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
      data: the data, in the form that the study's ``results`` accepts.
      arrays: arrays that determine the data; None if the settings ask for simulated data.
    """

    data: Any
    arrays: Any


@dataclass(frozen=True)
class Study:
    """A registered study.

    Attributes:
      settings: a frozen dataclass. Its fields are the flags, and the fields' docstrings are the flags' help. Its method
        ``check`` raises a JaxpflError for values that are not allowed.
      results: function ``settings -> Results`` that runs the study. Further arguments are the options, if ``options``
        is not None, and the data, if ``reads`` is not None.
      options: a frozen dataclass of `Options`, whose fields are flags too; None for a study without options.
      reads: function ``settings -> Read`` that reads the data on which the results depend; None for a study that draws
        its data.
    """

    settings: type[Any]
    results: Callable[..., Results]
    options: type[Options] | None = None
    reads: Callable[[Any], Read] | None = None

    def run(self, settings: Any = None, options: Options | None = None, read: Read | None = None) -> Results:
        """Run the study.

        Args:
          settings: settings of the study; None uses the defaults.
          options: options of the study; None uses their defaults. Ignored by a study without options.
          read: data that were already read by ``reads``; by default, this function calls ``reads``. Ignored by a study
            that draws its data.

        Raises:
          JaxpflError: as in the settings' ``check``, and if the seed does not fit in 32 bits.
        """
        given = self.settings() if settings is None else settings
        if hasattr(given, "seed"):
            checks.seed("seed", given.seed)
        more: list[Any] = []
        if self.options is not None:
            more.append(self.options() if options is None else options)
        if self.reads is not None:
            more.append((self.reads(given) if read is None else read).data)
        from jaxpfl.core import full_precision  # late, because it imports jax

        return full_precision.products(self.results)(given, *more)

    def arguments(self, settings: Any, options: Options | None = None) -> Iterator[str]:
        """Command-line arguments of ``jaxpfl estimate`` for settings and options that differ from their defaults.

        Paths are absolute, so that the command works in every folder.
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
