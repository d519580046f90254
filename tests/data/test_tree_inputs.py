"""Inputs that are several arrays (tokens and features, say), from one's own data to batches; tokens stay integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core.types import ClientData
from jaxpfl.data import (
    Source,
    describe,
    draw_batches,
    federate,
    format_description,
    pad,
    permute,
    plan_batches,
    pooled,
    stack_clients,
    summary,
    take,
)
from jaxpfl.support.errors import JaxpflError


class Text(NamedTuple):
    tokens: Any
    length: Any


def inputs(n: int, kind: type = dict) -> Any:
    tokens = np.arange(n * 4, dtype=np.uint8).reshape(n, 4)
    length = np.linspace(0.0, 1.0, n)
    return Text(tokens, length) if kind is Text else {"tokens": tokens, "length": length}


@pytest.mark.parametrize("kind", [dict, Text])
def test_stacking_trees(kind: type) -> None:
    clients = [(inputs(n, kind), np.arange(n) % 3) for n in (3, 5)]
    federation = stack_clients(clients, test=[clients[1], (inputs(0, kind), np.zeros(0, int))])
    x = federation.train.x
    assert type(x) is kind
    tokens, length = x if kind is Text else (x["tokens"], x["length"])
    assert (tokens.shape, tokens.dtype, length.shape, length.dtype) == ((2, 5, 4), np.int32, (2, 5), np.float32)
    np.testing.assert_array_equal(tokens[0, :3], np.arange(12).reshape(3, 4))
    assert not tokens[0, 3:].any()

    moved = pad(permute(federation, [1, 0]), train_capacity=7)
    tokens = jax.tree.leaves({"a": moved.train.x})[-1] if kind is dict else moved.train.x.tokens
    assert tokens.shape == (2, 7, 4)
    np.testing.assert_array_equal(tokens[0, :5], np.arange(20).reshape(5, 4))


def test_from_a_source_to_a_batch() -> None:
    source = Source("own", inputs(40), np.arange(40) % 4, inputs(8), np.arange(8) % 4, 4, "own")
    federation = federate(source, partition="dirichlet", clients=4, alpha=1.0)
    counts = summary(federation, 4, source)
    assert counts.unused == 0
    described = describe(counts)
    assert described["input_shape"] == {"length": [], "tokens": [4]}
    assert "inputs length scalar, tokens 4" in format_description(described)

    plan = plan_batches(np.asarray(federation.train.size), steps=2, batch_size=3)
    one = jax.tree.map(jnp.asarray, federation.train.client(1))
    assert isinstance(one, ClientData)
    indices, valid = draw_batches(plan, jax.random.key(0), 0, one.size)
    x, y, _ = take(one, indices[0], valid[0], plan)
    assert (x["tokens"].shape, x["tokens"].dtype) == ((3, 4), jnp.int32)
    # The labels are the examples' own, and a row of tokens names its example.
    np.testing.assert_array_equal(x["tokens"][:, 0] // 4 % 4, y)
    assert federate(pooled(source), partition="iid", clients=2).train.x["tokens"].shape[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((4, 4), int)}, "client 1, train: 4 inputs but 5 labels"),
        ({"tokens": np.zeros((5, 3), int)}, r"client 1, train: one input has shape \(3,\).*\(4,\)"),
        ({"length": np.full(5, np.nan)}, "client 1, train: example 0 holds a NaN"),
        ({"tokens": np.full((5, 4), 2**31)}, "client 1, train: integer inputs must fit in 32 bits"),
        ({"more": np.zeros(5)}, "client 1, train: inputs are PyTreeDef.*more.*the clients before it"),
    ],
)
def test_bad_trees_name_the_client(change: dict, message: str) -> None:
    clients = [(inputs(n), np.arange(n) % 3) for n in (3, 5)]
    clients[1] = (clients[1][0] | change, clients[1][1])
    with pytest.raises(JaxpflError, match=message) as error:
        stack_clients(clients)
    assert "\n" not in str(error.value)


def test_no_array_at_all_and_lists() -> None:
    with pytest.raises(JaxpflError, match="client 0, train: inputs without an array"):
        stack_clients([({}, np.zeros(2, int))])
    federation = stack_clients([([[1, 2], [3, 4]], [0, 1]), (([5, 6],), (1,))])  # lists and tuples are arrays
    assert (federation.train.x.shape, federation.train.x.dtype) == ((2, 2, 2), np.int32)
    mixed = stack_clients([({"a": np.zeros((2, 1), int)}, [0, 1]), ({"a": np.zeros((2, 1))}, [0, 1])])
    assert mixed.train.x["a"].dtype == np.float32


def test_a_source_whose_arrays_differ_in_length() -> None:
    x = inputs(40) | {"length": np.zeros(39)}
    source = Source("own", x, np.arange(40) % 4, None, None, 4, "own")
    with pytest.raises(JaxpflError, match="data set 'own', train: 39 inputs but 40 labels"):
        federate(source, partition="iid", clients=2)
