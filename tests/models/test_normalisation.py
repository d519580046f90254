"""Group, layer and batch normalisation against flax's; padded examples count nowhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpfl
from jaxpfl.algorithms.parts.servers import trained_part
from jaxpfl.models import build_model, classification, from_linen, lora
from jaxpfl.models.base import in_bfloat16
from jaxpfl.models.layers import EPSILON, BatchNorm, GroupNorm, LayerNorm, group_norm
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.support.errors import JaxpflError

CHANNELS = 6


class FeaturesFirst(nn.Module):
    """`GroupNorm` on [N, ..., C], to be held against flax's."""

    groups: int

    @nn.compact
    def __call__(self, x):
        return jnp.moveaxis(GroupNorm(self.groups, name="norm")(jnp.moveaxis(x, (0, -1), (-1, 0))), (0, -1), (-1, 0))


class Flax(nn.Module):
    groups: int

    @nn.compact
    def __call__(self, x):
        return nn.GroupNorm(self.groups, epsilon=EPSILON, name="norm")(x)


def close(ours, theirs, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * jnp.abs(b).max()), ours, theirs)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(module, variables, x, cotangent):
    y, pull = jax.vjp(module.apply, variables, x)
    return y, pull(cotangent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "groups", "dtype", "rtol"),
    [((4, 5), 2, "float64", 1e-9), ((), 6, "float64", 1e-9), ((4, 5), 1, "float32", 1e-5)],
)
def test_group_norm_equals_flax(places, groups, dtype, rtol):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        x, cotangent = (jnp.asarray(rng.normal(2, 3, (3, *places, CHANNELS)), dtype) for _ in range(2))
        variables = {"params": {"norm": {n: jnp.asarray(rng.normal(size=CHANNELS), dtype) for n in ("scale", "bias")}}}
        started = FeaturesFirst(groups).init(jax.random.key(0), x)
        close(started, Flax(groups).init(jax.random.key(0), x), 0)
        assert {leaf.dtype for leaf in jax.tree.leaves(started)} == {jnp.dtype(dtype)}
        ours, theirs = (value_and_gradients(m, variables, x, cotangent) for m in (FeaturesFirst(groups), Flax(groups)))
        close(ours, theirs, rtol)


def test_layer_norm_equals_flax():
    x = jax.random.normal(jax.random.key(0), (4, CHANNELS)) * 3 + 1
    modules = LayerNorm(), nn.LayerNorm(epsilon=EPSILON)
    ours, theirs = (jax.jit(module.init)(jax.random.key(0), x) for module in modules)
    close(ours, theirs, 0)
    variables = {"params": {"scale": jnp.arange(1.0, 7.0), "bias": jnp.arange(6.0)}}
    cotangent = jnp.sin(jnp.arange(24.0)).reshape(x.shape)
    ours, theirs = (value_and_gradients(module, variables, x, cotangent) for module in modules)
    close(ours, theirs, 1e-5)


def test_a_large_common_value_does_not_drown_the_variance():
    """By the difference of two moments the variance would be lost: 1e4 squared has no room for 1 in float32."""
    x = np.random.default_rng(0).normal(size=(CHANNELS, 8, 8, 2)).astype(np.float32)
    norm = jax.jit(lambda z: group_norm(z, jnp.ones(CHANNELS), jnp.zeros(CHANNELS), 2))
    plain, shifted = norm(x), norm(x + 1e4)
    np.testing.assert_allclose(shifted, plain, atol=1e-2)


def test_an_example_of_equal_values_has_a_finite_gradient():
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(group_norm(x, jnp.ones(4), jnp.zeros(4), 2) ** 3)))
    assert np.isfinite(gradient(jnp.ones((4, 3, 3, 2)))).all()


X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
VALID = np.array([True] * 4 + [False] * 2)


class Net(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3)(self.norm(nn.Dense(4)(x)))


def made(module, **options):
    model = from_linen(module, **options)
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(X))
    statistics = jax.tree.map(lambda a: a + 0.5, params["batch_stats"])
    return model, params | {"batch_stats": statistics}


def assert_near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("model", ["linen", "mlp-bn:4"])
def test_padded_examples_count_nowhere(model):
    model = from_linen(Net(nn.BatchNorm())) if model == "linen" else build_model(model, 3, (5,))
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(X))
    observe = jax.jit(model.statistics.observe)
    logits, moved = observe(params, X[:4], valid=np.ones(4, bool))
    for garbage in (0.0, 1e3):
        padded = np.where(VALID[:, None], X, garbage).astype(np.float32)
        got, also = observe(params, padded, valid=VALID)
        assert_near((got[:4], also), (logits, moved))
    assert np.abs(jax.tree.leaves(moved["batch_stats"])[0]).max() > 1e-4
    assert_near(jax.jit(model.training)(params, X[:4]), logits)


def test_an_empty_batch_moves_nothing_and_has_a_gradient():
    model, params = made(Net(nn.BatchNorm()))
    nobody = np.zeros(6, bool)

    def loss(params):
        logits, moved = model.statistics.observe(params, jnp.zeros_like(X), valid=nobody)
        return jnp.where(nobody[:, None], logits, 0).sum(), moved

    gradient, moved = jax.jit(jax.grad(loss, has_aux=True))(params)
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
    apply = jax.jit(model.apply)
    assert_near(apply(lower, X), apply(zero, X))


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
    "statistic 'seen', whose layer is not a flax.linen.BatchNorm": Counting(),
    "got 30 rows for 6 examples": Reshaped(),
    "must not have an axis_name, got i": Net(nn.BatchNorm(axis_name="i")),
    "over the examples' axis": Net(nn.BatchNorm(axis=0)),
    "normalizes by batches in evaluation": Net(nn.BatchNorm(use_running_average=False)),
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
    with pytest.raises(JaxpflError, match=r"Net has running statistics .* would not update"):
        model.apply(params, X, key=jax.random.key(0), train=True)
    with pytest.raises(JaxpflError, match=r"lora never updates running statistics"):
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
        ("adaped", {}, r"adaped does not support models with running statistics .* one of local, fedavg"),
        ("fedavg", {"options": {"fednova": True}}, "fedavg.fednova does not support BatchNorm"),
        ("fedavg", {"privacy": PrivacyConfig(**NOISE)}, r"running statistics \(fedavg\)"),
        ("fedbn", {"privacy": PrivacyConfig(**NOISE, unit="example")}, "mixes the examples of a batch"),
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
    assert_near(statistics.select(got), statistics.select(want))
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
