"""Fixtures of the conformance tests: every test here runs for every registered method."""

import jax
import pytest
from problem import ragged_federation

from jaxpfl import METHODS, Federation, Method


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def federation() -> Federation:
    return ragged_federation()
