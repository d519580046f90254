"""What no method or setting of the oracles can serve: refused before anything is compiled, in one line."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle import IDS, SIZES, STEPS, M, classification_problem, clients, least_squares, perceptron, simulation, stack

import jaxpfl
from jaxpfl import METHODS, JaxpflError, JaxpflWarning, LocalWork, classification
from jaxpfl.algorithms.parts import schedules
from jaxpfl.core.participation import Availability, poisson, uniform
from jaxpfl.models import build_model
from jaxpfl.models.base import start_from
from jaxpfl.privacy import Mechanism
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.similarity import graphs


def refused(message, call):
    with pytest.raises(JaxpflError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# --- methods --------------------------------------------------------------------------------------


def without_validation(ids=IDS):
    """The fourth client has no validation examples."""
    validation = clients(classification_problem().validation)
    validation[3] = validation[3][0][:0], validation[3][1][:0]
    return stack(oracle.train_data(), oracle.scored_data(), ids, validation)


def task(**model):
    return perceptron()._replace(model=perceptron().model._replace(**model))


def linear():
    return classification(build_model("linear", 3, (4,)), (4,), 3)


def alike():
    """A task whose models all start from the same parameters."""
    return start_from(perceptron(), perceptron().init(jax.random.key(0)))


def apart():
    """A task without classes whose models start apart."""
    given = least_squares(4)
    return given._replace(model=given.model._replace(init=lambda key, x: jax.random.normal(key, (4,))))


def nodes(number):
    return {"choices": {"graph": graphs.from_edges([], number)}}


NO_NORM = r"this model declares none: .* mlp-ln, cnn-gn or resnet"
ABOUT = r"in_flight must be 0 or between 3 \(clients in a round\) and 5 \(all clients\), got 2"
REFUSED = [
    (
        "adamix",
        {"cohort": uniform(5, 4), "components": 5},
        r"be at most 4 \(the number of clients in a round\), got 5: otherwise every",
    ),
    ("adaped", {"architectures": "same+lineer"}, "linear"),
    ("adaped", {"architectures": "+".join(["same"] * 7)}, "has no client"),
    ("adaped-plus", {"fine_tune_steps": -1}, r"adaped-plus\.fine_tune_steps must be >= 0, got -1"),
    ("adaped-plus", {"idle_rounds": -1, "keep": True}, r"adaped-plus\.idle_rounds must be >= 0, got -1"),
    ("adaped-plus", {"idle_rounds": 2}, r"adaped-plus\.idle_rounds=2 requires keep=True"),
    ("adaped-plus", {"start": "init"}, r"adaped-plus\.start=init requires keep=True"),
    ("cfl", {"cohort": uniform(5, 3)}, r"the cohort must be 5 \(the number of clients\), got 3"),
    ("cfl", {"max_clusters": 1}, "cfl.max_clusters must be >= 2, got 1: use fedavg for a single cluster"),
    ("fedala", {"weight_steps": 0}, "^fedala.weight_steps must be >= 1, got 0$"),
    ("fedbabu", {"fine_tune": "heads"}, "unknown fedbabu.fine_tune 'heads': did you mean 'head'"),
    ("fedbabu", {"fine_tune_steps": -1}, "^fedbabu.fine_tune_steps must be >= 0, got -1$"),
    ("fedbn", {"task": task(norm=None)}, NO_NORM),
    ("fedbn", {"task": task(norm=lambda path: False)}, NO_NORM),
    ("fedbuff", {"cohort": uniform(5, 3), "in_flight": 2}, ABOUT),
    ("fedbuff", {"cohort": poisson(5, 0.5)}, "require cohorts of a fixed size, got participation = poisson"),
    ("fedem", {"task": apart()}, "fedem mixes class probabilities"),
    ("fedem", {"task": alike()}, "^fedem requires models with different initial parameters"),
    ("fedem", {"components": 1}, "^fedem.components must be >= 2, got 1"),
    ("fedem", {"components": 6}, r"^fedem.components must be <= 5 \(the number of clients\)"),
    ("fedpac", {"head_steps": 0}, r"fedpac\.head_steps must be >= 1, got 0"),
    ("fedper", {"task": task(head=None)}, "^fedper requires .*names its head"),
    ("fedper", {"task": task(head=lambda path: False)}, "^fedper requires .*matches none of its parameters"),
    ("fedper", {"task": linear()}, "^fedper requires .*matches every parameter"),
    ("fedproto", {"architectures": "same+mlp:7"}, "fedproto requires .* the same number of features, got 5 and 7"),
    ("fedproto", {"predict": "heads"}, "unknown fedproto.predict 'heads'"),
    ("fedrep", {"task": task(head=None)}, "^fedrep requires .*names its head"),
    ("fedrep", {"head_steps": 3}, "at least one step on the head and one on the body"),
    ("ifca", {"task": alike()}, "^ifca requires models with different initial parameters"),
    ("ifca", {"clusters": 1}, "^ifca.clusters must be >= 2, got 1"),
    ("ifca", {"clusters": 6}, r"^ifca.clusters must be <= 5 \(the number of clients\)"),
    ("ifca", {"choices": {"server_optimizer": "fedadam"}}, "server_optimizer must be sgd, got fedadam"),
    ("knn-per", {"neighbours": 0}, r"knn-per\.neighbours must be >= 1, got 0"),
    ("local", {"engine": {"unseen": classification_problem((5,), (7,))}}, "client 7 is in both federation and unseen"),
    ("map-gaussian", {"estimate": "moments"}, "unknown estimate 'moments'"),
    ("map-kd", {"distance": "l1"}, "unknown distance 'l1'"),
    ("map-kd", {"distance": "square", "exact": True}, "exact = true requires distance = kd, got square"),
    ("map-kd", {"scaling": "max"}, "unknown scaling 'max'"),
    ("network-lasso", {"p": 3.0}, "p must be 1, 2 or inf, got 3.0"),
    ("network-lasso", {"scaling": "means"}, "did you mean 'mean'"),
    ("network-lasso", {"admm_steps": 0}, "network-lasso.admm_steps must be >= 1, got 0"),
    ("network-lasso", {"tolerance": 0.0}, "network-lasso.tolerance must be > 0 and < 1, got 0.0"),
    ("network-lasso", {"shared": "w1,w3"}, "shared = 'w3' matches no parameter; the parameters are b1, b2, w1, w2"),
    ("network-lasso", {"personal": "none"}, "network-lasso has nothing to train"),
    ("network-lasso", nodes(6), "the graph must have 5 nodes, one for each client, got 6"),
    ("network-lasso", {"choices": {"graph": None}}, "network-lasso requires a graph of the clients"),
    ("persfl", {"temperatures": (1.0, 0.0)}, "^persfl.temperatures must be one or more numbers > 0"),
    ("persfl", {"imitations": (1.5,)}, "^persfl.imitations must be one or more numbers >= 0 and <= 1"),
    ("persfl", {"teacher": "first"}, "^persfl.teacher must be best or last"),
    ("persfl", {"stored": 1}, "^persfl.stored must be 0 or >= 2, got 1"),
    ("persfl", {"stored": 4, "teacher": "last"}, "^persfl.stored requires teacher = best"),
    ("persfl", {"distill_steps": 0}, "^persfl.distill_steps must be >= 1"),
    ("persfl", {"task": least_squares(4)}, "persfl distills probabilities"),
    ("persfl", {"problem": without_validation()}, "^persfl selects models .*, but 1 of 5 clients have none"),
    ("persfl", {"engine": {"unseen": without_validation(range(100, 105))}}, "1 of 5 clients have none"),
    ("pooled", {"steps": -1}, r"pooled\.steps must be >= 0, got -1"),
    ("quped", {"bits": 1}, r"quped\.bits must be 0 or between 2 and 16"),
]


@pytest.mark.parametrize(("method", "given", "message"), REFUSED)
def test_methods(method, given, message):
    if method == "pooled":
        work = LocalWork(np.array(SIZES), STEPS, 6)
        return refused(message, lambda: METHODS["pooled"].build(perceptron(), work, **given))
    return refused(message, lambda: simulation(method, **given).init([0]))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ifca", {"clusters": 6}, r"^ifca.clusters must be <= 5 \(the number of clients\), got 6"),
        ("fedem", {"components": 6}, r"^fedem.components must be <= 5 \(the number of clients\), got 6"),
        ("network-lasso", {}, "the graph must have 5 nodes, one for each client, got 6"),
    ],
)
def test_unseen_clients_do_not_count(method, options, message):
    work = LocalWork(np.array([*SIZES, 8]), STEPS, 6, unseen=1, graph=graphs.from_edges([], M + 1))
    refused(message, lambda: METHODS[method].build(perceptron(), work, **options))


# --- settings -------------------------------------------------------------------------------------

NO_FACTORS = [
    (optax.cosine_decay_schedule(0.1, 4), "must have a maximum of 1 within 4 rounds, got 0.1"),
    (lambda r: 1.0 - r, r"factors >= 0 and <= 1, got -1 in round 2"),
    (lambda r: r / 0.0, r"factors >= 0 and <= 1, got nan in round 0"),
    (lambda r: [r, r], "must return one number for each round, got"),
    (lambda r: 1.0 + 0j * r, "must return real factors, got complex"),
    (lambda r: 1.0 if r < 2 else 0.5, "a function that JAX can trace, got the error: Attempted boolean conversion"),
]
SETTINGS = [
    *(("fedavg", {"clip_gradients": c}, "clip_gradients must be > 0 and finite, got") for c in (0, float("nan"))),
    ("fedavg", {"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin': did you mean 'cosine'"),
    ("fedavg", {"lr_schedule": "cosine:ends=1"}, "unknown argument of lr_schedule cosine 'ends': did you mean 'end'"),
    ("fedavg", {"lr_schedule": "cosine:end=2"}, "lr_schedule cosine:end must be a number >= 0 and <= 1, got '2'"),
    ("fedavg", {"lr_schedule": "step"}, "lr_schedule step requires every"),
    ("fedavg", {"lr_schedule": "constant:warmup=5"}, r"warmup must be below the number of rounds \(4\), got 5"),
    ("fedavg", {"lr_schedule": "decay:warmup=1"}, "unknown argument of lr_schedule decay 'warmup'"),
    *(("fedavg", {"label_smoothing": s}, "label_smoothing must be") for s in (1.0, -0.1, float("nan"), "0.1", True)),
    ("l2gd", {"keep_optimizer": True, "client_optimizer": "adam"}, "l2gd does not support keep_optimizer"),
    ("pfedme", {"hyper": {"server_lr": 0.0}}, r"pfedme\.server_lr must be > 0"),
    (
        "fedavg",
        {"options": {"fednova": True}, "client_optimizer": "adam"},
        "fedavg.fednova requires client_optimizer = sgd, got adam",
    ),
    ("ditto", {"privacy": Mechanism(1.0, 1.0, "per_step")}, "ditto; methods that can: .*adaped.*: the method's"),
    ("fedavg", {"augment": "crop"}, r"augment = crop requires images \[height, width, channels\], got \(4,\)"),
]


@pytest.mark.parametrize(("method", "given", "message"), SETTINGS)
def test_settings(method, given, message):
    model = {"model": perceptron().model, "rounds": 4, "local_steps": STEPS, "batch_size": 100}
    refused(message, lambda: jaxpfl.fit(method, classification_problem(), **model | given))


@pytest.mark.parametrize(("function", "message"), NO_FACTORS)
def test_what_is_no_factor(function, message):
    refused(message, lambda: schedules.resolve(function, 4))


def test_stored_runs():
    refused(
        "takes lr_schedule only as text or a number, got .*jaxpfl.fit",
        lambda: resolve(RunConfig(lr_schedule=lambda r: 1.0)),
    )
    refused("label_smoothing must be", lambda: resolve(RunConfig(label_smoothing=1.0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
        ({"stragglers": 1.5}, "stragglers must be >= 0 and <= 1, got 1.5"),
        ({"same_stragglers": True}, "requires stragglers > 0"),
    ],
)
def test_shares_out_of_range(arguments, message):
    refused(message, lambda: Availability(**arguments).checked())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client_optimizer": "sgd", "keep_optimizer": True}, "keep_optimizer = True has no effect: sgd has"),
        (
            {"lr_schedule": "constant", "hyper": {"lr_decay": 0.5}},
            "fedavg.lr_decay = 0.5 has no effect: lr_schedule = constant",
        ),
    ],
)
def test_what_changes_nothing_is_warned_about(given, message):
    with pytest.warns(JaxpflWarning, match=message):
        jaxpfl.fit("fedavg", classification_problem(), model=perceptron().model, rounds=1, batch_size=100, **given)
