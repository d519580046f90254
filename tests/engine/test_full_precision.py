"""Products outside rounds are in full precision too, where JAX's default on an accelerator is less."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered_products import products

import jaxpfl
from jaxpfl.benchmarks.studies import regression_model as regression
from jaxpfl.core import full_precision
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.estimators import base
from jaxpfl.estimators.empirical_bayes import ebnm, homogeneity
from jaxpfl.estimators.histograms import private
from jaxpfl.estimators.histograms.base import from_sparse

PACKAGE = Path(jaxpfl.__file__).parent


def precisions(lowered):
    """Precision of each product of a lowered program."""
    return [how for how, _ in products(lowered.as_text())]


def test_the_first_states_have_the_precision_of_the_platform():
    """FedAMP's clients start from what the server sends, which it computes by products."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(5, 4)).astype(np.float32), rng.integers(3, size=5)) for _ in range(3)]
    spec = RunSpec(method=jaxpfl.METHODS["fedamp"], model="linear")
    simulation = simulation_of(spec, jaxpfl.stack_clients(clients, test=clients))
    found = {}
    for platform in ("cpu", "cuda"):
        programs, (_, values, own, _) = simulation._on(platform, 1)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        found[platform] = precisions(jax.jit(programs.function("start", 3)).lower((keys, None), values.hp, own))
    assert set(found["cpu"]) == {"DEFAULT"}
    assert found["cuda"] == ["HIGHEST"] * len(found["cpu"])


def test_estimators_have_full_products_and_a_precision_of_ones_own_for_jax_is_kept():
    rng = np.random.default_rng(0)
    x, theta = rng.normal(size=(4, 5, 3)).astype(np.float32), np.ones(3, np.float32)
    y = x @ theta
    population = regression.Population(jnp.zeros(3), jnp.asarray(1.0), jnp.asarray(1.0))

    def coefficients():
        return jax.jit(lambda x, y: regression.em(population, jax.vmap(regression.rotate)(x, y), 1e-6, 2)).lower(x, y)

    assert set(precisions(coefficients())) == {"HIGHEST"}
    users = from_sparse(np.array([0, 2, 3]), np.array([0, 2, 1]), np.array([4, 1, 2]), 3)
    assert set(precisions(jax.jit(private.clipped_sums).lower(users, np.eye(3), 0.5))) == {"HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert set(precisions(coefficients())) == {"DEFAULT"}
    assert jax.config.jax_default_matmul_precision is None  # pyright: ignore[reportAttributeAccessIssue]


ASKED = {
    "mean of a prior": lambda found, t: found.prior.mean,
    "spread of a prior": lambda found, t: found.prior.sd,
    "residuals": lambda found, t: found.prior.marginal_below(t, found.s),
    "homogeneity": lambda found, t: homogeneity(t, np.ones(20, np.float32)),
}
"""Answers that are computed when they are asked for, outside of any program of ours."""


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_an_answer_is_asked_later_has_full_products(asked):
    t = np.linspace(-1, 2, 20, dtype=np.float32)
    found = ebnm(t, 0.5, prior="npmle")
    assert set(precisions(jax.jit(asked).lower(found, t))) == {"HIGHEST"}


def test_our_own_precision_is_not_taken_for_the_users():
    assert full_precision.products(full_precision.users_own)() is False
    with jax.default_matmul_precision("tensorfloat32"):
        assert full_precision.products(full_precision.users_own)() is True


def test_whatever_an_estimator_computes_by_products_has_full_ones():
    twice = base.Estimator(
        summarize=lambda key, shared, own: (own.x.T @ own.x, own),
        combine=lambda key, shared, message, sent: message.mean(axis=0),
        personalize=lambda shared, message, sent, own: shared @ shared,
    )
    clients = base.every(jnp.ones((2, 3, 2)))
    assert precisions(jax.jit(partial(base.estimate, twice)).lower(jax.random.key(0), clients)) == ["HIGHEST"] * 2


@pytest.mark.parametrize("folder", ["estimators", "similarity", "studies"])
def test_what_is_compiled_outside_rounds_is_compiled_so(folder):
    texts = {path: path.read_text() for path in sorted((PACKAGE / folder).rglob("*.py"))}
    assert any("full_precision.jit" in text for text in texts.values()) or folder == "similarity"  # on the host
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert [line for line in lines if re.search(r"\bjax\.jit\b", line) and not _is_prose(line)] == []


def _is_prose(line: str) -> bool:
    """True of an example, and where a docstring names ``jax.jit``."""
    return line.strip().startswith(">>>") or "`" in line
