"""The methods again, in plain NumPy, one client and one step after the other: the engine is held against it.

Written from the equations alone: gradients by hand, Python loops, no JAX. A model here is the two-layer
perceptron ``logits = tanh(x w1 + b1) w2 + b2``, its parameters in a dictionary. `ADAPED_DEFECTS` are planted
on purpose: each must be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Params = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]
Hyper = dict[str, float]

ADAPED_DEFECTS = (
    "theta steps against the new mu",
    "mu steps against the old theta",
    "mu steps with the new psi",
    "psi steps on f(theta, mu)",
    "psi steps on f(theta+, mu)",
    "cross-entropy in mu's step",
    "teacher and student swapped",
    "no weight decay on theta",
    "no weight decay on mu",
    "weight decay on psi",
    "eta3 decays",
    "eta1 for eta2",
    "c left out",
    "no floor",
    "mu averaged by n_i",
    "theta restarts from mu",
)


# --- the model ------------------------------------------------------------------------------------


def forward(params: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def backward(params: Params, x: np.ndarray, d_logits: np.ndarray) -> Params:
    """The gradient of the parameters from that of the logits, ``d_logits`` [n, classes]."""
    h = np.tanh(x @ params["w1"] + params["b1"])
    d_h = (d_logits @ params["w2"].T) * (1 - h**2)
    return {"w1": x.T @ d_h, "b1": d_h.sum(0), "w2": h.T @ d_logits, "b2": d_logits.sum(0)}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def cross_entropy(logits: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of ``-log softmax(logits)[y]``, and its logit gradient ``(softmax - onehot) / n``."""
    n, log_q = len(y), log_softmax(logits)
    onehot = np.eye(logits.shape[1])[y]
    return -(onehot * log_q).sum() / n, (np.exp(log_q) - onehot) / n


