"""Personal models against NumPy: MR-MTL, Ditto, pFedMe, APFL, Per-FedAvg, L2GD and FedAMP."""

import jax
import numpy as np
import oracle
import pytest
from numpy_reference import averaged, backward, combine, cross_entropy, forward, run_rounds, sgd, step, subtract
from oracle import ROUNDS, SEED, SETTINGS, SGD, STEPS, M, Oracle, assert_same, assert_scores, client_row

from jaxpfl import METHODS
from jaxpfl.algorithms.fedamp import clouds
from jaxpfl.algorithms.l2gd import probability
from jaxpfl.core.randomness import Purpose, stream

UNIFORM = [1.0] * M


def mr_mtl(world, hp, server, own, defect=""):
    """Own models, drawn to the uniform mean of the cohort's models."""

    def work(mean, own, turn):
        w = mean if defect == "w restarts from the mean" else own
        losses = []
        for x, y in turn.batches:
            loss, d_logits = cross_entropy(forward(w, x), y)
            anchor = own if defect == "anchor is w" else mean
            gradient = combine(backward(w, x, d_logits), subtract(w, anchor), hp["lam"])
            w = step(w, gradient, hp["lr"] * turn.factor, hp["weight_decay"])
            losses.append(loss)
        return w, w, {"train_loss": np.mean(losses)}

    return run_rounds(world, hp, server, own, work, averaged(world.sizes if defect == "mean by n_i" else UNIFORM))


