"""Faults that break a claim of privacy, planted one by one (``faults.toml``): a test sees each.

A fault replaces a text of the package's source in a copy. Most are seen in the default run. Without a fault, a test of
each file passes on the copy; the others pass in runs of their own.
"""

import compileall
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
KINDS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
FAULTS = {f"{kind}: {name}": fault for kind, faults in KINDS.items() for name, fault in faults.items()}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with its compiled modules."""
    found = importlib.util.find_spec("jaxpfl")
    copy = shutil.copytree(Path(found.origin).parent, tmp_path_factory.mktemp("planted") / "jaxpfl")
    assert compileall.compile_dir(copy, quiet=1)
    return copy


@pytest.fixture(scope="module")
def outcome(package: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Function of tests that runs them on the copy and returns pytest's exit status and its output."""
    # A changed module must not leave its compiled form behind.
    environment = {name: value for name, value in os.environ.items() if name != "JAXPFL_TESTS_UNTIL"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(Path(__file__).with_name("forked_pytest.py"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=TESTS.parent, env=environment) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None

        def run(*tests: str, slow: bool) -> tuple[int, str]:
            log = package.parent / "log"
            given = ["-m", "slow" if slow else "not slow", *(str(TESTS / test) for test in tests)]
            print(json.dumps([str(log), str(package.parent), given]), file=runner.stdin, flush=True)
            status = int(runner.stdout.readline())
            return status, log.read_text(errors="replace")

        yield run
        runner.stdin.close()


@pytest.mark.parametrize("slow", [False, True])
def test_without_a_fault_they_pass(outcome: Callable[..., tuple[int, str]], slow: bool) -> None:
    tests = [fault["test"] for fault in FAULTS.values() if fault.get("slow", False) == slow]
    status, output = outcome(*{test.partition("::")[0]: test for test in tests}.values(), slow=slow)
    assert status == 0, output


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(package: Path, outcome: Callable[..., tuple[int, str]], name: str) -> None:
    fault = FAULTS[name]
    path = package / fault["file"]
    sound, times = path.read_text(), path.stat()
    assert sound.count(fault["text"]) == 1, f"{path.name} has changed: give the fault its present text"
    try:
        path.write_text(sound.replace(fault["text"], fault["planted"]))
        status, output = outcome(fault["test"], slow=fault.get("slow", False))
    finally:
        path.write_text(sound)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert re.search(r"\d failed", output), output
    assert not re.search(r"NameError|ImportError|SyntaxError", output), output
