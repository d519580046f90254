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
    *("theta steps against the new mu", "mu steps against the old theta", "mu steps with the new psi"),
    *("psi steps on f(theta, mu)", "psi steps on f(theta+, mu)", "cross-entropy in mu's step"),
    *("teacher and student swapped", "no weight decay on theta", "no weight decay on mu", "weight decay on psi"),
    *("eta3 decays", "eta1 for eta2", "c left out", "no floor", "mu averaged by n_i", "theta restarts from mu"),
)


# --- the model ------------------------------------------------------------------------------------


def features(params: Params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ params["w1"] + params["b1"])


def forward(params: Params, x: np.ndarray) -> np.ndarray:
    return features(params, x) @ params["w2"] + params["b2"]


def backward(params: Params, x: np.ndarray, d_logits: np.ndarray, d_features: np.ndarray | float = 0.0) -> Params:
    """The gradient of the parameters from those of the logits [n, classes] and, beside them, of the features."""
    h = features(params, x)
    d_h = (d_logits @ params["w2"].T + d_features) * (1 - h**2)
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


def flat(params: Params) -> np.ndarray:
    """The parameters as one vector, by their sorted names."""
    return np.concatenate([params[k].ravel() for k in sorted(params)])


def unflat(vector: np.ndarray, like: Params) -> Params:
    """The inverse of `flat`."""
    parts = np.split(vector, np.cumsum([like[k].size for k in sorted(like)])[:-1])
    return {k: part.reshape(like[k].shape) for k, part in zip(sorted(like), parts, strict=True)}


def clip(tree: Params, limit: float) -> tuple[Params, float]:
    """``tree / max(|tree| / limit, 1)``, whose norm is at most ``limit``, and the norm of the tree."""
    norm = np.sqrt(sum(np.sum(np.square(v)) for v in tree.values()))
    return {k: v / max(norm / limit, 1.0) for k, v in tree.items()}, norm


# --- what happens around the steps ----------------------------------------------------------------


class World(NamedTuple):
    """Inputs of all methods: each client's batches of a round, and the cohorts.

    Attributes:
      sizes: n_i, the clients' training examples.
      steps: tau.
      cohorts: rows of each round's cohort.
      batches: ``(row, earlier turns, round, number) -> batches``, fewer for a straggler.
      each: batches of one step.
    """

    sizes: Sequence[int]
    steps: int
    cohorts: Sequence[Sequence[int]]
    batches: Callable[[int, int, int, int], list[Batch]]
    each: int = 1


class Turn(NamedTuple):
    """A client's turn in a round.

    Attributes:
      row: place of the client in the stack.
      round: number of the round.
      batches: its mini-batches.
      factor: factor on its rates.
      draw: ``number -> batches`` of another number of steps.
    """

    row: int
    round: int
    batches: list[Batch]
    factor: float
    draw: Callable[[int], list[Batch]]


class Round(NamedTuple):
    """After a round: the server's state, the clients' states, how often each took part, and the metrics."""

    server: Any
    clients: list[Any]
    participations: list[int]
    metrics: dict[str, float]


Work = Callable[[Any, Any, Turn], tuple[Any, Any, dict[str, float]]]
"""``(server, own state, turn) -> (own state, upload, metrics)``."""
Serve = Callable[[Any, list[Any], Sequence[int], list[Any]], Any]
"""``(server, uploads, cohort, all own states) -> server``."""


def averaged(weights: Sequence[float]) -> Serve:
    """A server that averages the uploaded models: ``mu + sum w_i (mu_i - mu) / sum w_i``."""
    return lambda mu, uploads, cohort, own: average(
        mu, [subtract(upload, mu) for upload in uploads], [weights[i] for i in cohort]
    )


def run_rounds(
    world: World,
    hp: Hyper,
    server: Any,
    own: Sequence[Any],
    work: Work,
    serve: Serve,
    idle: Callable[[Any, Turn], Any] | None = None,
    idle_cap: int = 0,
) -> list[Round]:
    """Rounds of a method, one client after the other.

    Clients outside the cohort go on by ``idle`` for at most ``idle_cap`` rounds in a row.
    """
    own, m, history = list(own), len(own), []
    taken, alone, streak = [0] * m, [0] * m, [0] * m
    for r, cohort in enumerate(world.cohorts):

        def turn(i: int, r: int = r) -> Turn:
            def draw(number: int) -> list[Batch]:
                return world.batches(i, taken[i] + alone[i], r, number)

            return Turn(i, r, draw(world.steps * world.each), decay(hp, r, world.steps), draw)

        for i in set(range(m)) - set(cohort):
            if streak[i] < idle_cap:
                own[i] = idle(own[i], turn(i))
                alone[i] += 1
                streak[i] += 1
        uploads, measured = [], []
        for i in cohort:
            own[i], upload, metrics = work(server, own[i], turn(i))
            uploads.append(upload)
            measured.append(metrics)
            taken[i] += 1
            streak[i] = 0
        server = serve(server, uploads, cohort, own) if cohort else server
        history.append(Round(server, list(own), list(taken), means(measured)))
    return history


