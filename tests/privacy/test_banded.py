"""Banded noise: the sensitivity of C, its coefficients, the accountant's events, turns, and runs that go on."""

from dataclasses import replace
from itertools import combinations, pairwise

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl.core.participation import cyclic, of
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import CentralNoise, Cyclic, Mechanism, PrivacyConfig, PrivacyPlan, descriptions, noise, plan_of
from jaxpfl.runs.config import differences
from jaxpfl.support.errors import JaxpflError

SETTING = {"model": "linear", "local_steps": 2, "batch_size": 5, "cohort": 2, "participation": "cyclic"}
BANDED = Mechanism(1.5, 0.3, noise="banded")


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=7, classes_per_client=3, test_share=0.5)


def matrix(c, rounds):
    """C, [R, R], of its diagonals."""
    return sum(np.diag(np.full(rounds - j, value), -j) for j, value in enumerate(c))


def patterns(rounds, separation):
    """Every set of rounds of which no two are closer."""
    for count in range(1, rounds + 1):
        for chosen in combinations(range(rounds), count):
            if all(b - a >= separation for a, b in pairwise(chosen)):
                yield list(chosen)


@pytest.mark.parametrize(("rounds", "bands", "separation"), [(7, 3, 3), (9, 2, 4), (5, 5, 5), (8, 1, 2)])
def test_sensitivity_by_brute_force_is_the_accounted_one(rounds, bands, separation):
    """Contributions of norm 1 in any direction: the worst pattern has the epsilon that the plan says."""
    c = descriptions.banded_coefficients(bands, rounds)
    rng, worst = np.random.default_rng(0), 0.0
    for chosen in patterns(rounds, separation):
        for _ in range(5):
            g = rng.normal(size=(len(chosen), 3))
            moved = matrix(c, rounds)[:, chosen] @ (g / np.linalg.norm(g, axis=1, keepdims=True))
            worst = max(worst, np.linalg.norm(moved))
    plan = PrivacyPlan(CentralNoise(2.0, coefficients=c), Cyclic(separation), rounds)
    turns = -(-rounds // separation)
    assert worst <= np.sqrt(turns) + 1e-9
    if rounds - (turns - 1) * separation >= bands:  # the last turn's column is whole
        assert worst == pytest.approx(np.sqrt(turns), rel=1e-9)
        assert plan.epsilon(1e-3) == pytest.approx(dp.get_epsilon_gaussian(2.0 / worst, 1e-3), rel=1e-3)


def test_turns_closer_than_the_bands_would_break_the_bound():
    c = descriptions.banded_coefficients(4, 8)
    close = matrix(c, 8)[:, [0, 2, 4, 6]].sum(axis=1)
    assert np.linalg.norm(close) > 1.2 * np.sqrt(4)
    with pytest.raises(JaxpflError, match="bands must be at most 2"):
        PrivacyPlan(CentralNoise(2.0, coefficients=c), Cyclic(2), 8)


def test_coefficients_are_those_of_jax_privacy():
    """jax_privacy 2.0.0, `toeplitz.optimize_banded_toeplitz(20, 5)` and (100, 10), in float32."""
    want = [0.77086765, 0.42534554, 0.3252376, 0.26577166, 0.22006837]
    np.testing.assert_allclose(descriptions.banded_coefficients(5, 20), want, rtol=1e-5)
    np.testing.assert_allclose(
        descriptions.banded_coefficients(10, 100)[:4], [0.64158174, 0.37949972, 0.31213395, 0.27618428], rtol=1e-4
    )


@pytest.mark.parametrize(("bands", "rounds"), [(1, 6), (3, 20), (20, 20)])
def test_error_is_that_of_the_dense_matrices(bands, rounds):
    c = descriptions.banded_coefficients(bands, rounds)
    sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(c, rounds))
    assert descriptions.prefix_error(c, rounds) == pytest.approx(np.linalg.norm(sums) / np.sqrt(rounds), rel=1e-9)
    independent = np.sqrt((rounds + 1) / 2)
    assert descriptions.prefix_error_ratio(c, rounds) == pytest.approx(
        descriptions.prefix_error(c, rounds) / independent, rel=1e-12
    )
    assert np.linalg.norm(c) == pytest.approx(1, rel=1e-12)


def test_events():
    c, gaussian = descriptions.banded_coefficients(3, 10), dp.GaussianDpEvent(2.0)
    plan = PrivacyPlan(CentralNoise(2.0, coefficients=c), Cyclic(4), 10)
    assert plan.event() == dp.SelfComposedDpEvent(gaussian, 3)
    assert plan.relation == "zero-out"
    sampled = PrivacyPlan(CentralNoise(2.0, coefficients=c), Cyclic(4, 0.25), 10)
    assert sampled.event() == dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.25, gaussian), 3)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-4).compose(sampled.event())
    assert sampled.epsilon(1e-4) == pytest.approx(accountant.get_epsilon(1e-4), rel=2e-3)
    assert sampled.statement(1e-4).paper_epsilon is None
    said = str(plan.statement(1e-3))
    assert "zero-out, by pld; cyclic participation" in said
    assert "a turn every 4 rounds" in said
    assert f"3 bands with {descriptions.prefix_error_ratio(c, 10):.3g} times the prefix-sum error" in said


