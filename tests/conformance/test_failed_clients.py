"""Clients whose state or upload is not finite: who is not heard, and whose upload is used all the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problem import outcome, ragged_federation, simulate

from jaxpfl import METHODS, Algorithm
from jaxpfl.core.protocol import wrapped_client

pytestmark = pytest.mark.slow

BAD = 9
"""Id of a client of the ragged problem, row 2."""


def failing(algorithm: Algorithm, part: str, says: bool) -> Algorithm:
    """The algorithm with a client whose state or upload is NaN, and that says so itself, or leaves it to the engine."""
    (client,) = algorithm.clients

    def update(key: Any, hp: Any, ctx: Any, message: Any, state: Any, splits: Any) -> Any:
        bad = ctx.client_id == BAD
        state, upload, metrics = client.update(key, hp, ctx, message, state, splits)
        if part == "state":
            state = spoiled(state, bad)
        if part == "upload":
            upload = upload._replace(total=spoiled(upload.total, bad))
        return state, upload._replace(failed=bad) if says else upload, metrics

    return algorithm._replace(clients=(wrapped_client(client, update=update),))


def spoiled(tree: Any, bad: Any) -> Any:
    return jax.tree.map(lambda a: jnp.where(bad, jnp.full_like(a, jnp.nan), a), tree)


@functools.cache
def of(part: str, *, says: bool = False) -> dict[str, Any]:
    wrap = functools.partial(failing, part=part, says=says)
    return outcome(simulate(METHODS["adaped"], ragged_federation(), cohort=None, wrap=wrap), 1, scored=False)


def server(result: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result["state"].server)]


def test_a_finite_upload_beside_a_state_that_is_not_is_not_used() -> None:
    by_state, by_upload, whole = (of(part) for part in ("state", "upload", "nothing"))
    for a, b, all_of_them in zip(server(by_state), server(by_upload), server(whole), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, all_of_them)
    counts = by_state["state"].counts
    assert counts.uploads[0].tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert counts.diverged[0].tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_a_client_that_says_that_it_failed_is_heard_and_keeps_its_state() -> None:
    got = of("state", says=True)
    for a, b in zip(server(got), server(of("nothing")), strict=True):
        np.testing.assert_array_equal(a, b)
    counts = got["state"].counts
    assert counts.uploads[0].tolist() == [1] * 7
    assert counts.diverged[0].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got["state"].clients))


def test_an_upload_that_is_not_finite_is_never_used() -> None:
    """Whatever its client says of itself."""
    said, unsaid = of("upload", says=True), of("upload")
    for a, b in zip(server(said), server(unsaid), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
