"""Robust rules against float64 NumPy written from their definitions: ties, even counts, slots that do not count.

Estimates that a server receives in place of the mean, in the engine: who counts, and for how much."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import Algorithm, Client, ExecutionPlan, JaxpflError, Message, Server, Simulation, Upload, stack_clients
from jaxpfl.core import participation
from jaxpfl.core.participation import Availability
from jaxpfl.engine.tasks import make_task
from jaxpfl.uploads.robust import aggregation, attack_of, attacked, resolve, robust

VALID = {
    "all": np.ones(9, bool),
    "an even number": np.arange(9) != 3,
    "some": np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], bool),
    "two": np.array([0, 1, 0, 0, 0, 0, 1, 0, 0], bool),
    "one": np.arange(9) == 4,
    "none": np.zeros(9, bool),
}


pytestmark = pytest.mark.usefixtures("x64")


def stacked(seed: int = 0) -> dict[str, np.ndarray]:
    """Nine vectors of seven numbers, with ties in one coordinate and between two vectors."""
    rng = np.random.default_rng(seed)
    rows = {"w": rng.normal(size=(9, 2, 3)) * np.linspace(1, 30, 9)[:, None, None], "b": rng.normal(size=9)}
    rows["w"][:, 0, 0] = [2, 1, 2, 2, 0, 1, 2, 1, 5]
    rows["w"][6], rows["b"][6] = rows["w"][5], rows["b"][5]
    return rows


def flat(rows: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([rows["w"].reshape(9, -1), rows["b"].reshape(9, -1)], axis=1)


def got(rule, rows: dict[str, np.ndarray], valid: np.ndarray) -> np.ndarray:
    """Estimate with garbage in the slots that do not count, as one vector."""
    spoiled = {name: np.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, np.nan) for name, leaf in rows.items()}
    found = jax.jit(rule)(spoiled, jnp.asarray(valid))
    return np.concatenate([np.ravel(found["w"]), np.ravel(found["b"])])


def trimmed(x: np.ndarray, cut: int) -> np.ndarray:
    ordered = np.sort(x, axis=0)
    return ordered[cut : len(x) - cut].mean(axis=0)


def krum_scores(x: np.ndarray, f: int) -> np.ndarray:
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    neighbours = max(len(x) - f - 2, 1)
    return np.array([np.sort(np.delete(row, i))[:neighbours].sum() for i, row in enumerate(distances)])


def weiszfeld(x: np.ndarray, steps: int, smoothing: float) -> np.ndarray:
    z = np.median(x, axis=0)
    for _ in range(steps):
        w = 1 / np.maximum(smoothing, np.linalg.norm(x - z, axis=1))
        z = (w[:, None] * x).sum(axis=0) / w.sum()
    return z


def bounded(x: np.ndarray, bound: float | None) -> np.ndarray:
    norms = np.linalg.norm(x, axis=1)
    bound = np.median(norms) if bound is None else bound
    return np.mean([row * min(1, bound / norm) for row, norm in zip(x, norms, strict=True)], axis=0)


RULES = {
    "median": (aggregation.median, lambda x: np.median(x, axis=0)),
    "trimmed mean": (partial(aggregation.trimmed_mean, fraction=0.3), lambda x: trimmed(x, len(x) * 3 // 10)),
    "krum": (partial(aggregation.krum, attackers=2), lambda x: x[krum_scores(x, 2).argmin()]),
    "multi-krum": (
        partial(aggregation.multi_krum, attackers=2),
        lambda x: x[np.argsort(krum_scores(x, 2), kind="stable")[: max(len(x) - 4, 1)]].mean(axis=0),
    ),
    "multi-krum of 3": (
        partial(aggregation.multi_krum, attackers=1, select=3),
        lambda x: x[np.argsort(krum_scores(x, 1), kind="stable")[:3]].mean(axis=0),
    ),
    "geometric median": (
        partial(aggregation.geometric_median, steps=7, smoothing=0.01, tolerance=1e-30),
        lambda x: weiszfeld(x, 7, 0.01),
    ),
    "norm bound": (partial(aggregation.norm_bound, bound=3.0), lambda x: bounded(x, 3.0)),
    "median norm": (aggregation.norm_bound, lambda x: bounded(x, None)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition(name):
    rule, reference = RULES[name]
    for seed in (0, 1):
        rows = stacked(seed)
        for valid in VALID.values():
            x = flat(rows)[valid]
            want = reference(x) if len(x) else np.zeros(7)
            np.testing.assert_allclose(got(rule, rows, valid), want, rtol=1e-12, atol=1e-14)


def test_an_even_number_has_the_mean_of_the_two_middle_values():
    rows, valid = jnp.asarray([1.0, 7.0, 3.0, 100.0, jnp.nan]), jnp.asarray([True] * 4 + [False])
    assert float(aggregation.median(rows, valid)) == 5.0


def test_equal_scores_go_to_the_first_slot():
    rows = jnp.asarray([[9.0], [1.0], [1.5], [5.0], [5.5]])  # two pairs at the same distance: one neighbour counts
    assert float(aggregation.krum(rows, jnp.ones(5, bool), attackers=2)[0]) == 1.0


def test_distances_of_near_vectors_keep_their_digits():
    """In float32 at a norm of 1e4, products of the vectors would have no digit of these distances."""
    rows = jnp.float32(1e4) + jnp.asarray([[0.0], [0.5], [0.75], [3.0], [8.0]], jnp.float32)
    assert float(aggregation.krum(rows, jnp.ones(5, bool), attackers=1)[0]) == 1e4 + 0.5


def test_a_vector_beyond_all_bounds_moves_no_rule_far():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, 4)).astype(np.float32)
    rows[2] = 3e37  # its squared norm overflows
    estimates = jax.jit(lambda rows: {name: rule(rows, jnp.ones(9, bool)) for name, (rule, _) in RULES.items()})(rows)
    for name, estimate in estimates.items():
        assert np.isfinite(estimate).all(), name
        assert np.abs(estimate).max() < 5, name


def test_the_geometric_median_of_a_triangle():
    """From the Fermat point of an equilateral triangle all corners are seen under the same angles: its centre."""
    corners = jnp.asarray([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2], [0.5, 3**0.5 / 2 + 1e6]])
    valid = jnp.asarray([True, True, True, False])
    found = aggregation.geometric_median(corners, valid, steps=100, smoothing=1e-9, tolerance=1e-12)
    np.testing.assert_allclose(found, [0.5, 3**0.5 / 6], atol=1e-9)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e9])
def test_the_geometric_median_is_the_minimiser_however_far_attackers_are(far):
    """Forces of length one from every vector balance there; the mean of them all is where the attackers are."""
    x = np.random.default_rng(5).normal(size=(20, 6))
    x[:8] += far * np.array([1, -1, 1, 1, 0, 2])
    found = np.asarray(resolve("geometric-median").rule(jnp.asarray(x), jnp.ones(20, bool)))
    toward = x - found
    forces = toward / np.linalg.norm(toward, axis=1, keepdims=True)
    assert np.linalg.norm(forces.sum(axis=0)) < 1e-3
    assert np.linalg.norm(found) < 10


def test_a_fraction_is_taken_as_it_is_written():
    assert [aggregation.trimmed(0.29, 100), aggregation.trimmed(0.1, 30), aggregation.trimmed(0.1, 9)] == [29, 3, 0]


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
    ("attack", "change"),
    [
        ("sign-flip", lambda rows: -rows),
        ("sign-flip:factor=2", lambda rows: -2 * rows),
        ("scale", lambda rows: 10 * rows),
    ],
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
    with pytest.raises(JaxpflError, match="aggregate = krum:attackers=1 replaces a mean of uploads, but"):
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
