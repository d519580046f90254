"""Personalisation by priors against NumPy, written from the equations; and AdaPeD as an instance of it.

Four rounds in float64 of unequal clients, the rate decaying inside the run, weight decay on.
"""

import jax
import numpy as np
import pytest
from numpy_reference import Params, backward, cross_entropy, decay, forward, step
from oracle_setup import (
    SIZES,
    STEPS,
    assert_same,
    classification_problem,
    client_row,
    perceptron,
    run,
    simulation,
    world,
)

from jaxpfl import JaxpflError, LocalWork
from jaxpfl.algorithms import METHODS
from jaxpfl.core.participation import uniform

ROUNDS = 4
COHORT = uniform(len(SIZES), 4)
"""Even: the median of an odd cohort is a client's own entry, up to the rounding of what travelled, whose sign Laplace's
penalty would feel."""
HYPER = {
    "lr": 0.2,
    "lr_decay": 0.7,
    "decay_every": 4.0,
    "weight_decay": 0.02,
    "weight": 0.8,
    "lr_location": 0.3,
    "lr_scale": 0.2,
    "scale_init": 0.3,
    "scale_floor": 0.02,
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def flat(params: Params) -> np.ndarray:
    return np.concatenate([params[k].ravel() for k in sorted(params)])


def unflat(vector: np.ndarray, like: Params) -> Params:
    parts = np.split(vector, np.cumsum([like[k].size for k in sorted(like)])[:-1])
    return {k: part.reshape(like[k].shape) for k, part in zip(sorted(like), parts, strict=True)}


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


def reference(
    kind: str, estimate: str, scaling: str, batch_size: int, mu: Params, *, proximal: bool = True
) -> list[tuple[dict, list[Params]]]:
    given = world(classification_problem(), COHORT, batch_size, ROUNDS)
    hp, scale = HYPER, "b" if kind == "laplace" else "s2"
    gamma = {"mu": flat(mu), scale: hp["scale_init"]}
    if kind == "mixture":
        gamma = {"p": np.full(2, 0.5), "mu": np.tile(flat(mu), (2, 1)), "s2": np.full(2, hp["scale_init"])}
    clients, seen, history = [mu] * len(SIZES), [0] * len(SIZES), []
    for r, cohort in enumerate(given.cohorts):
        factor, copies = decay(hp, r, STEPS), []
        for i in cohort:
            own, theta = gamma, clients[i]
            for x, y in given.batches(i, seen[i]):
                weight = hp["weight"] / given.sizes[i] if scaling == "sum" else hp["weight"]
                rate, loss = hp["lr"] * factor, backward(theta, x, cross_entropy(forward(theta, x), y)[1])
                if proximal:
                    after = step(theta, loss, rate, hp["weight_decay"])
                    theta = unflat(prox(kind, own, flat(after), rate * weight), theta)
                else:
                    pull = unflat(weight * slope(kind, own, flat(theta)), theta)
                    theta = step(theta, {k: loss[k] + pull[k] for k in loss}, rate, hp["weight_decay"])
                if estimate == "gradient":
                    own = descend(kind, own, flat(theta), hp["lr_location"] * factor, hp)
            clients[i] = theta
            copies.append(own)
            seen[i] += 1
        if estimate == "gradient":
            gamma = {k: sum(own[k] for own in copies) / len(cohort) for k in gamma}
        else:
            gamma = fit(kind, gamma, np.stack([flat(clients[i]) for i in cohort]), hp)
        history.append((gamma, list(clients)))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [100, 6], ids=["full batches", "mini-batches"])
@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("map-gaussian", "gaussian", {}),
        ("map-gaussian", "gaussian", {"estimate": "fit", "scaling": "mean"}),
        ("map-laplace", "laplace", {}),
        ("map-laplace", "laplace", {"estimate": "fit"}),
        ("adamix", "mixture", {}),
    ],
)
def test_rounds(method, kind, options, batch_size):
    made = simulation(method, classification_problem(), HYPER, cohort=COHORT, batch_size=batch_size, **options)
    got = run(made, ROUNDS)
    mu = client_row(got.states[0].clients[0], 0)
    estimate = "fit" if method == "adamix" else options.get("estimate", "gradient")
    want = reference(kind, estimate, options.get("scaling", "sum"), batch_size, mu)
    for state, (gamma, thetas) in zip(got.states[1:], want, strict=True):
        server = state.server._asdict()
        means = server.pop("mu")
        centers = np.stack([flat(client_row(means, c)) for c in range(2)]) if kind == "mixture" else flat(means)
        assert_same(server | {"mu": centers}, {k: np.asarray(v) for k, v in gamma.items()})
        for i in range(len(SIZES)):
            assert_same(client_row(state.clients[0], i), thetas[i])
    assert np.isfinite(got.history["penalty"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("map-gaussian", "gaussian"), ("map-laplace", "laplace")])
