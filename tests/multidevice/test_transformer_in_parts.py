"""A transformer of ten million parameters, each client's on two devices: the same numbers, half of the memory."""

from functools import partial

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec

WIDTH, LENGTH, FEATURES, CLASSES = 912, 6, 12, 10


class Transformer(nn.Module):
    """A pre-norm block of attention and a perceptron, on sequences of vectors."""

    @nn.compact
    def __call__(self, x):
        norm, dense, attention = (
            partial(layer, param_dtype=x.dtype) for layer in (nn.LayerNorm, nn.Dense, nn.MultiHeadDotProductAttention)
        )
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH), x.dtype)
        x = dense(WIDTH)(x) + positions
        x = x + attention(8)(norm()(x))
        x = x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(norm()(x))))
        return dense(CLASSES)(norm()(x).mean(axis=1))


def federation():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(4, LENGTH, FEATURES)), rng.integers(CLASSES, size=4)) for _ in range(2)]
    return jaxpfl.stack_clients(clients, test=clients)


def run(shards):
    """A round of Ditto, two steps of each model: results, and bytes of states and of the round on the first device."""
    spec = RunSpec(
        method=jaxpfl.METHODS["ditto"],
        model=Transformer(),
        local_steps=2,
        batch_size=2,
        plan=ExecutionPlan(devices=shards, model_shards=shards, rounds_per_call=1),
    )
    simulation = simulation_of(spec, federation())
    state, history = simulation.advance(simulation.init([0]), 1)
    held = jax.tree.leaves((state.server, state.clients))
    on_first = sum(s.data.nbytes for leaf in held for s in leaf.addressable_shards if s.device == jax.devices()[0])
    stats = simulation._program("advance", 1).memory_analysis()
    assert stats is not None
    results = jax.tree.map(np.asarray, (state.server, state.clients, history, simulation.evaluate(state)))
    return results, on_first, stats.temp_size_in_bytes + stats.argument_size_in_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_transformer_of_ten_million_parameters_on_two_devices():
    with jax.enable_x64(True):
        (want, whole, peak), (got, part, peak_of_part) = (run(shards) for shards in (1, 2))
    size = sum(a.size for a in jax.tree.leaves(want[0]))
    assert size > 1e7
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(np.abs(b).max(initial=0), 1e-3))
    assert part < 0.51 * whole
    assert peak_of_part < 0.6 * peak
