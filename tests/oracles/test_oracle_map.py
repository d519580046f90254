"""Personalisation by priors against NumPy, written from the equations; and AdaPeD as an instance of it."""

import jax
import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, flat, forward, run_rounds, step, unflat
from oracle import ADAPED, SETTINGS, SGD, Oracle, assert_same, cases, client_row, plain_clients, run_setting

FOUR = SETTINGS["four"]
"""Even: the median of an odd cohort is a client's own entry, up to the rounding of what travelled, whose sign Laplace's
penalty would feel."""
HYPER = SGD | {"lr": 0.2, "weight": 0.8, "lr_location": 0.3, "lr_scale": 0.2, "scale_init": 0.3, "scale_floor": 0.02}


# --- the priors by hand: theta, mu are vectors ----------------------------------------------------


def slope(kind: str, gamma: dict, theta: np.ndarray) -> np.ndarray:
    """The gradient of ``-log p(theta)``."""
    if kind == "gaussian":
        return (theta - gamma["mu"]) / gamma["s2"]
    if kind == "laplace":
        return np.sign(theta - gamma["mu"]) / gamma["b"]
    belongs = responsibilities(gamma, theta)
    return sum(r * (theta - m) / s2 for r, m, s2 in zip(belongs, gamma["mu"], gamma["s2"], strict=True))


def prox(kind: str, gamma: dict, theta: np.ndarray, size: float) -> np.ndarray:
    """The minimum of ``size * penalty(t) + |t - theta|^2 / 2``, for a mixture of its bound that touches it at theta."""
    if kind == "gaussian":
        return (gamma["s2"] * theta + size * gamma["mu"]) / (gamma["s2"] + size)
    if kind == "laplace":
        apart = theta - gamma["mu"]
        return gamma["mu"] + np.sign(apart) * np.maximum(np.abs(apart) - size / gamma["b"], 0)
    pulls = size * responsibilities(gamma, theta) / gamma["s2"]
    return (theta + pulls @ gamma["mu"]) / (1 + pulls.sum())


def responsibilities(gamma: dict, theta: np.ndarray) -> np.ndarray:
    log = np.log(gamma["p"]) - len(theta) / 2 * np.log(2 * np.pi * gamma["s2"])
    log = log - ((theta - gamma["mu"]) ** 2).sum(1) / (2 * gamma["s2"])
    r = np.exp(log - log.max())
    return r / r.sum()


def descend(kind: str, gamma: dict, theta: np.ndarray, rate: float, hp: dict) -> dict:
    """One step of the gradient message."""
    if kind == "gaussian":
        mu = gamma["mu"] + rate * (theta - gamma["mu"])
        s2 = gamma["s2"] + hp["lr_scale"] * (((theta - mu) ** 2).mean() - gamma["s2"])
        return {"mu": mu, "s2": max(s2, hp["scale_floor"])}
    mu = gamma["mu"] + rate * gamma["b"] * np.sign(theta - gamma["mu"])
    b = gamma["b"] + hp["lr_scale"] * (np.abs(theta - mu).mean() - gamma["b"])
    return {"mu": mu, "b": max(b, hp["scale_floor"])}


def fit(kind: str, gamma: dict, thetas: np.ndarray, hp: dict) -> dict:
    floor = hp["scale_floor"]
    if kind == "gaussian":
        return {"mu": thetas.mean(0), "s2": max(thetas.var(0).mean(), floor)}
    if kind == "laplace":
        mu = np.median(thetas, axis=0)
        return {"mu": mu, "b": max(np.abs(thetas - mu).mean(), floor)}
    old, new = (em(begin, thetas, floor) for begin in (gamma, start(thetas, floor)))
    return new if likelihood(new, thetas) > likelihood(old, thetas) + 1 else old


def start(thetas: np.ndarray, floor: float, k: int = 2) -> dict:
    """Greedy k-means++: the model that lowers the potential most, k times."""
    squares = ((thetas[:, None] - thetas) ** 2).sum(-1)
    nearest, chosen = np.full(len(thetas), np.inf), []
    for _ in range(k):
        chosen.append(int(np.minimum(squares, nearest).sum(1).argmin()))
        nearest = np.minimum(nearest, squares[chosen[-1]])
    return {
        "p": np.full(k, 1 / k),
        "mu": thetas[chosen],
        "s2": np.full(k, max(nearest.mean() / thetas.shape[1], floor)),
    }


def em(gamma: dict, thetas: np.ndarray, floor: float, steps: int = 20) -> dict:
    for _ in range(steps):
        r = np.stack([responsibilities(gamma, theta) for theta in thetas])
        mu = np.stack([r[:, c] @ thetas / r[:, c].sum() for c in range(2)])
        s2 = [r[:, c] @ ((thetas - mu[c]) ** 2).mean(1) / r[:, c].sum() for c in range(2)]
        gamma = {"p": r.mean(0), "mu": mu, "s2": np.maximum(s2, floor)}
    return gamma


def likelihood(gamma: dict, thetas: np.ndarray) -> float:
    d, total = thetas.shape[1], 0.0
    for theta in thetas:
        log = np.log(gamma["p"]) - d / 2 * np.log(2 * np.pi * gamma["s2"])
        total += np.logaddexp.reduce(log - ((theta - gamma["mu"]) ** 2).sum(1) / (2 * gamma["s2"]))
    return total


# --- the method -----------------------------------------------------------------------------------