def ditto(world, hp, server, own, defect=""):
    """``v <- v - eta_v [grad f(v) + lam (v - mu)]`` about the broadcast mu, FedAvg beside it."""

    def work(mu, v, turn):
        w, _ = sgd(mu, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        losses = []
        for x, y in turn.batches:
            anchor = {"anchor aliased": v, "anchor is the client's w": w}.get(defect, mu)
            loss, d_logits = cross_entropy(forward(v, x), y)
            gradient = combine(backward(v, x, d_logits), subtract(v, anchor), hp["lam"])
            rate = hp["lr" if defect == "one rate" else "lr_personal"] * turn.factor
            v = step(v, gradient, rate, hp["weight_decay"])
            losses.append(loss)
        return v, v if defect == "v averaged" else w, {"train_loss": np.mean(losses)}

    return run_rounds(world, hp, server, own, work, averaged(UNIFORM if defect == "uniform mean" else world.sizes))


INNER = 3


def pfedme(world, hp, server, own, defect=""):
    """K proximal steps of theta on each mini-batch, then ``w <- w - eta lam (w - theta)``."""
    eta, lam, wd = hp["lr_global"], hp["lam"], hp["weight_decay"]
    beta = 0.0 if defect == "beta = 0" else hp["server_lr"]

    def work(mu, own, turn):
        theta, w, losses = mu, mu, []
        for x, y in turn.batches:
            for _ in range(INNER):
                anchor = {"anchor aliased": theta, "anchor is mu": mu}.get(defect, w)
                loss, d_logits = cross_entropy(forward(theta, x), y)
                gradient = combine(backward(theta, x, d_logits), subtract(theta, anchor), lam)
                decay = 2 * wd if defect == "weight decay twice" else wd
                theta = step(theta, gradient, hp["lr"] * turn.factor, decay)
            pull = {k: lam * (w[k] - theta[k]) for k in w}
            w = step(w, pull, eta * turn.factor, wd if defect == "weight decay on w" else 0.0)
            losses.append(loss)
        personal = w if defect == "w is the personal model" else theta
        return personal, combine(mu, subtract(w, mu), beta), {"train_loss": np.mean(losses)}

    return run_rounds(world, hp, server, own, work, averaged(UNIFORM))


def mix(own, mu):
    return {k: own["alpha"] * own["v"][k] + (1 - own["alpha"]) * mu[k] for k in mu}


def apfl(world, hp, server, own, defect="", *, adapt=True, keep=False):
    """w by FedAvg's steps, v and alpha by the gradient at the mixture ``alpha v + (1 - alpha) w``."""
    wd = hp["weight_decay"]

    def work(mu, own, turn):
        w, v, alpha, measured = mu, own["v"], own["alpha"], []
        for x, y in turn.batches:
            mixed = v if defect == "gradient at v" else mix({"v": v, "alpha": alpha}, w)
            logits = forward(mixed, x)
            if defect == "logits mixed":
                logits = alpha * forward(v, x) + (1 - alpha) * forward(w, x)
            loss, d_logits = cross_entropy(logits, y)
            at_mixture = backward(v if defect == "logits mixed" else mixed, x, d_logits)
            share = 1.0 if defect == "v steps without alpha" else alpha
            by_alpha = sum(np.sum((v[k] - w[k]) * at_mixture[k]) for k in w)
            by_w = backward(w, x, cross_entropy(forward(w, x), y)[1])
            v = step(v, {k: share * at_mixture[k] for k in v}, hp["lr_personal"] * turn.factor, wd)
            w = step(w, by_w, hp["lr"] * turn.factor, wd)
            if adapt:
                alpha = alpha - hp["lr_alpha"] * turn.factor * by_alpha
                alpha = alpha if defect == "no projection" else np.clip(alpha, 0, 1)
            measured.append((loss, alpha))
        loss, mean_alpha = np.mean(measured, axis=0)
        own = {"v": v, "alpha": np.float64(alpha), "w": (w, np.float64(1)) if keep else ()}
        return own, w, {"train_loss": loss, "alpha": mean_alpha}

    return run_rounds(world, hp, server, own, work, averaged(UNIFORM))


def gradient(params, batch):
    x, y = batch
    loss, d_logits = cross_entropy(forward(params, x), y)
    return loss, backward(params, x, d_logits)


def hessian_product(params, batch, vector, size=1e-4):
    """``H vector`` by central differences of fourth order."""

    def apart(s):
        ends = (gradient(combine(params, vector, sign * s), batch)[1] for sign in (1, -1))
        return subtract(*ends)

    near, far = apart(size), apart(2 * size)
    return {k: (8 * near[k] - far[k]) / (12 * size) for k in near}


def perfedavg(world, hp, server, own, defect="", *, hessian=False):
    """``w <- w - beta (I - alpha H) grad f(w - alpha grad f(w; D); D')``, H by differences."""
    alpha = hp["alpha"]

    def work(mu, own, turn):
        w, losses = mu, []
        for inner, outer in zip(turn.batches[::2], turn.batches[1::2], strict=True):
            adapted = combine(w, gradient(w, inner)[1], -alpha)
            loss, g = gradient(adapted, inner if defect == "one batch for both" else outer)
            if hessian != (defect == "the other order"):
                g = combine(g, hessian_product(w, inner, g), -alpha)
            start = adapted if defect == "w not restored" else w
            w = step(start, g, hp["lr"] * turn.factor, hp["weight_decay"])
            losses.append(loss)
        return (), w, {"train_loss": np.mean(losses)}

    return run_rounds(world, hp, server, own, work, averaged(UNIFORM))


ALPHA = 0.3


def adapted(mu, batches):
    """mu after one step alpha on each client's batch."""
    return [combine(mu, gradient(mu, batch)[1], -ALPHA) for batch in batches]


def adapted_models(last):
    batches = [oracle.tuning_batches(i, SETTINGS["uniform"].batch_size, 1)[0] for i in range(M)]
    return {"after": adapted(last.server, batches), "mu": last.server, "before": [last.server] * M}


def tosses(hp, rounds=ROUNDS):
    q = hp["p"] * STEPS / (1 - hp["p"] + hp["p"] * STEPS)
    keys = [stream(jax.random.key(SEED), Purpose.BROADCAST, r) for r in range(rounds)]
    return [bool(jax.random.uniform(key, (), np.float32) < q) for key in keys]


def mean_of(models):
    return {k: np.mean([model[k] for model in models], axis=0) for k in models[0]}


def l2gd(world, hp, server, own, defect=""):
    """One coin for all in a round: local steps, or a step toward the mean of ALL personal models."""
    p, coin = hp["p"], tosses(hp)

    def work(mean, theta, turn):
        rate = hp["lr"] * turn.factor
        if coin[turn.round]:
            x, y = turn.draw(1)[0]
            loss = cross_entropy(forward(theta, x), y)[0]
            share = rate * hp["lam"] / (1 if defect == "p left out" else p)
            theta = combine(theta, subtract(theta, mean), -share)
        else:
            scale = 1 if defect == "1 - p left out" else 1 - p
            theta, loss = sgd(theta, turn.batches, rate / scale, hp["weight_decay"])
        return theta, (), {"train_loss": loss}

    def serve(mean, uploads, cohort, own):
        return mean_of([own[i] for i in cohort] if defect == "mean of the cohort" else own)

    return run_rounds(world, hp, mean_of(own), own, work, serve)


def cloud(models, i, hp, defect=""):
    """FedAMP's cloud model as printed."""
    xi = []
    for j, other in enumerate(models):
        square = sum(((models[i][k] - other[k]) ** 2).sum() for k in other)
        scale = hp["alpha"] if defect == "A for its derivative" else hp["alpha"] / hp["sigma"]
        xi.append(0.0 if i == j else scale * np.exp(-square / hp["sigma"]))
    if sum(xi) > 1:
        xi = [one / sum(xi) for one in xi]
    xi[i] = 1 - sum(xi)
    return {k: sum(one * model[k] for one, model in zip(xi, models, strict=True)) for k in models[i]}


def fedamp(world, hp, server, own, defect=""):
    """Cloud models of pairs of clients, and proximal steps near them; the server has all models."""

    def work(models, w, turn):
        u, losses = cloud(models, turn.row, hp, defect), []
        w = u if defect == "steps from the cloud model" else w
        pull = hp["lam"] / (1 if defect == "alpha left out of the pull" else hp["alpha"])
        for x, y in turn.batches:
            loss, d_logits = cross_entropy(forward(w, x), y)
            w = step(
                w, combine(backward(w, x, d_logits), subtract(w, u), pull), hp["lr"] * turn.factor, hp["weight_decay"]
            )
            losses.append(loss)
        return w, w, {"train_loss": float(np.mean(losses))}

    return run_rounds(world, hp, own, own, work, lambda models, uploads, cohort, own: list(own))


def with_server_models(state):
    models = [client_row(state.server.models, i) for i in range(M)]
    return models, [client_row(state.clients[0], i) for i in range(M)]


ORACLES = {
    "mr-mtl": Oracle("mr-mtl", SGD | {"lam": 0.6}, mr_mtl, ("w restarts from the mean", "anchor is w", "mean by n_i")),
    "ditto": Oracle(
        "ditto",
        SGD | {"lam": 0.7, "lr_personal": 0.3},
        ditto,
        ("anchor aliased", "anchor is the client's w", "one rate", "v averaged", "uniform mean"),
        quick=True,
    ),
    "pfedme": Oracle(
        "pfedme",
        SGD | {"lam": 0.9, "lr_global": 0.6, "server_lr": 0.8},
        pfedme,
        (
            "anchor aliased",
            "anchor is mu",
            "weight decay twice",
            "weight decay on w",
            "w is the personal model",
            "beta = 0",
        ),
        {"inner_steps": INNER},
    ),
    "apfl": Oracle(
        "apfl",
        SGD | {"alpha_init": 0.4, "lr_personal": 0.3, "lr_alpha": 2.0},
        apfl,
        ("gradient at v", "v steps without alpha", "logits mixed", "no projection"),
        models=lambda last: {"after": [mix(own, last.server) for own in last.clients], "mu": last.server},
    ),
    "apfl, w kept": Oracle(
        "apfl",
        SGD | {"alpha_init": 0.4, "lr_personal": 0.3, "lr_alpha": 2.0},
        lambda *given: apfl(*given, keep=True),
        options={"keep_w": True},
        plain=True,
        models=lambda last: {"after": [mix(own, own["w"][0]) for own in last.clients], "mu": last.server},
    ),
    "apfl, alpha fixed": Oracle(
        "apfl",
        SGD | {"alpha_init": 0.4, "lr_personal": 0.3},
        lambda *given: apfl(*given, adapt=False),
        options={"adapt_alpha": False},
        plain=True,
        models=lambda last: {"after": [mix(own, last.server) for own in last.clients], "mu": last.server},
    ),
    "perfedavg": Oracle(
        "perfedavg",
        SGD | {"alpha": ALPHA},
        perfedavg,
        ("w not restored", "one batch for both", "the other order"),
        {"hessian": False},
        adapted_models,
        each=2,
    ),
    "perfedavg, hessian": Oracle(
        "perfedavg",
        SGD | {"alpha": ALPHA},
        lambda *given: perfedavg(*given, hessian=True),
        options={"hessian": True},
        plain=True,
        models=adapted_models,
        each=2,
    ),
    "l2gd": Oracle(
        "l2gd",
        SGD | {"lam": 0.6, "p": 0.3},
        l2gd,
        ("p left out", "1 - p left out", "mean of the cohort"),
    ),
    "fedamp": Oracle(
        "fedamp",
        SGD | {"alpha": 0.4, "sigma": 2.5, "lam": 0.7},
        fedamp,
        ("A for its derivative", "steps from the cloud model", "alpha left out of the pull"),
        models=lambda last: {"after": last.clients},
        view=with_server_models,
        plain=True,
    ),
}
test_rounds = oracle.check_rounds(ORACLES)


@pytest.mark.slow
def test_personal_steps_of_dittos_own():
    """``personal_steps`` moves v further and leaves w's steps, and so the server, as they are."""
    got = ORACLES["ditto"].got().states[-1]
    more = oracle.run_setting("ditto", ORACLES["ditto"].hp, SETTINGS["uniform"], personal_steps=5).states[-1]
    np.testing.assert_allclose(more.server["w1"], got.server["w1"], rtol=1e-12)
    assert np.abs(more.clients[0]["w1"] - got.clients[0]["w1"]).max() > 1e-3


@pytest.mark.slow
def test_what_is_scored():
    """pFedMe: theta and not w. APFL: one mixed model, not the mixture of two models' logits. Per-FedAvg: never the
    model that saw the test examples."""

    def assert_apart(name, models):
        got = ORACLES[name].got()
        measured = oracle.on_host(got.simulation.evaluate(got.state))["after"]["loss"]
        assert oracle.distance(measured, oracle.scores(models)["loss"]) > 1e-3

    assert_apart("pfedme", ORACLES["pfedme"].want(defect="w is the personal model")[-1].clients)
    last = ORACLES["apfl"].want()[-1]

    def mixed_logits(own):
        return lambda x: own["alpha"] * forward(own["v"], x) + (1 - own["alpha"]) * forward(last.server, x)

    assert_apart("apfl", [mixed_logits(own) for own in last.clients])
    assert_apart("perfedavg", adapted(ORACLES["perfedavg"].want()[-1].server, oracle.scored_data()))


@pytest.mark.slow
def test_a_client_of_apfl_that_was_in_no_cohort_mixes_with_mu():
    want, got = ORACLES["apfl, w kept"].want()[0], ORACLES["apfl, w kept"].got()
    first, _ = got.simulation.advance(got.simulation.init([SEED]), 1)
    assert {0, 1} == set(want.participations)
    pairs = zip(want.clients, want.participations, strict=True)
    mixed = [mix(own, own["w"][0] if seen else want.server) for own, seen in pairs]
    assert_scores(got._replace(state=first), mixed, want.server)


def test_the_coin_of_l2gd():
    """Rounds of probability q with tau local steps otherwise: of all iterations the share p aggregates."""
    assert set(tosses(ORACLES["l2gd"].hp)) == {True, False}
    for tau in (1, 10):
        q = probability(0.2, tau)
        assert q / (q + (1 - q) * tau) == pytest.approx(0.2, rel=1e-12)
    assert probability(0.2, 1) == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 3.0])
def test_clouds_of_fedamp(scale):
    """Nearly equal models, whose weights sum to more than one, to models apart."""
    rng = np.random.default_rng(3)
    models = [{"a": 5 + scale * rng.normal(size=(2, 3)), "b": scale * rng.normal(size=2)} for _ in range(M)]
    given = ORACLES["fedamp"].hp | {"alpha": 2.0}
    made = clouds(METHODS["fedamp"].hyper.replace(**given), jax.tree.map(lambda *leaves: np.stack(leaves), *models))
    for i in range(M):
        assert_same(client_row(made, i), cloud(models, i, given))
