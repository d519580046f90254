"""Privacy plans: their meaning, their refusals, and their epsilon by dp-accounting."""

import json
import math
from dataclasses import replace

import dp_accounting as dp
import numpy as np
import pytest

from jaxpfl.privacy import (
    CentralNoise,
    DistributedNoise,
    FixedSize,
    Full,
    PerStepNoise,
    Poisson,
    PrivacyPlan,
    accounting,
    calibrate,
    poisson_cap,
)
from jaxpfl.support.errors import JaxpflError

PER_STEP = PerStepNoise((1.0, 0.5), (5.0, 4.0), steps=10, min_uploads=50)


def test_contract_replace_one_is_doubled_by_pld_and_not_by_rdp():
    """Contract with dp-accounting 0.6, on which `events.event` rests: what each accountant makes of one multiplier."""
    one = dp.NeighboringRelation.REPLACE_ONE
    gaussian = dp.GaussianDpEvent(4.0)
    doubled = dp.get_epsilon_gaussian(4.0 / 2, 1e-5)
    assert dp.pld.PLDAccountant(one).compose(gaussian).get_epsilon(1e-5) == pytest.approx(doubled, rel=1e-4)
    as_given = dp.rdp.RdpAccountant(neighboring_relation=one).compose(gaussian).get_epsilon(1e-5)
    assert as_given == dp.rdp.RdpAccountant().compose(gaussian).get_epsilon(1e-5)
    whole = dp.SampledWithoutReplacementDpEvent(10, 10, gaussian)
    assert dp.rdp.RdpAccountant(neighboring_relation=one).compose(whole).get_epsilon(1e-5) == as_given
    assert not dp.pld.PLDAccountant(one).supports(whole)


def test_both_accountants_of_replace_one_speak_of_2c():
    plan = PrivacyPlan(CentralNoise(4.0), Full(), 3, "replace-one")
    half = PrivacyPlan(CentralNoise(2.0), Full(), 3)
    assert plan.epsilon(1e-5) == pytest.approx(half.epsilon(1e-5), rel=1e-4)
    assert plan.epsilon(1e-5, "rdp") == pytest.approx(half.epsilon(1e-5, "rdp"), rel=1e-12)
    assert plan.event("pld").event.noise_multiplier == 4.0
    assert plan.event("rdp").event.noise_multiplier == 2.0
    assert PrivacyPlan(CentralNoise(4.0), FixedSize(50, 5), 3).event("rdp").event.event.noise_multiplier == 2.0


def test_events():
    gaussian = dp.GaussianDpEvent(2.0)
    noise = CentralNoise(2.0)
    cases = {
        Full(): gaussian,
        Poisson(0.1): dp.PoissonSampledDpEvent(0.1, gaussian),
        Poisson(0.1, 50, 50): dp.PoissonSampledDpEvent(0.1, gaussian),
        Poisson(0.1, 50, 12): dp.TruncatedSubsampledGaussianDpEvent(50, 0.1, 12, 2.0),
    }
    for sampling, one_round in cases.items():
        plan = PrivacyPlan(noise, sampling, 7)
        assert plan.event() == dp.SelfComposedDpEvent(one_round, 7)
        assert plan.relation == "add-or-remove-one"
    assert PrivacyPlan(noise, FixedSize(50, 5), 7).relation == "replace-one"
    for by_clients in (DistributedNoise(2.0, 10), PER_STEP):
        assert PrivacyPlan(by_clients, Full(), 7).relation == "zero-out"
        assert PrivacyPlan(by_clients, FixedSize(50, 50), 7).relation == "replace-one"


