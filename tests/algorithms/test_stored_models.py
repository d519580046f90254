"""Global models kept by a server with a given number of places, round by round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms.parts.servers import add_model, begin_store


def stored_rounds(size: int, rounds: int) -> list[int]:
    """Rounds of the global models kept by a server with that many places, by the rule, round by round."""
    kept = [0]
    for r in range(1, rounds + 1):
        stride = 1
        while r >= stride * size:
            stride *= 2
        if r % stride == 0:
            if len(kept) == size:
                kept.remove(next(q for q in kept if q % stride))
            kept.append(r)
    return sorted(kept)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_stored_models_are_equally_spaced_whatever_the_rounds(size):
    """The model of round r is r itself here; no gap, that to the present round included, is over twice another."""

    @jax.jit
    def rounds(r: int):
        return jax.lax.fori_loop(1, r + 1, lambda t, kept: add_model(kept, t, t), begin_store(jnp.int32(0), size))

    for last in range(70):
        kept = rounds(last)
        want = stored_rounds(size, last)
        present = np.asarray(kept.rounds)[np.asarray(kept.present)]
        assert sorted(present.tolist()) == want
        np.testing.assert_array_equal(np.asarray(kept.models)[np.asarray(kept.present)], present)
        gaps = np.diff([*want, last + 1])
        assert want[0] == 0
        assert len(want) == min(size, last + 1)
        assert gaps.max() <= max(2 * gaps[:-1].min(initial=last + 1), 1)
