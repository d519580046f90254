"""Two models in a client that teach each other, against NumPy: federated mutual learning and QuPeD."""

import jax
import numpy as np
import pytest
from numpy_reference import averaged, backward, cross_entropy, distillation, forward, run_rounds, step
from oracle import SETTINGS, SGD, M, Oracle, check_rounds, run_setting

from jaxpfl.algorithms.quped import quantize

UNIFORM = [1.0] * M


def fml(world, hp, server, own, defect=""):
    """Two models, each taught by the other's fixed predictions."""
    alpha, beta, wd = hp["alpha"], hp["beta"], hp["weight_decay"]
    if defect == "alpha and beta swapped":
        alpha, beta = beta, alpha

    def work(mu, theta, turn):
        losses = []
        for x, y in turn.batches:
            a, b = forward(theta, x), forward(mu, x)
            loss, ce_a = cross_entropy(a, y)
            ce_b = cross_entropy(b, y)[1]
            _, leak_b, kl_a = distillation(b, a)  # mu teaches theta
            _, leak_a, kl_b = distillation(a, b)  # theta teaches mu
            d_a, d_b = alpha * ce_a + (1 - alpha) * kl_a, beta * ce_b + (1 - beta) * kl_b
            if defect == "teachers not detached":
                d_a, d_b = d_a + (1 - beta) * leak_a, d_b + (1 - alpha) * leak_b
            if defect == "divergences reversed":
                d_a, d_b = alpha * ce_a + (1 - alpha) * leak_a, beta * ce_b + (1 - beta) * leak_b
            new = step(theta, backward(theta, x, d_a), hp["lr"] * turn.factor, wd)
            if defect == "mu learns from the new theta":
                d_b = beta * ce_b + (1 - beta) * distillation(forward(new, x), b)[2]
            mu = step(mu, backward(mu, x, d_b), hp["lr_global"] * turn.factor, wd)
            theta = new
            losses.append(loss)
        return theta, mu, {"train_loss": np.mean(losses)}

    return run_rounds(world, hp, server, own, work, averaged(UNIFORM))


def rounded(params, bits):
    """``s round(x / s)`` with ``s = max |x| / (2^(bits - 1) - 1)`` for each array; itself at full precision."""
    if not bits:
        return params
    scales = {k: max(np.abs(x).max() / (2 ** (bits - 1) - 1), 1e-300) for k, x in params.items()}
    return {k: scales[k] * np.round(x / scales[k]) for k, x in params.items()}


def quped(bits):
    """Both models descend one divergence in turn; the quantiser has the straight-through gradient."""

    def formula(world, hp, server, own, defect=""):
        lam, wd = hp["lam"], hp["weight_decay"]

        def work(mu, theta, turn):
            losses = []
            for x, y in turn.batches:
                deployed = rounded(theta, bits)
                a, b = forward(deployed, x), forward(mu, x)
                loss, d_a = cross_entropy(a, y)
                d_a = d_a + lam * distillation(b, a)[2]
                at = theta if defect == "gradient at the array behind" else deployed
                start = deployed if defect == "steps from the rounded model" else theta
                theta = step(start, backward(at, x, d_a), hp["lr"] * turn.factor, wd)
                student = a if defect == "mu steps against the old theta" else forward(rounded(theta, bits), x)
                d_b = cross_entropy(b, y)[1] * (defect != "no cross-entropy for mu")
                gradient = backward(mu, x, d_b + lam * distillation(b, student)[1])
                mu = step(mu, gradient, hp["lr_global"] * turn.factor, wd)
                losses.append(loss)
            return theta, mu, {"train_loss": np.mean(losses)}

        return run_rounds(world, hp, server, own, work, averaged(UNIFORM))

    return formula


BITS = 3
ORACLES = {
    "fml": Oracle(
        "fml",
        SGD | {"lr_global": 0.3, "alpha": 0.35, "beta": 0.6},
        fml,
        ("teachers not detached", "divergences reversed", "alpha and beta swapped", "mu learns from the new theta"),
    ),
    "quped": Oracle(
        "quped",
        SGD | {"lr_global": 0.3, "lam": 0.8},
        quped(0),
        ("mu steps against the old theta", "no cross-entropy for mu"),
        {"bits": 0},
    ),
    "quped, rounded": Oracle(
        "quped",
        SGD | {"lr_global": 0.3, "lam": 0.8},
        quped(BITS),
        ("gradient at the array behind", "steps from the rounded model"),
        {"bits": BITS},
        lambda last: {"after": [rounded(theta, BITS) for theta in last.clients], "mu": last.server},
        plain=True,
    ),
}
test_rounds = check_rounds(ORACLES)


@pytest.mark.slow
def test_clients_of_another_architecture():
    """Models that meet in their logits only: both train, and the global one keeps its structure."""
    mixed = run_setting("fml", ORACLES["fml"].hp, SETTINGS["full"], 2, architectures="same+linear").states
    assert len(mixed[-1].clients) == 2
    assert mixed[-1].server.keys() == mixed[0].server.keys()
    assert not mixed[-1].diverged.any()


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_few_values(bits):
    """At most 2^bits - 1 values, symmetric about zero; off by half a level at most; rounding again changes nothing."""
    x = {"w": np.random.default_rng(1).normal(size=500), "zeros": np.zeros(3)}
    q = jax.tree.map(np.asarray, quantize(x, bits))
    scale = np.abs(x["w"]).max() / (2 ** (bits - 1) - 1)
    assert len(np.unique(np.round(q["w"] / scale))) <= 2**bits - 1
    assert np.abs(q["w"] - x["w"]).max() <= scale / 2 * (1 + 1e-12)
    assert not q["zeros"].any()
    np.testing.assert_allclose(quantize(q, bits)["w"], q["w"], rtol=1e-12)
