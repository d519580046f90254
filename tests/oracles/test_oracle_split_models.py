"""Models in two parts against NumPy: FedPer, LG-FedAvg, FedRep, FedBABU, FedALA and FedROD."""

from functools import partial

import jax
import numpy as np
import oracle
import pytest
from numpy_reference import average, averaged, backward, cross_entropy, decay, forward, run_rounds, sgd, step, subtract
from oracle import CLASSES, HEAD, ROUNDS, SEED, SETTINGS, SGD, SIZES, STEPS, M, Oracle, assert_same, client_row

from jaxpfl.models.base import smoothed_cross_entropy

slow = partial(pytest.param, marks=pytest.mark.slow)
UNIFORM = [1.0] * M
BATCH = SETTINGS["uniform"].batch_size
LAST_FACTOR = decay(SGD, ROUNDS - 1, STEPS)


def part(params, names):
    return {k: params[k] for k in names}


def fedper(world, hp, body, heads, defect=""):
    """``(phi_i, h_i)`` after tau joint steps; ``phi <- phi + sum_i n_i (phi_i - phi) / sum_i n_i``."""
    first = list(heads)

    def work(body, head, turn):
        head = first[turn.row] if defect == "heads restart" else head
        end, loss = sgd(body | head, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        return head if defect == "body alone steps" else part(end, HEAD), part(end, body), {"train_loss": loss}

    def serve(body, uploads, cohort, own):
        weights = [1.0 if defect == "uniform mean" else world.sizes[i] for i in cohort]
        if defect == "heads averaged":
            own[:] = [average(own[0], [subtract(own[i], own[0]) for i in cohort], weights)] * len(own)
        return average(body, [subtract(upload, body) for upload in uploads], weights)

    return run_rounds(world, hp, body, heads, work, serve)


def lg_fedavg(world, hp, head, bodies, defect=""):
    """Heads are averaged by n_i, bodies stay with the clients."""
    first = head

    def work(head, body, turn):
        start = first if defect == "heads restart" else head
        end, loss = sgd(body | start, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        return body if defect == "head alone steps" else part(end, body), part(end, HEAD), {"train_loss": loss}

    return run_rounds(world, hp, head, bodies, work, averaged(UNIFORM if defect == "uniform mean" else world.sizes))


def alternate(body, head, batches, head_steps, rate, defect=""):
    """``h <- h - eta grad_h f(phi, h)``, then ``phi <- phi - eta grad_phi f(phi, h)``: the new body and head."""
    first, losses = head, []
    for t, (x, y) in enumerate(batches):
        on_head = t < head_steps
        if defect == "body first":
            on_head = t >= len(batches) - head_steps
        at = body | (first if defect == "body's gradient at the old head" and not on_head else head)
        loss, d_logits = cross_entropy(forward(at, x), y)
        new = step(body | head, backward(at, x, d_logits), rate, SGD["weight_decay"])
        if on_head or defect == "joint steps":
            head = part(new, head)
        if not on_head or defect == "joint steps":
            body = part(new, body)
        losses.append(loss)
    return body, head, np.mean(losses)


def fedrep(head_steps):
    """Steps on the head, then on the body; bodies averaged uniformly."""

    def formula(world, hp, body, heads, defect=""):
        def work(body, head, turn):
            body, head, loss = alternate(body, head, turn.batches, head_steps, hp["lr"] * turn.factor, defect)
            return head, body, {"train_loss": loss}

        return run_rounds(world, hp, body, heads, work, averaged(world.sizes if defect == "mean by n_i" else UNIFORM))

    return formula


def stepped(params, batches, rate, moving):
    """Steps of SGD on some parameters, one batch at a time."""
    losses = []
    for batch in batches:
        new, loss = sgd(params, [batch], rate, SGD["weight_decay"])
        params = params | part(new, moving)
        losses.append(loss)
    return params, float(np.mean(losses))


def fedbabu(world, hp, model, own, defect=""):
    """The head never moves, bodies are averaged by n_i."""
    body = [k for k in model if k not in HEAD]

    def work(model, own, turn):
        moving = list(model) if defect == "head steps too" else body
        end, loss = stepped(model, turn.batches, hp["lr"] * turn.factor, moving)
        return own, model | part(end, body), {"train_loss": loss}

    return run_rounds(world, hp, model, own, work, averaged(UNIFORM if defect == "uniform mean" else world.sizes))


TUNED, FINE_TUNE_FACTOR = 4, 0.3


def fine_tuned(model, moving):
    rate = FINE_TUNE_FACTOR * SGD["lr"] * LAST_FACTOR
    return [stepped(model, oracle.tuning_batches(i, BATCH, TUNED), rate, moving)[0] for i in range(M)]


def tuned_models(last):
    mu = last.server
    return {"after": fine_tuned(mu, list(mu)), "mu": mu, "before": [mu] * M}


ETA, WEIGHT_STEPS = 6.0, 4


def mixture(theta, head, weights):
    return theta | {k: head[k] + (theta[k] - head[k]) * weights[k] for k in HEAD}


def learnt(theta, head, weights, batches, defect=""):
    """FedALA's weights after a clipped step on each mini-batch."""
    for x, y in batches:
        at = mixture(theta, head, weights)
        gradient = backward(at, x, cross_entropy(forward(at, x), y)[1])
        weights = {k: weights[k] - ETA * (theta[k] - head[k]) * gradient[k] for k in HEAD}
        if defect != "no clipping":
            weights = {k: np.clip(w, 0, 1) for k, w in weights.items()}
    return weights


def fedala(world, hp, theta, own, defect=""):
    """Weights of the mixture by clipped steps, then local steps from it; means by n_i."""
    own = [{"head": part(theta, HEAD), "weights": {k: np.ones_like(theta[k]) for k in HEAD}}] * M

    def work(theta, own, turn):
        head, weights = own["head"], own["weights"]
        if defect != "weights stay":
            weights = learnt(theta, head, weights, turn.draw(WEIGHT_STEPS), defect)
        start = theta if defect == "starts from the global model" else mixture(theta, head, weights)
        end, loss = sgd(start, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        upload = end if defect != "change from the mixture" else {k: theta[k] + end[k] - start[k] for k in end}
        return {"head": part(end, HEAD), "weights": weights}, upload, {"train_loss": loss}

    return run_rounds(world, hp, theta, own, work, averaged(world.sizes))


def mixed_anew(last):
    theta, before, after = last.server, [], []
    for i, own in enumerate(last.clients):
        weights = learnt(theta, own["head"], own["weights"], oracle.tuning_batches(i, BATCH, WEIGHT_STEPS))
        before.append(mixture(theta, own["head"], own["weights"]))
        after.append(mixture(theta, own["head"], weights))
    return {"after": after, "mu": theta, "before": before}


def log_counts(data):
    with np.errstate(divide="ignore"):
        return [np.log(np.bincount(y, minlength=CLASSES)) for _, y in data]


def balanced(logits, prior, y):
    """Gradient of the balanced softmax's loss by the logits: of the classes that the client has, zero for others."""
    (present,) = np.nonzero(np.isfinite(prior))
    gradient = np.zeros_like(logits)
    gradient[:, present] = cross_entropy(logits[:, present] + prior[present], np.searchsorted(present, y))[1]
    return gradient


def rod_steps(g, head, batches, prior, rate, defect=""):
    """A client's steps: the generic model, its own head, and the mean of the personal losses."""
    losses = []
    for x, y in batches:
        logits, both = forward(g, x), g | head
        loss, d_both = cross_entropy(logits + forward(both, x), y)
        by_head = backward(both, x, d_both)
        by_generic = backward(g, x, balanced(logits, prior, y))
        if defect == "the personal loss trains the body":
            by_generic = {k: by_generic[k] + (0 if k in HEAD else by_head[k]) for k in g}
        g = step(g, by_generic, rate, SGD["weight_decay"])
        head = step(head, by_head, rate, SGD["weight_decay"])
        losses.append(loss)
    return g, head, float(np.mean(losses))


def fedrod(world, hp, generic, own, defect=""):
    """The generic model on the balanced softmax, the personal head on what that leaves."""
    priors = [np.zeros(CLASSES)] * M if defect == "plain softmax" else log_counts(oracle.train_data())

    def work(generic, head, turn):
        g, head, loss = rod_steps(generic, head, turn.batches, priors[turn.row], hp["lr"] * turn.factor, defect)
        return head, g, {"train_loss": loss}

    own = [{k: np.zeros_like(generic[k]) for k in HEAD}] * M
    return run_rounds(world, hp, generic, own, work, averaged(UNIFORM if defect == "uniform mean" else world.sizes))


def both_heads(last):
    def summed(head):
        return lambda x: forward(last.server, x) + forward(last.server | head, x)

    return {"after": [summed(head) for head in last.clients], "mu": last.server}


def joined(last):
    return {"after": [last.server | own for own in last.clients]}


def halves_joined(state):
    """FedBABU's server has the body and the head apart."""
    body, head = map(oracle.plain, state.server)
    return body | head, oracle.plain_clients(state)


ORACLES = {
    "fedper": Oracle(
        "fedper",
        SGD,
        fedper,
        ("heads averaged", "heads restart", "uniform mean", "body alone steps"),
        models=joined,
        quick=True,
    ),
    "lg-fedavg": Oracle(
        "lg-fedavg", SGD, lg_fedavg, ("heads restart", "uniform mean", "head alone steps"), models=joined
    ),
    "fedrep": Oracle("fedrep", SGD, fedrep(1), models=joined),
    "fedrep, 3 and 2": Oracle(
        "fedrep",
        SGD,
        fedrep(3),
        ("body first", "joint steps", "body's gradient at the old head", "mean by n_i"),
        {"head_steps": 3, "body_steps": 2},
        joined,
        steps=5,
        plain=True,
    ),
    "fedbabu": Oracle(
        "fedbabu",
        SGD | {"fine_tune_factor": FINE_TUNE_FACTOR},
        fedbabu,
        ("head steps too", "uniform mean"),
        {"fine_tune_steps": TUNED, "fine_tune": "all"},
        lambda last: {
            "after": fine_tuned(last.server, list(last.server)),
            "mu": last.server,
            "before": [last.server] * M,
        },
        halves_joined,
    ),
    "fedala": Oracle(
        "fedala",
        SGD | {"lr_weights": ETA},
        fedala,
        ("no clipping", "weights stay", "starts from the global model", "change from the mixture"),
        {"weight_steps": WEIGHT_STEPS},
        mixed_anew,
    ),
    "fedrod": Oracle(
        "fedrod", SGD, fedrod, ("plain softmax", "the personal loss trains the body", "uniform mean"), models=both_heads
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


def assert_models(run, want):
    """The personalized models' parameters."""
    models = oracle.on_host(run.simulation.personal_models(run.state))
    for i, model in enumerate(want):
        assert_same(client_row(models, i), model)


@pytest.mark.slow
@pytest.mark.parametrize("moving", ["all", "head", "body"])
def test_fine_tuning_of_fedbabu_moves_that_part(moving):
    one = ORACLES["fedbabu"]
    options = one.options | {"fine_tune": moving}
    run = one.got() if moving == "all" else oracle.run_setting("fedbabu", one.hp, SETTINGS["uniform"], **options)
    model = one.view(run.states[-1])[0]
    names = {"all": list(model), "head": HEAD, "body": [k for k in model if k not in HEAD]}[moving]
    assert_models(run, fine_tuned(model, names))


@pytest.mark.slow
def test_some_weights_of_fedala_are_inside_and_some_at_a_bound():
    weights = np.concatenate([own["weights"]["w2"].ravel() for own in ORACLES["fedala"].want()[-1].clients])
    assert (weights == 0).any()
    assert ((weights > 0) & (weights < 1)).any()


@pytest.mark.parametrize("method", ["fedper", "local", *map(slow, ("fedrep", "lg-fedavg", "fedbn", "fedproto", "fml"))])
def test_clients_start_alike_but_for_local(method):
    options = {"architectures": "mlp:5"} if method == "fml" else {}
    first = oracle.simulation(method, **options).init([SEED]).clients[0]
    apart = max(float(abs(leaf[0] - leaf[0, :1]).max()) for leaf in jax.tree.leaves(first))
    assert apart > 0.1 if method == "local" else apart == 0


@pytest.mark.slow
def test_fedrod_leaves_out_classes_that_a_client_lacks():
    problem = oracle.without_last_class()
    data = oracle.clients(problem.train)
    priors = log_counts(data)
    assert all(np.isneginf(prior[-1]) for prior in priors)
    start, end = oracle.run_method("fedrod", SGD, rounds=1, problem=problem).states
    nothing = {k: np.zeros_like(start.server[k]) for k in HEAD}
    ends = [
        rod_steps(start.server, nothing, [batch] * STEPS, prior, SGD["lr"])
        for batch, prior in zip(data, priors, strict=True)
    ]
    assert_same(end.server, average(start.server, [subtract(g, start.server) for g, _, _ in ends], SIZES))
    assert_same(oracle.plain_clients(end), [head for _, head, _ in ends])
    task = oracle.perceptron()._replace(loss=smoothed_cross_entropy(0.2))
    assert not oracle.run_method("fedrod", SGD, rounds=2, problem=problem, task=task).states[-1].diverged.any()
