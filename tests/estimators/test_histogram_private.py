"""Private histograms: the noise that an eps needs, what one user can move, and faults that an audit finds."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histogram_reference import FLOOR, floored, small, users_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpfl.benchmarks.studies.histogram import printed as histogram_printed
from jaxpfl.benchmarks.studies.histogram import starts
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms.private import MASS_WEIGHT, Release
from jaxpfl.privacy.audit import epsilon_lower_bound
from jaxpfl.support.errors import JaxpflError

COUNTS, TRUTH, CLUSTERS, POPULATION = small(seed=2, n=24, d=12)
CENTERS = jnp.asarray(floored(POPULATION.centers), jnp.float32)
MEAN = floored(COUNTS.sum(0) / COUNTS.sum())
ALL = jnp.arange(12)
RADIUS = 0.3
WEIGHTS = histogram_private.standard_weights(jnp.asarray(MEAN, jnp.float32))


@pytest.mark.parametrize(("releases", "sigma", "printed"), [(1, 0.479, 10.7), (5, 1.071, 25.7), (50, 3.387, 88.0)])
def test_noise_at_eps_15_and_delta_1e10(releases, sigma, printed):
    z = histogram_private.calibrated(15.0, 1e-10, releases)
    assert z == pytest.approx(sigma, abs=6e-4)
    assert histogram_private.plan([z] * releases).epsilon(1e-10) == pytest.approx(15, rel=1e-4)
    assert histogram_private.plan([z] * releases).epsilon(1e-10) <= 15
    part = histogram_printed.call_budget(15.0, 1e-10, releases)
    assert histogram_printed.gaussian_stddev(*part) == pytest.approx(printed, abs=0.06)
    composed = histogram_printed.theorem_3_1(*part, releases)
    assert composed == pytest.approx((15.0, 1e-10), rel=1e-6)


def test_two_releases_a_round_cost_the_square_root_of_two():
    one, two = (histogram_private.calibrated(15.0, 1e-10, r) for r in (5, 10))
    assert two == pytest.approx(math.sqrt(2) * one, rel=1e-3)


def test_a_divided_budget_is_the_whole_one():
    z = histogram_private.calibrated(3.0, 1e-10, 1)
    mean, each = histogram_private.divided(z, 4, 0.3)
    assert mean**-2 + 4 * each**-2 == pytest.approx(z**-2)
    assert mean**-2 == pytest.approx(0.3 * z**-2)
    assert histogram_private.plan([mean, *[each] * 4]).epsilon(1e-10) == pytest.approx(3.0, rel=1e-4)


def test_the_printed_calibration_is_refused_where_it_does_not_hold():
    with pytest.raises(JaxpflError, match="requires an epsilon > 0 and < 1 for each call"):
        histogram_printed.gaussian_stddev(1.0, 1e-10)
    with pytest.raises(JaxpflError, match="too large for the paper's calibration: each of 5 rounds"):
        histogram_printed.call_budget(1e6, 1e-10, 5)


@jax.jit
def released(users: histogram.Users) -> tuple[Release, Release, Release, jax.Array, jax.Array]:
    """Everything that is released of users, before its noise: the start's sum, a round, a round of kept tokens, a
    standardised round, and DimRed's moment."""
    uniform = jnp.full((1, 12), 1 / 12)
    return (
        histogram_private.clipped_sums(users, uniform, RADIUS),
        histogram_private.clipped_sums(users, CENTERS, RADIUS),
        histogram_private.clipped_sums(users, CENTERS, RADIUS, ALL < 6),
        WEIGHTS * histogram_private.noisy_sums(jax.random.key(0), users, CENTERS, WEIGHTS, 0.0).sums,
        starts.second_moment(users, jnp.asarray(MEAN, jnp.float32), ALL, 0.8),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=12, max_size=12).filter(any), st.integers(0, 23))
def test_one_user_moves_what_is_released_by_at_most_the_stated_sensitivity(own, place):
    """With and without a user of any counts; the others are the same, their histograms and their places too."""
    counts = COUNTS.copy()
    counts[place] = own
    users = users_of(np.maximum(counts, 0), 8)
    there = np.ones(users.size.shape, bool)
    there.ravel()[place] = False
    gone = users.replace(size=jnp.where(there, users.size, 0))
    row, column = divmod(place, 8)
    hers = users.place[row] // 12 == column  # the counts of a user that is gone are gone
    gone = gone.replace(count=users.count.at[row].set(jnp.where(hers, 0, users.count[row])))
    *vectors, standardised, moment = jax.tree.map(
        lambda a, b: np.asarray(a, float) - np.asarray(b, float), released(users), released(gone)
    )
    for change in vectors:
        sums, masses = np.linalg.norm(change.sums), np.linalg.norm(change.masses)
        assert sums <= RADIUS * (1 + 1e-5)
        assert masses <= 1 + 1e-5
        joint = math.hypot(sums / RADIUS, MASS_WEIGHT * masses)
        assert joint <= math.sqrt(1 + MASS_WEIGHT**2) * (1 + 1e-5)
        assert np.count_nonzero(np.abs(change.masses) > 1e-6) <= 1  # a user is in one cluster
    assert np.linalg.norm(standardised) <= histogram_private.REACH * (1 + 1e-5)
    assert np.linalg.norm(np.triu(moment)) <= 0.8**2 * (1 + 1e-4)


