"""Clipping bounds what one client can do to a sum, whatever it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxpfl.privacy.noise import clip, norm

ADVERSARIAL = st.one_of(
    st.floats(width=32),
    st.sampled_from([np.inf, -np.inf, np.nan, 1e30, -1e30, 8.5e37, 1.7e38, 3e38, 1e-45, 1e-30, 0.0]),
)
UPLOADS = st.tuples(
    hnp.arrays(np.float32, 5, elements=ADVERSARIAL), hnp.arrays(np.float32, (2, 3), elements=ADVERSARIAL)
)
LIMITS = st.sampled_from([1e-3, 0.25, 1.0, 30.0])
ROUNDING = 1 + 1e-5

_clip = jax.jit(clip)


@given(UPLOADS, LIMITS)
@settings(max_examples=100, deadline=None)
def test_the_result_is_finite_and_short(upload, limit):
    clipped, _ = _clip(upload, limit)
    entries = np.concatenate([np.ravel(a) for a in clipped]).astype(np.float64)
    assert np.isfinite(entries).all()
    assert np.linalg.norm(entries) <= limit * ROUNDING


@given(st.lists(UPLOADS, min_size=1, max_size=4), UPLOADS, LIMITS)
@settings(max_examples=40, deadline=None)
def test_one_more_client_moves_the_sum_by_at_most_the_limit(others, one, limit):
    """Add or remove one: the sums differ by that client's clipped upload alone."""

    def total(uploads):
        return sum(
            np.concatenate([np.ravel(a) for a in _clip(upload, limit)[0]]).astype(np.float64) for upload in uploads
        )

    moved = total([*others, one]) - total(others)
    assert np.linalg.norm(moved) <= limit * ROUNDING


@given(hnp.arrays(np.float32, 7, elements=st.floats(-100, 100, width=32)), LIMITS)
@settings(max_examples=100, deadline=None)
def test_what_is_short_stays_and_directions_do(upload, limit):
    clipped, size = _clip(upload, limit)
    length = np.linalg.norm(upload.astype(np.float64))
    np.testing.assert_allclose(size, length, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(clipped, upload * min(1.0, limit / max(length, 1e-300)), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e38, 1.7e38, 3.4e38])  # of some the reciprocal is no normal number
def test_neither_squares_nor_reciprocals_overflow(scale):
    upload = jnp.full(4, scale / 4, jnp.float32)
    np.testing.assert_allclose(norm(upload), scale / 2, rtol=1e-6)
    np.testing.assert_allclose(clip(upload, scale / 4)[0], scale / 8, rtol=1e-6)
    assert np.linalg.norm(clip(upload, 0.1)[0]) <= 0.1 * ROUNDING


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_few_digits_are_clipped_in_single_precision(dtype):
    """In a narrow type the norm would be wrong by up to 1 %."""
    clipped = np.asarray(clip(jnp.full(300, 1 / 3, dtype), 1.0)[0])
    assert clipped.dtype == np.float32
    assert np.linalg.norm(clipped.astype(np.float64)) <= ROUNDING


def test_nothing_to_clip():
    assert clip((), 1.0)[0] == ()
