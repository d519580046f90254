"""FedAvg with one client is plain SGD on its examples: rounds leave no trace.

``w <- w - eta (grad CE(w; batch) + wd w)``, the batches consecutive places of an endless row of epochs, each
a permutation of all examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import sgd
from oracle_setup import IDS, SEED, STEPS, assert_same, classification_problem, clients, on_host, simulation

from jaxpfl import ExecutionPlan
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.data.orders import order_at

SIZE, BATCH, ROUNDS, RATE, DECAY = 13, 4, 40, 0.2, 0.01


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def endless(epochs: int) -> np.ndarray:
    """The epochs' orders in a row; epoch e's key is ``fold_in(stream of (BATCHES, client), e)``."""
    key = stream(jax.random.key(SEED), Purpose.BATCHES, IDS[0])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs))
    orders = np.asarray(jax.vmap(lambda k: order_at(k, jnp.int32(SIZE), jnp.arange(SIZE, dtype=jnp.int32)))(keys))
    assert (np.sort(orders, axis=1) == np.arange(SIZE)).all()
    return orders.ravel()


@pytest.mark.slow
def test_fedavg_with_one_client_is_sgd():
    problem = classification_problem((SIZE,), IDS[:1])
    hp = {"lr": RATE, "lr_decay": 1.0, "weight_decay": DECAY}
    made = simulation("fedavg", problem, hp, batch_size=BATCH, plan=ExecutionPlan(rounds_per_call=ROUNDS))
    state = made.init([SEED])
    start = on_host(state).server
    end, history = made.advance(state, ROUNDS)

    ((x, y),) = clients(problem.train)
    places = endless(ROUNDS * STEPS * BATCH // SIZE + 1)[: ROUNDS * STEPS * BATCH]
    batches = [(x[index], y[index]) for index in places.reshape(-1, BATCH)]
    want, loss = sgd(start, batches, RATE, DECAY)
    assert_same(on_host(end).server, want)
    np.testing.assert_allclose(history["train_loss"].mean(), loss, rtol=1e-9)
    assert history["train_loss"][0, -5:].mean() < 0.7 * history["train_loss"][0, :5].mean()
