"""``--explain-plan``: execution plan and memory of a run, with reasons; nothing is trained."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.execution_plan import explain
from jaxpfl.runs.setup import Experiment, require
from jaxpfl.support.presentation import new_table


def explain_plan(experiment: Experiment) -> dict[str, Any]:
    """Compile one round of each method and report the choices behind it.

    Returns:
      Method -> ``choices`` (rows of subject, choice, reason), ``memory`` (bytes of data, states and working memory),
      ``free`` (bytes available to a program, None if unknown), ``compile_seconds``, and ``exchange``: the bytes ``up``
      and ``down`` of one client in one round.

    Raises:
      JaxpflError: if a round would not fit in memory.
    """
    report = {}
    for name in experiment.methods:
        simulation = experiment.simulation(name)
        runs = require(experiment.config.seeds)
        began = time.perf_counter()
        held = simulation.memory(runs)
        report[name] = {
            "compile_seconds": time.perf_counter() - began,
            "exchange": dict(zip(("up", "down"), simulation.bytes_per_client(), strict=True)),
            "choices": [list(row) for row in explain(simulation.execution)],
            "memory": held,
            "free": memory.free(simulation.placement.devices),
        }
    return report


def print_explanation(console: Console, report: dict[str, Any]) -> None:
    """Print one table per method."""
    for name, entry in report.items():
        table = new_table(name)
        table.add_column("what", style="bold", no_wrap=True)
        table.add_column("choice")
        table.add_column("why")
        for row in entry["choices"]:
            table.add_row(*row)
        held = {what: memory.readable(amount) for what, amount in entry["memory"].items()}
        left = "free memory unknown" if entry["free"] is None else f"{memory.readable(entry['free'])} may be taken"
        table.add_row(
            "memory",
            f"{held['working']} for a round",
            f"beside {held['data']} of data, {held['states']} of client states; {left}",
        )
        table.add_row("compiling", f"{entry['compile_seconds']:.1f} s", "one program, whatever the number of rounds")
        up, down = (memory.readable(entry["exchange"][way]) for way in ("up", "down"))
        table.add_row("exchange", f"{up} up, {down} down", "of one client in one round, uncompressed")
        console.print(table)
