"""PersFL by the engine in float64 against NumPy: the teachers of every round, every student of the grid, the choice.

Stage 1 is FedAvg, which `test_oracle_rounds` holds against NumPy: its recorded models are what teachers are chosen of.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from numpy_reference import backward, cross_entropy, decay, forward, log_softmax, run_fedavg, step
from oracle import IDS, NEWCOMERS, SEED, SETTINGS, SGD, SIZES, STEPS, M, Run, assert_same, classification_problem

from jaxpfl import METHODS, LocalWork
from jaxpfl.core.protocol import ALL_STEPS, ClientContext, Message
from jaxpfl.core.randomness import Purpose, stream

ROUNDS, BATCH, DISTILL, HYPER = 5, 6, 4, SGD
GRID = {"temperatures": (1.0, 3.0), "imitations": (0.0, 0.5, 1.0)}
PAIRS = [(0.0, 1.0), (0.5, 1.0), (0.5, 3.0), (1.0, 1.0), (1.0, 3.0)]
KINDS = {
    "teacher first": ("persfl", {}),
    "student first": ("persfl", {"teacher_first": False}),
    "last teacher": ("persfl", {"teacher": "last"}),
    "GD": ("persfl-gd", {}),
}
LOSS_DEFECTS = ("no T^2", "no temperature", "weights swapped", "the other direction", "starts from the last model")


def persfl(**given) -> Run:
    return oracle.run_setting("persfl", HYPER, SETTINGS["reliable"], ROUNDS, distill_steps=DISTILL, **GRID, **given)


@cache
def engine() -> Run:
    return persfl()


# --- stage 1 --------------------------------------------------------------------------------------


def teachers(broadcast: list, cohorts: list, validation: list, *, first_wins: bool = True) -> list[list]:
    """After each round (place of the teacher among the broadcast models, its loss) for every client."""
    kept, history = [(0, np.finfo(float).max)] * len(validation), []
    for r, cohort in enumerate(cohorts):
        for i in cohort:
            loss = cross_entropy(forward(broadcast[r], validation[i][0]), validation[i][1])[0]
            if loss < kept[i][1] if first_wins else loss <= kept[i][1]:
                kept[i] = (r, loss)
        history.append(list(kept))
    return history


@cache
def stage_1() -> tuple[list, list, list]:
    """The global models before every round and after the last one, the cohorts, and the validation examples."""
    cohorts = oracle.world(SETTINGS["reliable"], ROUNDS).cohorts
    return (
        [state.server for state in engine().states],
        list(cohorts),
        oracle.clients(classification_problem().validation),
    )


def test_teachers_of_every_round():
    broadcast, cohorts, validation = stage_1()
    want = teachers(broadcast, cohorts, validation)
    for state, kept in zip(engine().states[1:], want, strict=True):
        for i, (r, loss) in enumerate(kept):
            got = oracle.client_row(state.clients[0], i)
            assert_same(got.params, broadcast[r], rtol=0)
            assert_same(got.loss, np.float64(loss))
    assert len({r for r, _ in want[-1]}) > 1  # else the choice is no choice


def test_stage_1_is_fedavg():
    start, *states = engine().states
    want = run_fedavg(oracle.world(SETTINGS["reliable"], ROUNDS), HYPER, start.server, [()] * M)
    for state, expected in zip(states, want, strict=True):
        assert_same(state.server, expected.server)


@pytest.mark.slow
def test_the_first_of_equal_teachers_wins():
    """A validation example that no model gets wrong any more ties at a loss of zero; ``<=`` would take the second."""
    client = METHODS["persfl"].build(oracle.perceptron(), LocalWork(np.array(SIZES), STEPS, BATCH)).clients[0]
    model = oracle.perceptron().init(jax.random.key(0))
    sure = [model | {"w2": 0 * model["w2"], "b2": np.array([b, 0.0, 0.0])} for b in (900.0, 950.0)]
    splits = jax.tree.map(jnp.asarray, classification_problem().splits.client(0))
    splits = splits._replace(validation=splits.validation.with_examples(y=0 * splits.validation.examples.y))
    kept = first = None
    for mu in sure:
        kept = update(client, kept, mu, splits)
        first = first or kept
    assert_same(kept, first, rtol=0)
    validation = [(splits.validation.x, splits.validation.y)]
    places = [teachers(sure, [[0], [0]], validation, first_wins=strict)[-1][0] for strict in (True, False)]
    assert places == [(0, 0.0), (1, 0.0)]
    assert_same(kept.params["b2"], sure[0]["b2"], rtol=0)


def update(client, kept, mu, splits):
    key, hp, message = jax.random.key(0), METHODS["persfl"].hyper, Message(jax.tree.map(jnp.asarray, mu))
    ctx = ClientContext(jnp.int32(0), jnp.int32(3), jnp.int32(0), ALL_STEPS, key)
    kept = client.init(key, hp, ctx, message) if kept is None else kept
    return client.update(key, hp, ctx, message, kept, splits)[0]


# --- stage 2 --------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits))


def soft_gradient(o: np.ndarray, a: np.ndarray, teacher_first: bool) -> np.ndarray:
    """By a: KL(p || q) gives ``q - p``, and KL(q || p) gives ``q (log q - log p - KL)``; p of o, q of a."""
    if teacher_first:
        return softmax(a) - softmax(o)
    log_q, log_p, q = log_softmax(a), log_softmax(o), softmax(a)
    return q * (log_q - log_p - (q * (log_q - log_p)).sum(1, keepdims=True))


def distil(teacher: dict, batches: list, lam: float, t: float, kind: str, defect: str = "", last=None) -> dict:
    """``a - eta [(1 - lam) CE' + lam T^2 / T soft'(o/T, a/T)]``, from the teacher."""
    rate = HYPER["lr"] * decay(HYPER, ROUNDS - 1, STEPS)
    student = last if defect == "starts from the last model" else teacher
    direction = (kind != "student first") != (defect == "the other direction")
    if defect == "weights swapped":
        lam = 1 - lam
    if defect == "no temperature":
        t = 1.0
    for x, y in batches:
        o, a = forward(teacher, x), forward(student, x)
        scale = 1 / t if defect == "no T^2" else t
        d = (1 - lam) * cross_entropy(a, y)[1] + lam * scale * soft_gradient(o / t, a / t, direction) / len(y)
        student = step(student, backward(student, x, d), rate, HYPER["weight_decay"])
    return student


def accuracy(model: dict, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(forward(model, x).argmax(1) == y))


def final_teacher(i: int, kind: str) -> dict:
    """The best of what the client received and of the last global model; or the last."""
    broadcast, cohorts, validation = stage_1()
    if kind == "last teacher":
        return broadcast[-1]
    everyone = [*cohorts, range(M)]
    return broadcast[teachers(broadcast, everyone, validation)[-1][i][0]]


def students(i: int, kind: str, pairs: list, defect: str = "") -> list[dict]:
    batches = oracle.tuning_batches(i, BATCH, DISTILL)
    teacher, last = final_teacher(i, kind), stage_1()[0][-1]
    return [distil(teacher, batches, lam, t, kind, defect, last) for lam, t in pairs]


@cache
def personal(kind: str, **options) -> list:
    """Personalised model of every client, by `personalize` from the final state of the run."""
    method, choices = KINDS[kind]
    choices = {"distill_steps": DISTILL} | GRID | choices | options
    made = METHODS[method].build(oracle.perceptron(), LocalWork(np.array(SIZES), STEPS, BATCH), **choices)
    hp, last = METHODS[method].hyper.replace(**HYPER), engine().states[-1]
    kept = () if choices.get("teacher") == "last" else last.clients[0]

    @jax.jit
    @partial(jax.vmap, in_axes=(0, 0, 0, None))
    def personalize(row, client_id, kept, splits):
        key = stream(jax.random.key(SEED), Purpose.PERSONALIZE_BATCHES, client_id)
        ctx = ClientContext(jnp.int32(ROUNDS), client_id, jnp.int32(0), ALL_STEPS, key)
        return made.clients[0].personalize(key, hp, ctx, Message(last.server), kept, splits.client(row))

    models = personalize(jnp.arange(len(IDS)), jnp.array(IDS), kept, classification_problem().splits)
    return [jax.tree.map(np.asarray, oracle.client_row(models, i)) for i in range(M)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_student_of_greatest_validation_accuracy(kind):
    chosen = set()
    for i, got in enumerate(personal(kind)):
        made = students(i, kind, PAIRS)
        best = int(np.argmax([accuracy(model, *stage_1()[2][i]) for model in made]))
        assert (float(got.imitation), float(got.temperature)) == PAIRS[best]
        assert_same(got.params, made[best])
        chosen.add(best)
    assert len(chosen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["teacher first", "student first", "GD"])
def test_one_point_of_the_grid(kind):
    """Without a choice, every client's student is that of the point, whatever its accuracy."""
    want = [students(i, kind, [(0.25, 3.0)])[0] for i in range(M)]
    for got, student in zip(personal(kind, imitations=(0.25,), temperatures=(3.0,)), want, strict=True):
        assert_same(got.params, student)
    for defect in LOSS_DEFECTS if kind == "teacher first" else ():
        assert oracle.distance([students(i, kind, [(0.25, 3.0)], defect)[0] for i in range(M)], want) > 1e-5, defect


