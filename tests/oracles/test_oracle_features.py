"""Methods that act on features, against NumPy: MOON, FedDBE, FedProto, FedPAC and kNN-Per."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import (
    averaged,
    backward,
    cross_entropy,
    features,
    forward,
    log_softmax,
    means,
    run_fedavg,
    run_rounds,
    step,
)
from oracle import CLASSES, HEAD, SGD, SIZES, STEPS, M, Oracle, assert_same, assert_scores, client_row, clients

from jaxpfl import METHODS, LocalWork
from jaxpfl.algorithms.fedpac import RIDGE, least_on_simplex
from jaxpfl.algorithms.fedproto import Prototypes
from jaxpfl.algorithms.knn_per import knn_per
from jaxpfl.core.protocol import ClientContext, Message
from jaxpfl.core.types import Splits
from jaxpfl.models import build_model, classification


def cosine(z, a):
    """Cosine of two vectors, and its gradient by the first."""
    lengths = np.linalg.norm(z) * np.linalg.norm(a)
    value = z @ a / lengths
    return value, a / lengths - value * z / (z @ z)


def contrastive(z, glob, prev, t):
    """The contrastive loss of one example, and its gradient by z."""
    (near, d_near), (far, d_far) = cosine(z, glob), cosine(z, prev)
    share = np.exp(near / t) / (np.exp(near / t) + np.exp(far / t))
    return -np.log(share), -(1 - share) / t * (d_near - d_far)


def moon(world, hp, server, own, defect=""):
    """Steps that draw features to the global model's and away from the last model's."""

    def work(start, previous, turn):
        previous = start if defect == "the last model left out" else previous
        w, measured = start, []
        for x, y in turn.batches:
            z, (loss, d_logits) = features(w, x), cross_entropy(forward(w, x), y)
            pairs = features(start, x), features(previous, x)
            if defect == "drawn to the last model":
                pairs = pairs[::-1]
            if defect == "the global model moves along":
                pairs = z, pairs[1]
            each = [contrastive(*rows, hp["temperature"]) for rows in zip(z, *pairs, strict=True)]
            pull = hp["mu"] * np.stack([gradient for _, gradient in each]) / len(y)
            w = step(w, backward(w, x, d_logits, pull), hp["lr"] * turn.factor, hp["weight_decay"])
            measured.append({"train_loss": loss, "contrast": np.mean([value for value, _ in each])})
        return w, w, means(measured)

    return run_rounds(world, hp, server, [server] * M, work, averaged(world.sizes))


def feddbe(world, hp, server, shifts, defect=""):
    """Shifts of the features, and moving means of them that are drawn to the global one, known after one round."""
    train = oracle.train_data()
    start = {"model": server["averaged"]["model"], "mean": None}

    def work(server, shift, turn):
        w, mean, rate, wd = server["model"], server["mean"], hp["lr"] * turn.factor, hp["weight_decay"]
        moving, measured = np.zeros_like(shift), []
        for x, y in turn.batches:
            z = features(w, x)
            kept = 0.0 if defect == "no moving mean" else (1 - hp["mu"]) * moving
            moving = kept + hp["mu"] * z.mean(0)
            shifted = z if mean is None else z + shift
            loss, d_logits = cross_entropy(shifted @ w["w2"] + w["b2"], y)
            d_shift, pull, apart = (d_logits @ w["w2"].T).sum(0), 0.0, 0.0
            if mean is not None:
                apart = ((moving - mean) ** 2).mean() / 2
                pull = hp["kappa"] * (moving - mean) / mean.size * hp["mu"] / len(y)
            gradient = backward(w, x, d_logits, pull)
            if defect != "the head's gradient without the shift":
                gradient |= {"w2": shifted.T @ d_logits}
            if mean is not None and defect != "the shift stays":
                shift = shift - rate * (d_shift + wd * shift)
            w = step(w, gradient, rate, wd)
            measured.append({"train_loss": loss, "mean_distance": apart})
        upload = {"model": w, "mean": features(w, train[turn.row][0]).mean(0)}
        return shift, upload, means(measured)

    def serve(server, uploads, cohort, own):
        mean, weights = server["mean"], [world.sizes[i] for i in cohort]
        if mean is None or defect == "the mean moves on":
            mean = np.average([upload["mean"] for upload in uploads], axis=0, weights=weights)
        models = [upload["model"] for upload in uploads]
        return {"model": averaged(world.sizes)(server["model"], models, cohort, own), "mean": mean}

    history = run_rounds(world, hp, start, [np.zeros_like(shift) for shift in shifts], work, serve)
    return [one._replace(server={"averaged": one.server, "known": np.float64(1)}) for one in history]


def shifted_models(last):
    w = last.server["averaged"]["model"]

    def shifted(shift):
        return lambda x: forward(w, x) + shift @ w["w2"]

    return {"after": [shifted(shift) for shift in last.clients], "mu": w}


def class_sums(pairs):
    """Sums and numbers of rows [n, d] by their classes."""
    sums, counts = np.zeros((CLASSES, pairs[0][0].shape[1])), np.zeros(CLASSES)
    for rows, y in pairs:
        for row, k in zip(rows, y, strict=True):
            sums[k] += row
            counts[k] += 1
    return sums, counts


def new_means(server, sums, counts):
    """Class means where the cohort has examples, else the ones before."""
    has = counts > 0
    found = np.where(has[:, None], sums / np.maximum(counts, 1)[:, None], server["means"])
    return {"means": found, "known": np.where(has, 1.0, server["known"])}


def fedproto(world, hp, server, own, defect=""):
    """Steps drawn to the classes' prototypes, and these as means over clients and examples."""
    train = oracle.train_data()

    def work(server, w, turn):
        old, measured = w, []
        for x, y in turn.batches:
            rows, (loss, d_logits) = features(w, x), cross_entropy(forward(w, x), y)
            away = (rows - server["means"][y]) * server["known"][y, None]
            pull = hp["lam"] * (2 if defect == "twice the pull" else 1) * 2 * away / rows.size
            w = step(w, backward(w, x, d_logits, pull), hp["lr"] * turn.factor, hp["weight_decay"])
            measured.append({"train_loss": loss, "prototype_distance": (away**2).mean()})
        x, y = train[turn.row]
        rows = features(old if defect == "prototypes of the model before" else w, x)
        return w, class_sums([(rows, y)]), means(measured)

    def serve(server, uploads, cohort, own):
        if defect == "uniform mean":
            uploads = [(sums / np.maximum(counts, 1)[:, None], np.minimum(counts, 1)) for sums, counts in uploads]
        return new_means(server, *(sum(parts) for parts in zip(*uploads, strict=True)))

    return run_rounds(world, hp, server, own, work, serve)


