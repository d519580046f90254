"""JSON whose objects name nothing twice: Python's own reader keeps the last of such values without a word."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from jaxpfl.support.errors import shown


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: for text that is no JSON, and an object with two values of one name.

    Examples:
      >>> parse('{"rounds": 3, "rounds": 4}')
      Traceback (most recent call last):
      ValueError: 'rounds' stands twice in one object
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} stands twice in one object")
    return named
