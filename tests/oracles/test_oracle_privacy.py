"""A round behind the mechanism, by hand: ``server + sum_i clip(change_i) / D`` with a public D, clipped as a whole.

The noise is zero here, or known; `test_noise_scale` is about its distribution.
"""

from typing import Any

import jax
import numpy as np
import oracle
import pytest
from numpy_reference import adaped_step, clip, decay, sgd, subtract
from oracle import ADAPED, IDS, SGD, STEPS, M, Setting, assert_same, classification_problem, client_row, clients

import jaxpfl
from jaxpfl import METHODS
from jaxpfl.core.participation import full, poisson, uniform
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import Mechanism, descriptions, noise

SCALED = ADAPED | {"lr_psi": 0.4, "psi_init": 0.8, "psi_floor": 0.7, "c": 2.0}
COHORTS = {"uniform": uniform(M, 3), "poisson": poisson(M, 0.5), "poisson, two slots": poisson(M, 0.5, 2)}


def add(server: dict[str, Any], changes: list[dict[str, Any]], divisor: float) -> dict[str, Any]:
    return {k: server[k] + sum(c[k] for c in changes) / divisor for k in server}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COHORTS)
def test_fedavg(kind):
    """Every client weighs the same, whatever its examples; the divisor is the expected cohort, not the drawn one."""
    cohort, limit = COHORTS[kind], 0.75
    got = oracle.run_method("fedavg", SGD, cohort=cohort, batch_size=6, privacy=Mechanism(0.0, limit))
    given = oracle.world(Setting(cohort, 6))
    mu, seen, norms = got.states[0].server.state, [0] * M, []
    for r, drawn in enumerate(given.cohorts):
        changes = []
        for i in drawn:
            batches = given.batches(i, seen[i], r, STEPS)
            w, _ = sgd(mu, batches, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
            change, norm = clip(subtract(w, mu), limit)
            changes.append(change)
            norms.append(norm)
            seen[i] += 1
        mu = add(mu, changes, cohort.expected_cohort)
        assert_same(got.states[r + 1].server.state, mu)
        if changes:
            now = norms[-len(changes) :]
            np.testing.assert_allclose(got.history["upload_norm"][r], np.mean(now), rtol=1e-9)
            assert got.history["clipped"][r] == pytest.approx(np.mean(np.array(now) > limit))
    assert min(norms) < limit < max(norms)
    assert cohort.expected_cohort != M


@pytest.mark.slow
def test_adaped_clips_mu_and_psi_together_and_keeps_psi_above_its_floor():
    limit = 0.3
    got = oracle.run_method("adaped", SCALED, privacy=Mechanism(0.0, limit))
    (mu, psi), thetas = got.states[0].server.state, oracle.plain_clients(got.states[0])
    for r, state in enumerate(got.states[1:]):
        changes = []
        for i, batch in enumerate(oracle.train_data()):
            theta, own_mu, own_psi = thetas[i], mu, psi
            for _ in range(STEPS):
                factor = decay(SCALED, r, STEPS)
                theta, own_mu, own_psi, _, _ = adaped_step(theta, own_mu, own_psi, batch, SCALED, factor)
            thetas[i] = theta
            changes.append(clip(subtract(own_mu, mu) | {"psi": own_psi - psi}, limit)[0])
        mu = add(mu | {"psi": psi}, changes, M)
        psi = max(mu.pop("psi"), SCALED["psi_floor"])
        assert_same(state.server.state.mu, mu)
        np.testing.assert_allclose(state.server.state.psi, psi, rtol=1e-9)
        assert_same(oracle.plain_clients(state), thetas)


def after_noise(method: str, hyper: dict[str, float]) -> Any:
    """The server's state after one round of 16 runs whose noise is all that counts."""
    made = oracle.simulation(method, hyper, privacy=Mechanism(50.0, 1.0))
    return made.advance(made.init(range(16)), 1)[0].server.state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "scale", "hyper", "floor"),
    [
        ("adaped", "psi", SCALED, "psi_floor"),
        ("map-gaussian", "s2", {"lr": 0.1, "scale_floor": 0.02}, "scale_floor"),
        ("map-laplace", "b", {"lr": 0.1, "scale_floor": 0.02}, "scale_floor"),
    ],
)
def test_noise_that_takes_a_scale_below_its_floor_is_projected(method, scale, hyper, floor):
    scales = getattr(after_noise(method, hyper), scale)
    assert (scales >= hyper[floor]).all()
    assert (scales == hyper[floor]).any()
    assert (scales > hyper[floor]).any()


