"""Examples in docstrings run: every ``>>>`` of the package is executed, in a module's own names."""

import doctest
import importlib
from pathlib import Path

import pytest

import jaxpfl

ROOT = Path(jaxpfl.__file__).parent


def with_examples() -> list[str]:
    """Modules of the package that contain a ``>>>``."""
    found = [path.relative_to(ROOT.parent) for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text()]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found]


# Fits that compile for more than a second, whose numbers tests/estimators has in the default run.
DEAR = {f"jaxpfl.estimators.empirical_bayes.{name}" for name in ("groups", "normal_means", "unit_level")}


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in with_examples()]
)
def test_the_examples_of_a_module_run(module):
    result = doctest.testmod(importlib.import_module(module), verbose=False)
    assert result.attempted, f"{module}: no docstring holds its >>>"
    assert not result.failed


def test_the_front_doors_have_an_example():
    modules = {"data.sources.registry", "data.federate", "data.stack"}
    modules |= {"estimators.base", "privacy.mechanism", "privacy.accounting"}
    assert {f"jaxpfl.{name}" for name in modules} <= set(with_examples())
