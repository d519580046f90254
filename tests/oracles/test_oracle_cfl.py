"""CFL against NumPy: bipartitions by trying all of them, splits by the printed criteria, means by cluster."""

from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import Params, cross_entropy, decay, forward, sgd, subtract
from oracle_methods import SGD, scores
from oracle_setup import (
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    on_host,
    participation,
    run,
    simulation,
    world,
)

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.algorithms.cfl import bipartition, cosines

ROUNDS, M, BATCH = 6, len(SIZES), 6
HYPER = SGD | {"eps1": 0.45, "eps2": 0.5, "gamma": 0.3}
NEWCOMERS = ((8, 13, 3), (100, 101, 55))

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(max_clusters: int) -> Run:
    engine = {"unseen": classification_problem(*NEWCOMERS), "adapt_rounds": 2}
    given = {"cohort": participation("full"), "batch_size": BATCH, "engine": engine}
    return run(simulation("cfl", classification_problem(), HYPER, max_clusters=max_clusters, **given), ROUNDS)


def length(update: Params) -> float:
    return float(np.sqrt(sum((leaf**2).sum() for leaf in update.values())))


def cosine(a: Params, b: Params) -> float:
    return sum(float((a[k] * b[k]).sum()) for k in a) / (length(a) * length(b))


def mean(updates: list[Params]) -> Params:
    return {k: np.mean([one[k] for one in updates], axis=0) for k in updates[0]}


def best_bipartition(similarity: np.ndarray, members: list[int]) -> tuple[set[int], float]:
    """The part without the first member, and the largest similarity across, over all bipartitions."""
    found = (set(), np.inf)
    for size in range(1, len(members)):
        for part in combinations(members[1:], size):
            rest = [i for i in members if i not in part]
            cross = max(similarity[i, j] for i in part for j in rest)
            if cross < found[1]:
                found = (set(part), cross)
    return found


def reference(max_clusters: int, defect: str = "") -> list[tuple]:
    """(models by client, clusters, metrics) after each round."""
    given = world(classification_problem(), participation("full"), BATCH, ROUNDS)
    start = client_row(got(max_clusters).states[0].server.models, 0)
    models, cluster, used, history = [start], [0] * M, 1, []
    for r in range(ROUNDS):
        rate = SGD["lr"] * decay(SGD, r, STEPS)
        ends = [sgd(models[cluster[i]], given.batches(i, r), rate, SGD["weight_decay"]) for i in range(M)]
        updates = [subtract(end, models[cluster[i]]) for i, (end, _) in enumerate(ends)]
        similarity = np.array([[cosine(a, b) for b in updates] for a in updates])
        lengths, rests = [length(one) for one in updates], []
        new, parents = list(cluster), list(range(used))
        for c in range(used):
            members = [i for i in range(M) if cluster[i] == c]
            rests.append(length(mean([updates[i] for i in members])))
            if defect != "eps1 ignored" and rests[-1] >= HYPER["eps1"]:
                continue
            if max(lengths[i] for i in members) <= HYPER["eps2"] or len(members) < 2 or len(parents) == max_clusters:
                continue
            part, cross = best_bipartition(similarity, members)
            if np.sqrt((1 - cross) / 2) <= HYPER["gamma"]:
                continue
            for i in part:
                new[i] = len(parents)
            parents.append(c)
        by = cluster if defect == "mean of the old cluster" else new
        moves = [
            mean([updates[i] for i in range(M) if by[i] == (c if by is new else parents[c])])
            for c in range(len(parents))
        ]
        models = [{k: models[p][k] + move[k] for k in move} for p, move in zip(parents, moves, strict=True)]
        cluster, used = new, len(parents)
        metrics = {"clusters": used, "mean_update": max(rests), "largest_update": max(lengths)}
        metrics["train_loss"] = float(np.mean([loss for _, loss in ends]))
        history.append(([models[c] for c in cluster], list(cluster), metrics))
    return history


def by_client(state) -> list[Params]:
    return [client_row(state.server.models, int(c)) for c in state.server.cluster]


