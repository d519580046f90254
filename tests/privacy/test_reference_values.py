"""Published and independently computed privacy budgets, to three digits, and Gaussian DP in closed form."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from jaxpfl.privacy import CentralNoise, FixedSize, Full, PerStepNoise, Poisson, PrivacyPlan, calibrate
from jaxpfl.privacy.accounting import rdp_orders
from jaxpfl.privacy.comparison import theorem5_beside_sound


def three_digits(value: float):
    return pytest.approx(value, rel=5e-4)


def gdp_delta(mu: float, epsilon: float) -> float:
    """delta(eps) of mu-Gaussian DP in 40-digit arithmetic (Dong et al. 2022, Corollary 2.13)."""
    with mpmath.workdps(40):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2))


@pytest.mark.parametrize(("epsilon", "z"), [(3.35, 19.29), (13.16, 6.38), (27.30, 3.73)])
def test_noise_of_the_papers_table_2(epsilon, z):
    plan = calibrate(PrivacyPlan(CentralNoise(0.0), Full(), 300), epsilon, 1e-4)
    assert plan.noise_multiplier == pytest.approx(z, abs=0.0051)
    assert plan.epsilon(1e-4) == pytest.approx(epsilon, rel=2e-4)
    assert plan.epsilon(1e-4) <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "z"), [(4.0, 5.043), (9.0, 2.665)])
def test_noise_of_the_papers_figure_1b(epsilon, z):
    plan = calibrate(PrivacyPlan(CentralNoise(1.0), Poisson(1 / 3), 240), epsilon, 1e-4)
    assert plan.noise_multiplier == pytest.approx(z, abs=0.00051)
    assert plan.epsilon(1e-4) <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "epsilon"), [(None, 1.966), (8, 3.119), (12, 2.023), (20, 1.966), (50, 1.966)])
def test_a_cap_on_poisson_cohorts_costs(cap, epsilon):
    plan = PrivacyPlan(CentralNoise(2.0), Poisson(0.1, 50, cap), 100)
    assert plan.epsilon(1e-4) == three_digits(epsilon)


@pytest.mark.parametrize(("z", "rounds"), [(0.479, 1), (1.071, 5), (3.387, 50)])
def test_rdp_is_loose_at_small_delta_whatever_its_orders(z, rounds):
    """15.63 where 15.00 is meant: not the orders' coarseness, as a continuum of them shows, but RDP's."""
    plan = PrivacyPlan(CentralNoise(z), Full(), rounds)
    assert plan.epsilon(1e-10) == three_digits(15.00)
    assert plan.epsilon(1e-10, "rdp") == three_digits(15.63)
    alpha = 1 + np.geomspace(1e-3, 1e3, 1_000_000)
    best = rounds * alpha / (2 * z**2) + np.log1p(-1 / alpha) - np.log(1e-10 * alpha) / (alpha - 1)
    assert plan.epsilon(1e-10, "rdp") == pytest.approx(best.min(), rel=2e-4)


def test_orders_reach_far_enough_for_small_epsilon():
    """eps of 0.001 (best order near 5000): dp-accounting's default orders, which end at 1024, give three times that."""
    z, delta = 2000.0, 1e-5
    alpha = 1 + np.geomspace(1e-2, 1e6, 1_000_000)
    best = (alpha / (2 * z**2) + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1)).min()
    fine = PrivacyPlan(CentralNoise(z), Full(), 1).epsilon(delta, "rdp")
    assert best <= fine < 1.02 * best
    assert sorted(set(rdp_orders())) == rdp_orders()


