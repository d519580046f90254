"""Keys of programs: equal for what was made again, different for whatever changes, none for what cannot be read."""

import ast
import dataclasses
import functools
import operator
import os
import random
import subprocess
import sys
import threading
import time
import types
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpfl.algorithms import METHODS, LocalWork
from jaxpfl.engine import program_key
from jaxpfl.engine.program_key import key_of
from jaxpfl.models import build_model, classification

FACTOR = 2.0
HELPERS = types.ModuleType("helpers_of_a_user")
exec("RATE = 1.0\ndef rate():\n    return RATE", vars(HELPERS))


def reads_a_global(x):
    return x * FACTOR


def reads_a_module(x):
    return x * HELPERS.rate()


def calls_another(x):
    return reads_a_global(x) + 1


class Model:
    scale = 1.0
    __slots__ = ("width",)

    def __init__(self, width):
        self.width = width

    def apply(self, x):
        return x * self.width * self.scale


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


def rule(factor):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return same


def closure(value):
    return lambda x: x * value


def default(value):
    return types.FunctionType(reads_a_global.__code__, globals(), "f", (value,))


def jitted(value):
    held = jnp.full(3, value)
    return jax.jit(lambda x: x + held)


def fields(value):
    return Net(int(value))


@pytest.mark.parametrize(
    "make",
    [
        *(closure, default, jitted, rule, fields, Model, np.float32, optax.sgd),
        lambda v: functools.partial(reads_a_global, v),
        lambda v: closure([v]),
        lambda v: closure({"a": (v,)}),
        lambda v: closure({v, 7.0}),
        lambda v: closure(Model(v).apply),
        lambda v: closure(jnp.asarray(v)),
        lambda v: closure(jax.random.key(int(v))),
        lambda v: closure(jax.ShapeDtypeStruct((int(v),), np.float32)),
        lambda v: optax.chain(optax.clip(1.0), optax.scale_by_schedule(optax.linear_schedule(v, 0.0, 5))),
    ],
)
def test_what_is_made_again_is_equal_and_what_differs_is_not(make):
    keys = [key_of(make(value)) for value in (1.0, 1.0, 2.0)]
    assert None not in keys
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.parametrize("function", [reads_a_global, calls_another, lambda x: reads_a_global(x)])
def test_globals_count_through_every_function_called(function, monkeypatch):
    before = key_of(function)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert None is not before != key_of(function)


def test_a_modules_names_count(monkeypatch):
    before = key_of(reads_a_module)
    assert before is not None
    monkeypatch.setattr(HELPERS, "UNREAD", 1.0, raising=False)
    assert key_of(reads_a_module) == before
    monkeypatch.setattr(HELPERS, "RATE", 2.0)
    assert key_of(reads_a_module) != before


def test_attributes_of_classes_count(monkeypatch):
    before = key_of(Model(1).apply)
    monkeypatch.setattr(Model, "scale", 2.0)
    assert None is not before != key_of(Model(1).apply)


def test_code_counts_and_its_place_does_not():
    def function(text):
        names = {}
        exec(text, names)
        return names["f"]

    key = key_of(function("def f(x): return x + 1"))
    assert key == key_of(function("\n\n# moved\ndef f(x):\n    return x + 1"))
    assert key != key_of(function("def f(x): return x + 2"))
    assert key != key_of(function("def f(x): return x - 1"))
    assert key != key_of(function("def f(x): return x + True"))


def test_types_and_order_count():
    values = (1, 1.0, True, "1", b"1", np.float32(1), np.float64(1), np.ones(1), np.ones((1, 1)), jnp.ones(1), None)
    values += (jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32), 0.0, -0.0, [1], (1,), {1}, {1: 0}, {0: 1})
    values += ({"a": 0, "b": 0}, {"b": 0, "a": 0}, [[1], 2], [1, [2]], ["ab", "c"], ["a", "bc"])
    keys = [key_of(closure(value)) for value in values]
    assert None not in keys
    assert len({key.digest for key in keys}) == len(values)