@pytest.mark.slow
def test_ties_go_to_the_least_lambda_and_then_to_the_least_temperature():
    """With three to seven validation examples most of the grid ties; the last of equals would be another choice."""
    different = 0
    for i, got in enumerate(personal("teacher first")):
        scores = [accuracy(model, *stage_1()[2][i]) for model in students(i, "teacher first", PAIRS)]
        ties = [pair for pair, score in zip(PAIRS, scores, strict=True) if score == max(scores)]
        assert (float(got.imitation), float(got.temperature)) == ties[0]
        different += ties[0] != ties[-1]
    assert different
    unsorted = personal("teacher first", temperatures=(3.0, 1.0), imitations=(1.0, 0.5, 0.0))
    for got, want in zip(unsorted, personal("teacher first"), strict=True):
        assert_same(got, want, rtol=0)
    for got in personal("teacher first", imitations=(0.0,), temperatures=(3.0, 1.0)):
        assert float(got.temperature) == 1.0


@pytest.mark.slow
def test_scores_before_are_the_teachers_and_after_the_students():
    found = engine().simulation.evaluate(engine().state)
    models = {"before": [final_teacher(i, "teacher first") for i in range(M)]}
    models["after"] = [one.params for one in personal("teacher first")]
    for which, each in models.items():
        np.testing.assert_allclose(found[which]["loss"][0], oracle.scores(each)["loss"], rtol=1e-9)


