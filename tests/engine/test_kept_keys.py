"""Keys of programs: settings by value, our functions by name and closure, the user's by equality or identity.

Programs kept in a folder are found by other processes; what lies there damaged is made again."""

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpfl.algorithms import METHODS, LocalWork
from jaxpfl.engine import programs
from jaxpfl.engine.programs import key_of, named
from jaxpfl.models import build_model, classification
from jaxpfl.uploads.compression import resolve


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Held:
    """An object of the user's without equality of its own."""


class Compares:
    """One whose comparison gives no truth value."""

    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return np.array([True, False])


def task_of(width: float):
    return classification(build_model(f"mlp-ln:{int(width)}", 3, (4,)), (4,), 3)


@pytest.mark.parametrize(
    ("make", "has_name"),
    [
        (np.float32, True),
        (optax.sgd, True),
        (lambda v: optax.chain(optax.clip(1.0), optax.scale_by_schedule(optax.linear_schedule(v, 0.0, 5))), True),
        (lambda v: functools.partial(jnp.multiply, v), True),
        (lambda v: {"a": [v, (1,)], "b": {v, 7.0}}, True),
        (jnp.asarray, True),
        (lambda v: jax.random.key(int(v)), True),
        (lambda v: jax.ShapeDtypeStruct((int(v),), np.float32), True),
        (lambda v: resolve(f"top-k:share={v / 100}"), True),
        (task_of, True),
        (lambda v: METHODS["scaffold"].build(task_of(1), LocalWork(np.array([5, 6]), int(v), 2)), True),
        (lambda v: nn.Dense(int(v)), True),
        (lambda v: Net(int(v)), False),
        (lambda v: classification(Net(int(v)), (4,), 3), False),
    ],
)
def test_what_is_made_again_is_equal_and_what_differs_is_not(make, has_name):
    keys = [key_of(make(value)) for value in (1.0, 1.0, 2.0)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    assert keys[0] != keys[2]
    assert [key.named for key in keys] == [has_name] * 3
    assert (named(make(1.0)) == named(make(1.0)) != named(make(2.0))) == has_name


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x,
        lambda: optax.masked(optax.scale(0.1), lambda p: p.size > 1),
        lambda: jax.jit(lambda x: x),
        Held,
        lambda: Compares(1),
        lambda: type("Made", (), {"__module__": "builtins"}),
        lambda: np.ma.array([1.0], mask=[True]),
        lambda: iter([1]),
    ],
)
def test_what_has_no_equality_is_itself_alone_and_has_no_text(make):
    one, other = make(), make()
    assert key_of(one) == key_of(one) != key_of(other)
    assert named(one) is None


def test_which_of_the_users_objects_stands_where_counts():
    one, other = Held(), Held()
    keys = {key_of(*values) for values in ((one, other), (other, one), (one, one), (one,))}
    assert len(keys) == 4


def test_types_and_order_count():
    values = (1, 1.0, True, "1", b"1", np.float32(1), np.float64(1), np.ones(1), np.ones((1, 1)), jnp.ones(1), None)
    values += (jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32), 0.0, -0.0, [1], (1,), {1}, {1: 0}, {0: 1}, "int 1")
    values += ({"a": 0, "b": 0}, {"b": 0, "a": 0}, [[1], 2], [1, [2]], ["ab", "c"], ["a", "bc"], ("int 1",))
    assert len({named(value) for value in values} - {None}) == len(values)
    one, other = [1], [2]
    assert named(one, other, one) != named(one, other, other)


def test_two_classes_of_one_text_are_two():
    def define():
        class State(NamedTuple):
            x: int

        return State

    assert key_of(define()(1)) != key_of(define()(1))


def test_what_holds_itself_has_a_key():
    loop: list = []
    loop.append(loop)
    assert key_of(loop) == key_of(loop)


def test_the_configuration_counts():
    key = key_of(jnp.sin)
    for other in (jax.default_matmul_precision("float32"), jax.numpy_rank_promotion("raise"), jax.enable_x64(True)):
        with other:
            assert key_of(jnp.sin) != key
    assert key_of(jnp.sin) == key


def texts() -> dict[str, str | None]:
    """Texts of every method's functions."""
    work = LocalWork(np.array([5, 6]), 2, 3)
    plain = [m for m in METHODS.values() if not m.graph and not m.pooled]
    return {method.name: named(method.build(task_of(2), work)) for method in plain}


