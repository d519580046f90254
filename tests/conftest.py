"""Common set-up of all tests: two CPU devices, plots without a display, and compiled programs kept between tests."""

import ctypes
import functools
import gc
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["LC_ALL"] = "C.UTF-8"  # what is printed is the same wherever the tests run
os.environ.pop("JAX_LOGGING_LEVEL", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of commands import the package, half a second each without

import jaxlib

# The tests compile hundreds of small programs; XLA's older CPU emitters, which jaxlib 0.10 still has, take a third of
# the time for each, and one module for all of a program's kernels a tenth less than one for each.
if jaxlib.__version__.startswith("0.10."):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

import jax
import pytest

# Read by commands in processes of their own; what this process compiles is decided for each file below.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # they keep small programs too

from jaxpfl import use_cpu_cores
from jaxpfl.engine import execution_plan, programs

_RESIDENT = 2**30
"""Bytes of a worker from which the programs of one file are dropped before the next, which does not use them."""

_COMPUTING = (
    *("statistical/test_mnist_table.py", "statistical/test_regression_studies.py"),
    *("statistical/test_histogram_reference.py", "compression/test_total_variation.py"),
)
"""Files whose slow tests are simulations of many repetitions, which run for longer than they compile."""

_IN_TURN = ("cli/", "experiment/", "papers/", "statistical/test_digits_order.py", "test_readme.py", "test_tasks.py")
"""Files of commands and whole runs: that any number of clients at once gives the same is tested elsewhere, and with
their files in cli/test_clients_on_disk.py."""

_LONGEST = (
    *("conformance/test_same_numbers.py", "benchmarks/test_benchmarks.py", "mutation/test_faults_are_seen.py"),
    *("test_task_pages.py", "multiprocess/test_command_line.py", "privacy/test_sensitivity.py", "test_notebooks.py"),
    *("faults/test_faults.py", "conformance/test_gradients.py", "fuzz/test_fuzz.py"),
)
"""Files of a minute and a half and more, longest first. As a file has one worker, the last to begin would run alone."""

_UNTIL = "JAXPFL_TESTS_UNTIL"
"""Variable by which a run's workers learn when no further test begins, in seconds since 1970."""
_LATE = "begun after --most-minutes"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("time")
    group.addoption("--most-minutes", type=float, help="skip the tests that begin later, and count them in the report")
    group.addoption(
        "--begin-at",
        type=int,
        default=0,
        help="rotate the files but the longest, which come first, so that it is not always the same that are late",
    )


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.option.most_minutes
    if minutes is not None and "PYTEST_XDIST_WORKER" not in os.environ:  # workers take it from their parent
        os.environ[_UNTIL] = str(time.time() + 60 * minutes)
    # Programs that run for longer than they compile are as fast at level 1, and compile in a fifth; others are compiled
    # at level 0 (see `_of_the_file`).
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"
    # Programs for one device trace and compile in two thirds of the time. That two give the same numbers is a test of
    # its own; tests that ask for devices get them, as do those that use `two_devices`, and commands in processes.
    execution_plan._MOST_DEVICES = 1
    use_cpu_cores(2)
    assert len(jax.devices("cpu")) == 2  # starts the backend, so that a command run in a test finds these two
    # Many tests compile the same small programs, and compiling is most of their time.
    cache = getattr(config, "cache", None)
    if cache is None:  # pytest -p no:cacheprovider
        jax.config.update("jax_compilation_cache_dir", "")  # a choice, so that `fit` leaves the user's folder alone
        return
    os.environ["XDG_CACHE_HOME"] = str(cache.mkdir("xdg"))  # commands in processes of their own leave the user's alone
    # All workers, and the default and the slow run, share one folder: its path is a part of JAX's keys.
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = list(dict.fromkeys(item.path for item in items))
    if files and config.option.begin_at:
        first = config.option.begin_at % len(files)
        turn = {path: (place - first) % len(files) for place, path in enumerate(files)}
        turn |= {Path(__file__).parent / name: place - len(_LONGEST) for place, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: turn[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(_UNTIL, "inf")):
        pytest.skip(_LATE)


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: no collection need look at them. Tracing makes objects by the ten thousand.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts that tests of many cases recorded by ``record_property("counts", text)``, also in processes of xdist."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    told = [text for report in reports for name, text in report.user_properties if name == "counts"]
    if told:
        terminalreporter.section("counts")
    for text in told:
        terminalreporter.line(text)
    if late := [report for report in terminalreporter.stats.get("skipped", []) if _LATE in str(report.longrepr)]:
        terminalreporter.section("not run")
        terminalreporter.line(f"{len(late)} tests, as they would have {_LATE}, in")
        for path in sorted({report.nodeid.split("::")[0] for report in late}):
            terminalreporter.line(f"  {path}")


@pytest.fixture(scope="session", autouse=True)
def _patches_are_traced() -> Iterator[None]:
    """Programs that were traced without a patch of this package's functions, or with it, are not taken for others."""
    real, undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo

    def is_ours(target: Any) -> bool:
        name = target if isinstance(target, str) else getattr(target, "__module__", None) or target.__name__
        own = str(name).startswith("jaxpfl.") and target is not programs
        return own and not str(name).startswith(("jaxpfl.runs.", "jaxpfl.cli."))  # above all that is traced

    def patch(self: pytest.MonkeyPatch, target: Any, *more: Any, **options: Any) -> None:
        real(self, target, *more, **options)
        if is_ours(target):
            programs.clear()

    def end(self: pytest.MonkeyPatch) -> None:
        ours = any(is_ours(target) for target, *_ in self._setattr)
        undo(self)
        if ours:
            programs.clear()

    with pytest.MonkeyPatch.context() as both:
        both.setattr(pytest.MonkeyPatch, "setattr", patch)
        both.setattr(pytest.MonkeyPatch, "undo", end)
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """Has JAX compute in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets plans that do not say take both devices, also in the default run."""
    monkeypatch.setattr(execution_plan, "_MOST_DEVICES", 2)


@pytest.fixture(scope="module")
def clients_in_turn() -> Iterator[None]:
    """Trains small models one client and run after the other, as large ones: programs compile in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution_plan, "_CACHE_BYTES", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _of_the_file(request: pytest.FixtureRequest) -> None:
    """Clients in turn where that is enough; in the slow run, optimizations of what runs for longer than it compiles."""
    own = request.path.relative_to(Path(__file__).parent).as_posix()
    if own.startswith(_IN_TURN) and not own.startswith("cli/test_clients_on_disk.py"):
        request.getfixturevalue("clients_in_turn")
    computing = own.startswith(_COMPUTING) and request.config.option.markexpr != "not slow"
    jax.config.update("jax_disable_most_optimizations", not computing)


@pytest.fixture(scope="module", autouse=True)
def _drop_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep a worker below 2 GiB; dropped programs come back from the cache on disk."""
    yield
    for value in vars(request.module).values():  # runs that the tests of a file share, and their programs
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == request.module.__name__:
            value.cache_clear()
    if _resident() > _RESIDENT:
        programs.clear()
        jax.clear_caches()
        gc.collect()
        with suppress(OSError, AttributeError):  # elsewhere than with glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident() -> int:
    """Bytes of memory that this process holds; none where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