# --- new participants -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "kept"), [(0, []), (3, [0, 2, 4])], ids=["last model", "stored models"])
def test_a_new_participant_distils_from_the_best_that_it_receives(stored, kept):
    """Only newcomers are sent stored models: the same bytes a round, the same states and scores of trained clients."""
    unseen = classification_problem((*NEWCOMERS[0], 5), (*NEWCOMERS[1], 77))
    got = persfl(engine={"unseen": unseen, "adapt_rounds": 2}, stored=stored)
    broadcast, server, made = stage_1()[0], got.states[-1].server, got.simulation
    assert_same(server.state if stored else server, broadcast[-1], rtol=0)
    assert_same(got.states[-1].clients, engine().states[-1].clients, rtol=0)
    assert made.bytes_per_client() == engine().simulation.bytes_per_client()
    trained = (one.simulation.evaluate(one.state)["after"]["loss"] for one in (got, engine()))
    assert_same(*trained)
    validation = oracle.clients(unseen.validation)
    received = [broadcast[r] for r in [*kept, ROUNDS]]
    places = [place for place, _ in teachers(received, [range(4)] * len(received), validation)[-1]]
    assert not stored or len(set(places)) > 1  # else the choice is no choice
    best = []
    for i, place in enumerate(places):
        batches = oracle.tuning_batches(i, BATCH, DISTILL, unseen)
        options = [distil(received[place], batches, lam, t, "teacher first") for lam, t in PAIRS]
        best.append(max(options, key=lambda model, i=i: accuracy(model, *validation[i])))
    found = made.evaluate_unseen(got.state)
    for which, models in (("before", [received[place] for place in places]), ("after", best)):
        want = oracle.scores(models, oracle.clients(unseen.test))["loss"]
        np.testing.assert_allclose(found[which]["loss"][0], want, rtol=1e-9)


@pytest.mark.slow
def test_without_a_choice_clients_without_validation_examples_are_served():
    options = {"teacher": "last", "temperatures": (3.0,), "imitations": (0.5,), "distill_steps": 4}
    got = oracle.run_method(
        "persfl", rounds=1, problem=oracle.stack(oracle.train_data(), oracle.scored_data(), IDS), **options
    )
    assert np.isfinite(got.simulation.evaluate(got.state)["after"]["loss"]).all()
