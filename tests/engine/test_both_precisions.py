"""Common ground of float32 and float64 runs, and the limits of float32.

Cohorts, batches, starts and the noise of a key do not depend on the precision, so that runs differ by rounding alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import METHODS, JaxpflError, models
from jaxpfl.algorithms.parts import hyper
from jaxpfl.core import participation
from jaxpfl.core.participation import Availability
from jaxpfl.data.batching import draw_batches, plan_batches
from jaxpfl.models import classification
from jaxpfl.priors import Rates, distillation, gaussian, laplace
from jaxpfl.priors.base import interpolate
from jaxpfl.privacy import noise

SIZES = np.array([3, 17, 40])
KEY = jax.random.key(5)


def in_both(function):
    """Results of a function in float32 and in float64."""
    single = jax.tree.map(np.asarray, function())
    with jax.enable_x64(True):
        return single, jax.tree.map(np.asarray, function())


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["epoch", "step", "replacement"])
def test_batches_are_the_same(draw):
    plan = plan_batches(SIZES, 6, 4, draw)
    drawn = jax.jit(jax.vmap(partial(draw_batches, plan), in_axes=(None, 0, 0)))
    single, double = in_both(lambda: drawn(KEY, np.arange(3, dtype=np.int32), SIZES.astype(np.int32)))
    np.testing.assert_array_equal(single[0], double[0])
    np.testing.assert_array_equal(single[1], double[1])
    assert len(np.unique(single[0])) > 5


@pytest.mark.parametrize("kind", [pytest.param("uniform", marks=pytest.mark.slow), "poisson"])
def test_cohorts_and_failures_are_the_same(kind):
    sampling = participation.of(40, 10, kind)
    fails = Availability(dropout=0.3, stragglers=0.5)

    def drawn():
        keys = jax.random.split(KEY, 5)
        ids = jnp.arange(40)
        now = jnp.int32(2)
        of_clients = jax.vmap(lambda i: (fails.drops_out(KEY, now, i), fails.step_limit(KEY, now, i, 9)))
        return jax.jit(lambda: (jax.vmap(lambda key: sampling.sample(key, ids))(keys), *of_clients(ids)))()

    for a, b in zip(*in_both(drawn), strict=True):
        np.testing.assert_array_equal(a, b)
        assert len(np.unique(a)) > 1


@pytest.mark.parametrize(
    ("model", "shape", "kind"),
    [
        ("mlp:3", (4,), None),
        pytest.param("cnn", (28, 28, 1), None, marks=pytest.mark.slow),
        pytest.param("gru:3", (5,), np.int32, marks=pytest.mark.slow),
    ],
)
def test_models_start_the_same(model, shape, kind):
    def start():
        return jax.jit(classification(models.build_model(model, 3, shape), shape, 3, kind).init)(KEY)

    single, double = in_both(start)
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(double), strict=True):
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        np.testing.assert_array_equal(a, b)


def test_noise_is_the_same_up_to_rounding():
    tree = {"a": np.zeros((3, 5)), "b": np.zeros(4)}

    def drawn():
        given = jax.tree.map(lambda a: jnp.asarray(a, jnp.result_type(float)), tree)
        return jax.jit(
            lambda like: (noise.gaussian(KEY, like, 2.0, "a test"), noise.add_gaussian(KEY, like, 2.0, "a test"))
        )(given)

    (single, coarse), (double, fine) = in_both(drawn)
    for name in tree:
        np.testing.assert_allclose(single[name], double[name], rtol=0, atol=1e-5)
        np.testing.assert_allclose(coarse[name], fine[name], rtol=0, atol=2 * 2.0**-10 + 1e-5)  # half of each lattice


EPSILON = 2.0**-24
"""Largest relative error of rounding to float32."""


@pytest.mark.parametrize("rate", [1.0, 0.05, 1e-3])
@pytest.mark.parametrize(("start", "end"), [(0.1, 3.0), (3.0, 0.011)])
def test_a_scale_stalls_only_within_rounding_over_its_rate(rate, start, end):
    """A step ``s + rate (v - s)`` is lost where it is below half a unit of s: |v - s| <= 2^-24 s / rate. One step for
    the rounding of the last step is added."""

    def run(steps):
        return jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: interpolate(rate, s, jnp.float32(end)), s))(
            jnp.float32(start)
        )

    found = float(run(int(40 / rate)))
    assert abs(found - end) <= (2 * EPSILON / rate + 2 * EPSILON) * end


def test_psi_stalls_only_where_its_step_is_below_rounding():
    """Near its fixed point c f the step is lr (psi - c f) / (2 psi^2), which is lost below 2^-24 psi."""
    lr, f = 0.05, 3.2  # the default rate

    def step(_, psi):
        return jnp.maximum(psi - lr * distillation.scale_gradient(psi, jnp.float32(f), jnp.float32(1)), 0.5)

    psi = float(jax.jit(lambda psi: jax.lax.fori_loop(0, 20_000, step, psi))(jnp.float32(3.5)))
    assert abs(psi - f) <= 2 * EPSILON * 2 * f**3 / lr
    assert abs(psi - f) / f < 1e-4


@pytest.mark.parametrize(("family", "floor"), [(gaussian, 1e-4), (laplace, 1e-3)])
def test_a_scale_rests_on_its_floor_and_leaves_it(family, floor):
    prior = family.prior(**{"s2_init" if family is gaussian else "b_init": floor}, floor=floor)
    rates = Rates(jnp.float32(0.0), jnp.float32(1e-4))
    theta = {"w": jnp.zeros(3)}
    gamma = prior.init(theta)
    assert float(prior.descend(rates, gamma, theta)[1]) == np.float32(floor)  # all models equal: the scale falls
    far = prior.descend(rates, gamma, {"w": jnp.full(3, 2 * floor**0.5 + 2 * floor)})
    assert float(far[1]) > np.float32(floor)


def test_hyper_parameters_that_float32_does_not_hold_are_refused():
    """XLA takes numbers below the normal ones for zero on a CPU, and a scale that is zero would be divided by."""
    assert float(jax.jit(lambda x: x * 1e5)(jnp.asarray(np.float32(1e-40)))) == 0
    hp = METHODS["adaped"].hyper
    for value in (1e-40, 1e39):
        with pytest.raises(JaxpflError, match=r"adaped.psi_floor must be 0 or have a magnitude from 1.2e-38 to"):
            hyper.replace("adaped", hp, {"psi_floor": value})
    assert hyper.replace("adaped", hp, {"psi_floor": 2e-38, "weight_decay": 0.0}).psi_floor == 2e-38
    with jax.enable_x64(True):
        assert hyper.replace("adaped", hp, {"psi_floor": 1e-40}).psi_floor == 1e-40
