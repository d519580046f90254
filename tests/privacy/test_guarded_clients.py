"""Guarded gradients are of a client's own examples, and its loss is told beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.core.types import ClientData, Examples
from jaxpfl.privacy import guarded, silos

SIZES = (3, 5, 2)
CLIP = 0.8


def test_the_gradient_of_each_client_is_that_of_its_own_examples():
    """Whole batches without noise, against float64 NumPy: a client at another place would see its neighbour's."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 2)).astype(np.float32), rng.normal(size=sum(SIZES)).astype(np.float32)
    data = ClientData.stacked(Examples(x, y), SIZES)
    mechanism = silos.mechanism_of(
        np.array(SIZES), batch_size=9, per_round=lambda n: 1, once=lambda n: 0, releases=1, rounds=1,
        clipping_norm=CLIP, noise_multiplier=0.0,
    )  # fmt: skip
    w = jnp.array([0.1, -0.2])

    def one(own: ClientData, key):
        ledger = guarded.Ledger("m", "update")
        numbers = guarded._numbers_of(own.size, mechanism)
        (batch,) = guarded.GuardedData(ledger, own, (key, numbers, mechanism)).batches(1, None, 1)(0)
        loss, gradient = batch.gradient(lambda w, key, x, y: (x @ w - y) ** 2 / 2, w, key)
        return loss, gradient, ledger.loss

    run = jax.jit(one)
    for i, (n, end) in enumerate(zip(SIZES, np.cumsum(SIZES), strict=True)):
        loss, gradient, told = run(data.client(i), jax.random.key(i))
        rows, labels = x[end - n : end].astype(float), y[end - n : end].astype(float)
        errors = rows @ np.array([0.1, -0.2]) - labels
        each = errors[:, None] * rows
        each *= np.minimum(1, CLIP / np.linalg.norm(each, axis=1))[:, None]
        np.testing.assert_allclose(gradient, each.mean(axis=0), rtol=1e-5, atol=1e-6)
        assert np.isnan(loss)
        if told is not None:
            assert float(told) == pytest.approx((errors**2 / 2).mean(), rel=1e-5)


def test_the_loss_that_a_method_does_not_see_is_reported_in_place_of_what_it_saw():
    ledger = guarded.Ledger("m", "update")
    assert guarded._reported({"train_loss": 1.0}, ledger) == {"train_loss": 1.0}
    ledger.loss = jnp.float32(2.0)
    assert guarded._reported({"train_loss": 1.0, "scale": 3.0}, ledger) == {"train_loss": 2.0, "scale": 3.0}
    assert guarded._reported({"scale": 3.0}, ledger) == {"scale": 3.0}
