"""A round behind the mechanism, by hand: ``server + sum_i clip(change_i) / D`` with a public D, clipped as a whole.

The noise is zero here, or known; `test_noise_scale` is about its distribution.
"""

from typing import Any

import jax
import numpy as np
import pytest
from numpy_reference import adaped_step, decay, sgd, subtract
from oracle_setup import (
    IDS,
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    client_row,
    clients,
    run,
    simulation,
    stack,
    world,
)

from jaxpfl import METHODS
from jaxpfl.core.participation import full, poisson, uniform
from jaxpfl.privacy import Mechanism

pytestmark = pytest.mark.usefixtures("float64")

SGD = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": 0.02}
ADAPED = SGD | {"lr_global": 0.3, "lr_psi": 0.4, "psi_init": 0.8, "psi_floor": 0.7, "c": 2.0}
M = len(SIZES)
COHORTS = {
    "full": full(M),
    "uniform": uniform(M, 3),
    "poisson": poisson(M, 0.5),
    "poisson, two slots": poisson(M, 0.5, 2),
}
ROUNDS = 4


def clipped(change: dict[str, Any], limit: float) -> tuple[dict[str, Any], float]:
    """The change scaled to a norm of at most ``limit``, and its norm."""
    norm = np.sqrt(sum(np.sum(np.square(v)) for v in change.values()))
    return {k: v * min(1.0, limit / norm) for k, v in change.items()}, norm


def add(server: dict[str, Any], changes: list[dict[str, Any]], divisor: float) -> dict[str, Any]:
    return {k: server[k] + sum(c[k] for c in changes) / divisor for k in server}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["uniform", *(pytest.param(k, marks=pytest.mark.slow) for k in ("full", "poisson", "poisson, two slots"))]
)
def test_fedavg(kind):
    """Every client weighs the same, whatever its examples; the divisor is the expected cohort, not the drawn one."""
    problem, cohort, limit = classification_problem(), COHORTS[kind], 0.75
    made = simulation("fedavg", problem, SGD, cohort=cohort, batch_size=6, privacy=Mechanism(0.0, limit))
    got = run(made, ROUNDS)
    given = world(problem, cohort, 6, ROUNDS)
    mu, seen, norms = got.states[0].server.state, [0] * M, []
    for r, drawn in enumerate(given.cohorts):
        changes = []
        for i in (i for i in drawn if i < M):
            w, _ = sgd(mu, given.batches(i, seen[i]), SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
            change, norm = clipped(subtract(w, mu), limit)
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
    assert cohort.expected_cohort != M or kind == "full"


def test_adaped_clips_mu_and_psi_together_and_keeps_psi_above_its_floor():
    problem, limit = classification_problem(), 0.3
    got = run(simulation("adaped", problem, ADAPED, privacy=Mechanism(0.0, limit)), ROUNDS)
    (mu, psi), floors = got.states[0].server.state, 0
    thetas = [client_row(got.states[0].clients[0], i) for i in range(M)]
    for r in range(ROUNDS):
        changes = []
        for i, batch in enumerate(clients(problem.train)):
            theta, own_mu, own_psi = thetas[i], mu, psi
            for _ in range(STEPS):
                theta, own_mu, own_psi, _, _ = adaped_step(
                    theta, own_mu, own_psi, batch, ADAPED, decay(ADAPED, r, STEPS)
                )
            thetas[i] = theta
            changes.append(clipped(subtract(own_mu, mu) | {"psi": own_psi - psi}, limit)[0])
        both = add(mu | {"psi": psi}, changes, M)
        psi = max(both.pop("psi"), ADAPED["psi_floor"])
        mu, floors = both, floors + (psi == ADAPED["psi_floor"])
        assert_same(got.states[r + 1].server.state.mu, mu)
        np.testing.assert_allclose(got.states[r + 1].server.state.psi, psi, rtol=1e-9)
        for i in range(M):
            assert_same(client_row(got.states[r + 1].clients[0], i), thetas[i])


def after_noise(method: str, hyper: dict[str, float]) -> Any:
    """The server's state after one round of 16 runs whose noise is all that counts."""
    made = simulation(method, classification_problem(), hyper, privacy=Mechanism(50.0, 1.0))
    return made.advance(made.init(range(16)), 1)[0].server.state


@pytest.mark.slow
def test_noise_that_takes_psi_below_its_floor_is_projected():
    psi = after_noise("adaped", ADAPED).psi
    assert (psi >= ADAPED["psi_floor"]).all()
    assert (psi == ADAPED["psi_floor"]).any()
    assert (psi > ADAPED["psi_floor"]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "scale"), [("map-gaussian", "s2"), pytest.param("map-laplace", "b", marks=pytest.mark.slow)]
)
def test_noise_that_takes_a_prior_below_its_floor_is_projected(method, scale):
    hyper = {"lr": 0.1, "scale_floor": 0.02}
    scales = getattr(after_noise(method, hyper), scale)
    assert (scales >= hyper["scale_floor"]).all()
    assert (scales == hyper["scale_floor"]).any()
    assert (scales > hyper["scale_floor"]).any()


