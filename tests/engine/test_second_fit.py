"""A second run of the same shapes compiles and traces nothing; a function that is defined again is traced again."""

import functools
import gc
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.engine import programs
from jaxpfl.privacy import Mechanism

_WORK = {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"}


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    return jaxpfl.federate(jaxpfl.load("digits"), clients=6, classes_per_client=3, validation_share=0.2)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The traces and compilations of the block, of any program."""
    work: list[str] = []

    def hear(name: str, seconds: float, **about: object) -> None:
        if name in _WORK:
            work.append(f"{name} {about}")

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield work
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def run(federation, method="fedavg", **settings):
    given = {"rounds": 2, "cohort": 3, "model": "linear", "local_steps": 2, "plan": ExecutionPlan(rounds_per_call=5)}
    return jaxpfl.fit(method, federation, **given | settings)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"lr": 0.3, "seeds": [7], "rounds": 3, "eval_every": 1}),
        slow(
            {"lr_schedule": "cosine:end=0.1", "dropout": 0.1, "stragglers": 0.9, "compress": "qsgd:levels=4"},
            {"lr_schedule": "cosine:end=0.2,warmup=1", "dropout": 0.4, "stragglers": 0.2, "compress": "qsgd:levels=4"}
            | {"lr": 0.3, "rounds": 3, "seeds": [7]},
        ),
        slow({"seeds": 2, "lr": [0.3, 0.4]}, {"seeds": [4, 9], "lr": [0.1, 0.2], "hyper": {"weight_decay": [0.1, 0]}}),
        slow(
            {"privacy": Mechanism(1.0, 2.0, quantile=0.5, count_stddev=5.0)},
            {"privacy": Mechanism(0.5, 1.0, quantile=0.5, count_stddev=5.0)},
        ),
    ],
)
def test_traced_values_compile_and_trace_nothing(federation, first, second):
    run(federation, **first)
    with counted() as work:
        warm = run(federation, **second)
    assert work == []
    programs.clear()
    jax.clear_caches()
    cold = run(federation, **second)
    for fit in (warm, cold):
        assert np.isfinite(fit.scores["after"]["loss"]).all()
    told = [(fit.state._replace(key=(), noise=()), fit.scores, fit.history) for fit in (warm, cold)]
    chex.assert_trees_all_equal(*told)  # the numbers of a fresh process


@pytest.mark.slow
def test_methods_share_what_they_have_in_common(federation):
    run(federation, "fedavg")
    with counted() as work:
        run(federation, "fedavg-ft", options={"fine_tune_steps": 1})
    assert sum("backend_compile" in one for one in work) == 1  # its scores, and neither its start nor its round


class Scaled(nn.Module):
    by: float

    @nn.compact
    def __call__(self, x):
        return self.by * nn.Dense(10)(x.reshape(len(x), -1))


def losses(federation, **settings):
    return run(federation, **settings).scores["after"]["loss"]


@pytest.mark.slow
def test_what_is_the_users_counts_by_equality_or_identity(federation):
    def optimizer(rate):
        return optax.sgd(rate)

    first = losses(federation, model=Scaled(1.0), client_optimizer=optimizer)
    with counted() as work:
        np.testing.assert_array_equal(losses(federation, model=Scaled(1.0), client_optimizer=optimizer), first)
    assert work == []
    assert not np.array_equal(losses(federation, model=Scaled(2.0), client_optimizer=optimizer), first)

    def faster(rate):
        return optax.sgd(2 * rate)

    faster.__name__, faster.__qualname__ = optimizer.__name__, optimizer.__qualname__  # as in a cell that runs again
    assert not np.array_equal(losses(federation, model=Scaled(1.0), client_optimizer=faster), first)


def test_kept_programs_hold_no_data(federation):
    def trained():
        copy = jax.tree.map(np.array, federation)
        result = run(copy)
        parts = (copy.train.x, result.simulation, result.state.counts.table)
        return [weakref.ref(one) for one in (*parts, *jax.tree.leaves(result.simulation.federations))]

    kept = trained()
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * len(kept)


def plus(n: int):
    return functools.partial(jnp.add, n)


def test_the_number_of_kept_programs_is_bounded(monkeypatch):
    programs.clear()
    monkeypatch.setattr(programs, "MOST", 3)
    made = [programs.compiled(plus(n), (jnp.zeros(2),)) for n in range(5)]
    assert len(programs._kept) == 3
    again = [programs.compiled(plus(n), (jnp.zeros(2),)) for n in (4, 3, 2)]
    assert again == made[:1:-1]


def test_programs_make_room_where_memory_mappings_run_out(monkeypatch):
    programs.clear()
    asked = [programs.compiled(plus(n), (jnp.zeros(2),)) for n in range(8)]
    assert len(programs._kept) == len(asked)
    monkeypatch.setattr(programs, "_mappings", lambda: (30_000, 65_530))
    programs.compiled(plus(8), (jnp.zeros(2),))
    assert len(programs._kept) == 9
    monkeypatch.setattr(programs, "_mappings", lambda: (40_000, 65_530))
    programs.compiled(plus(9), (jnp.zeros(2),))
    assert len(programs._kept) == 5  # of ten; the newest among them
    assert programs.compiled(plus(7), (jnp.zeros(2),)) is asked[7]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells its mappings")
def test_forgotten_programs_give_their_mappings_back():
    programs.clear()
    gc.collect()
    before, allowed = programs._mappings()
    assert 0 < before < allowed < math.inf
    for n in range(8):
        programs.compiled(lambda x, n=n: jnp.sort(jnp.cumsum(x * n)), (jnp.zeros(50),))
    held, _ = programs._mappings()
    assert held > before + 24
    programs.clear()
    gc.collect()
    assert programs._mappings()[0] < before + (held - before) / 4


def test_threads_that_ask_for_one_program_make_it_once():
    programs.clear()
    made, together = [], threading.Barrier(4)

    def traced(x):
        return x * 3.25

    def ask():
        together.wait()
        made.append(programs.compiled(traced, (jnp.zeros(3),)))

    with counted() as work:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(map(id, made))) == 1
    assert sum("backend_compile" in one and "traced" in one for one in work) <= 1


def test_a_failure_is_not_kept():
    programs.clear()
    fails = [True]

    def function(x):
        if fails[0]:
            raise ValueError("not yet")
        return x

    with pytest.raises(ValueError, match="not yet"):
        programs.compiled(function, (jnp.zeros(2),))
    assert not programs._kept
