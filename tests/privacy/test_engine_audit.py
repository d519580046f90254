"""The audit of the engine's own rounds: below the claim on sound code, above it where a fault is planted.

On sound code a bound above the claim has probability 5 % (the confidence); the seeds are fixed. The faults are those
that private code is known for.
"""

import numpy as np
import pytest

from jaxpfl.experiment.audit import Audit, audit
from jaxpfl.participation import Participation, full, poisson, uniform
from jaxpfl.privacy import Mechanism, mechanism, privatize
from jaxpfl.privacy.noise import add_gaussian

Z, C, CLIENTS = 1.0, 0.5, 4
CENTRAL = Mechanism(Z, C)


def play(tried: Mechanism = CENTRAL, participation: Participation | None = None, **more) -> Audit:
    return audit(tried, participation or full(CLIENTS), **{"rounds": 1, "worlds": 2000} | more)


@pytest.mark.parametrize(
    ("tried", "participation", "more"),
    [
        pytest.param(CENTRAL, full(CLIENTS), {}, id="central"),
        pytest.param(CENTRAL, poisson(CLIENTS, 0.5), {"rounds": 3}, id="Poisson", marks=pytest.mark.slow),
        pytest.param(CENTRAL, poisson(CLIENTS, 0.5, 2), {"rounds": 3}, id="cut", marks=pytest.mark.slow),
        pytest.param(CENTRAL, uniform(CLIENTS, 2), {}, id="uniform", marks=pytest.mark.slow),
        pytest.param(Mechanism(Z, C, "distributed", CLIENTS), full(CLIENTS), {}, id="shares", marks=pytest.mark.slow),
        pytest.param(Mechanism(Z, C, "per_step"), full(CLIENTS), {"steps": 3}, id="steps", marks=pytest.mark.slow),
        pytest.param(
            Mechanism(Z, C, quantile=0.5, count_stddev=1.0), full(CLIENTS), {}, id="adaptive", marks=pytest.mark.slow
        ),
    ],
)
def test_sound_code_is_not_refuted(tried, participation, more):
    found = play(tried, participation, **more)
    assert not found.refuted
    assert 0 < found.claimed < found.bound.ceiling
    assert found.present.mean() > found.absent.mean()


def halved(algorithm, hp, tried):
    algorithm, hyper = privatize(algorithm, hp, tried)
    return algorithm, hyper.replace(noise_multiplier=hyper.noise_multiplier / 2)


def test_half_the_noise_is_found():
    assert play(behind=halved).refuted


@pytest.mark.slow
def test_a_skipped_clip_is_found(monkeypatch):
    monkeypatch.setattr(mechanism, "clip", lambda tree, limit: (tree, np.float32(0)))
    assert play().refuted


@pytest.mark.slow
def test_noise_that_is_divided_twice_is_found(monkeypatch):
    """Added to the mean where it belongs to the sum."""
    monkeypatch.setattr(mechanism, "add_gaussian", lambda key, tree, s: add_gaussian(key, tree, s / CLIENTS))
    assert play().refuted


@pytest.mark.slow
def test_a_divisor_that_counts_who_is_there_is_found():
    """The mean over them moves by up to 2 C / K where one of K is missing."""

    def counting(algorithm, hp, tried):
        algorithm, hyper = privatize(algorithm, hp, tried)
        server = algorithm.server

        def update(key, hp, ctx, state, reduced):
            there = ctx._replace(expected_cohort=reduced.contributors.astype(float))
            return server.update(key, hp, there, state, reduced)

        return algorithm._replace(server=server._replace(update=update)), hyper

    assert play(worlds=8000, behind=counting).refuted


@pytest.mark.slow
def test_a_quarter_of_the_noise_is_found_where_a_client_is_replaced():
    """The game is then between a client's data and their opposite; half the noise hides behind RDP's slack."""

    def quartered(algorithm, hp, tried):
        algorithm, hyper = halved(algorithm, hp, tried)
        return algorithm, hyper.replace(noise_multiplier=hyper.noise_multiplier / 2)

    found = play(participation=uniform(CLIENTS, 3), behind=quartered, worlds=8000)
    assert found.relation == "replace-one"
    assert found.refuted


@pytest.mark.slow
def test_the_noise_of_one_shard_of_two_is_found(monkeypatch):
    """Each of two devices adds its half of the variance, and one forgets."""
    monkeypatch.setattr(mechanism, "add_gaussian", lambda key, tree, s: add_gaussian(key, tree, s / 2**0.5))
    assert play(worlds=8000).refuted


@pytest.mark.slow
def test_a_share_too_few_is_found():
    """As many shares as make the noise, and one of them is missing from each upload's sum: K_min is not kept."""

    def too_many(algorithm, hp, tried):
        return privatize(algorithm, hp, Mechanism(Z, C, "distributed", 3 * CLIENTS))

    def released(algorithm, hp, tried):
        algorithm, hyper = too_many(algorithm, hp, tried)
        server = algorithm.server

        def update(key, hp, ctx, state, reduced):
            return server.update(key, hp, ctx, state, reduced._replace(contributors=reduced.contributors + 3 * CLIENTS))

        return algorithm._replace(server=server._replace(update=update)), hyper

    assert play(Mechanism(Z, C, "distributed", CLIENTS), behind=released).refuted
