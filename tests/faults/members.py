"""Kills of a random member of a group: ``python tests/faults/members.py KIND|all KILLS MINUTES [OUTPUT.json]``.

``distributed`` is a run of two processes. At a random moment one of them gets a SIGKILL; the other must end by itself,
in one line; the same command then goes on, and must end with the numbers of a group that nothing disturbed. Goes on
from the counts that OUTPUT has, and stops once there are so many kills, or after so many minutes. Kill i of a kind
depends on the seed, the kind and i alone, but for the time that all takes.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import RUN, results, same

SEED = 24
FIRST = 0.3
"""Share of a group's time from which on kills strike; before, it imports."""
ENVIRON = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
JAXPFL = (sys.executable, "-m", "jaxpfl.cli")
KINDS: dict[str, tuple[str, ...]] = {
    "distributed": ("run", "adaped", *RUN[: RUN.index("--plan.devices")], "--rounds", "12"),
}


def commands(kind: str, folder: Path) -> list[list[str]]:
    """The command of each process that is started by hand, which goes on with what is in the folder."""
    own = [*JAXPFL, *KINDS[kind], "--output", str(folder), *["--resume"] * (folder / "config.json").exists()]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    return [[*own, "--distributed", address, "--processes", "2", "--process", str(i)] for i in range(2)]


def run(kind: str, folder: Path, cache: Path, kill: tuple[float, random.Random] | None = None) -> dict[str, Any]:
    """Run a group to its end.

    Args:
      kind: of `KINDS`.
      folder: of its results.
      cache: for compiled programs.
      kill: seconds after which a member is killed, and what chooses it; None for no kill.

    Raises:
      subprocess.TimeoutExpired: if a member is still there after five minutes.
    """
    began = time.monotonic()
    environ = os.environ | ENVIRON | {"XDG_CACHE_HOME": str(cache)}
    group: list[subprocess.Popen[str]] = []
    found: dict[str, Any] = {"killed": None}
    try:
        for command in commands(kind, folder):
            group.append(
                subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
        if kill is not None:
            with suppress(subprocess.TimeoutExpired):
                group[0].wait(kill[0])
            alive = [one.pid for one in group if one.poll() is None]
            if alive:
                number = kill[1].randrange(len(alive))
                with suppress(ProcessLookupError):
                    os.kill(alive[number], signal.SIGKILL)
                    found["killed"] = number
        found["said"] = [one.communicate(timeout=300)[1] for one in group]
        found["statuses"] = [one.returncode for one in group]
    finally:
        for one in group:
            one.kill()
            one.wait()
    return found | {"seconds": time.monotonic() - began}


def trial(kind: str, number: int, want: Any, seconds: float, place: Path) -> dict[str, Any]:
    """Kill a member, go on, and compare.

    Raises:
      AssertionError: for other numbers, a member that does not end, or more than a line of it.
    """
    folder, rng = place / "out", random.Random(f"{SEED} {kind} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    found = run(kind, folder, place / "cache", (rng.uniform(FIRST, 1.0) * seconds, rng))
    if found["killed"] is not None:
        for status, text in zip(found["statuses"], found["said"], strict=True):
            assert status in (0, 2, -9), f"status {status}: {text}"
            assert "Traceback" not in text, text
            assert status != 2 or text.strip().splitlines()[-1].startswith("error: "), text
    left = results(folder)
    same(left, None, want)
    again = run(kind, folder, place / "cache")
    assert set(again["statuses"]) == {0}, f"run again: {again['statuses']} {again['said']}"
    same(results(folder), want)
    return found


def kills(kind: str, most: int, minutes: float, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Counts of a kind after each kill, those before among them."""
    failures: list[str] = list(before.get("failures", ()))
    outcomes = collections.Counter[str](before.get("statuses", {}))
    members = collections.Counter[str](before.get("member", {}))
    if members.total() >= most:
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(kind, place / "cold", place / "cache")
        whole = run(kind, place / "whole", place / "cache")
        assert set(whole["statuses"]) == {0}, whole["said"]
        want, until, number = results(place / "whole"), time.monotonic() + 60 * minutes, int(before.get("trials", 0))
        while members.total() < most and time.monotonic() < until:
            try:
                found = trial(kind, number, want, whole["seconds"], place)
                if found["killed"] is not None:
                    members[str(found["killed"])] += 1
                    outcomes[" ".join(map(str, found["statuses"]))] += 1
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failures.append(f"kill {number}: {error}")
                print(kind, failures[-1], flush=True)
            number += 1
            told = {"kind": kind, "seed": SEED, "trials": number, "kills": members.total(), "member": dict(members)}
            yield told | {"statuses": dict(outcomes), "failures": failures}


def main() -> None:
    asked, most, minutes, *rest = sys.argv[1:]
    for kind in KINDS if asked == "all" else asked.split(","):
        output = Path(rest[0]) if rest else None
        known = (one for one in stored(output).get("members", []) if (one["kind"], one["seed"]) == (kind, SEED))
        for told in kills(kind, int(most), float(minutes), next(known, {})):
            print(json.dumps(told), flush=True)
            if output is not None:  # an interruption keeps them
                add(output, told)


def stored(output: Path | None) -> dict[str, Any]:
    """Counts of a file; none if there is no such file."""
    return json.loads(output.read_text()) if output is not None and output.exists() else {}


def add(output: Path, told: dict[str, Any]) -> None:
    """Put the counts of a kind into a file, in the place of those before."""
    about = stored(output)
    kept = [one for one in about.get("members", []) if one["kind"] != told["kind"]]
    about["members"] = sorted([*kept, told], key=lambda one: one["kind"])
    output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
