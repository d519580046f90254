"""Batch normalisation: padded examples count nowhere, ours is flax's, and whatever cannot carry statistics says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpfl
from jaxpfl.algorithms.parts.servers import trained_part
from jaxpfl.models import build_model, classification, from_linen, lora
from jaxpfl.models.base import in_bfloat16
from jaxpfl.models.layers import BatchNorm
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.support.errors import JaxpflError

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
VALID = np.array([True] * 4 + [False] * 2)


class Net(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3)(self.norm(nn.Dense(4)(x)))


def made(module, **options):
    model = from_linen(module, **options)
    params = model.init(jax.random.key(0), jnp.asarray(X))
    statistics = jax.tree.map(lambda a: a + 0.5, params["batch_stats"])
    return model, params | {"batch_stats": statistics}


def assert_near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("model", ["linen", "mlp-bn:4"])
def test_padded_examples_count_nowhere(model):
    model = from_linen(Net(nn.BatchNorm())) if model == "linen" else build_model(model, 3, (5,))
    params = model.init(jax.random.key(0), jnp.asarray(X))
    observe = model.statistics.observe
    logits, moved = observe(params, X[:4], valid=np.ones(4, bool))
    for garbage in (0.0, 1e3):
        padded = np.where(VALID[:, None], X, garbage).astype(np.float32)
        got, also = observe(params, padded, valid=VALID)
        assert_near((got[:4], also), (logits, moved))
    assert np.abs(jax.tree.leaves(moved["batch_stats"])[0]).max() > 1e-4
    assert_near(model.training(params, X[:4]), logits)


def test_an_empty_batch_moves_nothing_and_has_a_gradient():
    model, params = made(Net(nn.BatchNorm()))
    nobody = np.zeros(6, bool)

    def loss(params):
        logits, moved = model.statistics.observe(params, jnp.zeros_like(X), valid=nobody)
        return jnp.where(nobody[:, None], logits, 0).sum(), moved

    gradient, moved = jax.grad(loss, has_aux=True)(params)
    jax.tree.map(np.testing.assert_array_equal, moved, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_ours_is_that_of_flax():
    ours, flax = BatchNorm(), nn.BatchNorm(momentum=0.9)
    x = np.random.default_rng(1).normal(2, 3, size=(6, 2, 2, 4)).astype(np.float32)  # [N, H, W, C]
    variables = flax.init(jax.random.key(0), x, use_running_average=True)
    given = jax.tree.map(lambda a: a + np.linspace(0.1, 0.4, 4, dtype=np.float32), variables)
    for running in (True, False):
        more = {"use_running_average": running, "mutable": ["batch_stats"]}
        want, stats = flax.apply(given, x, mask=VALID[:, None, None, None], **more)
        got, own = ours.apply(given, np.moveaxis(x, (0, 3), (3, 0)), mask=VALID, **more)
        assert_near(np.moveaxis(got, (0, 3), (3, 0)), want)
        assert_near(own, stats)


def test_a_variance_below_zero_counts_as_zero():
    model, params = made(Net(nn.BatchNorm()))
    lower, zero = (
        params | {"batch_stats": jax.tree.map(lambda a, v=v: jnp.full_like(a, v), params["batch_stats"])}
        for v in (-1.0, 0.0)
    )
    mean_of_zero = jax.tree.map(jnp.zeros_like, params["batch_stats"]["norm"]["mean"])
    lower["batch_stats"]["norm"]["mean"] = mean_of_zero
    assert_near(model.apply(lower, X), model.apply(zero, X))


def test_statistics_are_averaged_whatever_the_servers_optimizer_and_go_with_their_layer():
    model = from_linen(Net(nn.BatchNorm()), head=lambda path: path[0] in ("norm", "Dense_1"))
    task = classification(model, (5,), 3)
    assert trained_part(task)["batch_stats"]["norm"] == {"mean": False, "var": False}
    assert trained_part(task)["norm"] == {"scale": True, "bias": True}
    assert model.head(("batch_stats", "norm", "mean"))
    assert not model.head(("Dense_0", "kernel"))
    assert trained_part(classification(build_model("mlp", 3, (5,)), (5,), 3)) is True


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("batch_stats", "seen", lambda: jnp.zeros(()))
        return nn.Dense(3)(x)


class Reshaped(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 1)).reshape(x.shape)


REFUSED = {
    "statistic 'seen' of no flax.linen.BatchNorm": Counting(),
    "sees 30 rows of 6 examples": Reshaped(),
    "has axis_name = i": Net(nn.BatchNorm(axis_name="i")),
    "examples as features": Net(nn.BatchNorm(axis=0)),
    "normalises by batches in evaluation too": Net(nn.BatchNorm(use_running_average=False)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_module_whose_padding_would_count_is_refused_in_one_line(why):
    model = from_linen(REFUSED[why])

    def used():
        model.statistics.observe(model.init(jax.random.key(0), jnp.asarray(X)), X, valid=VALID)

    with pytest.raises(JaxpflError, match=why) as error:
        used()
    assert "\n" not in str(error.value)


def test_training_by_another_loss_and_other_collections_are_refused():
    model, params = made(Net(nn.BatchNorm()))
    with pytest.raises(JaxpflError, match=r"Net has running statistics .* would not move"):
        model.apply(params, X, key=jax.random.key(0), train=True)
    with pytest.raises(JaxpflError, match="lora: the model has running statistics"):
        lora(model, params)
    with pytest.raises(JaxpflError, match="bfloat16"):
        in_bfloat16(classification(model, (5,), 3))


NOISE = {"noise_multiplier": 1.0, "delta": 1e-3}


def federation():
    rng = np.random.default_rng(2)
    train = [(rng.normal(size=(n, 5)), rng.integers(3, size=n)) for n in (8, 11, 9, 12)]
    return jaxpfl.stack_clients(train, test=train)


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("adaped", {}, r"adaped does not carry the model's running statistics .* one of local, fedavg"),
        ("fedavg", {"options": {"fednova": True}}, "fedavg.fednova is of steps"),
        ("fedavg", {"privacy": PrivacyConfig(**NOISE)}, r"running statistics \(fedavg\)"),
        ("fedbn", {"privacy": PrivacyConfig(**NOISE, unit="example")}, "mixes those of a batch"),
    ],
)
def test_refusals_of_methods(method, options, why):
    with pytest.raises(JaxpflError, match=why) as error:
        jaxpfl.fit(method, federation(), model="mlp-bn:4", rounds=1, batch_size=4, **options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"compress": "top-k:share=0.05"}, {"attack": "noise", "attackers": 0.25}])
def test_neither_compression_nor_an_attack_changes_statistics(how):
    given = {"model": "mlp-bn:4", "rounds": 1, "batch_size": 4, "local_steps": 2}
    want, got = (jaxpfl.fit("fedavg", federation(), **given, **more).state.server for more in ({}, how))
    statistics = build_model("mlp-bn:4", 3, (5,)).statistics
    assert_near(statistics.of(got), statistics.of(want))
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, want)
    assert max(jax.tree.leaves(apart)) > 1e-3


@pytest.mark.slow
def test_private_fedbn_keeps_its_statistics():
    """Noise so large that whatever it reaches is far off; what clients keep is of their own batches."""
    privacy = Mechanism(noise_multiplier=1e4)
    result = jaxpfl.fit("fedbn", federation(), model="mlp-bn:4", rounds=1, batch_size=4, local_steps=2, privacy=privacy)
    state = result.state
    assert np.abs(jax.tree.leaves(state.server)[0]).max() > 100
    statistics = jax.tree.leaves(state.clients[0]["batch_stats"])
    assert statistics
    assert all(np.abs(leaf).max() < 10 for leaf in statistics)
