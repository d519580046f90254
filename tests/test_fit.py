"""``fit``: sweeps, a user's own model, and what it refuses."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError, Method, Model
from jaxpfl.algorithms import AveragingHyper
from jaxpfl.engine.spec import RunSpec, check_settings
from jaxpfl.privacy import Mechanism


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 4)), rng.integers(3, size=n)) for n in (5, 8, 6)]
    return jaxpfl.stack_clients(clients, test=clients)


def fit(federation, method="adaped", **changes):
    settings = {"model": "linear", "rounds": 3, "local_steps": 2, "batch_size": 4}
    return jaxpfl.fit(method, federation, **settings | changes)


@pytest.mark.parametrize(
    ("seeds", "given", "said"),
    [
        (
            range(3),
            {"hyper": {"psi_init": [1, 3.5, 8]}},
            r"psi_init = \[1.0, 3.5, 8.0\] .*seeds \[0, 1, 2\].*seeds=\[0, 0, 0\]",
        ),
        ([0, 1], {"lr": [0.1, 0.2]}, r"^lr = \[0.1, 0.2\]"),
        ([0, 1], {"stragglers": [0.1, 0.2]}, r"stragglers = \[0.1, 0.2\]"),
        ([0, 0, 1, 1], {"lr": [0.1, 0.2, 0.1, 0.2]}, None),
        ([0, 0], {"lr": [0.1, 0.2]}, None),
        ([0, 1], {"lr": [0.1, 0.1]}, None),
        ([0, 1], {"privacy": Mechanism((0.5, 1.0), 1.0)}, r"noise_multiplier = \[0.5, 1.0\]"),
    ],
)
def test_values_that_go_with_other_seeds_are_warned_of(seeds, given, said):
    spec = RunSpec(method="adaped", seeds=seeds, **given)
    if said is None:
        check_settings([spec], newcomers=False, strict=True)
    else:
        with pytest.warns(jaxpfl.JaxpflWarning, match=said):
            check_settings([spec], newcomers=False)


def test_shapes_of_the_result_and_the_bits_of_its_uploads(federation):
    result = fit(federation, "fedavg", seeds=2, rounds=5, eval_every=2, compress="sign")
    assert result.rounds.tolist() == [2, 4, 5]
    assert result.scores["after"]["accuracy"].shape == (3, 2, 3)
    assert result.personalized_accuracy.shape == (2, 3)
    assert result.global_accuracy is not None
    assert result.history["train_loss"].shape == (2, 5)
    entries = 4 * 3 + 3
    np.testing.assert_array_equal(result.history["upload_bits"], np.full((2, 5), 3 * (32 + entries)))
    with pytest.raises(JaxpflError, match="pools the data"):
        fit(federation, "pooled", compress="sign")


def test_clients_without_test_examples_have_no_score(federation):
    with pytest.warns(jaxpfl.JaxpflWarning, match="no client has test examples") as issued:
        result = fit(federation._replace(test=federation.test.emptied()), "local")
    assert {warning.filename for warning in issued} == {__file__}  # the user's file, not one of the package
    assert np.isnan(result.personalized_accuracy).all()
    assert result.validation_accuracy is None


def test_any_init_and_apply_are_a_model(federation):
    def init(key, x):
        return 0.1 * jax.random.normal(key, (x.shape[-1], 3))

    def apply(w, x, key=None, train=False):
        return jnp.tanh(x) @ w

    for model in (Model(init, apply), Model(init, lambda w, x: x @ w)):
        result = fit(federation, "local", model=model)
        assert np.isfinite(result.scores["after"]["loss"]).all()
        assert result.global_accuracy is None


def test_a_linen_module_is_a_model_and_integer_inputs_keep_their_type():
    rng = np.random.default_rng(0)
    clients = [(rng.integers(9, size=(6, 4)), rng.integers(3, size=6)) for _ in range(3)]
    tokens = jaxpfl.stack_clients(clients, test=clients)

    class Bag(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Embed(9, 3)(x).mean(axis=1)

    assert np.isfinite(fit(tokens, "local", model=Bag()).scores["after"]["loss"]).all()


@pytest.mark.slow
def test_tokens_beyond_the_vocabulary_are_refused():
    """Else they would be embedded as NaN, and their clients show as diverged."""
    tokens = np.array([[0, 1], [2, 7]])
    federation = jaxpfl.stack_clients([(tokens, [0, 1])], test=[(tokens, [1, 2])])
    message = "ids from 0 to 2, but the data contain 7: use a model with a larger vocabulary, or set num_classes"
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", federation, model="gru:4", rounds=1)
    jaxpfl.fit("fedavg", federation, model="gru:4", num_classes=8, rounds=1, local_steps=1)


def test_a_fit_is_not_pickled_but_its_results_are(federation):
    result = fit(federation, "local")
    for holder in (result, result.simulation):
        with pytest.raises(JaxpflError, match=r"a Simulation or a Fit cannot be pickled, .* pickle the Fit's state"):
            pickle.dumps(holder)
    kept = pickle.loads(pickle.dumps((result.state, result.history, result.scores)))
    np.testing.assert_array_equal(kept[2]["after"]["accuracy"], result.scores["after"]["accuracy"])
    went_on, _ = result.simulation.advance(kept[0], 1)
    assert went_on.round.tolist() == [4]


def test_a_builders_option_without_a_default_must_be_given(federation):
    def shifted(task, work, *, shift):
        return METHODS["fedavg"].build(task, work)

    method = Method("shifted", shifted, AveragingHyper())
    with pytest.raises(JaxpflError, match="shifted requires the option shift: options="):
        fit(federation, method)


def test_a_server_optimizer_of_uploads_that_stay_apart_is_refused(federation):
    method = METHODS["fedamp"]._replace(name="apart", hyper=AveragingHyper())
    with pytest.raises(JaxpflError, match=r"= adam has no effect, because apart does not sum its .* uploads"):
        fit(federation, method, server_optimizer="adam", server_lr=0.1)