def test_the_noise_is_that_of_the_sensitivity():
    """Each part's standard deviation over 4000 draws within 5 standard errors: a false alarm in 1e6."""
    z, runs = 0.7, 4000
    exact = Release(jnp.zeros((2, 3)), jnp.zeros(2))
    keys = jax.random.split(jax.random.key(0), runs)
    made = jax.jit(jax.vmap(lambda k: histogram_private.noisy(k, exact, RADIUS, z)))(keys)
    sensitivity = math.sqrt(1 + MASS_WEIGHT**2)
    for part, stddev in ((made.sums, z * sensitivity * RADIUS), (made.masses, z * sensitivity / MASS_WEIGHT)):
        draws = np.asarray(part).ravel()
        assert draws.std() == pytest.approx(stddev, rel=5 / math.sqrt(2 * len(draws)))
    moment = jax.jit(jax.vmap(lambda k: histogram_clusters.noisy_moment(k, jnp.zeros((3, 3)), 2.0, z)))(keys)
    np.testing.assert_array_equal(moment, np.swapaxes(moment, 1, 2))
    upper = np.asarray(moment)[:, *np.triu_indices(3)].ravel()
    assert upper.std() == pytest.approx(4 * z, rel=5 / math.sqrt(2 * len(upper)))


@pytest.mark.slow
def test_everything_together_is_the_exact_round_where_there_is_no_noise():
    """Without noise, shrinkage and clipping a private round is Algorithm 2's, and the mean is FedAvg's."""
    users = users_of(COUNTS, 8)
    first = histogram_private.release_of_all(jax.random.key(0), users, radius=1.0, noise=0.0)
    q = COUNTS / COUNTS.sum(1, keepdims=True)
    np.testing.assert_allclose(histogram_private.private_mean(first, FLOOR), floored(q.mean(0)), rtol=1e-4)
    made = histogram_private.cluster(
        jax.random.key(1), users, first, 3, 2, radius=1.0, noise=1e-9, first_noise=1e-9, floor=FLOOR, shrink=False
    )
    shrunk = histogram_private.cluster(
        jax.random.key(1), users, first, 3, 2, radius=1.0, noise=1e-9, first_noise=1e-9, floor=FLOOR
    )
    start = histogram_private.private_start(
        jax.random.split(jax.random.key(1))[0], histogram_private.private_mean(first, FLOOR), 3, 1.0, FLOOR
    )
    expected = histogram_clusters.cluster(users, start, 2, floor=FLOOR)
    some = np.asarray(expected.sizes) > 0
    np.testing.assert_allclose(np.asarray(made)[some], np.asarray(expected.centers)[some], rtol=1e-3, atol=1e-6)
    assert np.abs(np.asarray(shrunk) - np.asarray(made))[some].max() < 0.2


def test_shrinkage_takes_noise_for_noise():
    """Clusters that differ by noise alone come out as the mean; a strong signal is left nearly as it is."""
    rng, mean = np.random.default_rng(0), np.full(400, 1 / 400)
    masses, stddev = np.full(4, 100.0), 0.05
    noise = stddev * rng.standard_normal((4, 400))
    shrunk = jax.jit(histogram_private.shrunk)
    weak = shrunk(Release(jnp.asarray(100 * mean + noise), jnp.asarray(masses)), jnp.asarray(mean), stddev)
    assert np.square(weak - mean).sum() < 0.15 * np.square(noise / 100).sum()
    apart = 0.5 * mean * rng.choice([-1, 1], (4, 400))
    strong = shrunk(Release(jnp.asarray(100 * (mean + apart) + noise), jnp.asarray(masses)), jnp.asarray(mean), stddev)
    assert np.square(strong - mean - apart).sum() < 1.05 * np.square(noise / 100).sum()


# An audit: worlds with and without a canary, a user of one token that nobody else has, so that its cluster's noisy sum
# at that token is its score; two rounds.
WORLDS, AUDIT_DELTA, AUDIT_NOISE = 4000, 0.05, 1.2
RARE = 11