def nearest(w, server):
    return lambda x: -((features(w, x)[:, None] - server["means"]) ** 2).sum(-1)


def least(q):
    """The least ``a^T Q a`` on the simplex: of the solutions on every support that are not negative."""
    best, value = np.zeros(len(q)), np.inf
    for size in range(1, len(q) + 1):
        for support in map(list, combinations(range(len(q)), size)):
            y = np.linalg.solve(q[np.ix_(support, support)], np.ones(size))
            a = np.zeros(len(q))
            a[support] = y / y.sum()
            if (a >= 0).all() and a @ q @ a < value:
                best, value = a, a @ q @ a
    return best


def statistics(w, x, y):
    """V and m, class by class."""
    n, v, m = len(y), 0.0, np.zeros((CLASSES, w["b1"].size))
    for k in set(y.tolist()):
        rows, p = features(w, x)[y == k], (y == k).sum() / n
        m[k] = p * rows.mean(0)
        v += p * (rows**2).sum(1).mean() - p**2 * (rows.mean(0) ** 2).sum()
    return v / n, m


def head_weights(stats):
    out = []
    for _, own in stats:
        q = np.array([[((own - a) * (own - b)).sum() for _, b in stats] for _, a in stats])
        q += np.diag([v for v, _ in stats])
        out.append(least(q + RIDGE * np.diag(q).mean() * np.eye(len(stats))))
    return np.array(out)


HEAD_STEPS = 2


