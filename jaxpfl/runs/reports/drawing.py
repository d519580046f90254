"""Matplotlib figures as SVG inside a page, in the page's colours by day and by night."""

from __future__ import annotations

import io
import re
from typing import Any

from jaxpfl.runs.reports.page import text
from jaxpfl.support.console import GRID, INK

_PAGE_COLORS = {INK: "--ink", "#000000": "--ink", "#ffffff": "--paper", GRID: "--grid", "#fbfbfa": "--blank"}
"""Colours of ink and paper in figures, and the page's own that stand for them."""
_MOST_DOTS = 2000
"""Dots, or corners of bars, beyond which they are a picture inside the figure: a million clients would be 100 MB."""
_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


def svg(figure: Any, name: str, label: str) -> str:
    """A figure as SVG in HTML.

    Args:
      figure: of matplotlib.
      name: of the figure, unique in the page: identifiers inside the SVG begin with it.
      label: its content in words, for who does not see it.
    """
    import matplotlib

    buffer = io.StringIO()
    figure.patch.set_alpha(0)  # the page's paper
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
    # Text without a colour of its own is black.
    found = re.sub(r'(<text [^>]*style=")(?![^"]*fill)', r"\1fill: var(--ink); ", found)
    found = re.sub(r"'DejaVu Sans'[^;\"]*", _FONT, found)
    size = re.search(r'viewBox="0 0 ([\d.]+)', found)
    wide = f"{float(size[1]) * 4 / 3:.0f}px" if size else "100%"
    found = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", found, count=2)
    opening = f'<svg role="img" aria-label="{text(label)}" style="width: {wide}"'
    # A wide figure scrolls on a narrow screen, by keys too.
    return f'<figure tabindex="0">{found.replace("<svg", opening, 1)}</figure>'
