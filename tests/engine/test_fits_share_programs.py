"""Rows that are nobody's: fits of several client counts share one set of programs, and none of their numbers change."""

import jax
import numpy as np
import pytest
from test_second_fit import counted

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.execution_plan import bucket_of, explain
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.support.errors import JaxpflError

BUCKET = ExecutionPlan(client_bucket=104, rounds_per_call=5)
PLAIN = ExecutionPlan(rounds_per_call=5)


def federation_of(clients: int, seed: int = 0, largest: int = 8) -> jaxpfl.Federation:
    rng = np.random.default_rng([seed, clients])

    def some(count):
        return rng.normal(size=(count, 4)), rng.integers(3, size=count)

    sizes = rng.integers(5, largest + 1, clients)
    sizes[:2] = 5, largest
    ids, test, validation = rng.permutation(clients * 3)[:clients], *([some(2) for _ in sizes] for _ in range(2))
    return jaxpfl.stack_clients([some(n) for n in sizes], client_ids=ids, test=test, validation=validation)


def run(clients, method="fedavg", plan=BUCKET, **more):
    given = {"rounds": 2, "model": "linear", "local_steps": 2, "batch_size": 3, "num_classes": 3, "plan": plan}
    return jaxpfl.fit(method, federation_of(clients), **given | more)


