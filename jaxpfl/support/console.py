"""Tables and plots for all commands. Tables lose no digits on a narrow terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable

from jaxpfl.support.errors import JaxpflError, printable, writing
from jaxpfl.support.files import opened
from jaxpfl.support.output_paths import partial

# The colors of categories in all plots, in a tested order. A method has the same color in every plot of a run.
COLORS = ("#2a78d6", "#1baa7a", "#d99a00", "#6b4ae0", "#d8433f", "#1f9fb8", "#c2569b", "#6f7f2b")
INK, GRID = "#333333", "#e6e6e6"


def shades(count: int) -> list[str]:
    """Return ``count`` colors: the eight of `COLORS`, then darker and lighter variants of them; 24 are distinct.

    Examples:
      >>> len(set(shades(24)))
      24
    """

    found = []
    for i in range(count):
        color, level = COLORS[i % len(COLORS)], i // len(COLORS) % 3
        parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        if level == 1:
            parts = [0.55 * part for part in parts]
        elif level == 2:
            parts = [255 - 0.5 * (255 - part) for part in parts]
        found.append("#" + "".join(f"{round(part):02x}" for part in parts))
    return found


def columns() -> int:
    """Return the terminal's width in columns, or the value of the environment variable COLUMNS; at least 20."""
    return max(20, shutil.get_terminal_size().columns)


def filled(text: str, indent: str = "", widest: int | None = None) -> list[str]:
    """Wrap a paragraph to the terminal's width, and indent each line."""
    width = columns() if widest is None else min(widest, columns())
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def format_seconds(seconds: float | None) -> str:
    """Format seconds with at most one decimal; a time that was not measured becomes a dash."""
    return "-" if seconds is None else f"{seconds:.{1 if seconds < 9.95 else 0}f}"


def new_table(title: str, caption: str | None = None) -> Any:
    """Return an empty rich table with a title and a caption."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def new_axes(xlabel: str, ylabel: str, title: str) -> tuple[Any, Any]:
    """Return a matplotlib figure with a single pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    entitle(axes, title)
    plain(axes)
    return figure, axes


def unmarked(text: str) -> str:
    """Escape a string for rich, so that control characters and markup in brackets are shown literally."""
    from rich.markup import escape

    return escape(printable(text, 300))


def literal(text: str) -> str:
    """Escape a string for a plot, so that control characters and formulas between dollars are shown literally."""
    return printable(text, 300).replace("$", r"\$")


def entitle(axes: Any, title: str) -> None:
    """Set the title, left-aligned above the axes."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", wrap=True)


def plain(axes: Any) -> None:
    """Apply this project's plot style: two spines, and light grid lines for the values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Any, folder: Path, name: str) -> Path:
    """Write ``folder/name.png`` with `save_png`, after creating ``folder`` but none of its parents.

    Parents are not created because a results folder that is removed during a run must not reappear with only the last
    files.
    """
    path = folder / f"{name}.png"
    with writing(path):
        folder.mkdir(exist_ok=True)
    return save_png(figure, path)


_SIGNATURE: ContextVar[str | None] = ContextVar("signature", default=None)
_PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def signed(command: str) -> Iterator[None]:
    """Record ``command`` in the metadata of every picture drawn in the block."""
    token = _SIGNATURE.set(command)
    try:
        yield
    finally:
        _SIGNATURE.reset(token)


def signature(path: Path) -> str | None:
    """Return the command recorded in a picture; None if there is none or if the file is not a picture."""
    try:
        with opened(path) as file:
            head = file.read(4096)  # text chunks come before the pixels
    except OSError:
        return None
    found = re.search(rb"(?s)(....)tEXt(Source\x00.*)", head) if head.startswith(_PNG) else None
    return found[2][7 : int.from_bytes(found[1])].decode(errors="replace") if found else None


def claim_file(path: Path | None, flag: str, command: str, ours: Callable[[Path], bool] | None = None) -> None:
    """Check that a file may be written: it must not exist, unless an earlier call of the same command wrote it.

    Args:
      path: file to write, or None for no file.
      flag: flag that names the file.
      command: command as the user typed it.
      ours: predicate that is true for a file that the command wrote; by default, for a picture with the command's
        signature.

    Raises:
      JaxpflError: if the path is a folder, or a file that something else wrote.
    """
    if path is None or not path.exists():
        return
    if path.is_dir():
        raise JaxpflError(f"{flag} {path} is a folder: name a file")
    if not (signature(path) == command if ours is None else ours(path)):
        raise JaxpflError(f"{flag} {path} exists but was not written by {command}: choose another path")


def save_png(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, atomically; a missing folder is created.

    Raises:
      JaxpflError: if the file cannot be written.
    """
    if not path.name or path.is_dir():
        raise JaxpflError(f"cannot write to {path}: it is a folder")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), partial(path) as place:
        figure.savefig(place, dpi=150, format="png", metadata={"Source": _SIGNATURE.get()})
    return path


class Console(RichConsole):
    """Rich's console, except that tables keep their full width if the stream is not a terminal and COLUMNS is unset.

    In a notebook, output is plain text, because rich's HTML would make each line a separate output and a live progress
    display would cause a warning.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        notebook = RichConsole().is_jupyter  # a notebook's streams report that they are terminals
        super().__init__(stderr=stderr, quiet=quiet, force_jupyter=False, force_terminal=False if notebook else None)
        self.unbounded = not self.is_terminal and not os.environ.get("COLUMNS", "").isdecimal()

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as rich does, without cropping lines if the stream has no width."""
        how.setdefault("crop", not self.unbounded)
        super().print(*objects, **how)


class Table(RichTable):
    """Rich's table, except that each row becomes a paragraph with one line per column if the terminal is too narrow."""

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=10_000, max_width=10_000)
        for column in self.columns:
            if column.no_wrap:  # a cell of such a column may contain spaces, for example 97.9 ±0.2
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


def settle() -> None:
    """Make the standard streams replace characters that they cannot encode, instead of raising an error."""
    streams: Any = sys.stdout, sys.stderr
    for stream in streams:
        if hasattr(stream, "reconfigure"):  # missing in the streams of tests and notebooks
            stream.reconfigure(errors="replace")
