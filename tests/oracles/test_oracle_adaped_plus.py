"""AdaPeD-plus against NumPy: the steps of kept and tuned models with every ingredient on, and each ingredient alone."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy_reference import (
    Batch,
    Params,
    average,
    backward,
    cross_entropy,
    decay,
    distillation,
    forward,
    step,
    subtract,
)
from oracle_methods import SGD, assert_scores, batches, cohorts, scores
from oracle_setup import (
    CLASSES,
    SIZES,
    STEPS,
    Run,
    assert_same,
    classification_problem,
    client_row,
    clients,
    distance,
    draws,
    on_host,
    participation,
    run,
    simulation,
)

from jaxpfl import JaxpflError
from jaxpfl.core.participation import RELIABLE, Availability, full
from jaxpfl.core.randomness import Purpose

pytestmark = pytest.mark.usefixtures("float64")

ROUNDS, TUNE, BATCH = 4, 5, 6
HYPER = SGD | {"lr_global": 0.3, "lr_psi": 0.1, "psi_init": 0.7, "psi_floor": 0.3, "c": 2.0}
OF_ADAPED = tuple(HYPER)
HYPER |= {"ce_global": 0.8, "kd_global": 0.6, "anneal": 0.9}
ALL = {"fine_tune_steps": TUNE, "own_psi": True, "normalize": True, "gate": True}
SLOW = pytest.mark.slow
SETTINGS: dict[str, dict[str, Any]] = {
    "kept": ALL | {"keep": True},
    "tuned": ALL,
    "kept, from round 0": {"keep": True, "start": "init", "fine_tune_steps": 0},
    "kept, idle": ALL | {"keep": True, "idle_rounds": 2},
    "tuned, plain": {"fine_tune_steps": TUNE},
}
QUICK = ("kept", "tuned")


@cache
def got(name: str, kind: str = "uniform") -> Run:
    options = SETTINGS[name]
    slow = Availability(stragglers=0.5) if kind == "uniform" and "idle_rounds" not in options else RELIABLE
    made = simulation(
        "adaped-plus",
        classification_problem(),
        HYPER,
        cohort=participation(kind),
        batch_size=BATCH if kind == "uniform" else 100,
        engine={"availability": slow},
        **options,
    )
    return run(made, ROUNDS)


# --- the equations --------------------------------------------------------------------------------


def seen(psi: float, r: int, defect: str = "") -> float:
    """``psi anneal^epoch``; an epoch is ``decay_every`` steps."""
    return psi if defect == "no annealing" else psi * HYPER["anneal"] ** ((r * STEPS) // int(HYPER["decay_every"]))


def theta_step(
    theta: Params, mu: Params, psi: float, batch: Batch, options: dict[str, Any], factor: float, defect: str
) -> Params:
    """``theta - eta1 a grad [CE(theta) + g f(theta, mu) / (2 psi)]``, weight decay outside a."""
    x, y = batch
    student, teacher = forward(theta, x), forward(mu, x)
    trust = max(1 - cross_entropy(teacher, y)[0] / np.log(CLASSES), 0)
    g = trust if options.get("gate") and defect != "no gate" else 1.0
    a = 1 / (1 + 1 / (2 * psi)) if options.get("normalize") and defect != "weights not normalised" else 1.0
    d_logits = a * (cross_entropy(student, y)[1] + g * distillation(teacher, student)[2] / (2 * psi))
    rate = HYPER["lr_global" if defect == "eta2 for eta1" else "lr"]
    return step(theta, backward(theta, x, d_logits), rate * factor, HYPER["weight_decay"])


def psi_step(psi: float, theta: Params, mu: Params, x: np.ndarray) -> float:
    f = distillation(forward(mu, x), forward(theta, x))[0]
    return max(psi - HYPER["lr_psi"] * (1 / (2 * psi) - HYPER["c"] * f / (2 * psi**2)), HYPER["psi_floor"])


def mu_step(mu: Params, theta: Params, psi: float, batch: Batch, factor: float, defect: str) -> Params:
    """``mu - eta2 grad [kappa CE(mu) + delta f(theta+, mu) / (2 psi)]``."""
    x, y = batch
    kappa = 1.0 if defect == "kappa left out" else HYPER["ce_global"]
    delta = 0.0 if defect == "delta left out" else HYPER["kd_global"]
    teacher = forward(mu, x)
    pull = distillation(teacher, forward(theta, x))[1] / (2 * psi)
    d_logits = kappa * cross_entropy(teacher, y)[1] + delta * pull
    return step(mu, backward(mu, x, d_logits), HYPER["lr_global"] * factor, HYPER["weight_decay"])


def tuned(
    theta: Params, mu: Params, psi: float, i: int, kind: str, options: dict[str, Any], defect: str = ""
) -> Params:
    r = ROUNDS if defect == "fine-tuned at the next round's rate" else ROUNDS - 1
    size = BATCH if kind == "uniform" else 100
    steps = options["fine_tune_steps"]
    for batch in draws(classification_problem(), i, Purpose.PERSONALIZE_BATCHES, size, steps, 0) if steps else []:
        theta = theta_step(theta, mu, seen(psi, r, defect), batch, options, decay(HYPER, r, STEPS), defect)
        if options.get("own_psi") and defect != "psi rests in fine-tuning":
            psi = psi_step(psi, theta, mu, batch[0])
    return theta


def reference(name: str, kind: str = "uniform", defect: str = "") -> tuple[list[Any], list[Params]]:
    """Server and clients after each round, and the personal models at the end."""
    options, keep = SETTINGS[name], SETTINGS[name].get("keep", False)
    cap, start = options.get("idle_rounds", 0), got(name, kind).states[0].server
    server = {"mu": start.mu, "psi": HYPER["psi_init"]}
    own = [{"theta": server["mu"], "psi": server["psi"], "met": 0, "received": server} for _ in SIZES]
    done, streak, history = [0] * len(SIZES), [0] * len(SIZES), []

    def drawn(i: int, r: int) -> list[Batch]:
        if cap:  # no stragglers there
            return draws(classification_problem(), i, Purpose.BATCHES, BATCH, STEPS, done[i])
        return batches(kind, i, done[i], r)

    def begun(one: dict[str, Any], server: dict[str, Any]) -> tuple[Params, float]:
        late = options.get("start", "mu") == "mu" and defect != "theta from round 0"
        theta = server["mu"] if late and not one["met"] else one["theta"]
        mine = options.get("own_psi") and one["met"] and defect != "psi of the server"
        return theta, one["psi"] if mine else server["psi"]

    for r, cohort in enumerate(cohorts(kind)):
        factor, changes = decay(HYPER, r, STEPS), []
        for i in set(range(len(SIZES))) - set(cohort):
            if streak[i] < cap:
                mu = own[i]["received"]["mu"]
                psi = own[i]["psi"] if own[i]["met"] and options["own_psi"] else own[i]["received"]["psi"]
                theta = own[i]["theta"]
                for batch in drawn(i, r):
                    theta = theta_step(theta, mu, seen(psi, r, defect), batch, options, factor, defect)
                own[i] = own[i] | {"theta": theta}
                done[i], streak[i] = done[i] + 1, streak[i] + 1
        for i in cohort:
            mu = server["mu"]
            theta, psi = begun(own[i], server) if keep else (mu, server["psi"])
            for batch in drawn(i, r):
                if keep:
                    theta = theta_step(theta, mu, seen(psi, r, defect), batch, options, factor, defect)
                    mu = mu_step(mu, theta, seen(psi, r, defect), batch, factor, defect)
                    psi = psi_step(psi, theta, mu, batch[0])
                else:
                    mu = mu_step(mu, mu, psi, batch, factor, defect)
            own[i] = {"theta": theta, "psi": psi, "met": own[i]["met"] + 1, "received": server}
            done[i], streak[i] = done[i] + 1, 0
            changes.append({"mu": subtract(mu, server["mu"]), "psi": psi - server["psi"]})
        weights = [1.0 if defect == "averaged uniformly" else float(SIZES[i]) for i in cohort]
        server = average(server, changes, weights)
        history.append((server, list(own)))
    models = []
    for i, one in enumerate(own):
        theta, psi = begun(one, server) if keep else (server["mu"], server["psi"])
        models.append(tuned(theta, server["mu"], psi, i, kind, options, defect))
    return history, models


def engine_end(name: str, kind: str = "uniform") -> Any:
    return got(name, kind).states[-1]


# --- the tests ------------------------------------------------------------------------------------

CASES = [pytest.param(name, "uniform", id=name, marks=() if name in QUICK else SLOW) for name in SETTINGS]
CASES += [pytest.param("kept", "full", id="kept, everyone", marks=SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rounds(name, kind):
    want, models = reference(name, kind)
    for state, (server, own) in zip(got(name, kind).states[1:], want, strict=True):
        assert_same(state.server._asdict(), server)
        if not SETTINGS[name].get("keep"):
            assert state.clients[0] == ()
            continue
        for i in range(len(SIZES)):
            mine = client_row(state.clients[0], i)
            assert_same(mine.theta, own[i]["theta"])
            np.testing.assert_allclose(mine.psi, own[i]["psi"], rtol=1e-9)
            assert mine.met == own[i]["met"]
    server, own = want[-1]
    before = [one["theta"] if one["met"] else server["mu"] for one in own]
    if SETTINGS[name].get("start") == "init":
        before = [one["theta"] for one in own]
    assert_scores(got(name, kind), models, server["mu"], before if SETTINGS[name].get("keep") else [server["mu"]] * 5)


@pytest.mark.slow
def test_clients_that_no_round_took_have_todays_mu():
    """Their models before fine-tuning, after one round; the others have their own."""
    made = got("kept").simulation
    one = run(made, 1)
    server, own = reference("kept")[0][0]
    assert {client["met"] for client in own} == {0, 1}
    models = [client["theta"] if client["met"] else server["mu"] for client in own]
    measured = on_host(made.evaluate(one.state))["before"]
    assert_same({name: measured[name] for name in ("accuracy", "loss")}, scores(models))


def test_the_gate_opens_and_shuts():
    mu = got("kept").states[0].server.mu
    losses = [cross_entropy(forward(mu, x), y)[0] for x, y in clients(classification_problem().train)]
    end = [
        cross_entropy(forward(engine_end("kept").server.mu, x), y)[0]
        for x, y in clients(classification_problem().train)
    ]
    assert max(losses) > np.log(CLASSES) > min(end)


DEFECTS = {
    "kept": [
        "no annealing",
        "no gate",
        "weights not normalised",
        "eta2 for eta1",
        "kappa left out",
        "delta left out",
        "theta from round 0",
        "psi of the server",
        "averaged uniformly",
    ],
    "tuned": [
        "kappa left out",
        "averaged uniformly",
        "psi rests in fine-tuning",
        "fine-tuned at the next round's rate",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "defect"), [(name, defect) for name in DEFECTS for defect in DEFECTS[name]])
def test_a_defect_would_be_seen(name, defect):
    """In the states, or in what fine-tuning makes of them."""
    (history, models), (wrong, others) = reference(name), reference(name, defect=defect)
    assert distance((wrong[-1][0], others), (history[-1][0], models)) > 1e-4


@pytest.mark.slow
def test_without_its_ingredients_it_is_adaped():
    """Full participation of clients of one size: weights by examples are uniform."""
    hp = HYPER | {"ce_global": 0.0, "kd_global": 1.0, "anneal": 1.0}
    problem = classification_problem((8,) * 4, (0, 1, 2, 3))
    given = {"cohort": full(4), "batch_size": 5}
    made = simulation("adaped-plus", problem, hp, keep=True, start="init", fine_tune_steps=0, **given)
    theirs = simulation("adaped", problem, {name: hp[name] for name in OF_ADAPED}, **given)
    mine, adaped = run(made, 3), run(theirs, 3)
    assert_same(mine.states[-1].server._asdict(), adaped.states[-1].server._asdict())
    assert_same(mine.states[-1].clients[0].theta, adaped.states[-1].clients[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fine_tune_steps": -1}, r"adaped-plus\.fine_tune_steps must be >= 0, got -1"),
        ({"idle_rounds": -1, "keep": True}, r"adaped-plus\.idle_rounds must be >= 0, got -1"),
        ({"idle_rounds": 2}, r"adaped-plus\.idle_rounds=2 is of a kept theta: it needs keep=True"),
        ({"start": "init"}, r"adaped-plus\.start=init is of a kept theta: it needs keep=True"),
        ({"start": "ini", "keep": True}, r"adaped-plus\.start 'ini'.*init"),
    ],
)
def test_options_that_make_no_sense(options, said):
    with pytest.raises(JaxpflError, match=said):
        simulation("adaped-plus", classification_problem(), {}, **options)