@pytest.mark.slow
def test_adaptive_clipping_follows_the_quantile():
    """``C <- C exp(-rate (share below C - quantile))``; the count's noise is left too small to see."""
    problem, share = classification_problem(), 0.6
    mechanism = Mechanism(0.0, 2.0, quantile=share, quantile_lr=0.5, count_stddev=1e-12)
    got = run(simulation("fedavg", problem, SGD, privacy=mechanism), 6)
    mu, limit = got.states[0].server.state, 2.0
    for r in range(6):
        ends = [
            sgd(mu, [b] * STEPS, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])[0]
            for b in clients(problem.train)
        ]
        pairs = [clipped(subtract(w, mu), limit) for w in ends]
        mu = add(mu, [change for change, _ in pairs], M)
        assert got.history["clipping_norm"][r] == pytest.approx(limit)
        limit *= np.exp(-0.5 * (np.mean([norm <= limit for _, norm in pairs]) - share))
        assert_same(got.states[r + 1].server.state, mu)
        np.testing.assert_allclose(got.states[r + 1].server.clipping_norm, limit, rtol=1e-9)


def spoiled() -> Any:
    """A federation whose second client has an infinite entry."""
    problem = classification_problem()
    train = clients(problem.train)
    train[1][0][0, 0] = np.inf
    return stack(train, clients(problem.test), IDS, clients(problem.validation))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "adaped"])
def test_a_client_that_fails_contributes_zero_and_is_counted(method):
    """The others' sum over the SAME divisor: who failed must not show in it."""
    hp = SGD if method == "fedavg" else ADAPED
    mechanism = Mechanism(0.0, 0.3)
    got = run(simulation(method, spoiled(), hp, privacy=mechanism), 2)
    kept = [i for i in range(M) if i != 1]
    problem = classification_problem()
    others = [[clients(split)[i] for i in kept] for split in (problem.train, problem.test, problem.validation)]
    without = stack(others[0], others[1], [IDS[i] for i in kept], others[2])
    # The same divisor for one client fewer: the expected cohort of five at a rate above one cannot be, so a wrapper.
    four = full(M - 1)._replace(expected_cohort=float(M))
    want = run(simulation(method, without, hp, cohort=four, privacy=mechanism), 2)
    for a, b in zip(got.states[1:], want.states[1:], strict=True):
        assert_same(a.server, b.server)
    assert got.states[-1].diverged.tolist() == [0, 2, 0, 0, 0]
    assert_same(client_row(got.states[-1].clients, 1), client_row(got.states[0].clients, 1), rtol=0)
    for name in ("train_loss", "upload_norm", "clipped"):
        np.testing.assert_allclose(got.history[name], want.history[name], rtol=1e-9)


@pytest.mark.slow
def test_distributed_noise_needs_its_least_number_of_uploads():
    """A failed client still sends its share, so it counts; with one upload too few nothing is released."""
    problem, cohort = spoiled(), uniform(M, 3)
    enough, too_few = (
        run(simulation("fedavg", problem, SGD, cohort=cohort, privacy=mechanism), 3)
        for mechanism in (Mechanism(1.0, 1.0, "distributed", 3), Mechanism(1.0, 1.0, "distributed", 4))
    )
    first = enough.states[0].server
    for state in too_few.states[1:]:
        assert_same(state.server, first, rtol=0)
    for before, after in zip(enough.states, enough.states[1:], strict=False):
        assert not np.array_equal(before.server.state["w1"], after.server.state["w1"])
    assert enough.states[-1].diverged[1] == enough.states[-1].participations[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedem", {}),
        *(
            pytest.param(method, options, marks=pytest.mark.slow)
            for method, options in (
                ("adaped", {"idle_rounds": 2}),
                ("fedprox", {}),
                ("map-laplace", {}),
                ("scaffold", {}),
            )
        ),
    ],
)
def test_without_noise_and_with_a_wide_clip_it_is_the_uniform_mean(method, options):
    problem, setting = classification_problem(), {"cohort": uniform(M, 3), "choices": {"weighting": "uniform"}}
    private, plain = (
        run(simulation(method, problem, {}, **setting, privacy=privacy, **options), 4)
        for privacy in (Mechanism(0.0, 1e6), None)
    )
    for a, b in zip(private.states, plain.states, strict=True):
        assert_same(a.server.state, b.server)
        assert_same(a.clients[0], b.clients[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "mechanism"),
    [
        ("fedavg", Mechanism(0.5, 0.3, "distributed", 2)),
        *(
            pytest.param(method, mechanism, marks=pytest.mark.slow)
            for method, mechanism in (
                ("adaped", Mechanism(0.5, 0.3, "per_step")),
                ("fedavg", Mechanism(0.5, 0.3, "per_step")),
                ("fedem", Mechanism(0.5, 0.3)),
                ("map-gaussian", Mechanism(0.5, 0.3, quantile=0.5, count_stddev=1.0)),
                ("adamix", Mechanism(0.5, 0.3)),
            )
        ),
    ],
)
def test_whatever_clients_have_the_server_stays_finite(method, mechanism):
    """An infinite, a missing and a huge entry in every example of three of five clients, whichever a round draws."""
    problem = classification_problem()
    train = clients(problem.train)
    for client, value in ((1, np.inf), (2, np.nan), (3, 1e30)):
        train[client][0][:, 0] = value
    federation = stack(train, clients(problem.test), IDS, clients(problem.validation))
    own = METHODS[method].releases is not None
    got = run(
        simulation(
            method, federation, {}, choices={"privacy": mechanism}, privacy=None if own else mechanism, batch_size=6
        ),
        3,
    )
    for leaf in jax.tree.leaves(got.states[-1].server):
        assert np.isfinite(leaf).all()
    # A gradient that is not finite is clipped to zero in every step: what FedAvg trains stays finite.
    failed = 0 if method == "fedavg" and mechanism.noise == "per_step" else 3
    assert got.states[-1].diverged[[0, 1, 2, 4]].tolist() == [0, failed, failed, 0]
