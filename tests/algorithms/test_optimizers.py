"""Optimizers by name: every one makes a step under jit, names and arguments are checked, plain SGD costs nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpfl import JaxpflError, LocalWork
from jaxpfl.algorithms import Descent
from jaxpfl.algorithms.parts.optimizers import OPTIMIZERS, normalizes, one_vector, resolve
from jaxpfl.core.trees import Packed


def down(optimizer, rate):
    """Three steps down ``|w|^2 / 20``; the end of the descent."""
    made, params = resolve(optimizer)(rate), {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}

    def body(_, at):
        return at.step(made, jax.tree.map(lambda a: 0.1 * a, at.params))

    return jax.lax.fori_loop(0, 3, body, Descent.start(made, params))


def three_steps(optimizer, rate: float = 0.1):
    """Those steps compiled, the learning rate traced."""
    return jax.jit(partial(down, optimizer))(jnp.asarray(rate))


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_every_optimizer_steps_downhill_and_keeps_the_type(x64):
    with jax.enable_x64(x64):
        ends = jax.jit(lambda rate: {name: down(name, rate).params for name in OPTIMIZERS})(jnp.asarray(0.1))
        dtype = jnp.result_type(float)
        for path, leaf in jax.tree.leaves_with_path(ends):
            assert leaf.dtype == dtype, path
            assert (leaf < 1).all(), path


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("adam:b1=0.8,nesterov=true", lambda rate: optax.adam(rate, b1=0.8, nesterov=True)),
        ("sgd:momentum=0.7", lambda rate: optax.sgd(rate, momentum=0.7)),
        ("momentum:momentum=0.7", lambda rate: optax.sgd(rate, momentum=0.7)),
        ("fedavgm", lambda rate: optax.sgd(rate, momentum=0.9)),
        ("rmsprop: decay=0.5 , eps=1e-3", lambda rate: optax.rmsprop(rate, decay=0.5, eps=1e-3)),
    ],
)
def test_arguments_reach_optax(text, same):
    got, want = three_steps(text).params, three_steps(same).params
    jax.tree.map(np.testing.assert_array_equal, got, want)
    other = three_steps(text.split(":")[0] if ":" in text else "sgd").params
    assert not np.array_equal(got["w"], other["w"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adamm", r"unknown optimizer 'adamm': did you mean 'adam'\?"),
        ("adam:b3=0.1", r"unknown argument of optimizer adam 'b3': did you mean 'b2'\? \(known: b1, b2, eps"),
        ("adam:mu_dtype=float32", "unknown argument of optimizer adam 'mu_dtype'"),
        ("adam:b1=fast", "adam:b1 must be a number >= 0 and < 1, got 'fast'"),
        ("adam:b1=true", "adam:b1 must be a number >= 0 and < 1, got 'true'"),
        ("adam:b1=1", "adam:b1 must be a number >= 0 and < 1, got '1'"),
        ("adam:eps=-1", "adam:eps must be a number >= 0 and finite, got '-1'"),
        ("adam:nesterov=1", "adam:nesterov must be true or false, got '1'"),
        ("adam:", "the optimizer must be NAME or NAME:argument=value"),
        ("adam:b1=0.1,b1=0.2", "with each argument once, got"),
        ("adam:learning_rate=0.1", "the learning rate is not an argument of adam: set lr, or server_lr"),
    ],
)
def test_refusals(text, message):
    for given in ({"optimizer": text}, {"server_optimizer": text}):
        with pytest.raises(JaxpflError, match=message) as caught:
            LocalWork(np.array([3]), 1, 1, **given)
        assert "\n" not in str(caught.value)


def test_which_normalize():
    """Ten times the gradient makes ten times the step, or not; after some steps, as RAdam begins like momentum."""

    def last_step(name, gradient):
        made, params = resolve(name)(0.1), jnp.ones(2)

        def step(memory, _):
            update, memory = made.update(gradient * jnp.ones(2), memory, params)
            return memory, update

        return jax.lax.scan(step, made.init(params), length=8)[1][-1]

    last_steps = jax.jit(lambda gradient: {name: last_step(name, gradient) for name in OPTIMIZERS})
    small, large = last_steps(1e-2), last_steps(1e-1)
    for name in OPTIMIZERS:
        assert normalizes(name) == (not np.allclose(10 * small[name], large[name])), name
    assert not normalizes(optax.adam)


def test_weight_decay_is_added_to_the_gradient():
    """And AdamW's own acts on the parameters, apart from the gradient: ``-rate wd w`` where the gradient is zero."""
    params = jnp.array([2.0, -1.0])
    plain = LocalWork(np.array([3]), 1, 1).descent(0.1, 0.5)
    at = Descent.start(plain, params).step(plain, jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(at.params, params - 0.1 * (jnp.array([1.0, 0.0]) + 0.5 * params), rtol=1e-6)
    adamw = LocalWork(np.array([3]), 1, 1, optimizer="adamw:weight_decay=0.5").descent(0.1, 0.0)
    at = Descent.start(adamw, params).step(adamw, jnp.zeros(2))
    np.testing.assert_allclose(at.params, params - 0.1 * 0.5 * params, rtol=1e-6)


def test_one_vector_takes_the_same_step_in_plain_sgd_alone():
    """With a gradient of a wider type than the parameters, as noise makes it. Fromage needs each array's norm."""
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.array([1.0, -2.0])}
    gradient = {"w": jnp.full((2, 3), 0.5), "b": jnp.array([3.0, 1.0])}
    for name in ("sgd", "fromage"):
        optimizer = LocalWork(np.array([3]), 1, 1, optimizer=name).descent(0.1, 0.5)
        want = Descent.start(optimizer, params).step(optimizer, gradient).params
        with one_vector(True):
            start = Descent.start(optimizer, params)
            assert isinstance(start.stored, Packed) == (name == "sgd")
            jax.tree.map(np.testing.assert_array_equal, start.step(optimizer, gradient).params, want)


def test_plain_sgd_remembers_nothing():
    descent = LocalWork(np.array([3]), 1, 1).descent(0.1, 1e-4)
    assert not jax.tree.leaves(Descent.start(descent, {"w": jnp.ones(3)}).memory)
