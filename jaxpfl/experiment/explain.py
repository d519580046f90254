"""``--explain-plan``: how a run would execute, what it would hold in memory, and why; nothing is trained."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from jaxpfl.engine import device_memory as memory
from jaxpfl.engine.execution_plan import explain
from jaxpfl.experiment.setup import Experiment, require
from jaxpfl.presentation import new_table


def explain_plan(experiment: Experiment) -> dict[str, Any]:
    """Compiles one round of each method and reports the choices behind it.

    Returns:
      Method -> ``choices`` (rows of what, choice, why), ``memory`` (bytes of data, states and working memory),
      ``free`` (bytes a program may take, None where unknown) and ``compile_seconds``.

    Raises:
      JaxpflError: where a round would not fit into memory.
    """
    report = {}
    for name in experiment.methods:
        simulation = experiment.simulation(name)
        began = time.perf_counter()
        held = simulation.memory(require(experiment.config.seeds))
        report[name] = {
            "compile_seconds": time.perf_counter() - began,
            "choices": [list(row) for row in explain(simulation.execution)],
            "memory": held,
            "free": memory.free(simulation.placement.devices),
        }
    return report


def print_explanation(console: Console, report: dict[str, Any]) -> None:
    """One table for each method."""
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
        console.print(table)
