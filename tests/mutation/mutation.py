"""Mutation testing: changes one place of a module at a time, and asks whether a test fails.

``python tests/mutation/mutation.py cover MAP AREA`` adds to a map of the lines that each test runs, by `coverage`;
``... run MAP JOURNAL AREA [--sample N] [--seed S] [--budget SECONDS]`` runs mutants that the journal does not have;
with ``--slow`` both are of the area's slow tests, in a map of their own, which survivors meet (``run --again``);
``... count JOURNAL AREA RECORD.json`` puts counts, rates and the survivors into a record, with the reasons that
survivors of the same change had there. AREA is privacy, engine or estimators; ``cover`` takes files of tests as well,
``run`` files of modules.

Every mutant has a process of its own, forked from one that has imported other people's packages alone, and folders of
its own for compiled programs, which would else be found and hide it. It is killed by the first failing test; it is
timed out by ten times the CPU time of its tests.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import covering
import jax
import mutants
import mutation_child
from covering import ROOT, Covered
from mutants import Mutant
from scipy.stats import beta

THIRD = ("flax", "optax", "scipy.stats", "scipy.optimize", "dp_accounting", "hypothesis", "sklearn", "pandas", "yaml")
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
SPARE, TIMES = 30, 10
"""Seconds of CPU time that a mutant has beside so many times those of its tests."""


class Trial(NamedTuple):
    """A mutant of a file, with the tests that it meets and their seconds."""

    file: str
    mutant: Mutant | None
    tests: list[str]
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.file}:{self.mutant.name if self.mutant else 'whole'}"


def chosen(files: Sequence[str], sample: int, seed: int) -> list[tuple[str, Mutant]]:
    """Mutants of the files: all, or a sample that has each file and kind of change in its share."""
    rng = random.Random(seed)
    known = [(file, one) for file in files for one in mutants.all_of(_text(file))]
    if not sample or sample >= len(known):
        return known
    rng.shuffle(known)
    known.sort(key=lambda one: (one[0], one[1].kind))  # shuffled within file and kind
    step, start = len(known) / sample, rng.random()
    return [known[int((start + i) * step)] for i in range(sample)]


def tests_of(file: str, mutant: Mutant | None, covered: Sequence[Covered], budget: float) -> Trial:
    """The tests of a mutant: those that run its line, then those that run its function, then the rest of their files.

    Args:
      file: the mutated file.
      mutant: the change; none for the file as it is, with all tests that run any of it.
      covered: of every test.
      budget: seconds of CPU time after which no test is added.
    """
    running = [one for one in covered if one.lines.get(file)]
    span = _span(ROOT / file, mutant) if mutant else set()
    on_line = [one for one in running if mutant and mutant.line in one.lines[file]]
    in_function = [one for one in running if span & set(one.lines[file])]
    near = {one.test.partition("::")[0] for one in in_function or running}
    others = [one for one in covered if one.test.partition("::")[0] in near]
    order: dict[str, float] = {}
    for group in (on_line, in_function, running if not in_function else (), others):
        for one in sorted(group, key=lambda one: one.seconds):
            if sum(order.values()) < budget:
                order.setdefault(one.test, one.seconds)
    return Trial(file, mutant, list(order), sum(order.values()))


def _span(path: Path, mutant: Mutant) -> set[int]:
    """Lines of the body of the innermost function around a mutant."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, mutants.FUNCTIONS) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
            found = body if not found or len(body) < len(found) else found
    return found


def meet_all(trials: Iterable[Trial], workers: int, *, slow: bool) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Run trials in forked processes, and give each with what came out as it ends."""
    running: dict[int, tuple[Trial, Path, float]] = {}
    waiting = iter(trials)
    while True:
        while len(running) < workers and (trial := next(waiting, None)) is not None:
            place = Path(tempfile.mkdtemp(prefix="mutant-"))
            limit = SPARE + TIMES * trial.seconds
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                module = trial.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                of = (module, ROOT / trial.file, trial.mutant, trial.tests)
                mutation_child.meet(*of, place, limit, slow=slow)
            running[child] = trial, place, time.monotonic() + 10 * limit
        if not running:
            return
        child, status, used = os.wait4(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.1)
            for other, (_, _, end) in running.items():
                if time.monotonic() > end:  # waits for something that does not come
                    os.kill(other, signal.SIGKILL)
            continue
        trial, place, _ = running.pop(child)
        yield (
            trial,
            _outcome(place, os.waitstatus_to_exitcode(status)) | {"cpu": round(used.ru_utime + used.ru_stime, 1)},
        )
        shutil.rmtree(place, ignore_errors=True)


def _outcome(place: Path, status: int) -> dict[str, Any]:
    found = place / "found.json"
    if not found.exists():
        ended = TIMEOUT if status in (-signal.SIGXCPU, -signal.SIGKILL) else KILLED
        return {"outcome": ended, "test": f"the process ended with {status}"}
    told = json.loads(found.read_text())
    if told["status"] == 0:
        return {"outcome": SURVIVED, "test": ""}
    if told["status"] == 5:
        return {"outcome": SURVIVED, "test": "no test runs it"}
    output = (place / "output").read_text(errors="replace")
    return {"outcome": KILLED, "test": told["test"] or f"status {told['status']}: {output[-200:]}"}


def run(args: argparse.Namespace) -> None:
    """Run the mutants that the journal lacks, and add each to it as it ends."""
    covered = covering.read(args.map)
    sources = {file: _checksum(file) for file in args.files}
    done = {one["name"]: one for one in records(args.journal) if one["source"] == sources.get(one["file"])}
    wanted = [(file, None) for file in args.files] if args.whole else chosen(args.files, args.sample, args.seed)
    trials = [tests_of(file, one, covered, args.budget) for file, one in wanted]
    random.Random(args.seed).shuffle(trials)  # those that have run when it is stopped are a sample as well
    part, parts = map(int, args.part.split("/"))
    trials = trials[part::parts]
    if args.again:
        trials = [one for one in trials if done.get(one.name, {}).get("outcome") == SURVIVED]
    else:
        trials = [one for one in trials if one.name not in done]
    print(f"{len(trials)} mutants to run", flush=True)
    with args.journal.open("a") as journal:
        for trial, found in meet_all(trials, args.workers, slow=args.slow):
            told = {"name": trial.name, "file": trial.file, "source": sources[trial.file]}
            told |= {"tests": len(trial.tests)} | found
            if trial.mutant is not None:
                told |= {name: getattr(trial.mutant, name) for name in ("line", "function", "kind", "change")}
            elif found["outcome"] != SURVIVED:
                print(f"{trial.file}: as it is, a test fails: {found['test']}", file=sys.stderr)
            print(json.dumps(told), file=journal, flush=True)


def _checksum(file: str) -> str:
    """That of a module's text, without which a mutant's name says nothing."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12]


