"""Fixtures of the conformance tests: every test here runs for every federated method of the registry."""

import jax
import pytest
from problem import ragged_federation

from jaxpfl import METHODS, Federation, Method
from jaxpfl.algorithms import FEDERATED


@pytest.fixture(params=sorted(FEDERATED))
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def federation() -> Federation:
    return ragged_federation()
