"""Products of a lowered program, read off its text."""

from __future__ import annotations

import re


def products(text: str) -> list[tuple[str, str]]:
    """Precision and operand type of each product."""
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = [(re.search(r"precision = \[(\w+)", line), re.search(r"\(tensor<[\dx]*x(\w+)>", line)) for line in lines]
    assert all(kind for _, kind in found)
    return [(how[1] if how else "DEFAULT", kind[1]) for how, kind in found if kind]
