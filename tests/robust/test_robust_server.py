"""Estimates that a server receives in place of the mean, in the engine: who counts, and for how much."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import Algorithm, Client, ExecutionPlan, JaxpflError, Message, Server, Simulation, Upload, stack_clients
from jaxpfl.core import participation
from jaxpfl.core.participation import Availability
from jaxpfl.engine.tasks import make_task
from jaxpfl.uploads.robust import attack_of, attacked, resolve, robust

pytestmark = pytest.mark.usefixtures("x64")
CLIENTS = 9


def values() -> np.ndarray:
    """One vector for each client; what the sixth uploads is not a number."""
    return np.random.default_rng(1).normal(size=(CLIENTS, 3)).astype(np.float32).astype(float)


def means_of_data(clusters: int = 0) -> Algorithm:
    """Clients upload the vector of their first example, weighted by their number of examples, the third by zero; the
    server keeps the mean that it is given. With ``clusters``, each contributes to one of so many means."""

    def update(key, hp, ctx, message, state, splits):
        n = jnp.where(ctx.client_id == 2, 0, splits.train.size).astype(float)
        weight = n * jax.nn.one_hot(ctx.client_id % clusters, clusters, dtype=float) if clusters else n
        total = jnp.multiply.outer(weight, jnp.where(ctx.client_id == 5, jnp.nan, splits.train.x[0]))
        return state, Upload({"value": total}, {"value": weight}), {}

    client = Client(
        init=lambda key, hp, ctx, message: (),
        update=update,
        personalize=lambda key, hp, ctx, message, state, splits: (),
        predict=lambda hp, state, x: jnp.zeros((x.shape[0], 2)),
    )
    server = Server(
        init=lambda key, hp, ctx: (jnp.zeros((*[clusters][: clusters > 0], 3)), jnp.zeros((), jnp.int32)),
        broadcast=lambda key, hp, ctx, state: Message(()),
        update=lambda key, hp, ctx, state, reduced: ((reduced.mean()["value"], reduced.contributors), {}),
    )
    return Algorithm((client,), server, 1)


def after_a_round(algorithm: Algorithm, plan: ExecutionPlan | None = None, cohort: int = CLIENTS, **more):
    """The server's state and the round's metrics, and the cohort, [m] bool."""
    sizes = np.arange(1, CLIENTS + 1)
    clients = [(np.repeat(row[None], n, 0), np.zeros(n, int)) for row, n in zip(values(), sizes, strict=True)]
    federation = stack_clients(clients, test=clients)
    federation = jax.tree.map(lambda a: a.astype(float) if np.issubdtype(a.dtype, np.floating) else a, federation)
    task = make_task("linear", federation, 2)
    cohorts = participation.of(CLIENTS, cohort)
    simulation = Simulation(algorithm, task, federation, cohorts, (), plan=plan or ExecutionPlan(), **more)
    state, history = simulation.advance(simulation.init([4]), 1)
    counts = simulation.counts(state)
    (value, contributors), arrived = state.server, np.asarray(counts.uploads[0]) > 0
    return np.asarray(value[0]), int(contributors[0]), arrived, {name: row[0, 0] for name, row in history.items()}


def counted(arrived: np.ndarray) -> np.ndarray:
    """Vectors of the clients that count: of those whose upload arrived all but the one of weight zero."""
    return values()[arrived & (np.arange(CLIENTS) != 2)]


@pytest.mark.parametrize("clients", ["2", pytest.param("vmap", marks=pytest.mark.slow)])
def test_who_does_not_upload_does_not_count(clients):
    """Out of the cohort, dropped out, not finite, of weight zero; of the others none weighs more than another."""
    given = {"plan": ExecutionPlan(clients=clients, devices=1), "cohort": 8}
    failing = Availability(dropout=0.4)
    algorithm = robust(means_of_data(), resolve("median"))
    value, contributors, arrived, metrics = after_a_round(algorithm, availability=failing, **given)
    assert metrics["dropped"] > 0
    assert metrics["diverged"] == 1
    assert contributors == arrived.sum() == 8 - metrics["dropped"] - 1
    np.testing.assert_allclose(value, np.median(counted(arrived), axis=0), rtol=1e-12)


def test_the_mean_is_the_method_s_own():
    algorithm = means_of_data()
    assert robust(algorithm, resolve("mean")) is algorithm
    weights = np.where(np.isin(np.arange(CLIENTS), (2, 5)), 0, np.arange(1, CLIENTS + 1))
    value, *_ = after_a_round(algorithm)
    np.testing.assert_allclose(value, np.average(values(), axis=0, weights=weights), rtol=1e-12)


def test_each_of_several_means_is_estimated_among_its_own_clients():
    value, *_ = after_a_round(robust(means_of_data(clusters=2), resolve("median")))
    rows, ids = values(), np.arange(CLIENTS)
    even, odd = (ids % 2 == 0) & (ids != 2), (ids % 2 == 1) & (ids != 5)
    np.testing.assert_allclose(value, [np.median(rows[own], axis=0) for own in (even, odd)], rtol=1e-12)


def test_too_few_uploads_for_krum_are_told():
    """Seven uploads count: enough against two attackers, not against three."""
    enough, short = (after_a_round(robust(means_of_data(), resolve(f"krum:attackers={f}"))) for f in (2, 3))
    assert (enough[3]["below_quorum"], short[3]["below_quorum"]) == (0, 1)
    assert any(np.array_equal(short[0], row) for row in values())


def test_uploads_without_a_finite_number_or_a_weight_leave_zero():
    attack = attack_of("scale:factor=1e300")
    everyone = attacked(attacked(means_of_data(), attack, np.arange(CLIENTS)), attack, np.arange(CLIENTS))
    value, contributors, *_ = after_a_round(robust(everyone, resolve("geometric-median")))
    assert contributors == 1  # with a weight of zero
    np.testing.assert_array_equal(value, 0)


@pytest.mark.parametrize("factor", [2e307, 1e200], ids=["the sum", "its square"])
def test_uploads_that_overflow_only_in_the_sum_are_not_used(factor):
    """Each is finite; their clients count as diverged, and the others' uploads are used."""
    lying = attacked(means_of_data(), attack_of(f"scale:factor={factor}"), np.array([7, 8]))
    value, contributors, arrived, metrics = after_a_round(lying)
    assert (contributors, metrics["diverged"]) == (CLIENTS - 3, 3)
    assert not arrived[[7, 8]].any()
    weights = np.where(np.isin(np.arange(CLIENTS), (2, 5, 7, 8)), 0, np.arange(1, CLIENTS + 1))
    np.testing.assert_allclose(value, np.average(values(), axis=0, weights=weights), rtol=1e-12)


