"""Explanation of a sweep before it runs: its groups of runs, their programs, memory and time.

The programs are compiled, and so are in the cache when the sweep runs; a few rounds of each are timed, and nothing is
written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpfl.engine import Simulation
from jaxpfl.runs.sweep.definition import Definition
from jaxpfl.runs.sweep.execute import Prepared, fewer, prepared
from jaxpfl.runs.sweep.halving import share_of_rounds
from jaxpfl.runs.sweep.loaded import Data
from jaxpfl.runs.sweep.plan import Group, groups_of, runs_of
from jaxpfl.support.console import new_table, unmarked
from jaxpfl.support.errors import JaxpflError, is_exhausted
from jaxpfl.support.files import jsonable
from jaxpfl.support.host_memory import readable

_SECONDS = 0.2
"""Time within which rounds are timed, at least one."""
_MOST_NAMED = 60


def explain_plan(definition: Definition) -> dict[str, Any]:
    """The groups of a sweep, each compiled and timed.

    Returns:
      ``{"groups": [{"name", "method", "settings", "runs", "rounds", "chunk", "program", "memory": {"data", "states",
      "working"}, "compile_seconds", "round_seconds", "minutes", "reason"}, ...], "runs", "programs", "minutes",
      "peak_memory", "later": {"runs", "minutes"}}``, strict JSON. ``settings`` are those that all runs of the group
      share, ``chunk`` is the number of runs at once, ``program`` a number that groups with one training program share,
      memory in bytes. ``minutes`` include the compilation just measured; under successive halving they are of the
      rounds that are run, and the programs of the fewer rows that go on are not counted. A group that cannot run has a
      ``reason``, and None for what is not known of it. ``later`` are the runs of the chosen settings from the seeds
      that the search leaves out, and at most so many minutes.
    """
    loaded, programs = Data(), _Programs()
    shares = {
        name: share_of_rounds(definition, name) if definition.search.halving else 1.0 for name in definition.methods
    }
    found = groups_of(definition, runs_of(definition))
    groups = [_explained(group, shares[group.method], loaded, programs) for group in found]
    able = [group for group in groups if not group["reason"]]
    peak = max((sum(group["memory"].values()) for group in able), default=None)
    later = _later(definition, able)
    return jsonable({
        "groups": groups,
        "runs": sum(group["runs"] for group in groups),
        "programs": len(programs.known),
        "minutes": sum(group["minutes"] for group in able),
        "peak_memory": peak,
        "later": later,
    })  # fmt: skip


class _Programs:
    """Training programs in the order in which they are met."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def number(self, digest: str) -> int:
        """The number of a program, from 1."""
        return self.known.setdefault(digest, len(self.known) + 1)


def _explained(group: Group, share: float, loaded: Data, programs: _Programs) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": group.name,
        "method": group.method,
        "settings": dict(group.static),
        "runs": len(group.runs),
    }
    unknown = ("rounds", "chunk", "program", "memory", "compile_seconds", "round_seconds", "minutes")
    try:
        return told | _measured(prepared(group, loaded), share, programs) | {"reason": ""}
    except Exception as error:
        if not is_exhausted(error) and not isinstance(error, JaxpflError):
            raise
        return told | dict.fromkeys(unknown) | {"reason": " ".join(str(error).split())}


def _measured(ready: Prepared, share: float, programs: _Programs) -> dict[str, Any]:
    """A group's programs, memory and time, in chunks where memory asks, for a share of its rounds."""
    runs = rows = len(ready.group.runs)
    while True:
        try:
            compiling, round_, scoring, simulation = _timed(ready, rows)
            break
        except Exception as error:
            if not is_exhausted(error) or rows == 1:
                raise
            rows = fewer(rows, runs)
    program, memory = programs.number(simulation.digest(rows)), simulation.memory(rows)
    if runs % rows:
        programs.number(ready.simulation(slice(runs % rows)).digest(runs % rows))
    seconds = compiling + runs / rows * (share * ready.rounds * round_ + scoring)
    return {
        "rounds": ready.rounds,
        "chunk": rows,
        "program": program,
        "memory": memory,
        "compile_seconds": compiling,
        "round_seconds": round_,
        "minutes": seconds / 60,
    }


