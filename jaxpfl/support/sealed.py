"""JSON files with a checksum of what they hold: a part of one, or one changed by hand, is not taken for whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, writing

_SEAL = "crc32"
_AGAIN = "without the file it is run again"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with its checksum; folders above the file are made.

    Raises:
      UnwritableError: as on a full disk.
    """
    content = dict(files.jsonable(dict(content)))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, {**content, _SEAL: _sum(content)})


def read(path: Path, remedy: str = _AGAIN) -> dict[str, Any]:
    """The object of a file that `write` wrote.

    Args:
      path: of the file.
      remedy: against its loss, in words.

    Raises:
      JaxpflError: for a file that cannot be read, or that holds something else.
    """
    try:
        found = files.read_json(path)
    except JaxpflError as error:
        raise JaxpflError(f"{error}: {remedy}") from None
    if isinstance(found, dict) and _SEAL not in found:
        raise JaxpflError(f"{path} has no checksum, as files of before version 0.2: {remedy}")
    if not isinstance(found, dict) or found.pop(_SEAL) != _sum(found):
        raise JaxpflError(f"{path} is damaged, or was changed: {remedy}")
    return found


def _sum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
