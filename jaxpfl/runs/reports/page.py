"""A self-contained HTML page: sections of paragraphs, tables, figures and code, with the style and script included."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl.runs.sweep.results import Sheet
from jaxpfl.support.console import GRID, INK
from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import contents

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SIZE = re.compile(r" ?([kMGTP]?)B\b")
_MOST_CHARACTERS = 2000


class Section(NamedTuple):
    """A section of a page.

    Attributes:
      title: heading of the section.
      parts: HTML of the section's content, in order.
    """

    title: str
    parts: Sequence[str]


def page(title: str, lead: Sequence[str], sections: Iterable[Section]) -> str:
    """Return the HTML of a page.

    Args:
      title: title of the page.
      lead: HTML below the title.
      sections: sections of the page, which a table of contents lists; empty sections are left out.
    """
    shown = [section for section in sections if section.parts]
    links = "".join(f'<li><a href="#s{i}">{text(section.title)}</a></li>' for i, section in enumerate(shown))
    body = "".join(
        f'<section aria-labelledby="s{i}"><h2 id="s{i}">{text(section.title)}</h2>{"".join(section.parts)}</section>'
        for i, section in enumerate(shown)
    )
    own = resources.files("jaxpfl.runs.reports")
    made = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="jaxpfl report">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{(own / 'page.css').read_text()}</style></head>\n"
        f"<body><header><h1>{text(title)}</h1>{''.join(lead)}</header>"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n<main>{body}</main>\n'
        f"<script>{(own / 'page.js').read_text()}</script></body></html>\n"
    )
    return made.encode(errors="replace").decode()  # replaces lone surrogates, which UTF-8 cannot encode


def text(value: object) -> str:
    """Return a value as escaped HTML text; `printable` first replaces text that is unprintable or very long."""
    return html.escape(printable(str(value), _MOST_CHARACTERS))


def paragraph(words: object) -> str:
    """Return the HTML of a paragraph."""
    return f"<p>{text(words)}</p>"


def listing(items: Iterable[object]) -> str:
    """Return the HTML of a bulleted list; empty if there are no items."""
    rows = "".join(f"<li>{text(item)}</li>" for item in items)
    return f'<ul class="notes">{rows}</ul>' if rows else ""


def code(words: str) -> str:
    """Return the HTML of preformatted text, such as a command or the content of a file."""
    return f'<pre tabindex="0"><code>{html.escape(words)}</code></pre>'


def folded(title: str, *parts: str) -> str:
    """Return HTML in which the parts are hidden until the reader clicks on their title."""
    return f"<details><summary>{text(title)}</summary>{''.join(parts)}</details>"


def facts(values: Mapping[str, object]) -> str:
    """Return the HTML of a list of names and values; None is shown as a dash."""
    shown = {name: "-" if value is None else value for name, value in values.items()}
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in shown.items())
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    words: int = 1,
    bold: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """Return the HTML of a table that the reader can sort by any column; empty if there are no rows.

    Args:
      header: names of the columns.
      rows: the cells' strings. A cell that begins with a number is sorted by this number, even if a spread or unit
        follows.
      caption: explanation of the numbers.
      words: number of text columns, which come first; all other columns are numbers.
      bold: (row, column) of every cell in bold.
    """
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col"{_side(j, words)}><button type="button">{text(name)}</button></th>'
        for j, name in enumerate(header)
    )
    body = "".join(f"<tr>{_row(i, row, words, bold)}</tr>" for i, row in enumerate(rows))
    below = f"<caption>{text(caption)}</caption>" if caption else ""
    label = text(caption or ", ".join(header))
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{label}"><table class="sortable">{below}'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(number: int, cells: Sequence[str], words: int, bold: frozenset[tuple[int, int]]) -> str:
    parts = []
    for j, cell in enumerate(cells):
        tag, scope = ("th", ' scope="row"') if j == 0 else ("td", "")
        shown = f"<b>{text(cell)}</b>" if (number, j) in bold else text(cell)
        parts.append(f"<{tag}{scope}{_side(j, words)}{_key(cell) if j >= words else ''}>{shown}</{tag}>")
    return "".join(parts)


def _side(column: int, words: int) -> str:
    return "" if column < words else ' class="number"'


def _key(cell: str) -> str:
    """Return the HTML attribute with the number by which a cell is sorted; empty if the cell contains text.

    A size such as 2 MB is sorted by its number of bytes.
    """
    found = _NUMBER.match(cell)
    if not found:
        return ""
    size = _SIZE.match(cell[found.end() :])
    value = float(found[0]) * (1000 ** "BkMGTP".index(size[1] or "B") if size else 1)
    return f' data-key="{value!r}"' if math.isfinite(value) else ""


def picture(path: Path, label: str) -> str:
    """Return HTML with an embedded PNG file; empty if the file cannot be read.

    Args:
      path: path of the file.
      label: alternative text of the picture.
    """
    try:
        content = base64.b64encode(contents(path)).decode()
    except JaxpflError:
        return ""
    return f'<figure class="drawn"><img alt="{text(label)}" src="data:image/png;base64,{content}"></figure>'


_MOST_SHOWN = 40


def rich_table(given: Any) -> str:
    """Convert a rich table, whose text columns must come first, to HTML with the table's title as a heading."""
    columns = [[str(cell) for cell in column.cells] for column in given.columns]
    header = [str(column.header) for column in given.columns]
    words = sum(column.justify != "right" for column in given.columns)
    rows = list(zip(*columns, strict=True))
    title = f"<h3>{text(given.title)}</h3>" if given.title else ""
    return title + table(header, rows, caption=str(given.caption or ""), words=words)


