"""The forked process in which one mutant meets its tests."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, tree

MEMORY = 24 * 2**30
"""Bytes of address space; XLA reserves much that it never touches."""

PLAIN = (
    *("-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", "--override-ini=addopts=--strict-markers"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
"""Tests in one process; that imported plugins are not rewritten is no matter."""

FEW = ("local", "fedavg", "adaped", "fedbuff", "ifca")
"""Registered methods that slow tests of every method are run for; with the toys they use every part of the engine."""


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutated tree of one module, whose file is neither written nor read from bytecode."""

    def __init__(self, module: str, path: Path, mutant: Mutant | None):
        self.module, self.path = module, path
        self.tree = tree(path.read_text(encoding="utf-8"), mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        places = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=self, submodule_search_locations=places
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), vars(module))

    def get_source(self, fullname: str) -> str:
        """The tree as text, for readers of a function's source."""
        return ast.unparse(self.tree)


class Few:
    """Leaves out the parameters of a test that are registered methods other than `FEW`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from jaxpfl import METHODS

        left_out = METHODS.keys() - set(FEW)

        def kept(item: pytest.Item) -> bool:
            call = getattr(item, "callspec", None)
            values = call.params.values() if call else ()
            return not any(isinstance(name := getattr(v, "name", v), str) and name in left_out for v in values)

        items[:] = [item for item in items if kept(item)]


def marked(slow: bool) -> tuple[list[str], list[Few]]:
    """Options of pytest, and plugins, that choose the default run's tests, or the slow ones of few methods."""
    return (["-m", "slow"], [Few()]) if slow else (["-m", "not slow"], [])


class Ordered:
    """Runs the tests in a given order, only those, and keeps the name of the first that fails."""

    def __init__(self, order: Sequence[str]):
        self.order = {name: place for place, name in enumerate(order)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = [one for one in items if _of(one.nodeid) in self.order]
        items[:] = sorted(known, key=lambda one: self.order[_of(one.nodeid)])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"collecting {report.nodeid}"


def _of(name: str) -> str:
    """The name of a test without its parameters."""
    return name.partition("[")[0]


def meet(
    module: str, path: Path, mutant: Mutant | None, tests: Sequence[str], place: Path, seconds: float, *, slow: bool
) -> None:
    """Run the tests on the mutant and end the process.

    Args:
      module: name of the mutated module.
      path: its file.
      mutant: the change; none for a run that must pass.
      tests: names of tests without parameters, first to last.
      place: folder for all that the tests keep, and for ``found.json``.
      seconds: of CPU time; more ends the process by SIGXCPU.
      slow: of slow tests, by `marked`.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        output = os.open(place / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")  # compiled programs of the whole module are in the user's
        sys.dont_write_bytecode = True
        from hypothesis.configuration import set_hypothesis_home_dir

        set_hypothesis_home_dir(str(place / "hypothesis"))
        sys.meta_path.insert(0, Mutated(module, path, mutant))
        order = Ordered(tests)
        files = dict.fromkeys(name.partition("::")[0] for name in tests)
        marks, few = marked(slow)
        options = [*PLAIN, *marks, "-x", f"--basetemp={place / 'temporary'}"]
        status = int(pytest.main([*options, *files], plugins=[*few, order]))
        (place / "found.json").write_text(json.dumps({"status": status, "test": order.failed}))
    finally:
        os._exit(0)
