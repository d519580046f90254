"""Next token: loss, scores and a round against NumPy in float64, methods that train it, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError, Model
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.models import TASKS, classification
from jaxpfl.models.losses import class_mixture, token_loss
from jaxpfl.priors import distillation

V, T = 7, 5
QUICK = {"rounds": 1, "local_steps": 1, "batch_size": 64}


def sequences(n, seed, share=0.3):
    """Inputs [n, T] and labels [n, T], a share of them -1, one sequence without any."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, V, (2, n, T))
    y[rng.random((n, T)) < share] = -1
    y[0] = -1
    return x, y


def federation(sizes=(5, 9, 7), **more):
    return jaxpfl.stack_clients(*([sequences(n, 10 * split + n, **more) for n in sizes] for split in range(3)))


def log_softmax(a):
    a = a - a.max(axis=-1, keepdims=True)
    return a - np.log(np.exp(a).sum(axis=-1, keepdims=True))


def nats(logits, y):
    """Cross-entropy of each label in a flat list of those that are there."""
    at = np.argwhere(y >= 0)
    return np.array([-log_softmax(logits[s, t])[y[s, t]] for s, t in at])


def padding_counted(logits, y):
    return np.array([-log_softmax(logits[s, t])[max(y[s, t], 0)] for s, t in np.ndindex(*y.shape)])


def shifted_by_one(logits, y):
    return nats(logits[:, :-1], y[:, 1:])


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def bigram(scale=1.0):
    """Logits of a token are a row of a table."""
    return Model(
        lambda key, x: {"table": scale * jax.random.normal(key, (V, V))},
        lambda params, x, key=None, train=False: params["table"][x],
    )


def task():
    return TASKS["next-token"](classification(bigram(), (T,), V, jnp.int32))


def test_loss_distance_and_mixture_are_those_of_numpy(float64):
    rng = np.random.default_rng(3)
    logits, others = rng.normal(size=(2, 6, T, V))
    _, y = sequences(6, 4)
    expected = [nats(logits[s : s + 1], y[s : s + 1]).sum() / T for s in range(6)]
    np.testing.assert_allclose(token_loss(logits, y), expected, rtol=1e-12)
    assert expected[0] == 0  # a sequence without labels
    for defect in (padding_counted, shifted_by_one):
        wrong = [defect(logits[s : s + 1], y[s : s + 1]).sum() / T for s in range(6)]
        assert not np.allclose(wrong, expected, rtol=1e-3)

    p, q = np.exp(log_softmax(logits)), np.exp(log_softmax(others))
    rows = (p * np.log(p / q)).sum(axis=-1)
    measured = distillation.divergence_of(task())(jnp.asarray(logits), jnp.asarray(others), y)
    np.testing.assert_allclose(measured, np.where(y >= 0, rows, 0).sum(axis=1) / T, rtol=1e-10)
    assert not np.allclose(measured, rows.mean(axis=1), rtol=1e-3)  # padding counted
    by_teacher = jax.grad(lambda a: distillation.divergence_of(task())(a, others, y).sum())(jnp.asarray(logits))
    assert (np.asarray(by_teacher)[y < 0] == 0).all()

    mixed = class_mixture(jnp.array([0.3, 0.7]), jnp.stack([logits, others]))
    np.testing.assert_allclose(mixed, np.log(0.3 * p + 0.7 * q), rtol=1e-10)


def test_a_round_and_its_scores_are_those_of_numpy(float64):
    """One step of FedAvg on all examples: each token of the federation weighs the same, however long its sequence."""
    data, rate = federation(), 0.7
    given = {"model": bigram(), "task": "next-token", "lr": rate, "seeds": 1, "hyper": {"weight_decay": 0.0}}
    result = jaxpfl.fit("fedavg", data, **QUICK, **given)
    start = np.asarray(jax.tree.leaves(simulation(METHODS["fedavg"], data, bigram()).init([0]).server)[0])[0]
    (table,) = (np.asarray(leaf)[0] for leaf in jax.tree.leaves(result.state.server))

    clients = [sequences(n, n) for n in (5, 9, 7)]
    places = sum(y.size for _, y in clients)

    def objective(table):
        return sum(nats(table[x], y).sum() for x, y in clients) / places

    gradient, step = np.zeros((V, V)), 1e-5
    for i, j in np.ndindex(V, V):
        moved = np.zeros((V, V))
        moved[i, j] = step
        gradient[i, j] = (objective(start + moved) - objective(start - moved)) / (2 * step)
    np.testing.assert_allclose(table, start - rate * gradient, rtol=1e-7, atol=1e-9)
    per_sequence = [[nats(start[x[s]][None], y[s][None]).mean() for s in range(1, len(x))] for x, y in clients]
    assert abs(np.mean(np.concatenate(per_sequence)) - objective(start)) > 0.1  # another weighting is another loss

    tests = [sequences(n, 10 + n) for n in (5, 9, 7)]
    losses = [nats(table[x], y) for x, y in tests]
    right = [(table[x].argmax(axis=-1) == y)[y >= 0].mean() for x, y in tests]
    found = {name: values[-1, 0] for name, values in result.scores["global"].items()}
    np.testing.assert_allclose(found["loss"], [own.mean() for own in losses], rtol=1e-6)
    np.testing.assert_allclose(found["perplexity"], [np.exp(own.mean()) for own in losses], rtol=1e-6)
    np.testing.assert_allclose(found["accuracy"], right, rtol=1e-6)
    together = result.mean("loss", "global", weights="examples")  # of all tokens, not of sequences
    np.testing.assert_allclose(together, np.concatenate(losses).mean(), rtol=1e-6)
    assert abs(np.average([own.mean() for own in losses], weights=[5, 9, 7]) / together[0] - 1) > 1e-5
    assert not np.allclose(found["perplexity"], [np.exp(own).mean() for own in losses], rtol=1e-2)
    by_sequence = [[nats(table[a][None], b[None]).mean() for a, b in zip(x[1:], y[1:], strict=True)] for x, y in tests]
    of_sequences = [np.mean(np.exp(own)) for own in by_sequence]
    assert not np.allclose(found["perplexity"], of_sequences, rtol=1e-3)
    assert result.headline == "accuracy"


