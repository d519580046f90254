"""Files of a run folder that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpfl.errors import JaxpflError


@contextmanager
def whole(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears under its name only when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON with NaN as null, whole or not at all."""
    with whole(path) as file:
        json.dump(jsonable(value), file, indent=2)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
      JaxpflError: when the file is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise JaxpflError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def jsonable(value: Any) -> Any:
    """Arrays as lists, NumPy scalars as numbers, and what is not finite as None."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


class Records:
    """``metrics.jsonl``: one JSON object a line, of every method's rounds and evaluations, in the order of events."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, records: list[dict[str, Any]]) -> None:
        """Appends lines, on disk when the call returns."""
        with open(self.path, "a") as file:
            file.writelines(json.dumps(jsonable(record)) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last line cut by a kill is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise JaxpflError(f"{self.path} holds a line that is not JSON: {error}") from None

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrites the file with the wanted records only."""
        records = [record for record in self.read() if wanted(record)]
        with whole(self.path) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
