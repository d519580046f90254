"""The flat store of examples: views of clients, choices of clients, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ClientData, JaxpflError
from jaxpfl.core import types
from jaxpfl.core.types import chunk_of
from jaxpfl.engine.placement import place, put

SIZES = (3, 0, 5, 1)


def padded(sizes=SIZES, capacity=6):
    rng = np.random.default_rng(0)
    mask = np.arange(capacity) < np.array(sizes)[:, None]
    x = rng.normal(size=(len(sizes), capacity, 2)).astype(np.float32) * mask[..., None]
    return x, rng.integers(1, 4, size=mask.shape).astype(np.int32) * mask, mask


def same(data, x, y, mask):
    for got, want in ((data.x, x), (data.y, y), (data.mask, mask)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(data.size, mask.sum(axis=-1))


def test_views_are_the_padded_arrays():
    x, y, mask = padded()
    data = ClientData.padded(x, y, mask)
    assert (len(data.examples.y), data.capacity) == (9, 6)  # nothing is padded but the views
    same(data, x, y, mask)
    same(data.client(2), x[2], y[2], mask[2])
    same(ClientData.padded(x[2], y[2], mask[2]), x[2], y[2], mask[2])
    same(data.bounded(7), *(np.pad(a, [(0, 0), (0, 1)] + [(0, 0)] * (a.ndim - 2)) for a in (x, y, mask)))
    assert data.emptied().x.shape == (4, 0, 2)
    with pytest.raises(ValueError, match="read-only"):
        data.x[0] = 1.0


def test_views_of_traced_arrays():
    x, y, mask = padded()
    data = jax.tree.map(jnp.asarray, ClientData.padded(x, y, mask))

    @jax.jit
    def view(data, row):
        one = data.client(row)
        return one.x, one.y, one.mask

    for row in range(len(SIZES)):
        for got, want in zip(view(data, row), (x[row], y[row], mask[row]), strict=True):
            np.testing.assert_array_equal(got, want)
    # A method may change what it sees, as a NamedTuple of padded arrays could be.
    turned = jax.jit(lambda one: ClientData.padded(-one.x, one.y, one.mask))(data.client(2))
    same(turned, -x[2], y[2], mask[2])
    same(jax.jit(lambda a, b, c: ClientData.padded(a, b, c))(x, y, mask), x, y, mask)


def test_rows_share_the_store_or_shed_examples():
    x, y, mask = padded()
    data = ClientData.padded(x, y, mask)
    turned = data.rows([3, 2, 1, 0])
    assert turned.examples is data.examples
    same(turned, x[::-1], y[::-1], mask[::-1])
    np.testing.assert_array_equal(turned.flat().y, np.concatenate([y[i][mask[i]] for i in (3, 2, 1, 0)]))
    chosen = data.rows(np.array([False, False, True, True]))
    np.testing.assert_array_equal(chosen.examples.y, np.concatenate([y[2][mask[2]], y[3][mask[3]]]))
    assert chosen.flat() is not None
    same(chosen, x[2:], y[2:], mask[2:])
    twice = data.rows([0, 2, 2, 0, 3])
    assert len(twice.examples.y) == 9  # examples that two clients hold lie once
    np.testing.assert_array_equal(twice.flat().y, np.concatenate([y[i][mask[i]] for i in (0, 2, 2, 0, 3)]))


def test_too_many_examples_are_refused(monkeypatch):
    monkeypatch.setattr(types, "MOST_EXAMPLES", 8)
    with pytest.raises(JaxpflError, match=r"^a split has 9 examples, but at most 8 are supported$"):
        ClientData.padded(*padded())


def test_a_tree_whose_leaves_were_cut_is_refused():
    """A choice of clients of padded arrays would cut the store: gathers would read the nearest example silently."""
    rng = np.random.default_rng(0)
    federation = jaxpfl.stack_clients([(rng.normal(size=(n, 2)), rng.integers(2, size=n)) for n in (4, 6, 5)])
    cut = jax.tree.map(lambda a: a[:2], federation)
    for use in (lambda: cut.train.flat(), lambda: put(cut, place(2, 1, False))):
        with pytest.raises(JaxpflError, match=r"^a client's examples lie outside the store of 2 examples: select"):
            use()


@pytest.mark.parametrize(
    ("sizes", "chunk"),
    [
        ([30] * 5, 30),
        ([25, 30, 30], 30),  # nearly equal: one chunk
        ([30] * 2000 + [20_000], 30),
        ([2] * 9 + [500], 8),
        ([0, 0, 7], 7),
        ([0], 0),
    ],
)
def test_chunks_follow_the_median_client(sizes, chunk):
    assert chunk_of(np.array(sizes)) == chunk


def test_rows_that_there_are_not_and_an_id_twice_are_refused():
    clients = [(np.ones((n, 2)), np.zeros(n, int)) for n in (3, 1, 2)]
    federation = jaxpfl.stack_clients(clients, test=clients)
    for wrong in ([5], [-1], [0.5], [True, False]):
        with pytest.raises(JaxpflError, match=r"^rows must be integers from 0 to 2 or a mask \[3\], got "):
            federation.rows(wrong)
    twice = federation.rows([0, 0, 1])
    with pytest.raises(JaxpflError, match=r"ids must be distinct, because random numbers depend on them, got 0 twice$"):
        jaxpfl.fit("local", twice, model="linear", rounds=1, local_steps=1)