def _timed(ready: Prepared, rows: int) -> tuple[float, float, float, Simulation]:
    """Seconds of the compilation, of a round of the first rows at once, and of their scores."""
    simulation, seeds = ready.simulation(slice(rows)), [run.seed for run in ready.group.runs[:rows]]
    began = time.perf_counter()
    state = simulation.init(seeds)
    simulation.compile(seeds, *ready.splits)
    compiling = time.perf_counter() - began
    state, _ = simulation.advance(state, 1)
    length, round_ = 1, 0.0
    while length <= ready.rounds:
        began = time.perf_counter()
        state, _ = simulation.advance(state, length)
        np.asarray(state.round)  # waits for the program
        round_ = (time.perf_counter() - began) / length
        if round_ * length > _SECONDS / 2:
            break
        length *= 2
    return compiling, round_, sum(_seconds(lambda s=s: simulation.evaluate(state, s)) for s in ready.splits), simulation


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for leaf in call().values():
        np.asarray(leaf["loss"])
    return time.perf_counter() - began


def _later(definition: Definition, able: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of the chosen settings from the other seeds; at most as slow as the method's slowest group."""
    seeds = len(definition.seeds) - len(definition.searched)
    if not seeds:
        return {"runs": 0, "minutes": 0.0}
    slowest = {
        method: max((group["minutes"] / group["runs"] for group in able if group["method"] == method), default=0.0)
        for method in definition.methods
    }
    chosen = sum(any(group["method"] == method for group in able) for method in definition.methods)
    return {"runs": chosen * seeds, "minutes": seeds * sum(slowest.values())}


def print_explanation(console: Any, report: dict[str, Any]) -> None:
    """Print what `explain_plan` found.

    Args:
      console: of rich.
      report: from `explain_plan`.
    """
    table = new_table("Groups of runs", "in brackets: runs at once, where memory does not hold all of a group")
    table.add_column("method", no_wrap=True)
    table.add_column("settings of all its runs")
    for name in ("runs", "rounds", "program", "memory", "compile", "a round", "minutes"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in report["groups"][:_MOST_NAMED]:
        table.add_row(*map(unmarked, _row(group)))
    console.print(table)
    if (more := len(report["groups"]) - _MOST_NAMED) > 0:
        console.print(f"and {more} more groups: --json has them", highlight=False)
    for reason, runs in _refused(report).items():
        console.print(f"{runs} runs cannot run: {reason}", highlight=False, soft_wrap=True, markup=False)
    able = sum(group["runs"] for group in report["groups"] if not group["reason"])
    programs = f"{report['programs']} program{'s' * (report['programs'] != 1)}"
    total = f"{able} runs, {programs}, about {_minutes(report['minutes'])}"
    if report["peak_memory"] is not None:
        total += f", {readable(report['peak_memory'])} of memory at most"
    console.print(total, highlight=False, soft_wrap=True)
    if report["later"]["runs"]:
        later = f"then {report['later']['runs']} runs of the chosen settings from the other seeds, at most "
        console.print(later + _minutes(report["later"]["minutes"]), highlight=False, soft_wrap=True)


def _refused(report: dict[str, Any]) -> dict[str, int]:
    """Number of runs that cannot run, by reason."""
    found: dict[str, int] = {}
    for group in report["groups"]:
        if group["reason"]:
            found[group["reason"]] = found.get(group["reason"], 0) + group["runs"]
    return found


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    settings = ", ".join(f"{name} = {value}" for name, value in group["settings"].items())
    named = (group["method"], settings)
    if group["reason"]:
        return (*named, str(group["runs"]), *["-"] * 6)
    runs = f"{group['runs']}" + (f" ({group['chunk']})" if group["chunk"] < group["runs"] else "")
    memory = readable(sum(group["memory"].values()))
    times = (f"{group['compile_seconds']:.1f} s", f"{1000 * group['round_seconds']:.3g} ms")
    return (*named, runs, str(group["rounds"]), str(group["program"]), memory, *times, f"{group['minutes']:.2g}")


def _minutes(minutes: float) -> str:
    return f"{60 * minutes:.0f} seconds" if minutes < 2 else f"{minutes:.0f} minutes"