@pytest.mark.slow
def test_two_processes_find_the_same():
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import test_kept_keys as t; print(json.dumps(t.texts()))"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    one, other = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | seed).stdout)
        for seed in ({"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "8"})
    )
    assert {name for name in one if one[name] != other[name]} == set()
    assert None not in one.values()
    assert len(set(one.values())) == len(one)


CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "_LIBRARIES", programs._LIBRARIES | {__name__})  # a user's function has no name
    held = {name: jax.config.values[name] for name in CACHE}
    jax.config.update("jax_compilation_cache_dir", None)  # what JAX's cache gives is not written again
    compilation_cache.reset_cache()
    programs.clear()
    programs.keep_in(tmp_path)
    yield tmp_path
    programs.keep_in(None)
    programs.clear()
    for name, value in held.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def work_of(call):
    """The result of a call, and the traces, compilations and loads that it took."""
    heard: list[str] = []

    def hear(name: str, seconds: float, **about: object) -> None:
        heard.append(name.split("/")[-1])

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        return call(), heard
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def made(factor):
    return programs.compiled(lambda key, x: (key, {"y": factor * x}), (jax.random.key(0), jnp.arange(3.0)))


def test_a_program_is_loaded_without_a_trace(folder):
    first = made(2.0)
    programs.clear()  # as another process
    second, work = work_of(lambda: made(2.0))
    assert work == ["load_duration"]
    assert first is not second
    for program in (first, second):
        np.testing.assert_array_equal(program(jax.random.key(0), jnp.arange(3.0))[1]["y"], [0, 2, 4])
    _, work = work_of(lambda: made(3.0))
    assert "backend_compile_duration" in work


def test_a_program_of_a_function_of_the_users_is_traced_and_loaded(folder, monkeypatch):
    monkeypatch.undo()
    made(2.0)
    programs.clear()
    _, work = work_of(lambda: made(2.0))
    assert "jaxpr_trace_duration" in work
    assert work[-1] == "load_duration"
    _, work = work_of(lambda: made(3.0))  # a value that only the program tells
    assert "backend_compile_duration" in work


def test_a_program_reads_its_arguments_and_returns_the_users_classes(folder, monkeypatch):
    """Two that differ in a class only have the same text, as do two of which each ignores an argument."""
    monkeypatch.undo()
    for kind in (One, Other, One):
        programs.clear()
        program = programs.compiled(lambda x, kind=kind: kind(x + 1), (jnp.arange(3.0),))
        assert type(program(jnp.arange(3.0))) is kind
    x = jnp.arange(3.0), jnp.ones(3)
    for nth in (0, 1):
        np.testing.assert_array_equal(programs.compiled(lambda *x, nth=nth: x[nth], x)(*x), x[nth])


def test_a_program_that_calls_the_user_is_not_written(folder, monkeypatch):
    monkeypatch.undo()

    def call(x):
        jax.debug.callback(print, x)
        return x

    programs.compiled(call, (jnp.arange(3.0),))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_damaged_file_is_made_again(folder, content):
    made(2.0)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    programs.clear()
    program, work = work_of(lambda: made(2.0))
    assert "backend_compile_duration" in work
    np.testing.assert_array_equal(program(jax.random.key(0), jnp.arange(3.0))[1]["y"], [0, 2, 4])
    programs.clear()
    assert work_of(lambda: made(2.0))[1] == ["load_duration"]


@pytest.mark.parametrize("theirs", ["a file to which others write", "a folder to which others write", "another's file"])
def test_what_others_can_write_is_not_loaded(folder, tmp_path, theirs):
    """A pickle in the place of a program does not run."""
    made(2.0)
    (file,) = folder.iterdir()
    file.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    if theirs == "another's file":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(file, 12345, -1)
    else:
        (folder if "folder" in theirs else file).chmod(0o777)
    programs.clear()
    assert "backend_compile_duration" in work_of(lambda: made(2.0))[1]
    assert not (tmp_path / "ran").exists()


class One(NamedTuple):
    x: jax.Array


class Other(NamedTuple):
    x: jax.Array


class Payload(NamedTuple):
    """An object whose pickle makes a folder when it is loaded."""

    mark: Path

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_folder_that_cannot_be_written_costs_nothing(folder):
    programs.keep_in(folder / "gone")
    assert made(2.0) is made(2.0)
    assert not list(folder.iterdir())


def test_a_program_from_jaxs_own_cache_is_not_written(folder, tmp_path_factory):
    """XLA would write it without its code, and it would fail when it is called."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # by default it keeps no small program
    compilation_cache.reset_cache()
    made(2.0)
    (file,) = folder.iterdir()
    file.unlink()
    for _ in range(2):
        programs.clear()
        np.testing.assert_array_equal(made(2.0)(jax.random.key(0), jnp.arange(3.0))[1]["y"], [0, 2, 4])
        assert not list(folder.iterdir())
