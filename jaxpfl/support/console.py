"""Terminal output: tables that lose no digits on a narrow terminal, and plain ASCII where nothing else can be shown."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

_SPELLED = {"±": "+-", "─": "-", "…": "...", "·": "."}
_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class Console(RichConsole):
    """Rich's console, with characters that an ASCII stream lacks replaced before columns are aligned.

    If the stream is no terminal and COLUMNS is unset, output is as wide as its tables. In a notebook it is text too: as
    HTML each line would be an output of its own, and the live display of a progress a warning.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        notebook = RichConsole().is_jupyter  # whose streams call themselves terminals
        super().__init__(stderr=stderr, quiet=quiet, force_jupyter=False, force_terminal=False if notebook else None)
        self.unbounded = not self.is_terminal and not os.environ.get("COLUMNS", "").isdecimal()

    def print(self, *objects: Any, **how: Any) -> None:
        """As in rich, without cropping lines to a width that the stream does not have."""
        how.setdefault("crop", not self.unbounded)
        super().print(*objects, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """As in rich, with the text reduced to ASCII if the stream requires it."""
        return super().render_str(spelled(text) if self.options.ascii_only else text, **how)


class Table(RichTable):
    """Rich's table; if its columns do not fit, each row becomes a paragraph with one line per column."""

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            self.box = _HEAD
        wide = options.update(width=10_000, max_width=10_000)
        for column in self.columns:
            if column.no_wrap:  # also a figure with a space in it, such as 97.9 ±0.2
                parts = (column.header, *column.cells)
                column.min_width = max(Measurement.get(console, wide, part).maximum for part in parts)
        least = Measurement.get(console, wide, self).minimum
        if least > options.max_width:
            if not getattr(console, "unbounded", False):
                yield from self._paragraphs()
                return
            options = options.update(width=least, max_width=least)
        yield from super().__rich_console__(console, options)

    def _paragraphs(self) -> Iterator[Any]:
        cells = [list(column.cells) for column in self.columns]
        names = [str(column.header) for column in self.columns]
        yield from (text for text in (self.title, "") if text is not None)
        widest = max(map(len, names[1:]), default=0)
        for row in zip(*cells, strict=True):
            yield f"[bold]{row[0]}[/]"
            for name, cell in zip(names[1:], row[1:], strict=True):
                yield f"  {name:<{widest}}  {cell}"
        yield from (text for text in ("", self.caption) if self.caption)


def spelled(text: str) -> str:
    """The text with each non-ASCII character that has an ASCII spelling replaced by it."""
    return text.translate(str.maketrans(_SPELLED))


def settle(environment: Mapping[str, str] = os.environ) -> None:
    """Switch the standard streams to ASCII in the C locale, and replace characters that cannot be encoded."""
    codecs.register_error("jaxpfl.spelled", _unencodable)
    # The first that is set says it; Python itself sets LC_CTYPE where LANG is C.
    asked = next((environment[name] for name in ("LC_ALL", "LANG") if environment.get(name)), "")
    for stream in (sys.stdout, sys.stderr):
        _adapt(stream, asked in ("C", "POSIX"))


def _adapt(stream: Any, ascii_only: bool) -> None:
    if hasattr(stream, "reconfigure"):  # tests and notebooks put others in its place
        encoding = {"encoding": "ascii"} if ascii_only else {}
        stream.reconfigure(errors="jaxpfl.spelled", **encoding)


def _unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELLED.get(char, "?") for char in error.object[error.start : error.end]), error.end