def test_two_classes_of_one_text_are_two():
    def define():
        class State(NamedTuple):
            x: int

        return State

    one, two = define(), define()
    keys = key_of(one(1)), key_of(two(1))
    assert keys[0].digest == keys[1].digest
    assert keys[0].parts != keys[1].parts


def digest_of(value) -> str:
    """Digest that names a program on disk, whatever classes this process holds."""
    key = key_of(value)
    assert key is not None
    return key.digest


def named(text, module="rules_of_a_user") -> Any:
    """``Rule`` as a file of the user's defines it."""
    names = {"__name__": module}
    exec(text, names)
    return names["Rule"]


@pytest.mark.parametrize("kind", ["property", "staticmethod", "classmethod"])
def test_what_an_enum_computes_counts(kind):
    text = "import enum\nclass Rule(enum.Enum):\n  A = 1\n  @%s\n  def rate(self=0): return %s"
    one, again, other = (digest_of(closure(named(text % (kind, value)).A)) for value in (1.0, 1.0, 2.0))
    assert one == again != other


def test_classes_of_two_modules_are_two_on_disk():
    text = "class Rule:\n  rate = 1.0"
    one, again, other = (digest_of(named(text, module)) for module in ("one", "one", "other"))
    assert one == again != other


class Hidden(nn.Module):
    def __post_init__(self):
        self.factor = FACTOR
        super().__post_init__()

    def __call__(self, x):
        return x * self.factor


def test_what_a_module_keeps_beside_its_fields_counts(monkeypatch):
    nets = []
    for value in (1.0, 1.0, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        nets.append(Hidden())
    keys = [key_of(net.apply) for net in nets]
    assert None not in keys
    assert keys[0] == keys[1] != keys[2]


def test_a_class_made_by_a_library_is_the_users():
    def make(rate):
        return dataclasses.make_dataclass("Rule", [], namespace={"rate": lambda self: rate})

    one, again, other = (digest_of(closure(make(value)())) for value in (1.0, 1.0, 2.0))
    assert one == again != other


class Settings(dict):
    """A dictionary that also has attributes."""


def settings(attributes, **items):
    made = Settings(**items)
    vars(made).update(attributes)
    return closure(made)


def scaled_partial(factor):
    class Scaled(functools.partial):
        def __call__(self, x):
            return super().__call__(x) * factor

    return Scaled(jnp.abs)


def scaled_property(factor):
    class Scaled(property):
        def __get__(self, holder, kind=None):
            return factor

    return type("Holder", (), {"__module__": __name__, "rate": Scaled()})


def wrapper(factor):
    class Wrapper:
        def __init__(self):
            functools.update_wrapper(self, reads_a_global)
            self.factor = factor

        def lower(self):
            return self

    return Wrapper()


def slots(*given):
    model = Model.__new__(Model)
    if given:
        model.width = given[0]
    return closure(model)


def not_filled(*given):
    def function(x):
        return x * value

    if given:
        value = given[0]
    return function


def looks_up(text, **names):
    names = {"__name__": "user", **names}
    exec(f"def function(x):\n    return {text}", names)
    return names["function"]


def module(**names):
    made = types.ModuleType("mine")
    vars(made).update(names)
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (settings({}, a=1, b=2), settings({"b": 2}, a=1)),
        (scaled_partial(2.0), scaled_partial(3.0)),
        (scaled_property(2.0), scaled_property(3.0)),
        (wrapper(2.0), wrapper(3.0)),
        (slots(), slots("unset")),
        (not_filled(), not_filled("empty")),
        (looks_up("rate"), looks_up("rate", rate="missing")),
        (looks_up("abs"), looks_up("abs", abs="builtin")),
        (
            looks_up("jnp.size, size, jax.nn", jnp=jnp, size="jax.nn", jax=module(nn="nn")),
            looks_up("jnp.size, size, jax.nn", jnp=module(size="jax.numpy"), size="size", jax=jax),
        ),
        (closure(["<>"]), closure([[]])),
        (closure(["a", "again 3"]), closure(["a\nagain 3"])),
        (looks_up("x * (1e999 - 1e999 + 2j)"), looks_up("x * (1e999 - 1e999 + 3j)")),
    ],
)
def test_no_two_contents_are_told_alike(one, other):
    assert digest_of(one) != digest_of(other)


