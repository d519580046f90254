"""Lines of the mutated packages that each test runs, by `coverage`, every file of tests in a process of its own.

In one process a file of tests would find programs that another has traced, and seem not to run the lines that they are
of. Within a file that remains, so mutants meet all tests of a file that has one which runs the changed line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest
from mutation_child import PLAIN, marked

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxpfl/privacy", "jaxpfl/engine", "jaxpfl/estimators")


class Area(NamedTuple):
    """Modules that are mutated together, and the files of the tests that may notice, as patterns.

    Attributes:
      modules: files of modules.
      tests: files whose tests of the default run every mutant meets.
      slow: files whose slow tests those meet that survive.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    slow: tuple[str, ...] = ()


AREAS: Mapping[str, Area] = {
    "privacy": Area(
        tuple(
            f"jaxpfl/privacy/{name}.py"
            for name in (
                *("accounting", "events", "calibration", "noise", "clipping", "mechanism", "discrete_gaussian"),
                *("claim", "private_sum", "guarded", "banded", "silos", "local_dp"),
            )
        ),
        (
            *("tests/privacy/test_*.py", "tests/cli/test_priva*.py", "tests/statistical/test_noise_scale.py"),
            *("tests/oracles/test_oracle_privacy.py", "tests/oracles/test_oracle_banded.py"),
            *("tests/oracles/test_oracle_step_noise.py", "tests/oracles/test_oracle_clip_gradients.py"),
            *("tests/oracles/test_oracle_examples.py", "tests/algorithms/test_private_em.py"),
            *("tests/estimators/test_histogram_private.py", "tests/engine/test_stopping.py"),
        ),
    ),
    "engine": Area(
        (
            *(f"jaxpfl/engine/{name}.py" for name in ("round", "cohort", "evaluate", "state", "stopping", "groups")),
            *("jaxpfl/engine/noise_keys.py", "jaxpfl/engine/streamed/*.py"),
        ),
        (
            *("tests/engine/test_*.py", "tests/test_fit.py", "tests/test_sums.py", "tests/test_client_times.py"),
            *(
                f"tests/oracles/test_oracle_{name}.py"
                for name in (
                    *("rounds", "groups", "availability", "idle", "zero_weight", "divergence", "unseen", "reference"),
                    *("quadratics", "single_client", "ifca", "fedem"),
                )
            ),
            *("tests/privacy/test_noise_*.py", "tests/conformance/test_same_numbers.py"),
            *("tests/conformance/test_clients_elsewhere.py", "tests/cli/test_clients_on_disk.py"),
            *("tests/multidevice/test_two_devices.py", "tests/oracles/test_oracle_fedbuff.py"),
            *("tests/data/test_stored.py", "tests/fuzz/test_mends.py"),
            *("tests/compression/test_uploads.py", "tests/oracles/test_oracle_compression.py"),
        ),
        (
            *("tests/conformance/test_clients_elsewhere.py", "tests/cli/test_clients_on_disk.py"),
            *("tests/data/test_beyond_memory.py", "tests/engine/test_streamed_clients.py"),
            *("tests/oracles/test_oracle_fedbuff.py", "tests/engine/test_asynchronous_rounds.py"),
            *("tests/multidevice/test_two_devices.py", "tests/conformance/test_same_numbers.py"),
            *("tests/engine/test_streamed_blocks.py", "tests/conformance/test_failed_clients.py"),
            "tests/conformance/test_memory.py",
        ),
    ),
    "estimators": Area(
        ("jaxpfl/estimators/*.py", "jaxpfl/estimators/*/*.py"),
        ("tests/estimators/test_*.py", "tests/studies/test_own_*.py"),
    ),
}


def found(patterns: Iterable[str]) -> list[str]:
    """Files of patterns below the repository, each once, in the order of the patterns.

    Raises:
      SystemExit: for a pattern of none.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        matches = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        if not matches:
            raise SystemExit(f"error: no file {pattern}")
        files |= dict.fromkeys(matches)
    return list(files)


class Covered(NamedTuple):
    """A test, its CPU time in seconds, and the lines that it runs of each file."""

    test: str
    seconds: float
    lines: dict[str, list[int]]


class _Contexts:
    """Switches coverage's context to each test and times it."""

    def __init__(self, measure: coverage.Coverage):
        self.measure = measure
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name, began = item.nodeid.partition("[")[0], time.process_time()
        self.measure.switch_context(name)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


def of_tests(file: str, *, slow: bool) -> list[Covered]:
    """Cover of each test of a file, by `marked`; the caller is a process that has not imported the package."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        measure = coverage.Coverage(data_file=None, source=[str(ROOT / one) for one in PACKAGES])
        contexts = _Contexts(measure)
        measure.start()
        marks, few = marked(slow)
        status = pytest.main([*PLAIN, *marks, file], plugins=[*few, contexts])
        measure.stop()
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{file}: its tests fail as they are")
    data = measure.get_data()
    lines: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        for line, names in data.contexts_by_lineno(path).items():
            for name in names:
                lines.setdefault(name, {}).setdefault(str(Path(path).relative_to(ROOT)), []).append(line)
    return [Covered(test, round(seconds, 3), lines.get(test, {})) for test, seconds in contexts.seconds.items()]


def read(path: Path) -> list[Covered]:
    """All tests of a map on disk."""
    return [Covered(*one) for line in path.read_text().splitlines() for one in json.loads(line)["tests"]]


def measured(path: Path) -> set[str]:
    """Files of tests that a map on disk has."""
    return {json.loads(line)["file"] for line in path.read_text().splitlines()} if path.exists() else set()


def write(path: Path, files: Iterable[str], *, slow: bool) -> None:
    """Add files of tests to a map on disk, one line each."""
    for file in files:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                line: dict[str, Any] = {"file": file, "tests": of_tests(file, slow=slow)}
                with path.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            print(f"{file}: not measured", file=sys.stderr)
