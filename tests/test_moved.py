"""Old names: each finds what has another name now, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jaxpfl
from jaxpfl.moved import MOVED, place
from jaxpfl.protocol import ClientContext

OLD = sorted(f"jaxpfl.{package}.{name}" for package, names in MOVED.items() for name in names)


@pytest.fixture(autouse=True)
def not_imported_yet(monkeypatch):
    for name in [name for name in sys.modules if place(name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(jaxpfl.privacy, "local", raising=False)


def warnings_of(do: Callable[[], object]) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        return do(), [str(one.message) for one in seen if one.category is DeprecationWarning]


@pytest.mark.parametrize("old", [*OLD, "jaxpfl.estimate", "jaxpfl.estimate.gaussian", "jaxpfl.estimate.own.common"])
def test_an_old_name_warns_and_is_the_module_of_today(old):
    found, said = warnings_of(lambda: importlib.import_module(old))
    assert found is importlib.import_module(place(old) or "")
    assert said[-1] == f"{old} is {place(old)} now; the old name will go"


def test_from_a_package():
    with pytest.warns(DeprecationWarning, match="jaxpfl.privacy.local is jaxpfl.privacy.local_dp now"):
        from jaxpfl.privacy import local
    from jaxpfl.privacy import local_dp

    assert local is local_dp


@pytest.mark.parametrize("name", ["jaxpfl.estimators.histogram_nothing", "jaxpfl.estimate.nothing"])
def test_other_names_are_no_modules(name):
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        warnings_of(lambda: importlib.import_module(name))


def test_a_clients_limit_of_steps():
    ctx = ClientContext(jnp.int32(0), jnp.int32(0), jnp.int32(0), 7, jax.random.key(0))
    with pytest.warns(DeprecationWarning, match="ClientContext.local_steps is step_limit now"):
        assert ctx.local_steps == ctx.step_limit == 7
