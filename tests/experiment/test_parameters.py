"""Parameters that a prediction passes to the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import Model, classification
from jaxpfl.runs.export import Witness


@pytest.fixture
def witness() -> Witness:
    model = Model(lambda key, x: jnp.zeros((4, 3)), lambda w, x: x @ w)
    return Witness(classification(model, (4,), 3))


def test_a_mixture_of_parameters_is_one_model(witness):
    v, w = jnp.ones((4, 3)), jnp.full((4, 3), 3.0)

    def predict(alpha, both, x):
        return witness.task.model.apply(alpha * both[0] + (1 - alpha) * both[1], x)

    found = witness.parameters(predict, 0.25, (v, w))
    np.testing.assert_allclose(found, np.full((4, 3), 2.5))
    several = jax.jit(jax.vmap(lambda v, w: witness.parameters(predict, 0.25, (v, w))))(v[None], w[None])
    np.testing.assert_allclose(several, np.full((1, 4, 3), 2.5))


def test_another_models_pass_beside_it_does_not_count(witness):
    teacher, own = jnp.ones((4, 3)), jnp.full((4, 3), 2.0)

    def predict(x):
        logits = witness.task.model.apply(own, x)
        witness.task.model.apply(teacher, x)
        return logits

    assert witness.parameters(predict) is own


@pytest.mark.parametrize("combine", [jnp.mean, jnp.max])
def test_a_mixture_of_predictions_is_none(witness, combine):
    components = jnp.stack([jnp.ones((4, 3)), jnp.zeros((4, 3))])

    def predict(x):
        return combine(jax.vmap(lambda w: witness.task.model.apply(w, x))(components), axis=0)

    assert witness.parameters(predict) is None
    assert witness.parameters(lambda x: 2 * witness.task.model.apply(components[0], x)) is None
