"""Several global models against NumPy: IFCA, FedEM and CFL."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import average, backward, cross_entropy, forward, log_softmax, run_rounds, sgd, step, subtract
from oracle import NEWCOMERS, SGD, M, Oracle, assert_same, classification_problem, client_row, clients, on_host

from jaxpfl.algorithms.cfl import bipartition, cosines

CLUSTERS = 3


def server_models(state):
    return [client_row(state.server, j) for j in range(CLUSTERS)], oracle.plain_clients(state)


def choice(models, x, y):
    return int(np.argmin([cross_entropy(forward(model, x), y)[0] for model in models]))


CHOICES: list[list[int]] = []
"""How many clients chose each cluster in each round of the last run of IFCA's formula."""


def ifca(world, hp, models, own, defect=""):
    """``j_i = argmin_j f_i(theta_j)``; ``theta_j`` becomes the mean of what its clients in the cohort made of it."""
    train = oracle.train_data()
    CHOICES.clear()

    def work(models, own, turn):
        j = choice(models, *(turn.batches[0] if defect == "choice by the batch" else train[turn.row]))
        j = (j + 1) % CLUSTERS if defect == "another cluster" else j
        w, loss = sgd(models[j], turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        weight = world.sizes[turn.row] if defect == "mean by n_i" else 1.0
        return own, (j, weight, subtract(w, models[j])), {"train_loss": loss}

    def serve(models, uploads, cohort, own):
        new = list(models)
        for j, model in enumerate(models):
            mine = [(weight, change) for chosen, weight, change in uploads if chosen == j]
            if defect == "mean over the cohort":
                new[j] = {k: a + sum(change[k] for _, change in mine) / len(cohort) for k, a in model.items()}
            elif mine:
                new[j] = average(model, [change for _, change in mine], [weight for weight, _ in mine])
            elif defect == "empty cluster to zero":
                new[j] = {k: 0 * a for k, a in model.items()}
        CHOICES.append([sum(chosen == j for chosen, _, _ in uploads) for j in range(CLUSTERS)])
        return new

    return run_rounds(world, hp, models, own, work, serve)


def chosen_models(last):
    return {"after": [last.server[choice(last.server, x, y)] for x, y in oracle.train_data()]}


def log_joint(models, pi, x, y):
    """``log pi_l + log p_l(y | x)``, [n, k]."""
    return np.stack([log_softmax(forward(m, x))[np.arange(len(y)), y] for m in models], axis=1) + np.log(pi)


def responsibilities(models, pi, x, y, defect):
    """``q_s(l) = pi_l p_l(y_s | x_s) / sum_j pi_j p_j(y_s | x_s)``, [n, k]."""
    joint = log_joint(models, np.ones_like(pi) if defect == "responsibilities without proportions" else pi, x, y)
    q = np.exp(2 * joint if defect == "sharper responsibilities" else joint)
    return q / q.sum(axis=1, keepdims=True)


def weighted_steps(model, weights, batches, rate):
    """``w <- w - eta (grad mean_B q_s CE_s + wd w)``; ``weights`` finds an example's q by its inputs."""
    losses = []
    for x, y in batches:
        q = np.array([weights[row.tobytes()] for row in x])
        # Example by example, so that each has its weight.
        parts = [cross_entropy(forward(model, x[s : s + 1]), y[s : s + 1]) for s in range(len(y))]
        losses.append(float(np.mean([w * loss for w, (loss, _) in zip(q, parts, strict=True)])))
        d_logits = np.concatenate([w * d for w, (_, d) in zip(q, parts, strict=True)]) / len(y)
        model = step(model, backward(model, x, d_logits), rate, SGD["weight_decay"])
    return model, losses


def fedem(world, hp, models, own, defect=""):
    """Responsibilities, proportions, weighted steps, the participants' mean by n_i."""
    train = oracle.train_data()

    def work(models, pi, turn):
        x, y = train[turn.row]
        q, rows = responsibilities(models, pi, x, y, defect), [row.tobytes() for row in x]
        rate, changes, totals = hp["lr"] * turn.factor, [], np.zeros(len(turn.batches))
        for j, model in enumerate(models):
            w, losses = weighted_steps(model, dict(zip(rows, q[:, j], strict=True)), turn.batches, rate)
            changes.append(subtract(w, model))
            totals += losses
        size = np.full(CLUSTERS, 1.0 if defect == "uniform mean" else len(y))
        weights = q.sum(axis=0) if defect == "mean by responsibility" else size
        pi = pi if defect == "old proportions kept" else q.mean(axis=0)
        return pi, (changes, weights), {"train_loss": totals.mean()}

    def serve(models, uploads, cohort, own):
        new = []
        for j, model in enumerate(models):
            changes, weights = [c[j] for c, _ in uploads], [w[j] for _, w in uploads]
            if defect == "mean over all clients":  # those who were not there, as if they had not moved
                changes.append({k: np.zeros_like(a) for k, a in model.items()})
                weights.append(sum(world.sizes) - sum(weights))
            new.append(average(model, changes, weights))
        return new

    return run_rounds(world, hp, models, [np.full(CLUSTERS, 1 / CLUSTERS)] * M, work, serve)


def mixtures(last):
    """Log probabilities by the mixture of the components' probabilities."""

    def mixture(pi):
        return lambda x: np.log(
            sum(w * np.exp(log_softmax(forward(model, x))) for w, model in zip(pi, last.server, strict=True))
        )

    return {"after": [mixture(pi) for pi in last.clients]}


def length(update):
    return float(np.sqrt(sum((leaf**2).sum() for leaf in update.values())))


def cosine(a, b):
    return sum(float((a[k] * b[k]).sum()) for k in a) / (length(a) * length(b))


def mean(updates):
    return {k: np.mean([one[k] for one in updates], axis=0) for k in updates[0]}


def best_bipartition(similarity, members):
    """The part without the first member, and the largest similarity across, over all bipartitions."""
    found = (set(), np.inf)
    for size in range(1, len(members)):
        for part in combinations(members[1:], size):
            rest = [i for i in members if i not in part]
            cross = max(similarity[i, j] for i in part for j in rest)
            if cross < found[1]:
                found = (set(part), cross)
    return found


def cfl(max_clusters):
    """Bipartitions by trying all of them, splits by the printed criteria, means by cluster."""

    def formula(world, hp, server, own, defect=""):
        measured = []

        def work(server, own, turn):
            start = server["models"][turn.row]
            end, loss = sgd(start, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
            return own, subtract(end, start), {"train_loss": loss}

        def serve(server, updates, cohort, own):
            cluster = server["cluster"].astype(int).tolist()
            similarity = np.array([[cosine(a, b) for b in updates] for a in updates])
            lengths, rests, new, parents = [length(one) for one in updates], [], list(cluster), [*set(cluster)]
            for c in sorted(set(cluster)):
                members = [i for i in range(M) if cluster[i] == c]
                rests.append(length(mean([updates[i] for i in members])))
                if defect != "eps1 ignored" and rests[-1] >= hp["eps1"]:
                    continue
                large = max(lengths[i] for i in members) > hp["eps2"]
                if not large or len(members) < 2 or len(parents) == max_clusters:
                    continue
                part, cross = best_bipartition(similarity, members)
                if np.sqrt((1 - cross) / 2) <= hp["gamma"]:
                    continue
                for i in part:
                    new[i] = len(parents)
                parents.append(c)
            by, models = cluster if defect == "mean of the old cluster" else new, []
            for i, model in enumerate(server["models"]):
                move = mean([updates[j] for j in range(M) if by[j] == by[i]])
                models.append({k: model[k] + move[k] for k in move})
            measured.append({"clusters": len(parents), "mean_update": max(rests), "largest_update": max(lengths)})
            return {"models": models, "cluster": np.array(new, float)}

        history = run_rounds(world, hp, server, own, work, serve)
        return [one._replace(metrics=one.metrics | more) for one, more in zip(history, measured, strict=True)]

    return formula


def by_client(state):
    models = [client_row(state.server.models, int(c)) for c in state.server.cluster]
    return {"models": models, "cluster": state.server.cluster.astype(float)}, oracle.plain_clients(state)


CFL = SGD | {"eps1": 0.45, "eps2": 0.5, "gamma": 0.3}
ORACLES = {
    "ifca": Oracle(
        "ifca",
        SGD,
        ifca,
        ("empty cluster to zero", "mean over the cohort", "mean by n_i", "choice by the batch", "another cluster"),
        {"clusters": CLUSTERS},
        chosen_models,
        server_models,
        rounds=5,
        kinds=("reliable",),
    ),
    "fedem": Oracle(
        "fedem",
        SGD,
        fedem,
        (
            *("mean over all clients", "uniform mean", "mean by responsibility"),
            *("responsibilities without proportions", "old proportions kept", "sharper responsibilities"),
        ),
        {"components": CLUSTERS},
        mixtures,
        server_models,
    ),
    "cfl": Oracle(
        "cfl",
        CFL,
        cfl(4),
        ("eps1 ignored", "mean of the old cluster"),
        {"max_clusters": 4, "engine": {"unseen": classification_problem(*NEWCOMERS), "adapt_rounds": 2}},
        lambda last: {"after": last.server["models"]},
        by_client,
        rounds=6,
        kinds=("everyone",),
        quick=True,
        plain=True,
    ),
    "cfl, two at most": Oracle(
        "cfl",
        CFL,
        cfl(2),
        options={"max_clusters": 2},
        models=lambda last: {"after": last.server["models"]},
        view=by_client,
        rounds=6,
        kinds=("everyone",),
        plain=True,
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


@pytest.mark.slow
def test_the_clusters_of_ifca():
    """The run has a cluster with nobody, which keeps every bit, one with one client and one with more."""
    got, want = ORACLES["ifca"].got("reliable"), ORACLES["ifca"].want("reliable")[-1].server
    assert {0, 1} < {count for row in CHOICES for count in row}
    for before, after, counts in zip(got.states, got.states[1:], CHOICES, strict=False):
        for j in np.flatnonzero(np.array(counts) == 0):
            assert_same(client_row(after.server, j), client_row(before.server, j), rtol=0)
    chosen = [choice(want, x, y) for x, y in oracle.train_data()]
    assert len(set(chosen)) > 1
    models = on_host(got.simulation.personal_models(got.state))
    for i, j in enumerate(chosen):
        assert_same(client_row(models, i), want[j])
    np.testing.assert_array_equal(got.simulation.clusters(got.state)[0], chosen)


def test_the_splits_of_cfl():
    """In several rounds; what a new client has is the model of least loss."""
    made, want = ORACLES["cfl"].got("everyone"), ORACLES["cfl"].want("everyone")
    assert len({tuple(one.server["cluster"]) for one in want}) == 3 == max(made.history["clusters"])
    np.testing.assert_array_equal(made.simulation.clusters(made.state)[0], want[-1].server["cluster"])
    newcomers = classification_problem(*NEWCOMERS)
    server = made.states[-1].server
    models = [client_row(server.models, c) for c in range(int(server.used))]
    least = [models[choice(models, x, y)] for x, y in clients(newcomers.train)]
    found, want = on_host(made.simulation.evaluate_unseen(made.state)), oracle.scores(least, clients(newcomers.test))
    for which in ("before", "after"):
        np.testing.assert_allclose(found[which]["loss"], want["loss"], rtol=1e-9)


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


@pytest.mark.slow
def test_a_cluster_of_which_a_client_is_missing_is_not_parted():
    hp = CFL | {"eps1": 10.0, "gamma": 0.0}
    last = oracle.run_method("cfl", hp, rounds=3, problem=oracle.spoiled(1)).states[-1]
    np.testing.assert_array_equal(last.server.cluster, 0)
    assert last.diverged.tolist() == [0, 3, 0, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.server.models))
    assert oracle.run_method("cfl", hp, rounds=3).states[-1].server.used > 1
