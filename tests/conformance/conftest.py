"""What the conformance tests are run for.

Tests marked ``every_method`` take every registered federated method and the toys: those are the promises that a method
can break. The others are promises of the engine, and take methods that between them use all of it. What
`test_everything_that_must_not_matter_at_once` asks of every method at once is slow where it is asked piece by piece,
and itself for methods that do not belong to those. So are the dearest toys where the others ask the same.
"""

import jax
import pytest
from problem import ragged_federation
from toys import CASES, CORE

from jaxpfl import Federation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        whole = metafunc.definition.get_closest_marker("every_method")
        names = sorted(CASES if whole else CORE)
        seldom = set(names) - set(CORE) if whole and whole.kwargs.get("slow") else set() if whole else {"toy medians"}
        cases = [pytest.param(CASES[name], marks=pytest.mark.slow if name in seldom else ()) for name in names]
        metafunc.parametrize("method", cases, ids=names)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def federation() -> Federation:
    return ragged_federation()
