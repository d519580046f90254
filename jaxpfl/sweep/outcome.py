"""Outcome of a sweep whose runs are all there: its summary, written last."""

from __future__ import annotations

import math
from typing import Any

from jaxpfl import __version__, files
from jaxpfl.sweep.selection import select
from jaxpfl.sweep.summary import summarize
from jaxpfl.sweep.sweep import SUMMARY, Sweep


def finish(sweep: Sweep) -> dict[str, Any]:
    """Summarise a sweep and write what its folder lacks, ``summary.json`` last.

    Returns:
      The summary, as `summarize` gives it, with the folder and the version.
    """
    definition = sweep.definition
    records = sweep.in_order(sweep.journal().read())
    chosen = select(records, definition.searched) if definition.search.select == "validation" else {}
    groups = {record.group for record in records if record.rounds}
    seconds = math.fsum(record.seconds for record in records)
    summary = summarize(records, chosen, seeds=definition.searched, programs=len(groups), seconds=seconds)
    summary |= {"run_dir": str(sweep.folder), "version": __version__}
    files.write_json(sweep.folder / SUMMARY, summary)
    return summary