def means(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric."""
    return {name: float(np.mean([one[name] for one in measured])) for name in measured[0]} if measured else {}


def decay(hp: Hyper, round: int, steps: int) -> float:
    """The rate of round r is ``lr * lr_decay^(r // rounds per epoch)``; an epoch is ``decay_every`` steps."""
    return hp["lr_decay"] ** ((round * steps) // int(hp["decay_every"]))


def average(server: Any, changes: Sequence[Any], weights: Sequence[float]) -> Any:
    """``server + sum_i w_i change_i / sum_i w_i`` for numbers, arrays and dictionaries of them."""
    if isinstance(server, dict):
        return {k: average(server[k], [c[k] for c in changes], weights) for k in server}
    return server + sum(w * c for w, c in zip(weights, changes, strict=True)) / sum(weights)


def subtract(a: Any, b: Any) -> Any:
    return {k: subtract(a[k], b[k]) for k in a} if isinstance(a, dict) else a - b


def combine(a: Params, b: Params, share: float = 1.0) -> Params:
    """``a + share b``."""
    return {k: a[k] + share * b[k] for k in a}


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


def run_local(world: World, hp: Hyper, server: Any, own: Sequence[Params], defect: str = "") -> list[Round]:
    """``theta_i <- theta_i - eta (grad CE(theta_i) + wd theta_i)``, tau times in each of its rounds."""

    def work(server, theta, turn):
        theta, loss = sgd(theta, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"])
        return theta, (), {"train_loss": loss}

    return run_rounds(world, hp, server, own, work, lambda server, uploads, cohort, own: server)


def run_fedavg(world: World, hp: Hyper, server: Params, own: Sequence[Any], defect: str = "") -> list[Round]:
    """``mu <- mu + sum_i n_i (w_i - mu) / sum_i n_i`` over the cohort, w_i after tau steps from mu.

    With a proximal term in ``hp`` FedProx, whose mean is uniform.
    """

    def work(mu, own, turn):
        w, loss = sgd(mu, turn.batches, hp["lr"] * turn.factor, hp["weight_decay"], hp.get("prox", 0.0))
        return own, w, {"train_loss": loss}

    weights = [1.0] * len(own) if "prox" in hp else world.sizes
    return run_rounds(world, hp, server, own, work, averaged(weights))


# --- AdaPeD ---------------------------------------------------------------------------------------


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
    world: World, hp: Hyper, server: Any, own: Sequence[Any], defect: str = "", idle_cap: int = 0
) -> list[Round]:
    """Algorithm 2: the cohort starts from (mu, psi) and own theta_i; the server averages (mu_i, psi_i).

    With ``idle_cap`` Algorithm 7: clients outside go on alone for so many rounds in a row, and a client's state is
    ``theta`` with what it ``received`` last.
    """

    def work(server, own, turn):
        theta, mu, psi, steps = own["theta"] if idle_cap else own, server["mu"], server["psi"], []
        theta = mu if defect == "theta restarts from mu" else theta
        for batch in turn.batches:
            theta, mu, psi, ce, f = adaped_step(theta, mu, psi, batch, hp, turn.factor, defect)
            steps.append({"train_loss": ce, "divergence": f})
        own = {"theta": theta, "received": server} if idle_cap else theta
        return own, {"mu": mu, "psi": psi}, means(steps)

    def idle(own, turn):
        theta = adaped_alone(own["theta"], own["received"], turn.batches, hp, turn.factor)
        return own | {"theta": theta}

    serve = averaged(world.sizes if defect == "mu averaged by n_i" else [1.0] * len(own))
    history = run_rounds(world, hp, server, own, work, serve, idle, idle_cap)
    return [one._replace(metrics=one.metrics | {"psi": one.server["psi"]}) for one in history]