@pytest.mark.parametrize("max_clusters", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_rounds(max_clusters):
    made, want = got(max_clusters), reference(max_clusters)
    assert len({tuple(one[1]) for one in want}) >= (3 if max_clusters == 4 else 2)  # splits in several rounds
    for state, (models, cluster, _) in zip(made.states[1:], want, strict=True):
        np.testing.assert_array_equal(state.server.cluster, cluster)
        assert_same(by_client(state), models)
    for name in want[0][2]:
        np.testing.assert_allclose(made.history[name], [one[2][name] for one in want], rtol=1e-9, err_msg=name)
    assert max(made.history["clusters"]) == min(max_clusters, 3)
    found = on_host(made.simulation.evaluate(made.state))
    assert "global" not in found
    assert_same(found["after"]["loss"], scores(want[-1][0])["loss"])
    np.testing.assert_array_equal(made.simulation.clusters(made.state)[0], want[-1][1])


@pytest.mark.parametrize("defect", ["eps1 ignored", "mean of the old cluster"])
def test_a_defect_would_be_seen(defect):
    models, cluster, _ = reference(4, defect)[-1]
    last = got(4).states[-1]
    assert list(last.server.cluster) != cluster or distance(by_client(last), models) > 1e-3


def test_a_new_client_takes_the_model_of_least_loss():
    made, newcomers = got(4), classification_problem(*NEWCOMERS)
    server = made.states[-1].server
    models = [client_row(server.models, c) for c in range(int(server.used))]
    found, want = on_host(made.simulation.evaluate_unseen(made.state)), []
    for (x, y), (x_test, y_test) in zip(clients(newcomers.train), clients(newcomers.test), strict=True):
        least = min(models, key=lambda model, x=x, y=y: cross_entropy(forward(model, x), y)[0])
        want.append(cross_entropy(forward(least, x_test), y_test)[0])
    for which in ("before", "after"):
        np.testing.assert_allclose(found[which]["loss"], want, rtol=1e-9)


def test_bipartitions():
    rng, find = np.random.default_rng(0), jax.jit(bipartition)
    for size in (2, 3, 5, 7):
        for _ in range(6):
            similarity = rng.normal(size=(7, 7))
            similarity += similarity.T
            members = np.sort(rng.choice(7, size, replace=False))
            part, cross = best_bipartition(similarity, list(members))
            mask, found = find(similarity, np.isin(np.arange(7), members))
            assert set(np.flatnonzero(mask)) == part
            np.testing.assert_allclose(found, cross, rtol=1e-12)


def test_updates_without_length_are_like_none():
    similarity, lengths = cosines({"a": jnp.zeros((2, 3)).at[1].set(2.0), "b": jnp.zeros((2, 1))})
    np.testing.assert_allclose(similarity, [[0, 0], [0, 1]], rtol=1e-12)
    np.testing.assert_allclose(lengths, [0, np.sqrt(12)], rtol=1e-12)


def test_planted_clusters_are_found():
    """Labels of half of the clients are permuted: as far apart as clients can be."""
    rng = np.random.default_rng(1)
    rule = rng.normal(size=(4, 3))

    def client(turn: int):
        x = rng.normal(size=(40, 4))
        return x, (((x @ rule).argmax(axis=1) + turn) % 3).astype(np.int32)

    turns = np.array([0, 1, 1, 0, 1, 0])
    federation = jaxpfl.stack_clients([client(t) for t in turns], test=[client(t) for t in turns])
    more = {"model": "linear", "rounds": 12, "batch_size": 40, "local_steps": 5, "lr": 0.5}
    result = jaxpfl.fit("cfl", federation, hyper={"eps1": 0.7, "eps2": 0.7}, options={"max_clusters": 3}, **more)
    found = result.simulation.clusters(result.state)[0]
    np.testing.assert_array_equal(found != found[0], turns != turns[0])
    assert result.personalized_accuracy.mean() > 0.8


@pytest.mark.slow
def test_a_cluster_of_which_a_client_is_missing_is_not_parted():
    bad = classification_problem()
    size, start = int(bad.train.size[1]), int(bad.train.start[1])
    bad.train.examples.x[start : start + size] = np.inf
    last = run(simulation("cfl", bad, HYPER | {"eps1": 10.0, "gamma": 0.0}), 3).states[-1]
    np.testing.assert_array_equal(last.server.cluster, 0)
    assert last.diverged.tolist() == [0, 3, 0, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.server.models))
    fine = run(simulation("cfl", classification_problem(), HYPER | {"eps1": 10.0, "gamma": 0.0}), 3).states[-1]
    assert fine.server.used > 1


def test_refusals():
    with pytest.raises(JaxpflError, match="the cohort must be all 5 of them, got 3"):
        simulation("cfl", classification_problem(), HYPER, cohort=participation("uniform")).init([0])
    with pytest.raises(JaxpflError, match=r"cfl.max_clusters must be >= 2, got 1: with one cluster it is fedavg"):
        simulation("cfl", classification_problem(), HYPER, max_clusters=1)
