"""Codes: what is decoded is what was encoded, bit for bit, and a traced count of bits is the message's length."""

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxpfl.uploads.compression import codes, quantizers

D = 24  # one size: each count compiles once
some = settings(max_examples=60, deadline=None, derandomize=True)
integers = (
    st.integers(1, 2**31 - 1) | st.integers(0, 30).map(lambda k: 2**k) | st.integers(1, 31).map(lambda k: 2**k - 1)
)
anything = st.floats(width=32) | st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, 2.0])
few = st.sampled_from([0.0, -0.0, 1.5, -2.0])
vectors = hnp.arrays(np.float32, D, elements=anything) | hnp.arrays(np.float32, D, elements=few)


code_bits = jax.jit(codes.elias_bits)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32))


def test_the_codes_of_the_first_integers():
    assert "".join(map(str, messages.encode_elias(np.arange(1, 6)))) == "10100110010000101"


@some
@given(st.lists(integers, max_size=40))
def test_elias_round_trip(numbers: list[int]):
    message = messages.encode_elias(np.array(numbers, np.int64))
    assert len(message) == int(code_bits(np.pad(np.array(numbers, np.int32), (0, 40 - len(numbers)))).sum())
    reader = messages.Reader(message)
    assert reader.elias(len(numbers)).tolist() == numbers
    assert reader.at == len(message)


def test_every_power_of_two_and_its_neighbours():
    numbers = np.unique(np.concatenate([2 ** np.arange(31) + k for k in (-1, 0, 1)]))
    numbers = numbers[numbers > 0]
    want = [2 * (int(n).bit_length() - 1) + 1 for n in numbers]
    np.testing.assert_array_equal(codes.elias_bits(jnp.asarray(numbers, jnp.int32)), want)
    np.testing.assert_array_equal(messages.Reader(messages.encode_elias(numbers)).elias(len(numbers)), numbers)


run_bits, top_bits, place_bits, level_bits = (
    jax.jit(f) for f in (codes.run_bits, quantizers.top_k_bits, codes.position_bits, quantizers.qsgd_bits)
)


@some
@given(vectors)
def test_run_length_round_trip(x: np.ndarray):
    message = messages.encode_runs(x)
    same_bits(messages.decode_runs(message, D), x)
    assert len(message) == int(run_bits(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(61706),
        np.arange(61706),
        (-1.0) ** np.arange(61706),
        np.repeat(np.arange(20) % 3, 50),
        np.zeros(1),
        np.full(7, np.nan),
    ],
    ids=["one run", "all distinct", "two in turn", "three in runs", "one entry", "not a number"],
)
def test_run_length_of_odd_vectors(x: np.ndarray):
    x = x.astype(np.float32)
    message = messages.encode_runs(x)
    same_bits(messages.decode_runs(message, len(x)), x)
    assert len(message) == int(run_bits(x))


def test_run_length_messages_by_hand():
    # One run: a bit, 32 for the number, gamma(8) = 7 bits.
    assert len(messages.encode_runs(np.full(8, 2.5))) == 1 + 32 + 7
    # Eight runs of two numbers: a bit, gamma(2) = 3, two numbers, and of each run one bit and gamma(1) = 1.
    assert len(messages.encode_runs(np.tile([1.0, 2.0], 4))) == 1 + 3 + 64 + 8 * 2


@some
@given(hnp.arrays(bool, D))
def test_positions_round_trip(sent: np.ndarray):
    message = messages.encode_positions(np.flatnonzero(sent))
    np.testing.assert_array_equal(messages.Reader(message).positions(), np.flatnonzero(sent))
    assert len(message) == int(place_bits(sent))


@some
@given(vectors)
def test_sparse_round_trip(x: np.ndarray):
    message = messages.encode_top_k(x)
    same_bits(messages.decode_top_k(message, D), np.where(x == 0, 0, x))
    assert len(message) == int(top_bits(x))


@some
@given(hnp.arrays(np.int32, D, elements=st.integers(-5, 5) | st.integers(-(2**31) + 1, 2**31 - 1)), anything)
def test_qsgd_round_trip(levels: np.ndarray, norm: float):
    message = messages.encode_qsgd(np.float32(norm), levels)
    got = messages.decode_qsgd(message, D)
    same_bits(got[0], np.float32(norm))
    np.testing.assert_array_equal(got[1], levels)
    assert len(message) == int(level_bits(levels))