def test_loose_table():
    """K = m = 50, T = 3000, tau = 10, C = 1, sigma = 5, delta = 1e-4."""
    setting = {"clients_per_round": 50, "clients": 50, "tau": 10, "steps": 3000, "delta": 1e-4}
    alone = theorem5_beside_sound(c1=1.0, sigma1=5.0, **setting)
    assert alone["paper"]["epsilon"] == three_digits(7.874)
    assert alone["end_of_round"]["zero_out"]["epsilon"] == three_digits(6.455)
    assert alone["end_of_round"]["replace_one"]["epsilon"] == three_digits(15.67)
    assert alone["per_step"]["zero_out"]["epsilon"] == three_digits(29.48)
    assert alone["per_step"]["replace_one"]["epsilon"] == three_digits(83.59)
    both = theorem5_beside_sound(c1=1.0, sigma1=5.0, c2=1.0, sigma2=5.0, **setting)
    assert both["paper"]["epsilon"] == three_digits(12.147)
    # With noise at the end mu and psi together are one part of half the variance. As printed, psi's update sees mu's
    # noise, and a client's own tau steps are what can be counted: two parts of 10 steps, for 300 rounds.
    half = theorem5_beside_sound(c1=1.0, sigma1=5.0 / math.sqrt(2), **setting)
    own = PrivacyPlan(CentralNoise(5.0 / math.sqrt(20)), Full(), 300)
    for name, relation in (("zero_out", "add-or-remove-one"), ("replace_one", "replace-one")):
        at_end = both["end_of_round"][name]["epsilon"]
        assert at_end == pytest.approx(half["end_of_round"][name]["epsilon"], rel=1e-6)
        own_steps = replace(own, relation=relation).epsilon(1e-4)
        assert both["per_step"][name]["epsilon"] == pytest.approx(own_steps, rel=1e-6)


def test_slack_of_theorem_5_covers_zero_out_up_to_twelve_local_steps():
    """6 alpha/K C^2/s^2 against tau alpha/(2 K) C^2/s^2: below it for tau <= 12 only, by the same conversion."""

    def printed_covers(tau: int) -> bool:
        table = theorem5_beside_sound(
            c1=1.0, sigma1=5.0, clients_per_round=50, clients=50, tau=tau, steps=300 * tau, delta=1e-4
        )
        rdp = PrivacyPlan(CentralNoise(table["end_of_round"]["zero_out"]["noise_multiplier"]), Full(), 300)
        return rdp.epsilon(1e-4, "rdp") <= table["paper"]["epsilon"] * (1 + 1e-3)

    assert [printed_covers(tau) for tau in (11, 12, 13)] == [True, True, False]


@pytest.mark.parametrize("z", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("rounds", [1, 7, 100])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 1e-2])
def test_full_participation_is_gaussian_dp_in_closed_form(z, rounds, delta):
    mu = math.sqrt(rounds) / z
    epsilon = PrivacyPlan(CentralNoise(z), Full(), rounds).epsilon(delta)
    if epsilon == 0:
        assert gdp_delta(mu, 0.0) <= delta
        return
    # Pessimistic, and by less than one in ten thousand.
    assert gdp_delta(mu, epsilon) <= delta * (1 + 1e-6)
    assert gdp_delta(mu, epsilon * (1 - 1e-4)) > delta


def test_sampling_everyone_is_full_participation():
    full = PrivacyPlan(CentralNoise(3.0), Full(), 20)
    sampled = PrivacyPlan(CentralNoise(3.0), Poisson(1.0), 20)
    assert sampled.epsilon(1e-5) == pytest.approx(full.epsilon(1e-5), rel=1e-3)
    assert sampled.event() == full.event()
    nearly = PrivacyPlan(CentralNoise(3.0), Poisson(1 - 1e-9), 20)
    assert nearly.epsilon(1e-5) == pytest.approx(full.epsilon(1e-5), rel=1e-4)
    fixed = PrivacyPlan(CentralNoise(3.0), FixedSize(20, 20), 20)
    replaced = PrivacyPlan(CentralNoise(3.0), Full(), 20, "replace-one")
    assert fixed.epsilon(1e-5, "rdp") == pytest.approx(replaced.epsilon(1e-5, "rdp"), rel=1e-9)


def test_the_papers_formula_is_its_own_optimum():
    """Theorem 5 over a fine grid of orders, in plain NumPy, for sampled cohorts."""
    k, m, steps, tau, c1, s1, c2, s2, delta = 33, 100, 2400, 10, 0.8, 3.0, 0.2, 1.5, 1e-5
    plan = PrivacyPlan(PerStepNoise((c1, c2), (s1, s2), tau, k), FixedSize(m, k), steps // tau)
    alpha = 1 + np.geomspace(1e-4, 1e4, 2_000_000)
    rdp = (k / m) ** 2 * 6 * (steps / tau) * alpha * (c1**2 / (k * s1**2) + c2**2 / (k * s2**2))
    lemma = rdp + (np.log(1 / delta) + (alpha - 1) * np.log(1 - 1 / alpha) - np.log(alpha)) / (alpha - 1)
    assert plan.epsilon(delta, "paper") == pytest.approx(lemma.min(), rel=1e-8)
