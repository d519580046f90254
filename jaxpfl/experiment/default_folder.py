"""Default run folder of a command."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from jaxpfl.experiment.config import RunConfig, to_json


def default_folder(command: str, config: RunConfig, methods: tuple[str, ...], resume: bool) -> Path:
    """Run folder ``runs/COMMAND-DATA-HASH``, with the hash of everything fixed on resume, and a new number if taken."""
    fixed = to_json(replace(config, rounds=None, checkpoint_every=0, data_dir=None))
    fixed.pop("plan")
    text = json.dumps([command, sorted(methods), fixed], sort_keys=True)
    data = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.data)
    first = Path("runs") / f"{command}-{data}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    latest, number = None, 1
    while (folder := first if number == 1 else first.with_name(f"{first.name}-{number}")).exists():
        latest, number = folder, number + 1
    return latest if resume and latest is not None else folder