def test_noise_multipliers():
    assert CentralNoise(3.0).multiplier == pytest.approx(3.0)
    # z_Delta = (z^-2 - (2 sigma_b)^-2)^-1/2 (Andrew et al. 2021, Theorem 1): from the whole to the sum, and back.
    z, stddev = 1.5, 1.0
    of_sum = (z**-2 - (2 * stddev) ** -2) ** -0.5
    adaptive = CentralNoise(of_sum, count_stddev=stddev)
    assert adaptive.multiplier == pytest.approx(z)
    assert CentralNoise(9.0, count_stddev=stddev).scale_to(z).noise_multiplier == pytest.approx(of_sum)
    # An EM of 4 iterations over one cohort.
    assert CentralNoise(3.0, releases=4).multiplier == pytest.approx(1.5)
    assert CentralNoise(1.0, releases=4).scale_to(1.5).noise_multiplier == pytest.approx(3.0)
    assert DistributedNoise(2.0, 10).multiplier == 2.0
    # One's own tau steps; or the last step's noise of all, where K > tau and the sum is linear in it.
    z1, z2 = 5.0 / 1.0, 4.0 / 0.5
    both = (z1**-2 + z2**-2) ** -0.5
    assert pytest.approx(both / math.sqrt(10)) == PER_STEP.multiplier
    assert replace(PER_STEP, linear=True).multiplier == pytest.approx(both / math.sqrt(10 * 10 / 50))
    assert PerStepNoise((1.0,), (5.0,), 10, 4, linear=True).multiplier == pytest.approx(z1 / math.sqrt(10))
    scaled = PER_STEP.scale_to(1.0)
    assert scaled.multiplier == pytest.approx(1.0)
    assert scaled.stddevs[0] / scaled.stddevs[1] == pytest.approx(5.0 / 4.0)


def test_what_one_client_can_do_within_a_round_of_per_step_noise():
    """tau^2/K is reached: a client whose data push one way moves the sum by tau C, and the others, who undo in each
    step what their earlier noise did, leave the last step's noise only."""
    rng = np.random.default_rng(5)
    tau, uploads, clip, stddev, worlds = 6, 40, 1.0, 0.1, 4000
    sums = {}
    for pushes in (0.0, clip):
        paths = np.zeros((worlds, uploads))
        for _ in range(tau):
            gradient = np.clip(-paths, -clip, clip)
            gradient[:, 0] = pushes
            paths += gradient + stddev * rng.normal(size=paths.shape)
        sums[pushes] = paths.sum(axis=1)
    mu = (sums[clip].mean() - sums[0.0].mean()) / sums[0.0].std()
    bound = 1 / PerStepNoise((clip,), (stddev,), tau, uploads, linear=True).multiplier
    claimed_by_the_paper = math.sqrt(clip**2 / (uploads * stddev**2))
    # Client 0 keeps its own tau steps of noise: K - 1 + tau variances in place of K. Standard error of mu: 1.4 %.
    exact = tau * clip / (stddev * math.sqrt(uploads - 1 + tau))
    assert mu == pytest.approx(exact, rel=0.07)  # five standard errors: false alarms below 1e-6
    assert claimed_by_the_paper < mu < bound


def test_where_psi_sees_the_noise_of_mu_the_last_step_does_not_hide_both():
    """One step in which the others' psi gradients follow their own mu's noise, as they may where they are taken at the
    noisy mu: the sum of the psi tells of that noise, and both sums together are told apart better than by Gaussians
    with K times a client's variance. A client's own noise bounds it still."""
    rng = np.random.default_rng(6)
    uploads, worlds, c1, s1, c2, s2 = 40, 50_000, 1.0, 1.0, 1.0, 1 / 6
    noise = s1 * rng.normal(size=(worlds, uploads))
    gradient = np.clip(noise / 3, -c2, c2)
    gradient[:, 0] = 0
    sums = np.stack([noise.sum(axis=1), gradient.sum(axis=1) + s2 * math.sqrt(uploads) * rng.normal(size=worlds)])
    shift = np.array([c1, -c2])
    mu = math.sqrt(shift @ np.linalg.solve(np.cov(sums), shift))
    noises = PerStepNoise((c1, c2), (s1, s2), 1, uploads)
    # Relative standard error below 1 %; the margins are of 30 % and more.
    assert 1.2 / replace(noises, linear=True).multiplier < mu < 1 / noises.multiplier