def sheet_table(given: Sheet) -> str:
    """Return the HTML of a sweep's table; a long table is hidden until the reader opens it."""
    shown = table(given.header, given.rows, caption=given.note, words=given.words, bold=given.bold)
    return shown if len(given.rows) <= _MOST_SHOWN else folded(f"{len(given.rows)} rows", shown)


_PAGE_COLORS = {INK: "--ink", "#000000": "--ink", "#ffffff": "--paper", GRID: "--grid", "#fbfbfa": "--blank"}
"""Colors in figures -> the page's CSS variables that replace them, so that figures follow light and dark mode."""
_MOST_DOTS = 2000
"""Number of dots (or corners of bars) above which they are drawn as pixels; as SVG, a million would take 100 MB."""
_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


def svg(figure: Any, name: str) -> str:
    """Convert a matplotlib figure to SVG in HTML.

    The figure's title is moved from the figure into the HTML, so that it wraps on narrow screens.

    Args:
      figure: matplotlib figure; its title is removed.
      name: unique name of the figure in the page, with which all identifiers in the SVG begin.
    """
    import matplotlib

    label = figure.get_suptitle() or figure.axes[0].get_title(loc="left")
    if figure.get_suptitle():
        figure.suptitle("")
    else:
        figure.axes[0].set_title("", loc="left")
    buffer = io.StringIO()
    figure.patch.set_alpha(0)  # transparent, so that the page's background shows
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        for dots in axes.collections:
            dots.set_rasterized(max(len(dots.get_offsets()), len(dots.get_paths())) > _MOST_DOTS)
        corners = sum(len(patch.get_path().vertices) for patch in axes.patches)
        for patch in axes.patches:
            patch.set_rasterized(corners > _MOST_DOTS)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    found = buffer.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", name)
    found = re.sub(r'\bid="', f'id="{prefix}-', found)
    found = re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", found)
    for color, own in _PAGE_COLORS.items():
        found = re.sub(rf"{color}\b", f"var({own})", found, flags=re.IGNORECASE)
    # SVG text without a fill color is black, which would be unreadable in dark mode.
    found = re.sub(r'(<text [^>]*style=")(?![^"]*fill)', r"\1fill: var(--ink); ", found)
    found = re.sub(r"'DejaVu Sans'[^;\"]*", _FONT, found)
    size = re.search(r'viewBox="0 0 ([\d.]+)', found)
    wide = f"{float(size[1]) * 4 / 3:.0f}px" if size else "100%"
    found = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", found, count=2)
    opening = f'<svg role="img" aria-label="{text(label)}" style="width: {wide}"'
    # tabindex lets the reader scroll a wide figure with the keyboard on a narrow screen.
    return f'<figure tabindex="0"><figcaption>{text(label)}</figcaption>{found.replace("<svg", opening, 1)}</figure>'
