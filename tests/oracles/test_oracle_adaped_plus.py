"""AdaPeD-plus against NumPy: the steps of kept and tuned models with every ingredient on, and each ingredient alone."""

import numpy as np
import oracle
import pytest
from numpy_reference import averaged, backward, cross_entropy, decay, distillation, forward, run_rounds, step
from oracle import ADAPED, CLASSES, ROUNDS, SETTINGS, SIZES, STEPS, M, Oracle, assert_same, distance, on_host

TUNE, BATCH = 5, SETTINGS["uniform"].batch_size
BASE = ADAPED | {"psi_init": 0.7, "psi_floor": 0.3, "c": 2.0}
HYPER = BASE | {"ce_global": 0.8, "kd_global": 0.6, "anneal": 0.9}
ALL = {"fine_tune_steps": TUNE, "own_psi": True, "normalize": True, "gate": True}


def annealed(psi, r, defect=""):
    """``psi anneal^epoch``; an epoch is ``decay_every`` steps."""
    return psi if defect == "no annealing" else psi * HYPER["anneal"] ** ((r * STEPS) // int(HYPER["decay_every"]))


def theta_step(theta, mu, psi, batch, options, factor, defect):
    """``theta - eta1 a grad [CE(theta) + g f(theta, mu) / (2 psi)]``, weight decay outside a."""
    x, y = batch
    student, teacher = forward(theta, x), forward(mu, x)
    trust = max(1 - cross_entropy(teacher, y)[0] / np.log(CLASSES), 0)
    g = trust if options.get("gate") and defect != "no gate" else 1.0
    a = 1 / (1 + 1 / (2 * psi)) if options.get("normalize") and defect != "weights not normalised" else 1.0
    d_logits = a * (cross_entropy(student, y)[1] + g * distillation(teacher, student)[2] / (2 * psi))
    rate = HYPER["lr_global" if defect == "eta2 for eta1" else "lr"]
    return step(theta, backward(theta, x, d_logits), rate * factor, HYPER["weight_decay"])


def psi_step(psi, theta, mu, x):
    f = distillation(forward(mu, x), forward(theta, x))[0]
    return max(psi - HYPER["lr_psi"] * (1 / (2 * psi) - HYPER["c"] * f / (2 * psi**2)), HYPER["psi_floor"])


def mu_step(mu, theta, psi, batch, factor, defect):
    """``mu - eta2 grad [kappa CE(mu) + delta f(theta+, mu) / (2 psi)]``."""
    x, y = batch
    kappa = 1.0 if defect == "kappa left out" else HYPER["ce_global"]
    delta = 0.0 if defect == "delta left out" else HYPER["kd_global"]
    teacher = forward(mu, x)
    pull = distillation(teacher, forward(theta, x))[1] / (2 * psi)
    gradient = backward(mu, x, kappa * cross_entropy(teacher, y)[1] + delta * pull)
    return step(mu, gradient, HYPER["lr_global"] * factor, HYPER["weight_decay"])


def begun(own, server, options, defect=""):
    """theta and psi from which a client's turn starts."""
    if not options.get("keep"):
        return server["mu"], server["psi"]
    late = options.get("start", "mu") == "mu" and defect != "theta from round 0"
    theta = server["mu"] if late and not own["met"] else own["theta"]
    mine = options.get("own_psi") and own["met"] and defect != "psi of the server"
    return theta, own["psi"] if mine else server["psi"]


def adaped_plus(options):
    keep, cap = options.get("keep"), options.get("idle_rounds", 0)

    def formula(world, hp, server, own, defect=""):
        def work(server, own, turn):
            (theta, psi), mu = begun(own, server, options, defect), server["mu"]
            for batch in turn.batches:
                if keep:
                    seen = annealed(psi, turn.round, defect)
                    theta = theta_step(theta, mu, seen, batch, options, turn.factor, defect)
                    mu = mu_step(mu, theta, seen, batch, turn.factor, defect)
                    psi = psi_step(psi, theta, mu, batch[0])
                else:
                    mu = mu_step(mu, mu, psi, batch, turn.factor, defect)
            if keep:
                received = server if cap else ()
                own = {"theta": theta, "psi": np.float64(psi), "met": own["met"] + 1, "received": received}
            return own, {"mu": mu, "psi": psi}, {}

        def idle(own, turn):
            received, theta = own["received"], own["theta"]
            psi = annealed(own["psi"] if own["met"] and options["own_psi"] else received["psi"], turn.round, defect)
            for batch in turn.batches:
                theta = theta_step(theta, received["mu"], psi, batch, options, turn.factor, defect)
            return own | {"theta": theta}

        serve = averaged([1.0] * M if defect == "averaged uniformly" else SIZES)
        return run_rounds(world, hp, server, own, work, serve, idle, cap)

    return formula


def tuned(own, server, i, options, defect=""):
    """A client's model after fine-tuning."""
    (theta, psi), mu, steps = begun(own, server, options, defect), server["mu"], options["fine_tune_steps"]
    r = ROUNDS if defect == "fine-tuned at the next round's rate" else ROUNDS - 1
    for batch in oracle.tuning_batches(i, BATCH, steps) if steps else ():
        theta = theta_step(theta, mu, annealed(psi, r, defect), batch, options, decay(HYPER, r, STEPS), defect)
        if options.get("own_psi") and defect != "psi rests in fine-tuning":
            psi = psi_step(psi, theta, mu, batch[0])
    return theta


class Plus(Oracle):
    """An oracle whose defects are seen in the states or in what fine-tuning makes of them."""

    def tuned(self, last, defect=""):
        return [tuned(own, last.server, i, self.options, defect) for i, own in enumerate(last.clients)]

    def off_by(self, defect, kind="uniform"):
        right, wrong = self.want(kind)[-1], self.want(kind, defect)[-1]
        return distance((wrong.server, self.tuned(wrong, defect)), (right.server, self.tuned(right)))


def as_floats(state):
    """The clients' numbers of rounds as the other leaves."""
    own = oracle.plain_clients(state)
    return oracle.plain(state.server), [one | {"met": np.float64(one["met"])} if one else one for one in own]


def plus(*defects, kinds=("uniform",), plain=True, **options):
    def models(last):
        before = [begun(own, last.server, options)[0] for own in last.clients]
        after = [tuned(own, last.server, i, options) for i, own in enumerate(last.clients)]
        return {"after": after, "mu": last.server["mu"], "before": before}

    formula = adaped_plus(options)
    return Plus("adaped-plus", HYPER, formula, defects, options, models, as_floats, seen=1e-4, kinds=kinds, plain=plain)


ORACLES = {
    "kept": plus(
        *("no annealing", "no gate", "weights not normalised", "eta2 for eta1", "kappa left out", "delta left out"),
        *("theta from round 0", "psi of the server", "averaged uniformly"),
        keep=True,
        **ALL,
    ),
    "tuned": plus(
        "kappa left out", "averaged uniformly", "psi rests in fine-tuning", "fine-tuned at the next round's rate", **ALL
    ),
    "kept, from round 0": plus(keep=True, start="init", fine_tune_steps=0),
    "kept, idle": plus(keep=True, idle_rounds=2, kinds=("reliable",), plain=False, **ALL),
    "tuned, plain": plus(fine_tune_steps=TUNE, plain=False),
}
test_rounds = oracle.check_rounds(ORACLES)


@pytest.mark.slow
def test_clients_that_no_round_took_have_todays_mu():
    """Their models before fine-tuning, after one round; the others have their own."""
    made, last = ORACLES["kept"].got().simulation, ORACLES["kept"].want()[0]
    assert {own["met"] for own in last.clients} == {0, 1}
    models = [begun(own, last.server, ORACLES["kept"].options)[0] for own in last.clients]
    measured = on_host(made.evaluate(oracle.run(made, 1).state))["before"]
    assert_same({name: measured[name] for name in ("accuracy", "loss")}, oracle.scores(models))


@pytest.mark.slow
def test_the_gate_opens_and_shuts():
    first, last = (
        [cross_entropy(forward(ORACLES["kept"].got().states[r].server.mu, x), y)[0] for x, y in oracle.train_data()]
        for r in (0, -1)
    )
    assert max(first) > np.log(CLASSES) > min(last)