def test_a_client_without_labels_is_left_out_of_means():
    one, two = sequences(4, 1), sequences(4, 2)
    silent = two[0], np.full_like(two[1], -1)
    data = jaxpfl.stack_clients([one, two], test=[one, silent])
    result = jaxpfl.fit("fedavg", data, task="next-token", model=bigram(), **QUICK)
    scores = result.scores["global"]["accuracy"][-1, 0]
    assert np.isnan(scores).tolist() == [False, True]
    assert np.isfinite(result.mean("perplexity", "global")).all()


def test_diverged_predictions_score_worst():
    broken = bigram()._replace(apply=lambda params, x, key=None, train=False: params["table"][x] * jnp.nan)
    data = federation((5, 6))
    result = jaxpfl.fit("local", data, task="next-token", model=broken, **QUICK)
    assert (result.personalized_accuracy == 0).all()
    assert (result.mean("perplexity") == np.inf).all()


OPTIONS = {"persfl": {"distill_steps": 2}}
REFUSED = {
    "fedrod": "fedrod balances classes by their counts: the task 'next-token' has none",
    "fedproto": "fedproto needs prototypes of classes: the task 'next-token' has none",
    "knn-per": "knn-per lets examples vote for classes: the task 'next-token' has none",
    "fedpac": "fedpac aligns features by classes: the task 'next-token' has none",
    "moon": "moon compares features of examples: the task 'next-token' has some at each position",
    "feddbe": "feddbe compares features of examples: the task 'next-token' has some at each position",
}


def simulation(method, data, model, **options):
    return simulation_of(
        RunSpec(
            method=method,
            options=OPTIONS.get(method.name, {}) | options,
            model=model,
            task="next-token",
            rounds=1,
            cohort=1 if method.asynchronous else None,
            local_steps=2,
            batch_size=4,
            graph="models" if method.graph else None,
            neighbours=1 if method.graph else None,
        ),
        data,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedem", "persfl", "adaped", "scaffold", "fedbuff", "network-lasso"])
def test_methods_trace_it(method):
    """Of each kind of state and upload one: one round, traced."""
    assert simulation(METHODS[method], federation(), "transformer:8,1").program("cpu").eqns


@pytest.mark.parametrize("method", REFUSED)
def test_methods_of_classes_refuse_it_with_their_reason(method):
    with pytest.raises(JaxpflError, match=REFUSED[method]):
        simulation(METHODS[method], federation(), "transformer:8,1")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("adaped", {"gate": True}, "adaped.gate compares with a guess among classes: .* got next-token"),
        ("map-kd", {"exact": True}, "the exact normaliser is of the probabilities of a classification"),
        ("persfl", {"temperatures": (2.0,)}, "persfl.temperatures soften class probabilities: .*, not next-token"),
    ],
)
def test_options_of_classes_are_refused(method, options, message):
    with pytest.raises(JaxpflError, match=message):
        simulation(METHODS[method], federation(), "gru:4", **options)


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({}, {"num_classes": 3}, "there are 3 tokens, but labels go up to 6"),
        ({"y": lambda y: y[:, 0] + 1}, {}, r"labels of the task next-token are integers \[n, T\].* got int32 \[8\]"),
        ({"y": lambda y: y[:, :3]}, {}, r"got int32 \[8, 3\] for inputs \['n', 5\]"),
        ({"y": lambda y: y + 0.5}, {}, r"got float32 \[8, 5\]"),
        (
            {},
            {"model": Model(lambda key, x: jnp.ones(1), lambda w, x, **_: w * jnp.ones((len(x), V)))},
            "at each position",
        ),
        ({}, {"augment": "mixup"}, "augment = mixup is of inputs that are numbers"),
        ({}, {"attack": "label-flip", "attackers": 0.5}, "flips labels that are classes: the task is 'next-token'"),
        ({}, {"label_smoothing": 0.1}, "label_smoothing = 0.1 is of classes, and the task is next-token"),
    ],
)
def test_what_does_not_fit_is_refused(data, given, message):
    clients = [sequences(4, seed) for seed in (1, 2)]
    made = [(x, data.get("y", lambda y: y)(y)) for x, y in clients]
    settings = QUICK | {"model": "gru:4", "task": "next-token"} | given
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", jaxpfl.stack_clients(made, test=made), **settings)


def test_newcomers_tokens_are_known_or_refused():
    """A token that only an unseen client reads, never as a label."""
    splits = ([(np.full((3, T), V + 2), np.zeros((3, T), int))] for _ in range(3))
    newcomer = jaxpfl.stack_clients(*splits, client_ids=[9])
    given = {**QUICK, "task": "next-token", "model": "gru:3", "adapt_rounds": 1, "unseen": newcomer}
    fit = jaxpfl.fit("fedavg", federation(), **given)
    assert np.isfinite(fit.unseen["after"]["loss"]).all()
    with pytest.raises(JaxpflError, match=f"the model reads tokens 0 .. {V - 1}, the data have {V + 2}"):
        jaxpfl.fit("fedavg", federation(), num_classes=V, **given)