def fedpac(world, hp, server, own, defect=""):
    """Aligned features, and heads combined by a quadratic program, solved on every support."""
    train = oracle.train_data()

    def work(server, own, turn):
        w, shared, measured = server["shared"]["body"] | server["heads"][turn.row], server["shared"], []
        stats, head_batches = statistics(w, *train[turn.row]), turn.draw(HEAD_STEPS)
        for x, y in head_batches:
            gradient = backward(w, x, cross_entropy(forward(w, x), y)[1])
            new = step(w, gradient, hp["lr_head"] * turn.factor, hp["weight_decay"])
            w |= {k: new[k] for k in HEAD}
        for x, y in turn.batches:
            z, (loss, d_logits) = features(w, x), cross_entropy(forward(w, x), y)
            away = (z - shared["means"][y]) * shared["known"][y, None]
            gradient = backward(w, x, d_logits, hp["lam"] * 2 * away / z.size)
            new = step(w, gradient, hp["lr"] * turn.factor, hp["weight_decay"])
            w = new if defect == "the head moves with the body" else new | {k: w[k] for k in HEAD}
            measured.append({"train_loss": loss, "mean_distance": (away**2).mean()})
        if defect == "statistics of the trained body":
            stats = statistics(w, *train[turn.row])
        STEPS_TAKEN[turn.row] += len(head_batches) + len(turn.batches)
        return own, (w, stats), means(measured)

    def serve(server, uploads, cohort, own):
        shared, heads = server["shared"], list(server["heads"])
        ends = [w for w, _ in uploads]
        bodies = [{k: w[k] for k in shared["body"]} for w in ends]
        a = head_weights([stats for _, stats in uploads])
        assert defect or ((a > 0) & (a < 1)).any()
        a = np.full_like(a, 1 / len(a)) if defect == "uniform heads" else a
        for place, i in enumerate(cohort):
            heads[i] = {k: sum(share * w[k] for share, w in zip(a[place], ends, strict=True)) for k in HEAD}
        found = class_sums([(features(w, train[i][0]), train[i][1]) for w, i in zip(ends, cohort, strict=True)])
        body = averaged(world.sizes)(shared["body"], bodies, cohort, own)
        return {"shared": {"body": body} | new_means(shared, *found), "heads": heads}

    STEPS_TAKEN[:] = 0
    return run_rounds(world, hp, server, own, work, serve)


STEPS_TAKEN = np.zeros(M, int)
"""Steps of each client in the last run of FedPAC's formula."""


def with_heads(state):
    shared, heads = (
        oracle.plain(state.server.shared),
        [oracle.plain(client_row(state.server.heads, i)) for i in range(M)],
    )
    return {"shared": shared, "heads": heads}, oracle.plain_clients(state)


NEIGHBOURS, SCALE = 3, 0.3


def votes(w, x, remembered, defect="", left_out=None):
    """Probabilities of the classes by the nearest remembered examples of one input."""
    f, near = features(w, x), []
    for j, (other, y) in enumerate(zip(*remembered, strict=True)):
        if j != left_out:
            square = ((f - features(w, other)) ** 2).sum() / (SCALE * len(f))
            near.append((np.sqrt(square) if defect == "distances for their squares" else square, y))
    found = np.zeros(CLASSES)
    for square, y in sorted(near)[: NEIGHBOURS + (defect == "one neighbour more")]:
        found[y] += 1 if defect == "equal votes" else np.exp(-square)
    return found / found.sum()


def mixed(w, share, x, remembered, defect="", leave_out=False):
    near = np.stack([votes(w, one, remembered, defect, j if leave_out else None) for j, one in enumerate(x)])
    return share * near + (1 - share) * np.exp(log_softmax(forward(w, x)))


GRID = [i / 10 for i in range(11)]


def chosen_share(w, train, validation):
    """The likeliest interpolation, on validation examples or on the training examples with each left out."""
    x, y = train if validation is None else validation
    with np.errstate(divide="ignore"):
        found = [mixed(w, share, x, train, leave_out=validation is None)[np.arange(len(y)), y] for share in GRID]
        return GRID[int(np.argmax([np.log(p).sum() for p in found]))]


