"""Parameters given to start from: what fits, and one line for what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError, Model, classification
from jaxpfl.models import mlp
from jaxpfl.models.base import by_path, start_from

TASK = classification(mlp(3, (5,)), (4,), 3)


@pytest.fixture
def given() -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in by_path(TASK.init(jax.random.key(7))).items()}


def test_paths(given):
    assert list(given) == ["dense0/bias", "dense0/kernel", "head/bias", "head/kernel"]
    assert list(by_path(given)) == list(given)


@pytest.mark.parametrize("as_tree", [True, False])
def test_every_key_gives_them_in_the_models_own_type(given, as_tree):
    parameters = TASK.init(jax.random.key(7)) if as_tree else given
    task = start_from(TASK, parameters)
    for seed in (0, 1):
        got = jax.jit(task.init)(jax.random.key(seed))
        jax.tree.map(np.testing.assert_array_equal, got, TASK.init(jax.random.key(7)))
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(task.model.apply(got, x), TASK.model.apply(got, x))


def test_the_order_of_paths_does_not_matter(given):
    task = start_from(TASK, dict(reversed(given.items())))
    assert jax.tree.map(jnp.shape, task.init(jax.random.key(0))) == jax.tree.map(
        jnp.shape, TASK.init(jax.random.key(0))
    )


def test_a_model_that_is_one_array():
    task = classification(Model(lambda key, x: jnp.zeros((4, 3)), lambda w, x: x @ w), (4,), 3)
    got = start_from(task, {"parameters": np.ones((4, 3))}).init(jax.random.key(0))
    np.testing.assert_array_equal(got, np.ones((4, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense0/kernel": np.zeros((4, 6))}, r"'dense0/kernel' is \(4, 6\) in them and \(4, 5\) in the model"),
        ({"head/scale": np.zeros(3)}, r"'head/scale' is \(3,\) in them and absent in the model"),
        ({"head/bias": None}, r"'head/bias' is absent in them and \(3,\) in the model"),
        ({"head/bias": np.array([0, np.nan, 0])}, "must be finite, 'head/bias' holds a NaN"),
        ({"head/bias": np.full(3, 1e300)}, "must be finite, 'head/bias' holds a NaN or infinite"),
        ({"head/bias": np.array(["a", "b", "c"])}, "must be numbers, 'head/bias' is <U1"),
        ({"dense0/kernel": np.zeros(2), "head/bias": np.zeros(2)}, "'dense0/kernel' is"),
    ],
)
def test_what_does_not_fit(given, change, message):
    changed = {path: value for path, value in (given | change).items() if value is not None}
    with pytest.raises(JaxpflError, match=message):
        start_from(TASK, changed)
