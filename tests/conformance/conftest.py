"""Parameters of the conformance tests.

Tests marked ``every_method`` take every registered method and the toys: those are the promises that a method
can break. The others are promises of the engine, and take methods that between them use nearly all of it, one of them
in the default run. What `test_everything_that_must_not_matter_at_once` asks at once is slow, but for the methods
``apart`` that the oracles ask, also where it is asked piece by piece.
"""

import pytest
from problem import ragged_federation
from toys import CASES, CORE, QUICK

from jaxpfl import Federation


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        whole = metafunc.definition.get_closest_marker("every_method")
        apart = whole.kwargs.get("apart", ()) if whole else ()
        names = sorted(CASES.keys() - apart if whole else CORE)
        every_time = QUICK if apart or not whole else names
        cases = [pytest.param(CASES[name], marks=() if name in every_time else pytest.mark.slow) for name in names]
        metafunc.parametrize("method", cases, ids=names)


@pytest.fixture(scope="session")
def federation() -> Federation:
    return ragged_federation()