def test_bucket_of():
    counts = np.arange(1, 5000)
    buckets = np.array([bucket_of(int(count)) for count in counts])
    assert (buckets >= counts).all()
    assert (buckets < 1.25 * counts).all()
    assert [bucket_of(int(b)) for b in set(buckets)] == list(set(buckets))
    assert bucket_of(10**6) == 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", lambda m: {"cohort": m // 4}),
        ("ditto", lambda m: {}),
        ("adaped", lambda m: {"cohort": m // 4, "participation": "poisson", "cohort_cap": m // 3}),
        ("adaped", lambda m: {"cohort": m // 4, "options": {"idle_rounds": 2}, "draw": "replacement"}),
        ("fedavg", lambda m: {"batch_size": 20, "dropout": m / 1000, "seeds": 2, "hyper": {"lr": [0.1, m / 500]}}),
        ("fedavg", lambda m: {"cohort": m // 4, "cohort_cap": m // 3, "privacy": Mechanism(m / 100, 1.0)}),
        ("fedavg", lambda m: {"cohort": m // 4, "compress": "qsgd:levels=4"}),
        ("scaffold", lambda m: {"cohort": m // 4}),
    ],
)
def test_fits_of_other_client_counts_compile_nothing(method, settings):
    """Nor trace they anything; and each has the numbers that it has without a bucket."""
    run(100, method, **settings(100))
    for clients in (104, 101, 103):
        with counted() as work:
            got = run(clients, method, **settings(clients))
        assert work == [], clients
    want = run(103, method, PLAIN, **settings(103))
    assert got.scores["after"]["loss"].shape == (1, *want.scores["after"]["loss"].shape[1:])
    np.testing.assert_array_equal(got.history["participants"], want.history["participants"])
    assert got.state.counts.table.shape[1] == 104
    ends = [one.simulation.trim(one.state) for one in (got, want)]
    np.testing.assert_array_equal(ends[0].participations, ends[1].participations)
    for a, b in zip(*(jax.tree.leaves(end.server) for end in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for name, values in want.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_what_is_asked_of_a_fit_has_a_row_for_each_client():
    """Scores, counters, models, clusters, what a state may be stored as, and unseen clients."""
    unseen = federation_of(5, seed=1)
    unseen = unseen._replace(client_ids=np.arange(1000, 1005))
    got, want = (run(9, "ifca", ExecutionPlan(client_bucket=b), unseen=unseen, dropout=0.2) for b in (13, "none"))
    assert got.unseen is not None
    assert want.unseen is not None
    for one in (got, want):
        assert one.personalized_accuracy.shape == (1, 9)
        assert one.unseen_accuracy is not None
        assert one.unseen_accuracy.shape == (1, 5)
    np.testing.assert_allclose(got.unseen["after"]["loss"], want.unseen["after"]["loss"], rtol=1e-4)
    np.testing.assert_array_equal(got.clusters, want.clusters)
    for a, b in zip(jax.tree.leaves(got.gradients), jax.tree.leaves(want.gradients), strict=True):
        np.testing.assert_array_equal(a, b)
    models = [jax.tree.leaves(one.simulation.personal_models(one.state)) for one in (got, want)]
    for a, b in zip(*models, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert got.simulation.bytes_per_client() == want.simulation.bytes_per_client()
    # A state without a bucket goes on in one with a bucket, and the other way round.
    ends = []
    for one, other in ((got, want), (want, got)):
        state = other.simulation.adopt(one.simulation.trim(one.state))
        ends.append(other.simulation.trim(other.simulation.advance(state, 2)[0]))
    np.testing.assert_array_equal(ends[0].counts.table, ends[1].counts.table)
    for a, b in zip(*(jax.tree.leaves(end.server) for end in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_private_run_has_the_noise_and_the_claim_of_its_own_clients():
    for privacy in (Mechanism(0.7, 0.5), PrivacyConfig(epsilon=3.0, delta=1e-3)):
        got, want = (run(90, plan=plan, cohort=20, privacy=privacy) for plan in (BUCKET, PLAIN))
        assert got.statement(1e-3).epsilon == want.statement(1e-3).epsilon
        drawn = [np.asarray(jax.random.key_data(one.state.released)) for one in (got, want)]
        np.testing.assert_array_equal(drawn[0], drawn[1])
        for a, b in zip(*(jax.tree.leaves(one.state.server) for one in (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_share_of_the_clients_has_the_same_slots_whatever_their_number():
    """And never fewer than it needs."""
    given = {"num_classes": 3, "model": "linear", "method": jaxpfl.METHODS["fedavg"]}
    plan, slots = ExecutionPlan(client_bucket=128), set()
    for clients, cohort in ((113, 11), (120, 12), (128, 13)):
        spec = RunSpec(plan=plan, cohort=cohort, **given)
        participation = simulation_of(spec, federation_of(clients))._bucket.participation
        assert participation.capacity >= cohort
        slots.add(participation.capacity)
    assert slots == {14}


def test_a_bucket_below_the_clients_is_refused():
    for bucket in (8, "8"):
        with pytest.raises(JaxpflError, match=r"plan\.client_bucket must be at least the number of clients, 9, got 8"):
            run(9, plan=ExecutionPlan(client_bucket=bucket))
    with pytest.raises(JaxpflError, match=r"plan\.client_bucket must be none, auto or a positive number, got 0"):
        ExecutionPlan(client_bucket=0)


OWN = jaxpfl.METHODS["fedavg"]._replace(name="mine")


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("network-lasso", {"neighbours": 2}, "its server sees single uploads"),
        ("adamix", {"options": {"components": 2}}, "its server sees single uploads"),
        ("pooled", {}, "one client trains"),
        (OWN, {}, "a method of one's own may depend on the number of clients"),
    ],
)
def test_what_cannot_be_in_a_bucket_says_so_and_has_none(method, settings, why):
    method = jaxpfl.METHODS.get(method, method)
    given = {"num_classes": 3, "model": "linear", **settings}
    for plan, reasons in ((ExecutionPlan(client_bucket=16), 5), (PLAIN, 4)):
        simulation = simulation_of(RunSpec(method=method, plan=plan, **given), federation_of(9))
        told = explain(simulation.execution)
        rows = 1 if method.pooled else 9
        assert (simulation.placement.rows, len(told)) == (rows, reasons)
        assert reasons == 4 or told[-1] == ("rows of clients", str(rows), f"no bucket: {why}")