def even(key: jax.Array, users: histogram.Users, centers: jax.Array, noise: float, clipped: bool) -> jax.Array:
    """A round's sums at the canary's token over the canary's share of them, [k]: noise of one size."""
    exact = histogram_private.clipped_sums(users, centers, RADIUS if clipped else 1e3)
    return histogram_private.noisy(key, exact, RADIUS, noise).sums[:, RARE] / RADIUS


def standardised(key: jax.Array, users: histogram.Users, centers: jax.Array, noise: float, clipped: bool) -> jax.Array:
    """The same of noise that has the mean's shape."""
    sums, weights = histogram_private.clipped_sums, histogram_private.standard_weights(jnp.asarray(rarely(RARE)))
    with pytest.MonkeyPatch.context() as patch:
        if not clipped:
            patch.setattr(histogram_private, "clipped_sums", lambda u, c, _, **how: sums(u, c, 1e3, **how))
        made = histogram_private.noisy_sums(key, users, centers, weights, noise)
    return made.sums[:, RARE] * weights[RARE] / histogram_private.REACH


def rarely(token: int) -> np.ndarray:
    """The mean where hardly anybody has a token."""
    return floored(np.where(np.arange(len(MEAN)) == token, 0, MEAN)).astype(np.float32)


@pytest.fixture(scope="module")
def worlds():
    counts = COUNTS.copy()
    counts[:, RARE] = 0
    counts[0] = 0
    counts[0, RARE] = 50
    present = users_of(counts, 24)
    absent = present.replace(
        size=present.size.at[0, 0].set(0), count=jnp.where(present.place[0] < 12, 0, present.count[0])[None]
    )
    return present, absent


def claim() -> float:
    return histogram_private.plan([AUDIT_NOISE] * 2).epsilon(AUDIT_DELTA)


def bound(worlds, mechanism, scale: float, clipped: bool) -> float:
    """Lower bound on epsilon from the canary's scores, for noise of ``scale`` times the claim; optionally unclipped."""

    @jax.jit
    @jax.vmap
    def scores(key):
        def score(key, users):
            rounds = zip(jax.random.split(key, 2), (CENTERS, CENTERS[::-1]), strict=True)
            each = [mechanism(k, users, centers, scale * AUDIT_NOISE, clipped).sum() for k, centers in rounds]
            return sum(each) / math.sqrt(3)

        return tuple(score(k, users) for k, users in zip(jax.random.split(key), worlds, strict=True))

    found = scores(jax.random.split(jax.random.key(5), WORLDS))
    return epsilon_lower_bound(*found, delta=AUDIT_DELTA, confidence=0.999).epsilon


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [even, standardised])
def test_the_audit_accepts_the_mechanism(worlds, mechanism):
    """The bound exceeds a true claim with probability 1e-3 at most."""
    assert bound(worlds, mechanism, 1.0, True) <= claim()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [even, standardised])
@pytest.mark.parametrize(("fault", "scale", "clipped"), [("noise a quarter", 0.25, True), ("no clipping", 1.0, False)])
def test_the_audit_finds_planted_faults(worlds, mechanism, fault, scale, clipped):
    assert bound(worlds, mechanism, scale, clipped) > claim(), fault


@pytest.mark.slow
def test_algorithm_3_without_noise_is_the_mean_and_its_refinement():
    """sigma = 0 and a huge eps: b1 is the mean, b2 of unclipped deviations sums to zero, so P is the mean."""
    users = users_of(COUNTS, 8)
    made = histogram_printed.centering(
        jax.random.key(0), users, CENTERS, epsilon=1e9, stddev=0.0, clip=1e6, floor=FLOOR
    )
    found = histogram_clusters.sums(users, CENTERS)
    some = np.asarray(found.sizes) > 0
    means = np.asarray(found.histograms / jnp.maximum(found.sizes, 1)[:, None])
    np.testing.assert_allclose(np.asarray(made)[some], floored(means)[some], rtol=1e-3, atol=5e-5)


@pytest.mark.slow
def test_algorithm_3_has_the_printed_noise():
    """Sigma on the mean, whatever the users: 2000 draws, 5 standard errors."""
    users, runs, sigma = users_of(COUNTS, 24), 2000, 1e-3
    uniform = jnp.full((1, 12), 1 / 12)
    mean = np.asarray(histogram.mean(users))
    draw = jax.vmap(
        lambda k: histogram_printed.centering(k, users, uniform, epsilon=1e9, stddev=sigma, clip=1e-6, floor=1e-9)[0]
    )
    made = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(1), runs)))
    top = mean.argmax()
    expected = sigma * math.sqrt((1 - mean[top]) ** 2 + 11 * mean[top] ** 2)  # normalising takes some away
    assert made[:, top].std() == pytest.approx(expected, rel=0.12)