def map_prior(kind: str, estimate: str = "gradient", scaling: str = "sum", *, proximal: bool = True):
    """Steps on the loss and the prior's penalty; the prior by gradients or by a fit to the cohort's models."""

    def formula(world, hp, server, own, defect=""):
        gamma = {"mu": flat(own[0]), "b" if kind == "laplace" else "s2": hp["scale_init"]}
        if kind == "mixture":
            gamma = {"p": np.full(2, 0.5), "mu": np.tile(gamma["mu"], (2, 1)), "s2": np.full(2, hp["scale_init"])}

        def work(gamma, theta, turn):
            rate = hp["lr"] * turn.factor
            weight = hp["weight"] / world.sizes[turn.row] if scaling == "sum" else hp["weight"]
            for x, y in turn.batches:
                loss = backward(theta, x, cross_entropy(forward(theta, x), y)[1])
                if proximal:
                    after = step(theta, loss, rate, hp["weight_decay"])
                    theta = unflat(prox(kind, gamma, flat(after), rate * weight), theta)
                else:
                    pull = unflat(weight * slope(kind, gamma, flat(theta)), theta)
                    theta = step(theta, {k: loss[k] + pull[k] for k in loss}, rate, hp["weight_decay"])
                if estimate == "gradient":
                    gamma = descend(kind, gamma, flat(theta), hp["lr_location"] * turn.factor, hp)
            return theta, gamma, {}

        def serve(gamma, copies, cohort, own):
            if estimate == "gradient":
                return {k: sum(copy[k] for copy in copies) / len(cohort) for k in gamma}
            return fit(kind, gamma, np.stack([flat(own[i]) for i in cohort]), hp)

        return run_rounds(world, hp, gamma, own, work, serve)

    return formula


def vectors(state):
    """The prior's means as vectors."""
    server = state.server._asdict()
    means = server.pop("mu")
    centers = [flat(client_row(means, c)) for c in range(2)] if "p" in server else flat(means)
    return server | {"mu": np.array(centers)}, plain_clients(state)


def map_oracle(method: str, formula, **given):
    def models(last):
        mu = unflat(last.server["mu"], last.clients[0]) if last.server["mu"].ndim == 1 else None
        return {"after": last.clients, "mu": mu}

    return Oracle(method, HYPER, formula, models=models, view=vectors, **{"kinds": ("four",)} | given)


PLAIN_SGD = {"choices": {"optimizer": "sgd:momentum=0"}}
"""Not the proximal step: the penalty is in the gradient."""
ORACLES = {
    "gaussian": map_oracle("map-gaussian", map_prior("gaussian"), kinds=("four",)),
    "gaussian, fitted": map_oracle(
        "map-gaussian", map_prior("gaussian", "fit", "mean"), options={"estimate": "fit", "scaling": "mean"}, plain=True
    ),
    "gaussian, gradient": map_oracle(
        "map-gaussian", map_prior("gaussian", proximal=False), options=PLAIN_SGD, plain=True
    ),
    "laplace": map_oracle("map-laplace", map_prior("laplace")),
    "laplace, fitted": map_oracle("map-laplace", map_prior("laplace", "fit"), options={"estimate": "fit"}, plain=True),
    "laplace, gradient": map_oracle("map-laplace", map_prior("laplace", proximal=False), options=PLAIN_SGD, plain=True),
    "mixture": map_oracle("adamix", map_prior("mixture", "fit")),
}


@pytest.mark.parametrize(("name", "kind"), cases(ORACLES))
def test_rounds(name, kind):
    ORACLES[name].check(kind)
    assert np.isfinite(ORACLES[name].got(kind).history["penalty"]).all()


@pytest.mark.slow
def test_a_narrow_prior_is_no_hazard():
    """Far beyond what a step along the gradient allows: such steps leave, proximal ones end at mu."""
    hp = HYPER | {"weight": 1e6}
    for method in ("map-gaussian", "map-laplace"):
        last = run_setting(method, hp, FOUR).states[-1]
        assert not last.counts.diverged.any()
        took_part = last.counts.participations > 0
        for a, b in zip(jax.tree.leaves(last.clients[0]), jax.tree.leaves(last.server.mu), strict=True):
            np.testing.assert_allclose(a[took_part], np.broadcast_to(b, a.shape)[took_part], atol=1e-4)
    last = run_setting("map-gaussian", hp, FOUR, **PLAIN_SGD).states[-1]
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(last.clients[0])) > 1e3


# --- AdaPeD is the distillation prior's ------------------------------------------------------------


@pytest.mark.slow
def test_distillation_prior_is_adaped():
    """The prior's gradient message has AdaPeD's order: theta, then mu at the new theta, then psi at the new mu."""
    renamed = SGD | {"lr_location": 0.3, "lr_scale": 0.1, "scale_init": 0.6, "scale_floor": 0.5, "c": 5.0}
    got, want = run_setting("map-kd", renamed, FOUR), run_setting("adaped", ADAPED, FOUR)
    for a, b in zip(got.states, want.states, strict=True):
        assert_same((a.server, a.clients), (b.server, b.clients))
    assert_same(got.history["psi"], want.history["psi"])
    assert want.history["psi"][-1] > 0.5  # the floor hides no step
    for options in ({"distance": "reversed-kd"}, {"distance": "square"}, {"exact": True}):
        other = run_setting("map-kd", renamed, FOUR, 2, **options).history["psi"]
        assert np.isfinite(other).all()
        assert np.abs(other - got.history["psi"][:2]).max() > 1e-6
