"""A user's functions are identified by their code and everything that it holds, equally in every process."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpfl.engine.code_fingerprint import checksum
from jaxpfl.uploads.compression import resolve

FACTOR = 2.0


def scaled(factor):
    return lambda x: x * factor


def jitted(constant):
    held = jnp.full(3, constant)
    return jax.jit(lambda x: x + held)


def rule(factor):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return same


def masked(size):
    return lambda rate: optax.chain(optax.masked(optax.scale(0.1), lambda p: p.size > size), optax.sgd(rate))


def test_what_functions_hold_is_told_apart():
    for make in (scaled, jitted, rule, masked, lambda v: resolve(f"top-k:share={v / 100}"), lambda v: nn.Dense(int(v))):
        assert checksum(make(1.0)) != checksum(make(2.0))
        assert checksum(make(1.0)) == checksum(make(1.0))
    assert checksum(functools.partial(scaled, 1)) != checksum(functools.partial(scaled, 2))
    assert checksum(optax.adam) != checksum(optax.sgd)


def test_code_and_the_globals_that_it_reads_are_told_apart(monkeypatch):
    assert checksum(lambda x: x + 1) != checksum(lambda x: x + 2)

    def reads(x):
        return x * FACTOR

    before = checksum(reads)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert checksum(reads) != before


def test_arrays_are_told_by_value_type_and_shape():
    values = (np.ones(2), np.ones((2, 1)), np.ones(2, np.float32), np.zeros(2), jnp.ones(2), jax.random.key(0))
    assert len({checksum(value) for value in values}) == len(values)


def test_objects_that_hold_themselves_end():
    loop: list = []
    loop.append(loop)
    assert checksum(loop) == checksum(loop)


@pytest.mark.slow
def test_another_process_finds_the_same():
    code = (
        "import optax, flax.linen as nn; from jaxpfl.uploads.compression import resolve;"
        "from jaxpfl.engine.code_fingerprint import checksum;"
        "print(checksum(resolve('qsgd:levels=4'), nn.Dense(3), optax.adam, {'b': 1, 'a': {2, 'x'}}))"
    )
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    assert done[0].stdout == done[1].stdout != ""