@pytest.mark.slow
def test_adaptive_clipping_follows_the_quantile():
    """``C <- C exp(-rate (share below C - quantile))``; the count's noise is left too small to see."""
    share = 0.6
    mechanism = Mechanism(0.0, 2.0, quantile=share, quantile_lr=0.5, count_stddev=1e-12)
    got = oracle.run_method("fedavg", SGD, rounds=6, privacy=mechanism)
    mu, limit = got.states[0].server.state, 2.0
    for r in range(6):
        rate = SGD["lr"] * decay(SGD, r, STEPS)
        ends = [sgd(mu, [batch] * STEPS, rate, SGD["weight_decay"])[0] for batch in oracle.train_data()]
        pairs = [clip(subtract(w, mu), limit) for w in ends]
        mu = add(mu, [change for change, _ in pairs], M)
        assert got.history["clipping_norm"][r] == pytest.approx(limit)
        limit *= np.exp(-0.5 * (np.mean([norm <= limit for _, norm in pairs]) - share))
        assert_same(got.states[r + 1].server.state, mu)
        np.testing.assert_allclose(got.states[r + 1].server.clipping_norm, limit, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "hp"), [("fedavg", SGD), ("adaped", SCALED)])
def test_a_client_that_fails_contributes_zero_and_is_counted(method, hp):
    """The others' sum over the SAME divisor: who failed must not show in it."""
    mechanism = Mechanism(0.0, 0.3)
    got = oracle.run_method(method, hp, rounds=2, problem=oracle.spoiled(1), privacy=mechanism)
    # The same divisor for one client fewer: the expected cohort of five at a rate above one cannot be, so a wrapper.
    four = full(M - 1)._replace(expected_cohort=float(M))
    want = oracle.run_method(method, hp, rounds=2, problem=oracle.without(1), cohort=four, privacy=mechanism)
    for a, b in zip(got.states[1:], want.states[1:], strict=True):
        assert_same(a.server, b.server)
    assert got.states[-1].diverged.tolist() == [0, 2, 0, 0, 0]
    assert_same(client_row(got.states[-1].clients, 1), client_row(got.states[0].clients, 1), rtol=0)
    for name in ("train_loss", "upload_norm", "clipped"):
        np.testing.assert_allclose(got.history[name], want.history[name], rtol=1e-9)


@pytest.mark.slow
def test_distributed_noise_needs_its_least_number_of_uploads():
    """A failed client still sends its share, so it counts; with one upload too few nothing is released."""
    given = {"problem": oracle.spoiled(1), "cohort": uniform(M, 3), "rounds": 3}
    enough, too_few = (
        oracle.run_method("fedavg", SGD, privacy=Mechanism(1.0, 1.0, "distributed", least), **given) for least in (3, 4)
    )
    for state in too_few.states[1:]:
        assert_same(state.server, enough.states[0].server, rtol=0)
    for before, after in zip(enough.states, enough.states[1:], strict=False):
        assert not np.array_equal(before.server.state["w1"], after.server.state["w1"])
    assert enough.states[-1].diverged[1] == enough.states[-1].participations[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("fedem", {}), ("adaped", {"idle_rounds": 2}), ("scaffold", {})])
