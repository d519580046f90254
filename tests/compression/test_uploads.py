"""The wrapper around one client, whose upload is given: weights, parts, what is no number, what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import Algorithm, Client, ClientContext, JaxpflError, Upload
from jaxpfl.engine.state import Counts, whole
from jaxpfl.uploads.compression import Compressor, compressed, resolve, uploads

KEY = jax.random.key(0)
CTX = ClientContext(jnp.int32(0), jnp.int32(0), jnp.int32(0), 1, KEY)


def client_of(compressor, upload: Upload, **choices) -> Client:
    """A client that uploads what it is given in place of its data."""
    inner = Client(
        init=lambda key, hp, ctx, message: {"own": jnp.ones(2)},
        update=lambda key, hp, ctx, message, state, splits: (state, splits, {}),
        personalize=lambda key, hp, ctx, message, state, splits: state,
        predict=lambda hp, personal, x: x,
    )
    algorithm = Algorithm((inner,), None, 1)  # pyright: ignore[reportArgumentType]
    return compressed(algorithm, resolve(compressor), upload, **choices).clients[0]


def sent(compressor, *given: Upload, **choices):
    """The last upload, and the state after all of them."""
    client = client_of(compressor, given[0], **choices)
    state = client.init(KEY, None, CTX, None)
    for upload in given:
        state, result, _ = jax.jit(client.update, static_argnums=3)(KEY, None, CTX, None, state, upload)
    return result, state


def test_the_whole_upload_is_one_vector():
    total = {"a": jnp.array([[1.0, -9.0]]), "b": jnp.array([3.0, 0.5])}
    got, state = sent("top-k:share=0.5", Upload(total, jnp.ones(())))
    np.testing.assert_array_equal(got.total["a"], [[0, -9]])
    np.testing.assert_array_equal(got.total["b"], [3, 0])
    np.testing.assert_array_equal(state.memory[0], [1, 0, 0, 0.5])
    assert int(got.bits) == len("011") + len("010") + len("1") + 2 * 32


def test_memories_are_of_increments_whatever_their_weight():
    """Ten times the weight: ten times what is sent, and the same memory, also of rounds of another weight."""
    increments = jnp.array([[1.0, -9.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    light = sent("sign", *(Upload(x, jnp.ones(())) for x in increments))
    heavy = sent("sign", *(Upload(w * x, jnp.float32(w)) for w, x in zip((10.0, 7.0), increments, strict=True)))
    np.testing.assert_allclose(heavy[0].total, 7 * light[0].total, rtol=1e-6)
    np.testing.assert_allclose(heavy[1].memory[0], light[1].memory[0], rtol=1e-6)
    np.testing.assert_array_equal(heavy[0].weight, 7)


def test_parts_without_weight_send_nothing_and_keep_their_memory():
    def upload(chosen: int, values: list[float]) -> Upload:
        weight = jnp.zeros(2).at[chosen].set(3.0)
        return Upload({"w": 3 * jnp.zeros((2, 4)).at[chosen].set(jnp.array(values))}, weight)

    first = upload(0, [1, -9, 2, 0.5])
    got, state = sent("sign", first)
    np.testing.assert_array_equal(got.total["w"][1], np.zeros(4))  # not the sign of zero
    assert int(got.bits) == 32 + 4
    np.testing.assert_allclose(state.memory[0][1], np.zeros(4))
    later, after = sent("sign", first, upload(1, [4, 4, 4, 4.0]))
    np.testing.assert_allclose(later.total["w"], 3 * np.array([[0, 0, 0, 0], [4, 4, 4, 4]]))
    np.testing.assert_array_equal(after.memory[0][0], state.memory[0][0])
    third, last = sent("sign", first, upload(1, [4, 4, 4, 4.0]), upload(0, [0, 0, 0, 0.0]))
    x = np.array([1, -9, 2, 0.5]) - 3.125 * np.array([1, -1, 1, 1])
    np.testing.assert_allclose(third.total["w"][0], 3 * np.abs(x).mean() * np.sign(x), rtol=1e-6)
    np.testing.assert_array_equal(last.memory[0][1], after.memory[0][1])


def test_each_part_rounds_by_draws_of_its_own():
    total = {"w": jnp.broadcast_to(jnp.linspace(-1, 1, 64), (2, 64))}
    got, _ = sent("uniform:bits=1", Upload(total, jnp.ones(2)))
    assert not np.array_equal(got.total["w"][0], got.total["w"][1])


def test_no_weight_at_all_says_nothing():
    got, state = sent("sign", Upload(jnp.zeros(4), jnp.zeros(())))
    np.testing.assert_array_equal(got.total, np.zeros(4))
    np.testing.assert_array_equal(state.memory[0], np.zeros(4))
    assert int(got.bits) == 0


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_what_is_not_finite_is_left_for_the_engine_to_find(weight: float):
    got, _ = sent("sign", Upload(jnp.array([1.0, np.nan, 2.0]), jnp.float32(weight)))
    assert not np.isfinite(got.total).all()


def test_lossless_changes_no_bit_under_any_weight():
    x = jax.random.normal(KEY, (1000,)) * jnp.float32(0.1)
    got, state = sent("lossless", Upload(7 * x, jnp.float32(7)), feedback=True)
    np.testing.assert_array_equal(got.total, 7 * x)
    np.testing.assert_array_equal(state.memory[0], np.zeros(1000))
    assert int(got.bits) == 32_000


def test_entries_that_are_no_floats_go_as_they_are():
    total = {"x": jnp.array([1.0, 2.0]), "n": jnp.array([3, 4, 5], jnp.int32), "yes": jnp.array(True)}
    got, state = sent("sign", Upload(total, jnp.ones(())))
    np.testing.assert_array_equal(got.total["n"], [3, 4, 5])
    assert got.total["n"].dtype == jnp.int32
    assert bool(got.total["yes"])
    assert int(got.bits) == 32 + 2 + 3 * 32 + 8
    assert state.memory[0].shape == (2,)


def test_without_feedback_nothing_is_kept():
    for text in ("sign:feedback=false", "qsgd"):
        assert sent(text, Upload(jnp.ones(4), jnp.ones(())))[1].memory == ()
    assert sent("sign", Upload(jnp.ones(4), jnp.ones(())), feedback=False)[1].memory == ()


def test_a_compressor_of_ones_own():
    half = Compressor(lambda key, round, x: resolve("lossless").compress(key, round, x / 2))
    got, state = sent(half, Upload(jnp.ones(4), jnp.ones(())))
    np.testing.assert_array_equal(got.total, np.full(4, 0.5))
    np.testing.assert_array_equal(state.memory[0], np.full(4, 0.5))


def test_an_upload_whose_bits_int32_might_not_hold_is_refused():
    many = Upload(jax.ShapeDtypeStruct((uploads.MOST_NUMBERS + 1,), jnp.float32), jnp.ones(()))
    client = client_of("sign:feedback=false", many)
    with pytest.raises(JaxpflError, match=r"^an upload of 32537632 numbers cannot be compressed"):
        jax.eval_shape(lambda upload: client.update(KEY, None, CTX, None, uploads.Held((), ()), upload), many)


def test_bits_beyond_an_int32_are_counted_exactly():
    """Clients that send almost 2^31 bits each time, five hundred times: 10^12 in all."""
    most = 2**31 - 1
    each = jnp.array([most, 12345, most - 4096])

    def add(counts: Counts) -> Counts:
        rows = jax.vmap(lambda bits: Counts.row(upload_bits=bits, uploads=1))(each)
        return jax.vmap(Counts.plus)(counts, rows)

    start = Counts.zeros(3)
    many = jax.jit(lambda counts: jax.lax.fori_loop(0, 500, lambda _, c: add(c), counts))(start)
    np.testing.assert_array_equal(many.upload_bits, 500 * np.asarray(each, np.int64))
    np.testing.assert_array_equal(many.uploads, 500)
    since = whole(*jax.jit(Counts.upload_bits_since)(add(many), many))
    assert since == np.asarray(each, np.int64).sum() > 2**31
