"""A self-contained HTML page: sections of paragraphs, tables, figures and code, with its style and script inside."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jaxpfl.support.errors import JaxpflError, printable
from jaxpfl.support.files import contents

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SIZE = re.compile(r" ?([kMGTP]?)B\b")
_MOST_CHARACTERS = 2000


class Section(NamedTuple):
    """A part of a page under a heading.

    Attributes:
      title: its heading.
      parts: HTML of its parts, in order.
    """

    title: str
    parts: Sequence[str]


def page(title: str, lead: Sequence[str], sections: Iterable[Section]) -> str:
    """The HTML text of a page.

    Args:
      title: of the page.
      lead: HTML below the title.
      sections: its parts; those without content are left out, and a contents list names the others.
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
    return made.encode(errors="replace").decode()  # JSON may hold half of a surrogate pair, which UTF-8 has not


def text(value: object) -> str:
    """A value as HTML text, without control characters."""
    return html.escape(printable(str(value), _MOST_CHARACTERS))


def paragraph(words: object) -> str:
    """A paragraph."""
    return f"<p>{text(words)}</p>"


def listing(items: Iterable[object]) -> str:
    """A list of sentences; nothing for none."""
    rows = "".join(f"<li>{text(item)}</li>" for item in items)
    return f'<ul class="notes">{rows}</ul>' if rows else ""


def code(words: str) -> str:
    """Commands or a file's text, as they stand."""
    return f'<pre tabindex="0"><code>{html.escape(words)}</code></pre>'


def folded(title: str, *parts: str) -> str:
    """Parts that are shown on demand."""
    return f"<details><summary>{text(title)}</summary>{''.join(parts)}</details>"


def facts(values: Mapping[str, object]) -> str:
    """Names and values."""
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
    """A table that the reader may sort by any column; nothing for no rows.

    Args:
      header: names of the columns.
      rows: texts of the cells; numbers sort by their value, also with a spread or a unit behind them.
      caption: the meaning of the numbers.
      words: number of the first columns, which are words.
      bold: (row, column) of the cells in bold.
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
    """Attribute by which a number is sorted: its value, in bytes where it is a size; none for words."""
    found = _NUMBER.match(cell)
    if not found:
        return ""
    size = _SIZE.match(cell[found.end() :])
    value = float(found[0]) * (1000 ** "BkMGTP".index(size[1] or "B") if size else 1)
    return f' data-key="{value!r}"' if math.isfinite(value) else ""


def picture(path: Path, label: str) -> str:
    """A PNG file, embedded; nothing for one that is not there.

    Args:
      path: of the file.
      label: its content in words.
    """
    try:
        content = base64.b64encode(contents(path)).decode()
    except JaxpflError:
        return ""
    return f'<figure class="drawn"><img alt="{text(label)}" src="data:image/png;base64,{content}"></figure>'