@pytest.mark.parametrize(
    ("attack", "change"), [("sign-flip:factor=2", lambda rows: -2 * rows), ("scale", lambda rows: 10 * rows)]
)
def test_an_attacker_uploads_something_else_at_its_weight(attack, change):
    attackers = np.array([7, 0])
    value, *_ = after_a_round(attacked(means_of_data(), attack_of(attack), attackers))
    rows = values()
    rows[attackers] = change(rows[attackers])
    weights = np.where(np.isin(np.arange(CLIENTS), (2, 5)), 0, np.arange(1, CLIENTS + 1))
    np.testing.assert_allclose(value, np.average(rows, axis=0, weights=weights), rtol=1e-12)


@pytest.mark.slow
def test_noise_is_an_attacker_s_own_and_of_its_deviation():
    """The mean moves by the noise in place of the vector, times the attacker's share of the weights."""
    small, large = (attack_of(f"noise:deviation={s}").change(jax.random.key(0), jnp.ones(3)) for s in (1.0, 50.0))
    np.testing.assert_allclose(large, 50 * small, rtol=1e-9)
    weights = np.where(np.isin(np.arange(CLIENTS), (2, 5)), 0, np.arange(1, CLIENTS + 1))
    honest = np.average(values(), axis=0, weights=weights)
    total = sum(n for n in range(1, CLIENTS + 1) if n not in (3, 6))
    draws = {}
    for attacker, deviation in ((7, 50.0), (0, 1.0)):
        value, *_ = after_a_round(
            attacked(means_of_data(), attack_of(f"noise:deviation={deviation}"), np.array([attacker]))
        )
        share = (attacker + 1) / total
        draws[attacker] = ((value - honest) / share + values()[attacker]) / deviation
    assert not np.allclose(draws[7], draws[0])
    assert all(0.1 < np.linalg.norm(draw) < 4 for draw in draws.values())


def test_a_server_that_sees_each_upload_is_refused():
    stacked = robust(means_of_data(), resolve("median"))
    with pytest.raises(JaxpflError, match="aggregate = krum:attackers=1 replaces a mean of uploads: leave it out"):
        robust(stacked, resolve("krum:attackers=1"), "x")


def test_uploads_that_are_no_floats_are_refused():
    algorithm = means_of_data()
    (client,) = algorithm.clients

    def update(*given):
        state, upload, metrics = client.update(*given)
        return state, upload._replace(total=jax.tree.map(partial(jnp.asarray, dtype=jnp.int32), upload.total)), metrics

    whole = algorithm._replace(clients=(client._replace(update=update),))
    with pytest.raises(JaxpflError, match="a robust aggregate requires uploads of floating-point numbers"):
        after_a_round(robust(whole, resolve("median")))
