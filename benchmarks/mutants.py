"""Sample of mutants, each run through the tests that enter its function: ``python benchmarks/mutants.py OUT``.

A mutant is a copy of the package with one small change. Its tests run in the order of their cost until one fails. OUT
is written after each mutant, so that an interrupted run can continue. This is not a timing, and it needs a checkout.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FEWEST = 5  # tests of a mutant that run first, even if they are slow
PATIENCE = 300  # seconds after which tests that are still running count as failed
ALIVE = SURVIVED, NOT_ENTERED = "survived", "no test enters it"
MAP = "JAXPFL_MUTANTS_MAP"  # environment variable with the file to which the plugin below writes

# Operator -> the operator that replaces it.
SWAPPED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"},
    **{"in": "not in", "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+", "*": "/", "/": "*"},
    **{"//": "*", "%": "//", "**": "*", "&": "|", "|": "&"},
}
OPERATOR = re.compile(r"is not|not in|is|in|and|or|<<|>>|[<>=!]=|\*\*|//|[-<>+*/%&|@^]")


class Mutant(NamedTuple):
    """A change at one place of a file: the bytes from ``begin`` to ``end``, within a function or class."""

    file: str
    function: str
    line: int
    begin: int
    end: int
    old: str
    new: str


def mutants(path: Path, file: str) -> Iterator[Mutant]:
    """Yield the mutants of a file's functions. Raised errors, annotations and f-strings are not changed."""
    source = path.read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))].decode()

    def changes(node: Any) -> Iterator[tuple[int, int, str]]:
        """Yield the place and the new text of each change to a node itself."""
        operands: list[Any] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        elif isinstance(node, ast.BoolOp):
            operands = node.values
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield (*span(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1))
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield (*span(node.test), f"(not ({text(node.test)}))")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield (*span(node), f"({text(node.operand)})")
        elif isinstance(node, ast.Return) and node.value is not None and text(node.value) != "None":
            yield (*span(node.value), "None")
        elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
            begin, end = span(node.keywords[-1])
            before = source[:begin].rstrip()
            if before.endswith(b","):
                yield len(before) - 1, end, ""
        for left, right in itertools.pairwise(operands):
            begin, end = span(left)[1], span(right)[0]
            place = OPERATOR.search(source[begin:end].decode())
            if place and place[0] in SWAPPED:
                yield begin + place.start(), begin + place.end(), SWAPPED[place[0]]

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}" if function else node.name
        elif function:
            for begin, end, new in changes(node):
                line, old = source[:begin].count(b"\n") + 1, source[begin:end].decode()
                yield Mutant(file, function, line, begin, end, old, new)
        left = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", [])]
        for child in ast.iter_child_nodes(node):
            if child not in left:
                yield from visit(child, function)

    yield from visit(ast.parse(source), "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the functions of the package that a test enters, and its cost, if pytest loads this file as a plugin."""
    root = f"{ROOT / 'jaxpfl'}{os.sep}"
    entered: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.add(frame.f_code)

    began = time.process_time()
    sys.setprofile(see)
    threading.setprofile(see)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        names = {f"{code.co_filename.removeprefix(root)}::{code.co_qualname}" for code in entered}
        functions = sorted(name.replace("<locals>.", "") for name in names)
        with open(os.environ[MAP], "a") as file:
            print(json.dumps([item.nodeid, time.process_time() - began, functions]), file=file)


def test_map(path: Path, tests: list[str], options: list[str]) -> list[tuple[str, float, list[str]]]:
    """Return each test with its CPU seconds and the functions that it enters, measured once and kept in a file."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.mutants", "-q", *options]
        subprocess.run([*command, *tests], cwd=ROOT, env=os.environ | {MAP: str(part)}, check=True)
        part.rename(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def tests_of(mutant: Mutant, rows: list[tuple[str, float, list[str]]], seconds: float) -> list[str]:
    """Return the tests that enter a mutant's function, or a method of its class: first one case of each, by cost."""
    function = f"{mutant.file}::{mutant.function}."
    cases, ordered, chosen = Counter[str](), [], []
    for test, cost, names in sorted(rows, key=lambda row: row[1]):
        if any(f"{name}.".startswith(function) for name in names):
            cases[test.split("[")[0]] += 1
            ordered.append((cases[test.split("[")[0]], cost, test))
    for _, cost, test in sorted(ordered):
        seconds -= cost
        if seconds > 0 or len(chosen) < FEWEST:
            chosen.append(test)
    return chosen


class Runner:
    """Runner of tests on a folder's copy of the package, in forks of a process that has imported the other packages."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder, self.options = folder, options
        self._process = self._started()

    def _started(self) -> Any:
        # A changed module must not leave its compiled form behind.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.folder)}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, str(ROOT / "tests/mutation/forked_pytest.py")]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **pipes, cwd=ROOT, env=environment, start_new_session=True)

    def run(self, tests: list[str]) -> str:
        """Return the outcome of tests: ``SURVIVED``, the first failed test, or a note that they exceeded `PATIENCE`."""
        log = self.folder / "log"
        line = json.dumps([str(log), str(self.folder), [*self.options, *tests]])
        print(line, file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self.close()
            self._process = self._started()
            return f"no end in {PATIENCE} s"
        status = int(self._process.stdout.readline())
        if status == 0:
            return SURVIVED
        lines = log.read_text(errors="replace").splitlines()
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if not failed and status == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"the map of the tests is of other tests, delete it: {lines[-1]}")
        return failed[0] if failed else f"status {status}"

    def close(self) -> None:
        """End the process and its forks."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(mutant: Mutant, path: Path, tests: list[str], runner: Runner) -> str:
    """Return the outcome of a mutant's tests while the copy at ``path`` contains the mutant."""
    sound, times = path.read_bytes(), path.stat()
    path.write_bytes(sound[: mutant.begin] + mutant.new.encode() + sound[mutant.end :])
    try:
        outcome = runner.run(tests[:FEWEST]) if tests else NOT_ENTERED
        return runner.run(tests[FEWEST:]) if outcome == SURVIVED and tests[FEWEST:] else outcome
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main() -> None:
    """Run the mutants of the sample that have no outcome yet; print a line for each, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file of what became of each mutant, beside the map of the tests")
    parser.add_argument("--packages", nargs="+", default=["privacy", "uploads", "engine"], help="packages of jaxpfl")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders and files of tests, for the map")
    parser.add_argument("--seed", type=int, default=46, help="seed of the sample")
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample")
    parser.add_argument("--seconds", type=float, default=8, help="most CPU seconds of a mutant's tests")
    parser.add_argument("--again", action="store_true", help="run those that survived once more")
    given = parser.parse_args()
    for package in given.packages:
        if not (ROOT / "jaxpfl" / package).is_dir():
            parser.error(f"jaxpfl has no package {package}")
    options = ["-o", f"cache_dir={given.out.with_suffix('.cache').absolute()}", "-p", "xdist", "--assert=plain"]
    tests = test_map(given.out.with_suffix(".map"), given.tests, options)
    paths = [path for package in given.packages for path in sorted((ROOT / "jaxpfl" / package).rglob("*.py"))]
    every = [mutant for path in paths for mutant in mutants(path, path.relative_to(ROOT / "jaxpfl").as_posix())]
    random.Random(given.seed).shuffle(every)
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT / "jaxpfl", Path(folder) / "jaxpfl")
        runner = Runner(Path(folder), options)
        try:
            for nth, mutant in enumerate(every[: given.count], start=1):
                row = found.setdefault(str(nth), mutant._asdict() | {"outcome": None})
                if row | mutant._asdict() != row:
                    parser.error(f"{given.out} is of another sample, or of other code: give another file")
                if row["outcome"] is None or (given.again and row["outcome"] in ALIVE):
                    row["outcome"] = run(mutant, copy / mutant.file, tests_of(mutant, tests, given.seconds), runner)
                    given.out.with_suffix(".part").write_text(json.dumps(found, indent=1))
                    given.out.with_suffix(".part").rename(given.out)
                    print(
                        f"{nth} {mutant.file}:{mutant.line} {mutant.old!r} -> {mutant.new!r}: {row['outcome']}",
                        flush=True,
                    )
        finally:
            runner.close()
    for package in given.packages:
        of = [row["outcome"] for row in found.values() if row["file"].startswith(f"{package}/")]
        print(f"{package}: {sum(outcome not in ALIVE for outcome in of)} of {len(of)} killed")


if __name__ == "__main__":
    main()