@pytest.mark.parametrize(
    ("mechanism", "cohorts", "match"),
    [
        (replace(BANDED, bands=5), cyclic(8, 4), "bands must be at most 4"),
        (replace(BANDED, bands=8), cyclic(8, 8), "bands must be at most 6"),
    ],
)
def test_what_cannot_be_accounted_is_refused(mechanism, cohorts, match):
    with pytest.raises(JaxpflError, match=match):
        plan_of(mechanism, cohorts, rounds=6)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"noise": "central", "bands": 2}, "bands and coefficients require noise = banded"),
        ({"bands": 2, "coefficients": (1.0, 0.5)}, "coefficients must have norm 1"),
        ({"bands": 0}, "bands must be"),
    ],
)
def test_mechanisms_that_cannot_be(given, match):
    with pytest.raises(JaxpflError, match=match):
        replace(BANDED, **given)


def test_a_resumed_run_may_not_have_other_rounds():
    old, new = ({"rounds": rounds, "privacy": {"noise": "banded"}} for rounds in (10, 20))
    said = "rounds: 10 -> 20 (privacy.noise = banded depends on the number of rounds)"
    assert said in differences(old, new)[0]
    assert "rounds: 10 -> 20" in differences({"rounds": 10}, {"rounds": 20})[1]


def test_cyclic_cohorts():
    """Each client once in a cycle, whatever the order of the stack; at a rate, independently within its turn."""
    ids, key = np.arange(100, 111), jax.random.key(3)
    scheme = of(11, 3, "cyclic")
    assert (scheme.cycle, scheme.capacity, scheme.expected_cohort) == (4, 3, 11 / 4)
    rows_of = jax.jit(scheme.rows)
    cohorts = [np.asarray(rows_of(key, r, ids)) for r in range(8)]
    for first in (0, 4):
        assert sorted(row for c in cohorts[first : first + 4] for row in c if row < 11) == list(range(11))
    for r in range(4):
        np.testing.assert_array_equal(cohorts[r], cohorts[r + 4])
        turned = np.asarray(rows_of(key, r, ids[::-1].copy()))
        assert set(ids[::-1][turned[turned < 11]]) == set(ids[cohorts[r][cohorts[r] < 11]])
    assert any((cohorts[0] != np.asarray(rows_of(jax.random.key(4), 0, ids))).tolist())
    some = of(1000, 50, "cyclic", cycle=4)
    assert some.rate == pytest.approx(0.2)
    drawn = list(np.asarray(jax.jit(jax.vmap(some.rows, (None, 0, None)))(key, np.arange(40), np.arange(1000))))
    sizes = [(rows < 1000).sum() for rows in drawn]
    assert abs(np.mean(sizes) - 50) < 5.2 * np.sqrt(50 * 0.8 / 40)  # falsely outside with probability 2e-7
    turns = [set().union(*(rows[rows < 1000].tolist() for rows in drawn[t::4])) for t in range(4)]
    assert not any(a & b for a, b in combinations(turns, 2))
    with pytest.raises(JaxpflError, match="cycle must be at most clients / cohort"):
        of(10, 5, "cyclic", cycle=3)


def test_noise_is_the_inverse_of_the_bands():
    c, zero = descriptions.banded_coefficients(3, 5), jnp.zeros(400)
    step = jax.jit(lambda key, past: noise.add_banded(key, zero, 2.0, c, past, "sum"))
    drawn = jax.jit(lambda key: noise.gaussian(key, zero, 2.0, "sum"))
    past, found, keys = jnp.zeros((2, 400)), [], jax.random.split(jax.random.key(1), 5)
    for key in keys:
        noisy, past = step(key, past)
        found.append(noisy)
    # Each is rounded to a multiple of 2^-8.
    np.testing.assert_allclose(matrix(c, 5) @ np.stack(found), np.stack([drawn(key) for key in keys]), atol=5e-3)


@pytest.mark.slow
def test_a_run_that_goes_on_and_other_plans_have_the_same_numbers(federation):
    given = SETTING | {"rounds": 5, "privacy": PrivacyConfig(epsilon=8.0, delta=1e-2, noise="banded")}
    whole = jaxpfl.fit("fedavg", federation, **given, plan=ExecutionPlan(devices=1, rounds_per_call=5))
    state = whole.simulation.init([0])
    for _ in range(5):
        state, _ = whole.simulation.advance(state, 1)
    assert all(
        (np.asarray(a) == np.asarray(b)).all()
        for a, b in zip(
            jax.tree.leaves(whole.simulation.trim(state).server),
            jax.tree.leaves(whole.simulation.trim(whole.state).server),
            strict=True,
        )
    )
    assert whole.statement().bands == 4
    assert whole.statement().epsilon <= 8.0
    host = jaxpfl.fit("fedavg", federation, **given, plan=ExecutionPlan(devices=1, clients_in="host"))
    blocks = jaxpfl.fit("fedavg", federation, **given, plan=ExecutionPlan(devices=1, clients=1))
    for other in (host, blocks):
        np.testing.assert_allclose(other.history["train_loss"], whole.history["train_loss"], rtol=1e-5)
