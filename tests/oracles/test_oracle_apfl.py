"""APFL against NumPy: w by FedAvg's steps, v and alpha by the gradient at the mixture ``alpha v + (1 - alpha) w``."""

from functools import cache

import numpy as np
import pytest
from numpy_reference import Round, backward, cross_entropy, forward, step
from oracle_methods import (
    KINDS,
    SGD,
    assert_rounds,
    assert_scores,
    difference,
    engine,
    own_states,
    plain,
    run_averaging,
)
from oracle_setup import SEED, SIZES, Run, classification_problem, client_row, clients, distance, on_host

HYPER = SGD | {"alpha_init": 0.4, "lr_personal": 0.3, "lr_alpha": 2.0}

pytestmark = pytest.mark.usefixtures("float64")


@cache
def got(kind: str, **options: bool) -> Run:
    return engine("apfl", HYPER, kind, **options)


def mix(own, mu):
    return {k: own["alpha"] * own["v"][k] + (1 - own["alpha"]) * mu[k] for k in mu}


def reference(kind: str, defect: str = "", *, adapt: bool = True, keep: bool = False) -> list[Round]:
    wd = HYPER["weight_decay"]

    def work(mu, own, batches, factor):
        w, v, alpha, measured = mu, own["v"], own["alpha"], []
        for x, y in batches:
            mixed = v if defect == "gradient at v" else mix({"v": v, "alpha": alpha}, w)
            logits = forward(mixed, x)
            if defect == "logits mixed":
                logits = alpha * forward(v, x) + (1 - alpha) * forward(w, x)
            loss, d_logits = cross_entropy(logits, y)
            at_mixture = backward(v if defect == "logits mixed" else mixed, x, d_logits)
            share = 1.0 if defect == "v steps without alpha" else alpha
            of_alpha = sum(np.sum((v[k] - w[k]) * at_mixture[k]) for k in w)
            of_w = backward(w, x, cross_entropy(forward(w, x), y)[1])
            v = step(v, {k: share * at_mixture[k] for k in v}, HYPER["lr_personal"] * factor, wd)
            w = step(w, of_w, HYPER["lr"] * factor, wd)
            if adapt:
                alpha = alpha - HYPER["lr_alpha"] * factor * of_alpha
                alpha = alpha if defect == "no projection" else np.clip(alpha, 0, 1)
            measured.append((loss, alpha))
        loss, mean_alpha = np.mean(measured, axis=0)
        own = {"v": v, "alpha": np.float64(alpha), "w": (w, np.float64(1)) if keep else ()}
        return own, w, {"train_loss": loss, "alpha": mean_alpha}

    start = got(kind, adapt_alpha=adapt, keep_w=keep)
    return run_averaging(kind, HYPER, start.states[0].server, own_states(start), work)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds(kind):
    want, run = reference(kind), got(kind, adapt_alpha=True, keep_w=False)
    assert_rounds(run, want)
    mu = want[-1].server
    assert_scores(run, [mix(own, mu) for own in want[-1].clients], mu)


@pytest.mark.slow
def test_a_client_that_keeps_w_mixes_with_its_own():
    want, run = reference("uniform", keep=True), got("uniform", adapt_alpha=True, keep_w=True)
    assert_rounds(run, want)
    assert_scores(run, [mix(own, own["w"][0]) for own in want[-1].clients], want[-1].server)


@pytest.mark.slow
def test_a_client_that_was_in_no_cohort_mixes_with_mu():
    want, run = reference("uniform", keep=True)[0], got("uniform", adapt_alpha=True, keep_w=True)
    first, _ = run.simulation.advance(run.simulation.init([SEED]), 1)
    assert {0, 1} == set(want.participations)
    mixed = [
        mix(own, own["w"][0] if seen else want.server)
        for own, seen in zip(want.clients, want.participations, strict=True)
    ]
    assert_scores(run._replace(state=first), mixed, want.server)


@pytest.mark.slow
def test_alpha_that_is_not_adapted():
    want = reference("uniform", adapt=False)
    assert_rounds(got("uniform", adapt_alpha=False, keep_w=False), want)
    assert {own["alpha"] for own in want[-1].clients} == {HYPER["alpha_init"]}


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["gradient at v", "v steps without alpha", "logits mixed", "no projection"])
def test_a_defect_would_be_seen(defect):
    assert difference(got("uniform", adapt_alpha=True, keep_w=False), reference("uniform", defect)) > 1e-3


@pytest.mark.slow
def test_mixed_logits_would_be_seen():
    """The scores are those of one mixed model; a mixture of the two models' logits has others."""
    run = got("full", adapt_alpha=True, keep_w=False)
    measured = on_host(run.simulation.evaluate(run.state))
    last, losses = run.states[-1], []
    for i, (x, y) in enumerate(clients(classification_problem().test)):
        own = plain(client_row(last.clients[0], i))
        logits = own["alpha"] * forward(own["v"], x) + (1 - own["alpha"]) * forward(last.server, x)
        losses.append(cross_entropy(logits, y)[0])
    assert len(losses) == len(SIZES)
    assert distance(measured["after"]["loss"], np.array(losses)) > 1e-3