def records(journal: Path) -> list[dict[str, Any]]:
    """The last record of each mutant."""
    return list({one["name"]: one for one in _lines(journal)}.values())


def _lines(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def counts(journal: Path) -> dict[str, Any]:
    """Counts for each file, the share killed with its 95 % interval (Clopper and Pearson), and the survivors."""
    known = [one for one in records(journal) if "line" in one]
    files = {
        file: dict(Counter(one["outcome"] for one in known if one["file"] == file))
        for file in sorted({one["file"] for one in known})
    }
    number = len(known)
    killed = sum(one["outcome"] != SURVIVED for one in known)
    low = float(beta.ppf(0.025, killed, number - killed + 1)) if killed else 0.0
    high = float(beta.ppf(0.975, killed + 1, number - killed)) if killed < number else 1.0
    names = ("file", "line", "function", "kind", "change")
    left = [{name: one[name] for name in names} for one in known if one["outcome"] == SURVIVED]
    left.sort(key=lambda one: (one["file"], one["line"]))
    first = Counter({one["name"]: one["outcome"] for one in reversed(_lines(journal)) if "line" in one}.values())
    share = {"killed": killed, "mutants": number, "share": round(killed / number, 4), "at first": dict(first)}
    return share | {"interval": [round(low, 4), round(high, 4)], "files": files, "survivors": left}


def record(journal: Path, area: str, output: Path) -> None:
    """Put the counts of an area into a record, in the place of earlier ones, whose reasons stay."""
    about = json.loads(output.read_text()) if output.exists() else {"areas": {}}
    before = about["areas"].get(area, {})
    names = ("file", "function", "kind", "change")
    reasons = {tuple(one[name] for name in names): one.get("why", "") for one in before.get("survivors", [])}
    told = counts(journal)
    for one in told["survivors"]:
        one["why"] = reasons.get(tuple(one[name] for name in names), "")
    of = len([one for file in covering.found(covering.AREAS[area].modules) for one in mutants.all_of(_text(file))])
    about["versions"] = {name: version(name) for name in ("jaxpfl", "jax", "pytest", "coverage", "dp-accounting")}
    about["areas"][area] = {"of": of} | told
    output.write_text(json.dumps(about, indent=1) + "\n")


def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True, dest="verb")
    cover = verbs.add_parser("cover")
    cover.add_argument("map", type=Path)
    cover.add_argument("files", nargs="+", metavar="AREA")
    running = verbs.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("journal", type=Path)
    running.add_argument("files", nargs="+", metavar="AREA")
    running.add_argument("--sample", type=int, default=0)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--budget", type=float, default=60.0)
    running.add_argument("--part", default="0/1", help="of as many, each to be run by a process of its own")
    running.add_argument("--again", action="store_true", help="those that have survived, with more tests by --budget")
    running.add_argument("--whole", action="store_true", help="the files as they are, whose tests must pass")
    for verb in (cover, running):
        verb.add_argument("--slow", action="store_true", help="of slow tests, for few methods, in a map of their own")
    counting = verbs.add_parser("count")
    counting.add_argument("journal", type=Path)
    counting.add_argument("area", choices=covering.AREAS)
    counting.add_argument("record", type=Path)
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.verb != "count" and args.files[0] in covering.AREAS:
        (area,) = args.files
        tests = "slow" if args.slow else "tests"
        args.files = covering.found(getattr(covering.AREAS[area], tests if args.verb == "cover" else "modules"))
    if args.verb == "count":
        record(args.journal, args.area, args.record)
        return
    programs = Path(tempfile.gettempdir(), "jax-programs-of-mutants")  # by JAX, whose names are of the programs' text
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for name in THIRD:
        importlib.import_module(name)
    if args.verb == "cover":
        known = covering.measured(args.map)
        covering.write(args.map, [one for one in args.files if one not in known], slow=args.slow)
    else:
        run(args)


if __name__ == "__main__":
    main()
