"""QuPeD against NumPy: both models descend one divergence in turn; the quantiser with the straight-through gradient."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, distillation, forward, step
from oracle_methods import SGD, assert_rounds, assert_scores, difference, engine, own_states, run_averaging
from oracle_setup import Run, classification_problem, simulation

from jaxpfl import JaxpflError
from jaxpfl.algorithms.quped import quantize

HYPER = SGD | {"lr_global": 0.3, "lam": 0.8}
BITS = 3

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str, bits: int) -> Run:
    return engine("quped", HYPER, kind, bits=bits)


def rounded(params, bits: int):
    """``s round(x / s)`` with ``s = max |x| / (2^(bits - 1) - 1)`` for each array; itself at full precision."""
    if not bits:
        return params
    scales = {k: max(np.abs(x).max() / (2 ** (bits - 1) - 1), 1e-300) for k, x in params.items()}
    return {k: scales[k] * np.round(x / scales[k]) for k, x in params.items()}


def reference(kind: str, bits: int = 0, defect: str = "") -> list[Round]:
    lam, wd = HYPER["lam"], HYPER["weight_decay"]

    def work(received, theta, batches, factor):
        mu, losses = received, []
        for x, y in batches:
            deployed = rounded(theta, bits)
            a, b = forward(deployed, x), forward(mu, x)
            loss, d_a = cross_entropy(a, y)
            d_a = d_a + lam * distillation(b, a)[2]
            at = theta if defect == "gradient at the array behind" else deployed
            start = deployed if defect == "steps from the rounded model" else theta
            theta = step(start, backward(at, x, d_a), HYPER["lr"] * factor, wd)
            student = a if defect == "mu steps against the old theta" else forward(rounded(theta, bits), x)
            d_b = cross_entropy(b, y)[1] * (defect != "no cross-entropy for mu") + lam * distillation(b, student)[1]
            mu = step(mu, backward(mu, x, d_b), HYPER["lr_global"] * factor, wd)
            losses.append(loss)
        return theta, mu, {"train_loss": np.mean(losses)}

    start = got(kind, bits)
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("full", 0), ("uniform", 0), ("uniform", BITS)],
)
def test_rounds(kind, bits):
    want = reference(kind, bits)
    assert_rounds(got(kind, bits), want)
    assert_scores(got(kind, bits), [rounded(theta, bits) for theta in want[-1].clients], want[-1].server)


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["mu steps against the old theta", "no cross-entropy for mu"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform", 0), reference("uniform", 0, defect)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["gradient at the array behind", "steps from the rounded model"])
def test_a_defect_of_the_quantiser_would_be_seen(defect):
    assert difference(got("uniform", BITS), reference("uniform", BITS, defect)) > 1e-3


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


@pytest.mark.parametrize("bits", [1, 17, -2])
def test_bits_out_of_range(bits):
    with pytest.raises(JaxpflError, match=r"quped\.bits must be 0, or >= 2 and <= 16"):
        simulation("quped", classification_problem(), {}, bits=bits)