def nearest_votes(w, share, train):
    return lambda x: np.log(np.maximum(mixed(w, share, x, train), np.finfo(float).tiny))


def interpolated(last):
    """kNN-Per's models, with validation examples."""
    validation = clients(oracle.classification_problem().validation)
    shares = [chosen_share(last.server, *pair) for pair in zip(oracle.train_data(), validation, strict=True)]
    assert len(set(shares)) > 1
    after = [nearest_votes(last.server, *pair) for pair in zip(shares, oracle.train_data(), strict=True)]
    return {"after": after, "mu": last.server, "before": [last.server] * M}


ORACLES = {
    "moon": Oracle(
        "moon",
        SGD | {"mu": 2.0, "temperature": 0.6},
        moon,
        ("drawn to the last model", "the global model moves along", "the last model left out"),
        models=oracle.global_alone,
    ),
    "feddbe": Oracle(
        "feddbe",
        SGD | {"kappa": 6.0, "mu": 0.7},
        feddbe,
        ("no moving mean", "the shift stays", "the head's gradient without the shift", "the mean moves on"),
        models=shifted_models,
    ),
    "fedproto": Oracle(
        "fedproto",
        SGD | {"lam": 0.7},
        fedproto,
        ("twice the pull", "prototypes of the model before", "uniform mean"),
        models=lambda last: {"after": [nearest(w, last.server) for w in last.clients]},
    ),
    "fedpac": Oracle(
        "fedpac",
        SGD | {"lr_head": 0.3, "lam": 0.8},
        fedpac,
        ("the head moves with the body", "statistics of the trained body", "uniform heads"),
        {"head_steps": HEAD_STEPS},
        lambda last: {"after": [last.server["shared"]["body"] | head for head in last.server["heads"]]},
        with_heads,
        rtol=1e-8,
        plain=True,
    ),
    "knn-per": Oracle(
        "knn-per", SGD | {"scale": SCALE}, run_fedavg, options={"neighbours": NEIGHBOURS}, models=interpolated
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


@pytest.mark.slow
def test_a_class_that_nobody_has_is_not_predicted_by_fedproto_and_draws_nothing():
    got = oracle.run_method("fedproto", ORACLES["fedproto"].hp, rounds=2, problem=oracle.without_last_class())
    server, made = got.states[-1].server, got.simulation
    assert server.known.tolist() == [1.0] * (CLASSES - 1) + [0.0]
    assert not server.means[-1].any()
    own = client_row(oracle.on_host(made.personal_models(got.state)), 0)
    x, _ = oracle.scored_data()[0]
    logits = np.asarray(made.algorithm.clients[0].predict(None, own, jnp.asarray(x)))
    known = nearest(own.model, {"means": server.means[:-1]})(x)
    np.testing.assert_allclose(logits[:, :-1], known, rtol=1e-9)
    np.testing.assert_allclose(logits[:, -1], known.min(axis=1) - 1, rtol=1e-9)


def test_own_classes_of_fedproto_are_those_of_the_clients_training_examples():
    task, (x, _) = oracle.perceptron(), oracle.scored_data()[0]
    made = METHODS["fedproto"].build(task, LocalWork(np.array(SIZES), STEPS, 6), predict="own-classes")
    one = oracle.without_last_class().train.client(0)
    own, rng = task.init(jax.random.key(0)), np.random.default_rng(0)
    prototypes = Prototypes(rng.normal(size=(CLASSES, own["b1"].size)), jnp.array([1.0, 0, 1]))
    (client,) = made.clients

    @jax.jit
    def logits(own, x):
        personal = client.personalize(None, None, None, Message(prototypes), own, Splits(one, one))
        return client.predict(None, personal, x)

    assert set(np.asarray(logits(own, x)).argmax(axis=1)) == {0}


@pytest.mark.slow
def test_clients_with_other_models_share_prototypes():
    task = classification(build_model("mlp:5", CLASSES, (4,)), (4,), CLASSES)
    got = oracle.run_method("fedproto", ORACLES["fedproto"].hp, rounds=2, task=task, architectures="same+mlp:7,5")
    assert [len(own) for own in got.states[-1].clients] == [2, 3]
    assert np.isfinite(got.history["train_loss"]).all()
    assert got.history["prototype_distance"][-1] > 0


@pytest.mark.slow
def test_the_steps_of_fedpac_are_counted():
    got, _ = ORACLES["fedpac"].got(), ORACLES["fedpac"].want()
    np.testing.assert_array_equal(got.simulation.gradients(got.state).training[0], STEPS_TAKEN)


@pytest.mark.slow
def test_a_diverged_client_of_fedpac_adds_nothing_and_keeps_its_head():
    bad = 1
    problems = oracle.spoiled(bad), oracle.without(bad)
    made, other = (oracle.run_method("fedpac", ORACLES["fedpac"].hp, rounds=2, problem=one) for one in problems)
    start, end, want = made.states[0].server, made.states[-1].server, other.states[-1].server
    assert_same(oracle.plain(end.shared), oracle.plain(want.shared))
    for place, i in enumerate(i for i in range(M) if i != bad):
        assert_same(oracle.plain(client_row(end.heads, i)), oracle.plain(client_row(want.heads, place)))
    assert_same(oracle.plain(client_row(end.heads, bad)), oracle.plain(client_row(start.heads, bad)), rtol=0)
    assert made.states[-1].diverged.tolist() == [2 if i == bad else 0 for i in range(M)]


def test_the_quadratic_program_of_fedpac():
    rng, solve = np.random.default_rng(0), jax.jit(least_on_simplex)
    for _ in range(40):
        a = rng.normal(size=(6, 4))
        q, valid = a @ a.T + np.diag(rng.uniform(1e-3, 1, 6)), rng.uniform(size=6) < 0.8
        valid[0] = True
        want = np.zeros(6)
        want[valid] = least(q[np.ix_(valid, valid)])
        np.testing.assert_allclose(solve(q, valid), want, atol=1e-11)
    np.testing.assert_array_equal(solve(q, np.zeros(6, bool)), 0)
    np.testing.assert_allclose(solve(np.eye(6), np.ones(6, bool)), np.full(6, 1 / 6))


@pytest.mark.slow
def test_knn_per_without_validation_examples_leaves_one_out():
    problem = oracle.classification_problem()
    problem = problem._replace(validation=problem.validation.emptied())
    got = oracle.run_method("knn-per", ORACLES["knn-per"].hp, rounds=2, problem=problem, neighbours=NEIGHBOURS)
    w, train = got.states[-1].server, oracle.train_data()
    shares = [chosen_share(w, one, None) for one in train]
    np.testing.assert_allclose(got.simulation.personal_models(got.state).share[0], shares)
    assert len(set(shares)) > 1
    after = [nearest_votes(w, *pair) for pair in zip(shares, train, strict=True)]
    assert_scores(got, after, w, before=[w] * M)


@pytest.mark.slow
def test_a_defect_of_knn_per_would_be_seen():
    w = ORACLES["knn-per"].want()[-1].server
    for defect in ("distances for their squares", "one neighbour more", "equal votes"):
        pairs = zip(oracle.train_data(), oracle.scored_data(), strict=True)
        gaps = [np.abs(mixed(w, 0.5, x, train, defect) - mixed(w, 0.5, x, train)).max() for train, (x, _) in pairs]
        assert max(gaps) > 1e-2, defect


@pytest.mark.slow
def test_a_client_without_examples_predicts_with_the_global_model():
    (client,) = knn_per(oracle.perceptron(), LocalWork(np.array(SIZES), STEPS, 6), neighbours=NEIGHBOURS).clients
    w, key, (x, _) = oracle.perceptron().init(jax.random.key(3)), jax.random.key(0), oracle.scored_data()[0]
    one = jax.tree.map(np.asarray, oracle.classification_problem().train.emptied().bounded(6).client(0))
    ctx, hp = ClientContext(np.int32(1), np.int32(0), np.int32(0), 3, key), METHODS["knn-per"].hyper
    personal = client.personalize(key, hp, ctx, Message(w), (), Splits(one, one))
    want = log_softmax(forward(jax.tree.map(np.asarray, w), x))
    np.testing.assert_allclose(np.asarray(client.predict(hp, personal, x)), want, rtol=1e-9)