def distillation(teacher: np.ndarray, student: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Mean of ``KL(p || q)``, p of the teacher; its gradients by the teacher's and the student's logits,

    ``p (log p - log q - KL) / n`` and ``(q - p) / n``.
    """
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    p, q, n = np.exp(log_p), np.exp(log_q), len(teacher)
    kl = (p * (log_p - log_q)).sum(axis=1, keepdims=True)
    return kl.mean(), p * (log_p - log_q - kl) / n, (q - p) / n


def step(params: Params, gradient: Params, rate: float, weight_decay: float) -> Params:
    return {k: w - rate * (gradient[k] + weight_decay * w) for k, w in params.items()}


# --- what happens around the steps ----------------------------------------------------------------


class World(NamedTuple):
    """Inputs of all methods: each client's batches of a round, and the cohorts.

    Attributes:
      sizes: n_i, the clients' training examples.
      steps: tau.
      cohorts: the rows of each round's cohort.
      batches: ``(row, earlier participations) -> tau batches``.
    """

    sizes: Sequence[int]
    steps: int
    cohorts: Sequence[Sequence[int]]
    batches: Callable[[int, int], list[Batch]]


class Round(NamedTuple):
    """After a round: the server's state, the clients' states, how often each took part, and the metrics."""

    server: Any
    clients: list[Any]
    participations: list[int]
    metrics: dict[str, float]


def decay(hp: Hyper, round: int, steps: int) -> float:
    """The rate of round r is ``lr * lr_decay^(r // rounds per epoch)``; an epoch is ``decay_every`` steps."""
    return hp["lr_decay"] ** ((round * steps) // int(hp["decay_every"]))


def average(server: Any, changes: Sequence[Any], weights: Sequence[float]) -> Any:
    """``server + sum_i w_i change_i / sum_i w_i`` for numbers, arrays and dictionaries of them."""
    if isinstance(server, dict):
        return {k: average(server[k], [c[k] for c in changes], weights) for k in server}
    return server + sum(w * c for w, c in zip(weights, changes, strict=True)) / sum(weights)


def subtract(a: Params, b: Params) -> Params:
    return {k: a[k] - b[k] for k in a}


def sgd(
    params: Params, batches: Sequence[Batch], rate: float, weight_decay: float, prox: float = 0.0
) -> tuple[Params, float]:
    """SGD on the cross-entropy ``+ prox/2 |w - w_0|^2``, and the mean of the batches' cross-entropies."""
    start, losses = params, []
    for x, y in batches:
        loss, d_logits = cross_entropy(forward(params, x), y)
        gradient = backward(params, x, d_logits)
        gradient = {k: gradient[k] + prox * (params[k] - start[k]) for k in params}
        params = step(params, gradient, rate, weight_decay)
        losses.append(loss)
    return params, float(np.mean(losses))


def run_local(world: World, hp: Hyper, clients: Sequence[Params]) -> list[Round]:
    """``theta_i <- theta_i - eta (grad CE(theta_i) + wd theta_i)``, tau times in each of its rounds."""
    clients, seen, history = list(clients), [0] * len(clients), []
    for r, cohort in enumerate(world.cohorts):
        rate, losses = hp["lr"] * decay(hp, r, world.steps), []
        for i in cohort:
            clients[i], loss = sgd(clients[i], world.batches(i, seen[i]), rate, hp["weight_decay"])
            losses.append(loss)
            seen[i] += 1
        history.append(Round((), list(clients), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


def run_fedavg(world: World, hp: Hyper, server: Params, *, prox: float = 0.0, uniform: bool = False) -> list[Round]:
    """``mu <- mu + sum_i n_i (w_i - mu) / sum_i n_i`` over the cohort, w_i after tau steps from mu."""
    seen, history = [0] * len(world.sizes), []
    for r, cohort in enumerate(world.cohorts):
        rate, changes, losses = hp["lr"] * decay(hp, r, world.steps), [], []
        for i in cohort:
            w, loss = sgd(server, world.batches(i, seen[i]), rate, hp["weight_decay"], prox)
            changes.append(subtract(w, server))
            losses.append(loss)
            seen[i] += 1
        weights = [1.0 if uniform else world.sizes[i] for i in cohort]
        server = average(server, changes, weights)
        history.append(Round(server, [()] * len(seen), list(seen), {"train_loss": float(np.mean(losses))}))
    return history


# --- AdaPeD ---------------------------------------------------------------------------------------


def adaped_objective(theta: Params, mu: Params, psi: float, x: np.ndarray, y: np.ndarray, c: float = 1.0) -> float:
    """``CE(theta) + log(2 psi) / 2 + c f_KD(theta, mu) / (2 psi)``."""
    f = distillation(forward(mu, x), forward(theta, x))[0]
    return cross_entropy(forward(theta, x), y)[0] + np.log(2 * psi) / 2 + c * f / (2 * psi)


def adaped_step(
    theta: Params, mu: Params, psi: float, batch: Batch, hp: Hyper, factor: float, defect: str = ""
) -> tuple[Params, Params, float, float, float]:
    """One local step of Algorithm 2: ``(theta+, mu+, psi+, CE(theta), f_KD(theta+, mu+))``.

    ``theta+ = theta - eta1 grad_theta [CE(theta) + f(theta, mu) / (2 psi)]``,
    ``mu+ = mu - eta2 grad_mu f(theta+, mu) / (2 psi)``,
    ``psi+ = max(psi - eta3 [1/(2 psi) - c f(theta+, mu+) / (2 psi^2)], floor)``; ``factor`` decays eta1,2.
    """
    x, y = batch
    eta1, eta2, eta3 = hp["lr"] * factor, hp["lr_global"] * factor, hp["lr_psi"]
    eta2 = eta1 if defect == "eta1 for eta2" else eta2
    eta3 = eta3 * factor if defect == "eta3 decays" else eta3
    c = 1.0 if defect == "c left out" else hp["c"]
    wd_theta = 0.0 if defect == "no weight decay on theta" else hp["weight_decay"]
    wd_mu = 0.0 if defect == "no weight decay on mu" else hp["weight_decay"]

    def kd(theta: Params, mu: Params) -> tuple[float, Params, Params]:
        """f_KD, and its gradients by theta and by mu."""
        a, b = forward(theta, x), forward(mu, x)
        if defect == "teacher and student swapped":
            f, d_a, d_b = distillation(a, b)
        else:
            f, d_b, d_a = distillation(b, a)
        return f, backward(theta, x, d_a), backward(mu, x, d_b)

    def step_mu(theta: Params, psi: float) -> Params:
        gradient = {k: g / (2 * psi) for k, g in kd(theta, mu)[2].items()}
        if defect == "cross-entropy in mu's step":
            own = backward(mu, x, cross_entropy(forward(mu, x), y)[1])
            gradient = {k: gradient[k] + own[k] for k in own}
        return step(mu, gradient, eta2, wd_mu)

    def step_psi(f: float) -> float:
        gradient = 1 / (2 * psi) - c * f / (2 * psi**2)
        gradient += hp["weight_decay"] * psi if defect == "weight decay on psi" else 0.0
        new = psi - eta3 * gradient
        return new if defect == "no floor" else max(new, hp["psi_floor"])

    teacher = step_mu(theta, psi) if defect == "theta steps against the new mu" else mu
    ce, d_ce = cross_entropy(forward(theta, x), y)
    own, pull = backward(theta, x, d_ce), kd(theta, teacher)[1]
    new_theta = step(theta, {k: own[k] + pull[k] / (2 * psi) for k in own}, eta1, wd_theta)

    new_mu = step_mu(theta if defect == "mu steps against the old theta" else new_theta, psi)
    f = kd(new_theta, new_mu)[0]
    if defect == "psi steps on f(theta, mu)":
        new_psi = step_psi(kd(theta, mu)[0])
    elif defect == "psi steps on f(theta+, mu)":
        new_psi = step_psi(kd(new_theta, mu)[0])
    else:
        new_psi = step_psi(f)
    if defect == "mu steps with the new psi":
        new_mu = step_mu(new_theta, new_psi)
    return new_theta, new_mu, new_psi, ce, f


def adaped_alone(theta: Params, received: Any, batches: Sequence[Batch], hp: Hyper, factor: float) -> Params:
    """Algorithm 7 outside the cohort: ``theta <- theta - eta1 grad_theta [CE(theta) + f(theta, mu) / (2 psi)]`` with
    the last (mu, psi) received."""
    for x, y in batches:
        student = forward(theta, x)
        d_ce = cross_entropy(student, y)[1]
        d_kd = distillation(forward(received["mu"], x), student)[2]
        gradient = backward(theta, x, d_ce + d_kd / (2 * received["psi"]))
        theta = step(theta, gradient, hp["lr"] * factor, hp["weight_decay"])
    return theta


def run_adaped(
    world: World, hp: Hyper, mu: Params, clients: Sequence[Params], defect: str = "", idle_cap: int = 0
) -> list[Round]:
    """Algorithm 2: the cohort starts from (mu, psi) and own theta_i; the server averages (mu_i, psi_i).

    With ``idle_cap`` Algorithm 7: clients outside go on alone for so many rounds in a row.
    """
    server = {"mu": mu, "psi": hp["psi_init"]}
    clients, seen, history = list(clients), [0] * len(clients), []
    received, idled, streak = [server] * len(clients), [0] * len(clients), [0] * len(clients)
    for r, cohort in enumerate(world.cohorts):
        ends, means = [], []
        for i in set(range(len(clients))) - set(cohort):
            if streak[i] < idle_cap:
                batches = world.batches(i, seen[i] + idled[i])
                clients[i] = adaped_alone(clients[i], received[i], batches, hp, decay(hp, r, world.steps))
                idled[i] += 1
                streak[i] += 1
        for i in cohort:
            theta = server["mu"] if defect == "theta restarts from mu" else clients[i]
            mu, psi, steps = server["mu"], server["psi"], []
            for batch in world.batches(i, seen[i] + idled[i]):
                theta, mu, psi, ce, f = adaped_step(theta, mu, psi, batch, hp, decay(hp, r, world.steps), defect)
                steps.append((ce, f))
            clients[i], received[i], streak[i] = theta, server, 0
            seen[i] += 1
            ends.append({"mu": subtract(mu, server["mu"]), "psi": psi - server["psi"]})
            means.append(np.mean(steps, axis=0))
        weights = [world.sizes[i] if defect == "mu averaged by n_i" else 1.0 for i in cohort]
        server = average(server, ends, weights)
        loss, f = np.mean(means, axis=0)
        metrics = {"train_loss": loss, "divergence": f, "psi": server["psi"]}
        history.append(Round(server, list(clients), list(seen), metrics))
    return history
