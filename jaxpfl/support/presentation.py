"""Look of the tables and plots of every command."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jaxpfl.support.errors import JaxpflError, printable, writing
from jaxpfl.support.files import opened
from jaxpfl.support.partial import partial

# The validated eight-slot categorical order of this project's plots; a method keeps its colour in every plot of a run.
COLORS = ("#2a78d6", "#1baa7a", "#d99a00", "#6b4ae0", "#d8433f", "#1f9fb8", "#c2569b", "#6f7f2b")
INK, GRID = "#333333", "#e6e6e6"


def shades(count: int) -> list[str]:
    """``count`` colours: the eight of `COLORS`, then darker, then lighter variants of them, and so on in turn.

    Examples:
      >>> len(set(shades(24)))
      24
    """

    def shade(color: str, level: int) -> str:
        parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        if level % 3 == 1:
            parts = [0.55 * part for part in parts]
        elif level % 3 == 2:
            parts = [255 - 0.5 * (255 - part) for part in parts]
        return "#" + "".join(f"{round(part):02x}" for part in parts)

    return [shade(COLORS[i % len(COLORS)], i // len(COLORS)) for i in range(count)]


def columns() -> int:
    """Width of the terminal in columns, or the value of COLUMNS; at least 20."""
    return max(20, shutil.get_terminal_size().columns)


def filled(text: str, indent: str = "", widest: int | None = None) -> list[str]:
    """A paragraph wrapped to the terminal's width, each line with the given indent."""
    width = columns() if widest is None else min(widest, columns())
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def shown_seconds(seconds: float | None) -> str:
    """Seconds with three digits at most; a dash for those that were not measured."""
    return "-" if seconds is None else f"{seconds:.{1 if seconds < 9.95 else 0}f}"


def new_table(title: str, caption: str | None = None) -> Any:
    """An empty rich table with a title and a caption."""
    from rich import box

    from jaxpfl.support.console import Table

    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def new_axes(xlabel: str, ylabel: str, title: str) -> tuple[Any, Any]:
    """A matplotlib figure with a single pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    entitle(axes, title)
    plain(axes)
    return figure, axes


def unmarked(text: str) -> str:
    """A text of the user's as rich shows it: without control characters, and no markup between brackets."""
    from rich.markup import escape

    return escape(printable(text, 300))


def literal(text: str) -> str:
    """A text of the user's as a picture shows it: without control characters, and no formula between dollars."""
    return printable(text, 300).replace("$", r"\$")


def entitle(axes: Any, title: str) -> None:
    """Set the title, left-aligned above the axes."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def plain(axes: Any) -> None:
    """Apply this project's plot style: two spines and a light grid of values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Any, folder: Path, name: str) -> Path:
    """Write ``folder/name.png`` as in `save_png`, but create no folder except the last.

    Results whose folder is taken away while they are written must not go on in another, of which nothing else is.
    """
    path = folder / f"{name}.png"
    with writing(path):
        folder.mkdir(exist_ok=True)
    return _write(figure, path)


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
    """The command that drew a picture; None for a picture without one, and for other files."""
    try:
        with opened(path) as file:
            head = file.read(4096)  # text stands before the pixels
    except OSError:
        return None
    found = re.search(rb"(?s)(....)tEXt(Source\x00.*)", head) if head.startswith(_PNG) else None
    return found[2][7 : int.from_bytes(found[1])].decode(errors="replace") if found else None


def save_png(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, atomically; a missing folder is created.

    Raises:
      JaxpflError: the file cannot be written.
    """
    if not path.name or path.is_dir():
        raise JaxpflError(f"cannot write to {path}: it is a folder")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return _write(figure, path)


def _write(figure: Any, path: Path) -> Path:
    with writing(path), partial(path) as place:
        figure.savefig(place, dpi=150, format="png", metadata={"Source": _SIGNATURE.get()})
    return path