def test_what_an_enum_keeps_to_itself_counts():
    text = "import enum\nclass Rule(enum.Enum):\n  A = 1\n  __factor = %s\n  def rate(self): return self.__factor"
    one, again, other = (digest_of(closure(named(text % value).A)) for value in (1.0, 1.0, 2.0))
    assert one == again != other


def opens_a_file(x):
    return open("x").read()


def reads_the_clock(x):
    return x * time.time()


def reads_the_environment(x):
    return x * float(os.getenv("RATE", "1"))


def draws(x):
    return x * random.random()


def draws_with_numpy(x):
    return x * np.random.normal()  # noqa: NPY002


def looks_anywhere(x):
    return globals()["FACTOR"] * x


def loads_an_array(x):
    return x * np.load("rates.npy")


load = np.loadtxt


def loads_by_another_name(x):
    return x * load("rates.txt")


def draws_with_its_own_numpy(x):
    import numpy

    return x * numpy.random.normal()  # noqa: NPY002


def loads_with_its_own_numpy(x):
    from numpy import load

    return x * load("rates.npy")


def hands_a_module_on(x):
    return vars_of(HELPERS)


vars_of = str


def imports(x):
    import helpers_of_a_user

    return helpers_of_a_user.RATE * x


@pytest.mark.parametrize(
    "value",
    [
        *(opens_a_file, reads_the_clock, reads_the_environment, draws, draws_with_numpy, looks_anywhere, imports),
        *(hands_a_module_on, loads_an_array, loads_by_another_name),
        *(draws_with_its_own_numpy, loads_with_its_own_numpy),
        *map(closure, (operator.itemgetter(0), operator.methodcaller("sum"), np.ma.array([1.0], mask=[True]))),
        *map(closure, (iter([1]), threading.Lock(), np.random.default_rng(0), HELPERS, sys.stdout)),
        closure(np.zeros(2**28 + 1, np.int8)),
    ],
)
def test_what_cannot_be_read_has_no_key(value):
    assert key_of(value) is None


def test_contexts_and_settings_count():
    key = key_of(reads_a_global)
    with jax.default_matmul_precision("float32"):
        assert key_of(reads_a_global) != key
    with jax.numpy_rank_promotion("raise"):
        assert key_of(reads_a_global) != key
    with nn.intercept_methods(lambda call, args, kwargs, context: call(*args, **kwargs)):
        assert key_of(reads_a_global) is None
    assert key_of(reads_a_global) == key


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


def reads_a_context(x):
    return SCALE.get() * x


def test_the_value_of_a_context_variable_counts():
    key = key_of(reads_a_context)
    assert key is not None
    token = SCALE.set(2.0)
    assert key_of(reads_a_context) not in (None, key)
    SCALE.reset(token)
    assert key_of(reads_a_context) == key
    assert key_of(closure(ContextVar("none"))) is not None


def methods() -> dict[str, str]:
    """The digest of every method's functions, whatever JAX's settings."""
    task = classification(build_model("mlp-ln", 10, (4,)), (4,), 10)
    work = LocalWork(np.array([5, 6, 7, 8]), 2, 3)
    return {
        name: program_key._digest(method.build(task, work))
        for name, method in METHODS.items()
        if not method.graph and name != "persfl"
    }


@pytest.mark.slow
def test_every_method_has_a_key_that_is_the_same_in_every_process():
    here = methods()
    assert len(set(here.values())) == len(here)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_program_key; print(test_program_key.methods())"
    given = [sys.executable, "-c", code, str(Path(__file__).parent)]
    settings = dict(os.environ, PYTHONHASHSEED="7")
    there = subprocess.run(given, env=settings, capture_output=True, text=True, check=True)
    assert ast.literal_eval(there.stdout) == here
