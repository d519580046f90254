"""Normal means in groups: beside dense matrices, a published analysis of variance, coverage, and edges."""

import functools
from typing import Any

import groups_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from jaxpfl.estimators.empirical_bayes import ebnm_groups
from jaxpfl.support.errors import JaxpflError

pytestmark = pytest.mark.usefixtures("x64")


def data(within: float = 0.6, between: float = 0.8, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, s and the groups of 30 clients in seven groups, one of which has a single client."""
    rng = np.random.default_rng(seed)
    group = np.concatenate([np.arange(7), rng.integers(0, 6, 23)])
    s = rng.uniform(0.4, 1.2, 30)
    theta = 5 + between * rng.normal(size=7)[group] + within * rng.normal(size=30)
    return theta + s * rng.normal(size=30), s, group


@pytest.mark.parametrize(
    ("within", "between", "seed"),
    [
        (0.6, 0.8, 0),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((0.0, 1.0, 3), (0.9, 0.0, 3), (0.0, 0.0, 5))),
    ],
)
def test_predictions_are_those_of_dense_matrices(within, between, seed):
    x, s, group = data(within, between, seed)
    found, true = ebnm_groups(x, s, group), reference.groups(x, s, group)
    assert (true.within > 0, true.between > 0) == (within > 0, between > 0)  # all sides of the boundary are met
    np.testing.assert_allclose([found.within, found.between], [true.within, true.between], rtol=1e-5)
    np.testing.assert_allclose(found.log_likelihood, true.log_likelihood, rtol=1e-10)
    np.testing.assert_allclose(found.overall, true.overall, rtol=1e-7)  # a maximum is known to half the digits
    for name in ("mean", "mse", "group_mean", "group_mse", "residual", "risk"):
        np.testing.assert_allclose(getattr(found, name), getattr(true, name), rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(found.g1 + found.g2 + 2 * found.g3, found.mse)
    none: Any = optimize.minimize_scalar(
        lambda A: -reference.log_likelihood(x, s, group, A, 0), bounds=(0, 4), method="bounded", options={"xatol": 1e-9}
    )
    without = max(-none.fun, reference.log_likelihood(x, s, group, 0, 0))
    ratio = max(2 * (true.log_likelihood - without), 0)
    np.testing.assert_allclose(found.ratio, ratio, atol=1e-4)
    np.testing.assert_allclose(found.group_p_value, stats.chi2.sf(found.ratio, 1) / 2 if true.between > 0 else 1)
    own = np.array([np.average(x[group == g], weights=s[group == g] ** -2.0) for g in group])
    np.testing.assert_allclose(found.statistic, (((x - own) / s) ** 2).sum())
    np.testing.assert_allclose(found.p_value, stats.chi2.sf(found.statistic, 30 - 7))


@pytest.mark.slow
def test_a_published_analysis_of_variance():
    """Balanced, REML is the analysis of variance: .3652 between plants, .1610 between leaves, .0067 of errors."""
    each = reference.TURNIPS
    leaves, plants = each.mean(axis=2), each.mean(axis=(1, 2))
    squares = [  # mean squares of plants, leaves and determinations
        6 * ((plants - plants.mean()) ** 2).sum() / 3,
        2 * ((leaves - plants[:, None]) ** 2).sum() / 8,
        ((each - leaves[..., None]) ** 2).sum() / 12,
    ]
    np.testing.assert_allclose(squares, [2.520115, 0.328775, 0.006654], atol=6e-7)
    found = ebnm_groups(leaves.ravel(), (squares[2] / 2) ** 0.5, np.repeat(["a", "b", "c", "d"], 3))
    np.testing.assert_allclose([found.between, found.within], [0.365223, 0.161060], atol=1e-6)
    np.testing.assert_allclose(found.between, (squares[0] - squares[1]) / 6, rtol=1e-8)
    np.testing.assert_allclose(found.within, (squares[1] - squares[2]) / 2, rtol=1e-8)
    np.testing.assert_allclose(found.overall, each.mean())
    np.testing.assert_allclose(found.overall_stderr, (squares[0] / 24) ** 0.5, rtol=1e-8)


@pytest.mark.slow
def test_jit_vmap_and_single_precision():
    _, s, group = data()
    x = jnp.stack([jnp.asarray(data(seed=seed)[0]) for seed in range(3)])
    own_groups, spare = jnp.asarray(group), functools.partial(ebnm_groups, groups=9)
    together = jax.jit(jax.vmap(spare, in_axes=(0, None, None)))(x, jnp.asarray(s), own_groups)
    for i in range(3):
        alone = ebnm_groups(x[i], s, group)
        np.testing.assert_allclose(together.mean[i], alone.mean, rtol=1e-7)
        np.testing.assert_allclose(together.mse[i], alone.mse, rtol=1e-5)
        np.testing.assert_allclose(together.p_value[i], alone.p_value)
    with jax.enable_x64(False):
        single = ebnm_groups(np.asarray(x[0]), s, group)
        assert single.mean.dtype == jnp.float32
        np.testing.assert_allclose(single.mean, together.mean[0], rtol=1e-3)
    for own, errors in ((x[0].at[3].set(jnp.nan), s), (x[0], jnp.asarray(s).at[3].set(0.0))):
        spoilt = jax.jit(functools.partial(ebnm_groups, groups=7))(own, errors, own_groups)
        assert np.isnan(spoilt.mean).all()
        assert np.isnan(spoilt.within)
        assert np.isnan(spoilt.mse).all()


@pytest.mark.slow
def test_intervals_and_mean_squared_errors_of_simulated_groups():
    """300 files of 40 groups of five. The bounds of 4.9 standard errors between files are passed by chance once in
    1e6; both are to the order 1/G, so that a percent and a half is allowed for.
    """
    files, G, n = 300, 40, 5
    rng = np.random.default_rng(0)
    group, s = np.repeat(np.arange(G), n), rng.uniform(0.6, 1.4, G * n)
    of_groups = rng.normal(size=(files, G))
    theta = of_groups[:, group] + 0.8 * rng.normal(size=(files, G * n))
    x = jnp.asarray(theta + s * rng.normal(size=theta.shape))
    found = jax.vmap(lambda x: ebnm_groups(x, jnp.asarray(s), jnp.asarray(group), groups=G))(x)
    low, high = jax.vmap(lambda of: of.interval(0.95))(found)
    group_low, group_high = jax.vmap(lambda of: of.group_interval(0.95))(found)
    for ends, truth in (((low, high), theta), ((group_low, group_high), of_groups)):
        covered = np.asarray((ends[0] <= truth) & (truth <= ends[1])).mean(axis=1)
        assert abs(covered.mean() - 0.95) < 0.015 + 4.9 * covered.std() / files**0.5
    for mean, mse, truth in ((found.mean, found.mse, theta), (found.group_mean, found.group_mse, of_groups)):
        off = np.asarray(mse - (mean - truth) ** 2).mean(axis=1)
        assert abs(off.mean()) < 0.015 * np.asarray(mse).mean() + 4.9 * off.std() / files**0.5
    risk = np.asarray(found.risks - (found.mean - theta) ** 2).mean(axis=1)
    assert abs(risk.mean()) < 0.02 + 4.9 * risk.std() / files**0.5  # the fitting of A and B is not in it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda x, s, g: ((x, s, g[:4]), {}),
            r"group must have one entry for each of the 30 clients, got shape \(4,\)",
        ),
        (lambda x, s, g: ((x, s, np.arange(30)), {}), "at least one group must have two clients"),
        (lambda x, s, g: ((x, s, g % 2), {}), "at least 3 groups are required to estimate"),
        (lambda x, s, g: ((x, s, np.where(g == 2, np.nan, g)), {}), "group must be a number or a name, got nan for cl"),
        (lambda x, s, g: ((x, s, np.array([None, *"ab" * 14, "c"])), {}), "number or a name for each client, got None"),
        (lambda x, s, g: ((x, s, g), {"groups": 5}), "group must be from 0 to 4, got 5 for client 5"),
        (lambda x, s, g: ((x, s, g), {"groups": 0}), "groups must be a whole number >= 1, got 0"),
        (lambda x, s, g: ((x, 0 * s, g), {}), "s must be finite and > 0, got 0.0 for client 0"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(change, said):
    arguments, more = change(*data())
    with pytest.raises(JaxpflError, match=said) as error:
        ebnm_groups(*arguments, **more)
    assert "\n" not in str(error.value)


def test_unknown_groups_need_their_number():
    x, s, group = data()
    with pytest.raises(JaxpflError, match="groups, the number of groups, must be given"):
        jax.jit(ebnm_groups)(x, s, jnp.asarray(group))
