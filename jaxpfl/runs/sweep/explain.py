"""Explanation of a sweep before it runs: its groups of runs with their programs and memory.

The programs are compiled, and so are in the cache when the sweep runs; nothing is trained or written.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from jaxpfl.runs.sweep.definition import Definition
from jaxpfl.runs.sweep.execute import Data, fewer, prepared
from jaxpfl.runs.sweep.plan import Group, groups_of, runs_of
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, is_exhausted
from jaxpfl.support.files import jsonable
from jaxpfl.support.host_memory import readable

_MOST_NAMED = 60


def explain_plan(definition: Definition) -> dict[str, Any]:
    """The groups of a sweep, each compiled.

    Returns:
      ``{"groups": [{"name", "method", "settings", "runs", "rounds", "chunk", "program", "memory": {"data", "states",
      "working"}, "compile_seconds", "reason"}, ...], "runs", "programs", "peak_memory", "later"}``, strict JSON.
      ``settings`` are those that all runs of the group share, ``chunk`` is the number of runs at once, ``program`` a
      number that groups with one training program share, memory in bytes. A group that cannot run has a ``reason``,
      and None for what is not known of it. ``later`` counts the runs of the chosen settings from the seeds that the
      search leaves out.
    """
    loaded, programs = Data(), dict[str, int]()
    groups = [_explained(group, loaded, programs) for group in groups_of(definition, runs_of(definition))]
    able = [group for group in groups if not group["reason"]]
    methods = {group["method"] for group in able}
    return jsonable({
        "groups": groups,
        "runs": sum(group["runs"] for group in groups),
        "programs": len(programs),
        "peak_memory": max((sum(group["memory"].values()) for group in able), default=None),
        "later": len(methods) * (len(definition.seeds) - len(definition.searched)),
    })  # fmt: skip


def _explained(group: Group, loaded: Data, programs: dict[str, int]) -> dict[str, Any]:
    """One group, its programs numbered from 1 in the order in which they are met."""
    known = {"name": group.name, "method": group.method, "settings": dict(group.static), "runs": len(group.runs)}
    try:
        return known | _compiled(group, loaded, programs) | {"reason": ""}
    except Exception as error:
        if not is_exhausted(error) and not isinstance(error, JaxpflError):
            raise
        unknown = dict.fromkeys(("rounds", "chunk", "program", "memory", "compile_seconds"))
        return known | unknown | {"reason": " ".join(str(error).split())}


def _compiled(group: Group, loaded: Data, programs: dict[str, int]) -> dict[str, Any]:
    """Programs and memory of a group, in chunks where memory asks."""
    ready, runs = prepared(group, loaded), len(group.runs)
    rows, began = runs, time.perf_counter()
    while True:
        simulation, seeds = ready.simulation(slice(rows)), [run.seed for run in group.runs[:rows]]
        try:
            simulation.init(seeds)
            simulation.compile(seeds, *ready.splits)
            break
        except Exception as error:
            if not is_exhausted(error) or rows == 1:
                raise
            rows = fewer(rows, runs)
    sizes = [rows, *[runs % rows] * (runs % rows > 0)]
    digests = [ready.simulation(slice(size)).digest(size) for size in sizes]
    numbers = [programs.setdefault(digest, len(programs) + 1) for digest in digests]
    return {
        "rounds": ready.rounds,
        "chunk": rows,
        "program": numbers[0],
        "memory": simulation.memory(rows),
        "compile_seconds": time.perf_counter() - began,
    }


def print_explanation(console: Any, report: dict[str, Any]) -> None:
    """Print what `explain_plan` found on a console of rich."""
    table = new_table("Groups of runs", "in brackets: runs at once, where memory does not hold all of a group")
    table.add_column("method", no_wrap=True)
    table.add_column("settings of all its runs")
    for name in ("runs", "rounds", "program", "memory", "compile"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in report["groups"][:_MOST_NAMED]:
        table.add_row(*map(unmarked, _row(group)))
    console.print(table)
    if (more := len(report["groups"]) - _MOST_NAMED) > 0:
        console.print(f"and {more} more groups: --json has them", highlight=False)
    refused = Counter[str]()
    for group in report["groups"]:
        refused[group["reason"]] += group["runs"]
    able, programs = refused.pop("", 0), report["programs"]
    for reason, runs in refused.items():
        console.print(f"{runs} runs cannot run: {reason}", highlight=False, soft_wrap=True, markup=False)
    total = f"{able} runs, {programs} program{'s' * (programs != 1)}"
    if report["peak_memory"] is not None:
        total += f", {readable(report['peak_memory'])} of memory at most"
    if report["later"]:
        total += f"; then {report['later']} runs of the chosen settings from the other seeds"
    console.print(total, highlight=False, soft_wrap=True)


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    settings = ", ".join(f"{name} = {value}" for name, value in group["settings"].items())
    if group["reason"]:
        return (group["method"], settings, str(group["runs"]), *["-"] * 4)
    runs = f"{group['runs']}" + (f" ({group['chunk']})" if group["chunk"] < group["runs"] else "")
    memory, compiling = readable(sum(group["memory"].values())), f"{group['compile_seconds']:.1f} s"
    return (group["method"], settings, runs, str(group["rounds"]), str(group["program"]), memory, compiling)
