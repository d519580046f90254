"""Fixtures of the conformance tests: every test here runs for every registered method, and for the toys."""

import jax
import pytest
from problem import ragged_federation
from toys import CASES

from jaxpfl import Federation, Method


@pytest.fixture(params=sorted(CASES))
def method(request: pytest.FixtureRequest) -> Method:
    return CASES[request.param]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def federation() -> Federation:
    return ragged_federation()
