"""Plants code in each file of a checkpoint, and reads it: ``python tests/fuzz/planted.py FOLDER`` prints what came out.

A process of its own, as orbax leaves reads that it began before one failed, whose warnings come at any later time.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpfl import JaxpflError
from jaxpfl.engine import RunState
from jaxpfl.engine.state import Counts
from jaxpfl.runs.checkpoint import Checkpoints
from jaxpfl.support import files

ROUND = 2


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def planted(folder: Path, mark: Path) -> dict[Path, list[bytes]]:
    """Contents for each file of a checkpoint: a pickle, and metadata that name a class of the module ``evil``."""
    ways = {path: [pickle.dumps(Payload(mark))] for path in folder.rglob("*") if path.is_file()}
    for path, contents in ways.items():
        evil, number = re.subn(rb'"[a-z_]+(\.\w+)+"', b'"evil.Evil"', path.read_bytes())
        contents += [evil] if number else []
    return ways


def main(place: Path) -> dict[str, Any]:
    """Counts of what came out of the reads, and whether anything ran."""
    mark = place / "ran"
    (place / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: ...\n")
    sys.path.insert(0, str(place))
    like = RunState(
        jnp.arange(3.0), jnp.ones((2, 2)), Counts(jnp.zeros((2, 9), jnp.int32)), jnp.int32(ROUND), jnp.zeros(2)
    )
    folder = place / "checkpoints"
    Checkpoints(folder).save(ROUND, like, 1.0)
    ways = planted(folder / str(ROUND) / "state", mark)
    found = {"files": len(ways), "named": sum(len(contents) == 2 for contents in ways.values())}
    found |= {"read": 0, "refused": 0, "ran": 0}
    for path, contents in ways.items():
        good = path.read_bytes()
        for content in contents:
            path.write_bytes(content)
            files.write_checksums(folder / str(ROUND))
            try:
                state, _ = Checkpoints(folder).read(ROUND, like)
                np.testing.assert_array_equal(state.server, like.server)
                found["read"] += 1
            except JaxpflError:
                found["refused"] += 1
            found["ran"] += mark.exists()
        path.write_bytes(good)
    importlib.import_module("evil")
    assert mark.exists(), "the module could not have been found"
    mark.rmdir()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the pickle would not have run"
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(Path(sys.argv[1]))))