@pytest.mark.slow
def test_epsilon_grows_with_the_rate_and_falls_with_the_cap():
    plans = [PrivacyPlan(CentralNoise(1.5), Poisson(rate), 30) for rate in (0.01, 0.2, 1.0)]
    by_pld, by_rdp = (np.array([plan.epsilon(1e-5, name) for plan in plans]) for name in ("pld", "rdp"))
    assert (np.diff(by_pld) > 0).all()
    assert (np.diff(by_rdp) > 0).all()
    assert (by_rdp > by_pld).all()
    capped = [PrivacyPlan(CentralNoise(1.5), Poisson(0.2, 30, cap), 10).epsilon(1e-5) for cap in (6, 10, 30)]
    assert (np.diff(capped) < 0).all()


@pytest.mark.parametrize(("z", "rate", "rounds", "delta"), [(12.0, 0.9, 200, 1e-3), (1.7, 1.0, 9, 1e-6)])
def test_calibration_inverts(z, rate, rounds, delta):
    epsilon = PrivacyPlan(CentralNoise(z), Poisson(rate), rounds).epsilon(delta)
    found = calibrate(PrivacyPlan(CentralNoise(0.0), Poisson(rate), rounds), epsilon, delta)
    assert found.noise_multiplier == pytest.approx(z, rel=3e-4)
    assert found.epsilon(delta) <= epsilon


@pytest.mark.parametrize(("rate", "rounds"), [(1e-4, 10_000), pytest.param(1e-5, 10_000, marks=pytest.mark.slow)])
def test_calibration_at_tiny_rates_has_no_noise_to_spare(rate, rounds):
    found = calibrate(PrivacyPlan(CentralNoise(0.0), Poisson(rate), rounds), 0.01, 1e-6)
    assert 0.999 * 0.01 < found.epsilon(1e-6) <= 0.01


@pytest.mark.parametrize(
    ("plan", "accountant"),
    [
        (PrivacyPlan(CentralNoise(1.0, count_stddev=4.0), Poisson(0.2), 20), "pld"),
        pytest.param(PrivacyPlan(CentralNoise(1.0, releases=3), Poisson(0.2), 20), "rdp", marks=pytest.mark.slow),
        (PrivacyPlan(CentralNoise(0.0), Full(), 20, "replace-one"), "pld"),
        (PrivacyPlan(DistributedNoise(0.0, 10), Full(), 20), "pld"),
        (PrivacyPlan(PER_STEP, Full(), 20), "pld"),
        pytest.param(PrivacyPlan(PER_STEP, FixedSize(60, 50), 5), "rdp", marks=pytest.mark.slow),
        (PrivacyPlan(PER_STEP, FixedSize(60, 50), 20), "paper"),
        pytest.param(PrivacyPlan(CentralNoise(0.0), Poisson(0.2, 30, 9), 20), "pld", marks=pytest.mark.slow),
    ],
)
def test_calibration_of_every_kind(plan, accountant):
    found = calibrate(plan, 2.0, 1e-5, accountant)
    assert found.epsilon(1e-5, accountant) <= 2.0
    assert found.epsilon(1e-5, accountant) == pytest.approx(2.0, rel=1e-3)
    assert found.noise_multiplier == pytest.approx(found.noise.multiplier)
    assert found == PrivacyPlan(found.noise, plan.sampling, plan.rounds, plan.relation)


