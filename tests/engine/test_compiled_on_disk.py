"""Programs kept in a folder are found by other processes; what lies there damaged is made again."""

import os
import pickle
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpfl.engine import compiled

CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_LIBRARIES", compiled._LIBRARIES | {__name__})  # a user's function has no name
    held = {name: jax.config.values[name] for name in CACHE}
    jax.config.update("jax_compilation_cache_dir", None)  # what JAX's cache gives is not written again
    compilation_cache.reset_cache()
    compiled.clear()
    compiled.keep_in(tmp_path)
    yield tmp_path
    compiled.keep_in(None)
    compiled.clear()
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
    return compiled.compiled(lambda key, x: (key, {"y": factor * x}), (jax.random.key(0), jnp.arange(3.0)))


def test_a_program_is_loaded_without_a_trace(folder):
    first = made(2.0)
    compiled.clear()  # as another process
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
    compiled.clear()
    _, work = work_of(lambda: made(2.0))
    assert "jaxpr_trace_duration" in work
    assert work[-1] == "load_duration"
    _, work = work_of(lambda: made(3.0))  # a value that only the program tells
    assert "backend_compile_duration" in work


def test_a_program_reads_its_arguments_and_returns_the_users_classes(folder, monkeypatch):
    """Two that differ in a class only have the same text, as do two of which each ignores an argument."""
    monkeypatch.undo()
    for kind in (One, Other, One):
        compiled.clear()
        program = compiled.compiled(lambda x, kind=kind: kind(x + 1), (jnp.arange(3.0),))
        assert type(program(jnp.arange(3.0))) is kind
    x = jnp.arange(3.0), jnp.ones(3)
    for nth in (0, 1):
        np.testing.assert_array_equal(compiled.compiled(lambda *x, nth=nth: x[nth], x)(*x), x[nth])


def test_a_program_that_calls_the_user_is_not_written(folder, monkeypatch):
    monkeypatch.undo()

    def call(x):
        jax.debug.callback(print, x)
        return x

    compiled.compiled(call, (jnp.arange(3.0),))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_damaged_file_is_made_again(folder, content):
    made(2.0)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    compiled.clear()
    program, work = work_of(lambda: made(2.0))
    assert "backend_compile_duration" in work
    np.testing.assert_array_equal(program(jax.random.key(0), jnp.arange(3.0))[1]["y"], [0, 2, 4])
    compiled.clear()
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
    compiled.clear()
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
    compiled.keep_in(folder / "gone")
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
        compiled.clear()
        np.testing.assert_array_equal(made(2.0)(jax.random.key(0), jnp.arange(3.0))[1]["y"], [0, 2, 4])
        assert not list(folder.iterdir())