def test_with_another_optimizer_the_penalty_is_in_the_gradient(method, kind):
    made = simulation(
        method, classification_problem(), HYPER, cohort=COHORT, choices={"optimizer": "sgd:momentum=0"}, batch_size=6
    )
    got = run(made, ROUNDS)
    want = reference(kind, "gradient", "sum", 6, client_row(got.states[0].clients[0], 0), proximal=False)
    for i in range(len(SIZES)):
        assert_same(client_row(got.states[-1].clients[0], i), want[-1][1][i])


@pytest.mark.slow
def test_a_narrow_prior_is_no_hazard():
    """Far beyond what a step along the gradient allows: such steps leave, proximal ones end at mu."""
    hp = HYPER | {"weight": 1e6}
    options = {"cohort": COHORT, "batch_size": 6}
    for method in ("map-gaussian", "map-laplace"):
        got = run(simulation(method, classification_problem(), hp, **options), ROUNDS)
        last = got.states[-1]
        assert not last.counts.diverged.any()
        took_part = last.counts.participations > 0
        for a, b in zip(jax.tree.leaves(last.clients[0]), jax.tree.leaves(last.server.mu), strict=True):
            np.testing.assert_allclose(a[took_part], np.broadcast_to(b, a.shape)[took_part], atol=1e-4)
    gradient = simulation(
        "map-gaussian", classification_problem(), hp, choices={"optimizer": "sgd:momentum=0"}, **options
    )
    last = run(gradient, ROUNDS).states[-1]
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(last.clients[0])) > 1e3


@pytest.mark.slow
def test_adamix_of_one_component_is_the_gaussian_prior_fitted():
    problem = classification_problem()
    mixture = run(simulation("adamix", problem, HYPER, cohort=COHORT, batch_size=6, components=1), ROUNDS)
    gaussian = run(simulation("map-gaussian", problem, HYPER, cohort=COHORT, batch_size=6, estimate="fit"), ROUNDS)
    for got, want in zip(mixture.states, gaussian.states, strict=True):
        assert_same(got.clients, want.clients)
        assert_same(client_row(got.server.mu, 0), want.server.mu)
        assert_same(got.server.s2[0], want.server.s2)


def test_adamix_is_told_of_too_many_components():
    with pytest.raises(JaxpflError, match=r"at most the 4 clients of a round, got 5: a center on each model"):
        simulation("adamix", classification_problem(), {}, cohort=COHORT, components=5).init([0])


def test_unknown_estimate():
    with pytest.raises(JaxpflError, match="unknown estimate 'moments'"):
        METHODS["map-gaussian"].build(perceptron(), LocalWork(np.ones(2), 1, 1), estimate="moments")


# --- AdaPeD is the distillation prior's ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_size", [pytest.param(100, marks=pytest.mark.slow), 6], ids=["full batches", "mini-batches"]
)
@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.02])
def test_distillation_prior_is_adaped(batch_size, weight_decay):
    """The prior's gradient message has AdaPeD's order: theta, then mu at the new theta, then psi at the new mu."""
    problem, cohort = classification_problem(), COHORT
    rates = {"lr": 0.4, "lr_decay": 0.7, "decay_every": 4.0, "weight_decay": weight_decay}
    own = {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.6, "psi_floor": 0.5, "c": 5.0}
    want = run(simulation("adaped", problem, rates | own, cohort=cohort, batch_size=batch_size), ROUNDS)

    renamed = {"lr_location": 0.3, "lr_scale": 0.1, "scale_init": 0.6, "scale_floor": 0.5, "c": 5.0}
    got = run(simulation("map-kd", problem, rates | renamed, cohort=cohort, batch_size=batch_size), ROUNDS)
    for a, b in zip(got.states, want.states, strict=True):
        assert_same((a.server, a.clients), (b.server, b.clients))
    assert_same(got.history["psi"], want.history["psi"])
    assert want.history["psi"][-1] > 0.5  # the floor hides no step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": "l1"}, "unknown distance 'l1'"),
        ({"distance": "square", "exact": True}, "the exact normaliser is known for the distance kd only, got square"),
        ({"scaling": "max"}, "unknown scaling 'max'"),
    ],
)
def test_options_of_the_distillation_prior_are_refused_early(options, message):
    with pytest.raises(JaxpflError, match=message):
        METHODS["map-kd"].build(perceptron(), LocalWork(np.ones(2), 1, 1), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"distance": "reversed-kd"},
        {"distance": "square"},
        {"exact": True},
    ],
)
def test_options_of_the_distillation_prior_change_what_is_learnt(options):
    problem = classification_problem()
    plain, other = (
        run(simulation("map-kd", problem, {"lr": 0.4}, cohort=COHORT, batch_size=6, **given), 2)
        for given in ({}, options)
    )
    assert np.isfinite(other.history["psi"]).all()
    assert np.abs(other.history["psi"] - plain.history["psi"]).max() > 1e-6