def test_impossible_targets():
    plan = PrivacyPlan(CentralNoise(1.0), Full(), 10)
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(JaxpflError, match="epsilon must be > 0 and finite"):
            calibrate(plan, epsilon, 1e-5)
    with pytest.raises(JaxpflError, match=r"epsilon must be at most 200, got 1e\+09, which"):
        calibrate(plan, 1e9, 1e-5)
    with pytest.raises(JaxpflError, match=r"epsilon 100 at delta 0\.5 requires a noise multiplier below 0\.01"):
        calibrate(PrivacyPlan(CentralNoise(1.0), Poisson(0.1), 1), 100.0, 0.5)
    with pytest.raises(JaxpflError, match=r"epsilon 1e-09 at delta 1e-11 requires a noise multiplier above 1e\+07"):
        calibrate(plan, 1e-9, 1e-11)
    with pytest.raises(JaxpflError, match="count_stddev must be above"):
        calibrate(PrivacyPlan(CentralNoise(1.0, count_stddev=0.1), Full(), 10), 1.0, 1e-5)
    with pytest.raises(JaxpflError, match="stddevs must be > 0 to be scaled"):
        calibrate(PrivacyPlan(PerStepNoise((1.0,), (0.0,), 1, 1), Full(), 10), 1.0, 1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrivacyPlan(CentralNoise(0.0), Full(), 1).event(), "noise multiplier of 0"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1).epsilon(0.0), "delta must be > 0 and < 1, got 0.0"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1).epsilon(1.0), "delta must be > 0 and < 1, got 1.0"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1).epsilon(1e-14), "delta must be at least 1e-12 for pld"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1).epsilon(1e-5, "prd"), "unknown accountant 'prd'"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 0), "rounds must be a whole number >= 1, got 0"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1.5), "rounds must be a whole number"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), math.nan), "rounds must be a whole number"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1, "replace"), "unknown relation 'replace'"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1, "zero-out"), "add-or-remove-one or replace-one for full"),
        (lambda: PrivacyPlan(CentralNoise(1.0), Poisson(0.5), 1, "replace-one"), "be add-or-remove-one for poisson"),
        (lambda: PrivacyPlan(CentralNoise(1.0), FixedSize(9, 3), 1, "add-or-remove-one"), "must be replace-one for"),
        (lambda: PrivacyPlan(DistributedNoise(1.0, 3), Full(), 1, "add-or-remove-one"), "must be zero-out or replace"),
        (lambda: PrivacyPlan(PER_STEP, Poisson(0.5), 1), "noise that the clients add"),
        (lambda: PrivacyPlan(DistributedNoise(1.0, 9), FixedSize(50, 8), 1), "min_uploads must be at most 8, got 9"),
        (lambda: PrivacyPlan(PER_STEP, Full(49), 1), "min_uploads must be at most 49, got 50"),
        (
            lambda: PrivacyPlan(CentralNoise(1.0), Full(), 1).scale_noise(0.0),
            "noise_multiplier must be > 0 and finite, got 0.0",
        ),
        (lambda: CentralNoise(-1.0), "noise_multiplier must be >= 0 and finite, got -1.0"),
        (lambda: CentralNoise(math.nan), "noise_multiplier must be >= 0 and finite, got nan"),
        (lambda: CentralNoise(1.0, clipping_norm=0.0), "clipping_norm must be > 0"),
        (lambda: CentralNoise(1.0, count_stddev=math.inf), "count_stddev must be > 0 and finite, got inf"),
        (lambda: CentralNoise(1.0, releases=0), "releases must be a whole number"),
        (lambda: DistributedNoise(1.0, 0), "min_uploads must be a whole number >= 1, got 0"),
        (lambda: PerStepNoise((1.0,), (1.0, 2.0), 1, 1), "clips and stddevs must be equally long, got 1 and 2"),
        (lambda: PerStepNoise((1.0, 0.0), (1.0, 2.0), 1, 1), "c2 must be > 0 and finite, got 0.0"),
        (lambda: PerStepNoise((1.0,), (-1.0,), 1, 1), "sigma1 must be >= 0"),
        (lambda: Poisson(0.0), "sampling_rate must be > 0 and <= 1, got 0.0"),
        (lambda: Poisson(math.nan), "sampling_rate must be > 0 and <= 1, got nan"),
        (lambda: Poisson(0.5, None, 3), "num_clients is required if cap is set"),
        (lambda: FixedSize(5, 6), "cohort must be at most 5, got 6"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(JaxpflError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_statement():
    plan = PrivacyPlan(CentralNoise(2.0, clipping_norm=0.5), Poisson(0.1), 100)
    said = plan.statement(1e-4)
    assert said.epsilon == plan.epsilon(1e-4)
    assert said.paper_epsilon == plan.epsilon(1e-4, "paper")
    stored = json.loads(json.dumps(said._asdict()))
    assert (stored["relation"], stored["unit"]) == ("add-or-remove-one", "user")
    assert (stored["sampling_rate"], stored["noise_multiplier"], stored["clipping_norm"]) == (0.1, 2.0, 0.5)
    assert (stored["rounds"], stored["delta"], stored["accountant"]) == (100, 1e-4, "pld")
    assert str(said).partition("; not covered: ")[0] == (
        "eps = 1.966 at delta = 0.0001 for each user (add-or-remove-one, by pld; poisson participation, q = 0.1, z = 2"
        ", C = 0.5, R = 100); the paper's formula, which is not a valid bound, gives 8.074"
    )
    adaptive = PrivacyPlan(CentralNoise(2.0, count_stddev=3.0), Full(), 4).statement(1e-4)
    assert "adaptive C" in str(adaptive)
    assert "paper" not in str(adaptive)
    assert "C = 1 and 0.5" in str(PrivacyPlan(PER_STEP, Full(), 4).statement(1e-4))
    with pytest.raises(JaxpflError, match="noise multiplier of 0"):
        PrivacyPlan(CentralNoise(0.0), Full(), 4).statement(1e-4)


@pytest.mark.parametrize(("m", "q"), [(50, 0.1), (1000, 0.01), (7, 0.5), (30, 0.97), (5, 1.0), (3, 1e-9)])
@pytest.mark.parametrize("overflow", [1e-6, 1e-2])
def test_poisson_cap_is_the_smallest(m, q, overflow):
    """Against the binomial tail summed exactly."""

    def tail(cap: int) -> float:
        return math.fsum(math.comb(m, k) * q**k * (1 - q) ** (m - k) for k in range(cap + 1, m + 1))

    cap = poisson_cap(m, q, overflow)
    assert 1 <= cap <= m
    assert tail(cap) < overflow
    assert cap == 1 or tail(cap - 1) >= overflow


def test_the_default_cap_costs_next_to_nothing():
    cap = poisson_cap(50, 0.1)
    plain = PrivacyPlan(CentralNoise(2.0), Poisson(0.1), 100).epsilon(1e-4)
    assert plain <= PrivacyPlan(CentralNoise(2.0), Poisson(0.1, 50, cap), 100).epsilon(1e-4) < 1.001 * plain
    assert poisson_cap(1_000_000, 0.001) < 1200
    for args in ((0, 0.5), (5, 0.0), (5, 1.5), (5, 0.5, 0.0), (5, math.nan)):
        with pytest.raises(JaxpflError):
            poisson_cap(*args)


@pytest.mark.parametrize(("rate", "z", "rounds"), [(0.01, 0.3, 1000), (0.01, 0.2, 300), (0.1, 2.0, 100)])
def test_epsilon_is_right_to_one_in_a_thousand(rate, z, rounds):
    """Beside a grid ten times as fine as the first, of which epsilon is an upper bound too."""
    plan = PrivacyPlan(CentralNoise(z), Poisson(rate), rounds)
    with accounting.quiet():
        fine = plan.accountant("pld", accounting.pld_step(z, rate, rounds) / 10).compose(plan.event()).get_epsilon(1e-5)
    assert fine * (1 - 1e-6) <= plan.epsilon(1e-5) <= fine * (1 + 1e-3)