def test_without_noise_and_with_a_wide_clip_it_is_the_uniform_mean(method, options):
    given = {"cohort": uniform(M, 3), "choices": {"weighting": "uniform"}} | options
    private, plain = (oracle.run_method(method, privacy=privacy, **given) for privacy in (Mechanism(0.0, 1e6), None))
    for a, b in zip(private.states, plain.states, strict=True):
        assert_same(a.server.state, b.server)
        assert_same(a.clients[0], b.clients[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "mechanism"),
    [
        ("fedavg", Mechanism(0.5, 0.3, "distributed", 2)),
        ("adaped", Mechanism(0.5, 0.3, "per_step")),
        ("fedavg", Mechanism(0.5, 0.3, "per_step")),
        ("map-gaussian", Mechanism(0.5, 0.3, quantile=0.5, count_stddev=1.0)),
        ("adamix", Mechanism(0.5, 0.3)),
    ],
)
def test_whatever_clients_have_the_server_stays_finite(method, mechanism):
    """An infinite, a missing and a huge entry in every example of three of five clients, whichever a round draws."""
    train = oracle.train_data()
    for client, value in ((1, np.inf), (2, np.nan), (3, 1e30)):
        train[client][0][:, 0] = value
    problem = oracle.stack(train, oracle.scored_data(), IDS, clients(classification_problem().validation))
    own = METHODS[method].releases is not None
    given = {"choices": {"privacy": mechanism}, "privacy": None if own else mechanism, "batch_size": 6}
    last = oracle.run_method(method, rounds=3, problem=problem, **given).states[-1]
    for leaf in jax.tree.leaves(last.server):
        assert np.isfinite(leaf).all()
    # A gradient that is not finite is clipped to zero in every step: what FedAvg trains stays finite.
    failed = 0 if method == "fedavg" and mechanism.noise == "per_step" else 3
    assert last.diverged[[0, 1, 2, 4]].tolist() == [0, failed, failed, 0]


@pytest.mark.slow
def test_noise_of_a_banded_factorisation_is_that_of_the_matrix():
    """``z = C^-1 Z``: of clients that do not move the server's steps are z / D, with C z the rounds' own normals.

    The lattice's half step, 2^-25 deviations, is all that they may differ by.
    """
    rounds, bands = 7, 3
    plan = ExecutionPlan(rounds_per_call=1)
    mechanism = Mechanism(1.5, 0.3, noise="banded", bands=bands)
    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=7, classes_per_client=3, test_share=0.5)
    given = {"model": "linear", "local_steps": 2, "batch_size": 5, "cohort": 2, "participation": "cyclic"}
    given |= {"rounds": rounds, "lr": 1e-30, "plan": plan}
    result = jaxpfl.fit("fedavg", federation, **given, privacy=mechanism)
    state, models = result.simulation.init([0]), []
    released = jax.tree.map(lambda a: a[0], state.released)
    for _ in range(rounds + 1):
        models.append([np.asarray(a[0]) for a in jax.tree.leaves(result.simulation.trim(state).server.state)])
        like = jax.tree.map(lambda a: a[0], result.simulation.trim(state).server.state)
        state, _ = result.simulation.advance(state, 1)
    c, stddev = descriptions.banded_coefficients(bands, rounds), 1.5 * 0.3
    z = [np.diff(np.stack(leaves), axis=0) * (7 / 4) for leaves in zip(*models, strict=True)]
    for r in range(rounds):
        key = stream(stream(released, Purpose.SERVER_UPDATE, r), Purpose.RELEASE_NOISE)
        normals = jax.tree.leaves(noise.gaussian(jax.random.split(key)[0], like, stddev, "a test"))
        for leaf, want in zip(z, normals, strict=True):
            white = sum(c[j] * leaf[r - j] for j in range(min(bands, r + 1)))
            np.testing.assert_allclose(white, np.asarray(want), atol=1e-7)
