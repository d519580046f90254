"""Tasks beyond classification: regression, binary and multilabel, the next token, and the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError, Model, Task
from jaxpfl.engine import build
from jaxpfl.engine.evaluate import _means as means
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import task_of
from jaxpfl.models import TASKS, classification
from jaxpfl.models.metrics import class_mixture, token_loss
from jaxpfl.priors import distillation

FEATURES = 3
QUICK = {"model": "linear", "rounds": 2, "local_steps": 2, "batch_size": 4, "lr": 0.05}
OPTIONS = {"persfl": {"distill_steps": 2}}


def clients_of(label, *, seed=0, sizes=(5, 9, 7)):
    """Clients with rules of their own; ``label`` makes labels of scores [n, 2]."""
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=(FEATURES, 2))

    def client(n):
        own = rule + 0.2 * rng.normal(size=rule.shape)
        x = rng.normal(size=(n, FEATURES))
        return x, label(x @ own)

    return jaxpfl.stack_clients(*([client(n) for n in sizes] for _ in range(3)))


LABELS = {
    "regression": lambda s: s[:, 0],
    "binary": lambda s: (s[:, 0] > 0).astype(int),
    "multilabel": lambda s: (s > 0).astype(int),
    "ranking": lambda s: (s[:, 0] > 0).astype(int),
}


METRICS = {
    "regression": ["loss", "mae", "r2", "rmse"],
    "binary": ["accuracy", "auc", "calibration_error", "loss"],
    "multilabel": ["accuracy", "loss", "macro_f1"],
    "ranking": ["auc", "loss"],
}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multilabel", "ranking"])
def test_a_task_is_learned(task):
    federation = clients_of(LABELS[task], sizes=(60, 80, 70))
    after = jaxpfl.fit("fedavg", federation, task=task, **{**QUICK, "rounds": 40, "lr": 0.3})
    assert sorted(set(after.scores["global"])) == METRICS[task]
    assert (after.mean() > 0.8).all()


@pytest.mark.slow
def test_vectors_of_labels_are_learned():
    federation = clients_of(lambda s: s, sizes=(60, 80, 70))
    assert federation.train.examples.y.shape == (210, 2)
    result = jaxpfl.fit("fedavg", federation, task="regression", **{**QUICK, "rounds": 40, "lr": 0.3})
    assert sorted(set(result.scores["global"])) == METRICS["regression"]
    assert (result.mean("r2", model="global") > 0.8).all()
    assert (result.mean(model="global") < 0.7).all()


@pytest.mark.slow
def test_a_named_loss_trains():
    federation = clients_of(lambda s: np.abs(s[:, 0]))
    result = jaxpfl.fit("fedavg", federation, task="regression", loss="poisson", **QUICK)
    assert np.isfinite(result.personalized_score).all()
    assert result.headline == "rmse"


def test_labels_without_a_named_task_are_refused():
    with pytest.raises(JaxpflError, match=r"labels are float32, .* choose another task, such as regression"):
        jaxpfl.fit("fedavg", clients_of(LABELS["regression"]), **QUICK)
    with pytest.raises(JaxpflError, match=r"labels are several for each example.*multilabel, regression or next-token"):
        jaxpfl.fit("fedavg", clients_of(LABELS["multilabel"]), **QUICK)


@pytest.mark.parametrize(
    ("labels", "given", "message"),
    [
        ("regression", {"task": "binary"}, "labels of the task 'binary' must be 0 or 1, got"),
        ("multilabel", {"task": "binary"}, r"'binary' must be \[n\], got 2 for each example: use 'multilabel'"),
        ("binary", {"task": "multilabel"}, r"'multilabel' must be \[n, labels\], got \[n\]: use 'binary'"),
        ("regression", {"task": "regresion"}, "unknown task 'regresion': did you mean 'regression'"),
        ("regression", {"task": "regression", "loss": "poisson"}, "labels of the loss 'poisson' must be >= 0, got -"),
        ("regression", {"task": "regression", "label_smoothing": 0.1}, "label_smoothing = 0.1 requires task"),
        ("binary", {"loss": "squared"}, "loss = squared requires task = regression, got classification"),
        ("binary", {"metrics": {"mine": 3}}, "the metric 'mine' must be a function of predictions and labels, got 3"),
        ("binary", {"metrics": {"mine": lambda p, y: y.mean()}}, "metric 'mine' must be one number for each of"),
        ("binary", {"metrics": {"mine": jaxpfl.per_client(lambda p, y, valid: y)}}, "'mine' must be one number for a"),
        ("binary", {"metrics": 3}, "metrics must be names, or a dictionary of functions by name, got 3"),
    ],
)
def test_what_does_not_fit_is_refused(labels, given, message):
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", clients_of(LABELS[labels]), **QUICK, **given)


def outputs(*shape):
    """A model that returns an array [n, *shape]; ``None`` stands for n itself."""
    return Model(lambda key, x: jnp.ones(1), lambda w, x: w * jnp.ones([len(x) if s is None else s for s in shape]))


@pytest.mark.parametrize(
    ("output", "what"), [(lambda z: (z, z), "tuple"), (lambda z: {"logits": z}, "dict"), (lambda z: z > 0, "bool")]
)
def test_models_return_one_array_of_real_numbers(output, what):
    model = Model(lambda key, x: jnp.ones(1), lambda w, x: output(w * jnp.ones((len(x), 3))))
    with pytest.raises(JaxpflError, match=f"must return one array of real numbers for n examples, got a {what}"):
        jaxpfl.fit("fedavg", clients_of(lambda s: np.arange(len(s)) % 3), **QUICK | {"model": model})


@pytest.mark.parametrize(
    ("labels", "shape", "given", "message"),
    [
        ("classes", (None, 4), {"num_classes": 5}, r"returns \[n, 4\] for n examples, but 5 classes require \[n, 5\]$"),
        ("binary", (None,), {}, r"returns \[n\] for n examples, but 2 classes require \[n, 2\], or task = binary"),
        ("binary", (None, 2), {"task": "binary"}, r"returns .* 'binary' with labels \[n\] requires 1 per example"),
        ("multilabel", (None, 3), {"task": "multilabel"}, r"'multilabel' with labels \[n, 2\] requires 2 per example"),
    ],
)
def test_models_of_fewer_or_other_outputs_are_refused(labels, shape, given, message):
    label = LABELS.get(labels, lambda s: np.arange(len(s)) % 3)
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", clients_of(label), **QUICK | {"model": outputs(*shape)} | given)


def test_labels_of_any_split_count_for_a_models_outputs():
    clients = [(np.ones((3, FEATURES)), np.arange(3))] * 2
    more = [(x, y + 1) for x, y in clients]
    model = QUICK | {"model": outputs(None, 3), "rounds": 1}
    own = Task(outputs(None, 2), (FEATURES,), 3)
    for test, unseen, given in ((more, None, model), (clients, more, model), (clients, None, {"task": own})):
        new = None if unseen is None else jaxpfl.stack_clients(clients, test=unseen)
        with pytest.raises(JaxpflError, match=r"but \d classes require"):
            jaxpfl.fit("fedavg", jaxpfl.stack_clients(clients, test=test), unseen=new, **given)
    with pytest.raises(JaxpflError, match=r"num_classes must be greater than the largest label \(2\), got 2"):
        jaxpfl.fit("fedavg", jaxpfl.stack_clients(clients, test=clients), task=own._replace(num_classes=2))
    below = jaxpfl.stack_clients(clients, test=clients)
    below = below._replace(train=below.train.with_examples(y=below.train.examples.y - 1))
    with pytest.raises(JaxpflError, match="labels of the task 'classification' must be >= 0, got -1"):
        jaxpfl.fit("fedavg", below, **model)
    two = jaxpfl.stack_clients([(x, y % 2) for x, y in clients], test=clients[:2])
    with pytest.warns(jaxpfl.JaxpflWarning, match=r"returns \[n, 4\] .* the data have 3 classes: set num_classes = 4"):
        jaxpfl.fit("fedavg", two, **model | {"model": outputs(None, 4)})


def log_cosh(predictions, y):
    return jnp.log(jnp.cosh(predictions[:, 0] - y))


def test_own_metrics_and_their_means():
    metrics = {
        "far": lambda predictions, y: (jnp.abs(predictions[:, 0] - y) > 1).astype(jnp.float32),
        "bias": jaxpfl.per_client(lambda predictions, y, valid: ((predictions[:, 0] - y) * valid).sum() / valid.sum()),
    }
    federation = clients_of(LABELS["regression"])
    result = jaxpfl.fit("fedavg", federation, task="regression", loss=log_cosh, metrics=metrics, **QUICK)
    (dense,) = jax.tree.map(lambda a: np.asarray(a)[0], result.state.server).values()
    ends = np.cumsum(federation.test.size)
    x, y = federation.test.flat()
    left = (x @ dense["kernel"] + dense["bias"])[:, 0] - y
    by_client = np.split(left, ends[:-1])
    np.testing.assert_allclose(result.scores["global"]["bias"][-1, 0], [a.mean() for a in by_client], rtol=1e-4)
    np.testing.assert_allclose(result.mean("bias", "global"), np.mean([a.mean() for a in by_client]), rtol=1e-4)
    np.testing.assert_allclose(result.mean("bias", "global", weights="examples"), left.mean(), rtol=1e-4)
    np.testing.assert_allclose(result.mean("far", "global", weights="examples"), (np.abs(left) > 1).mean(), rtol=1e-5)
    np.testing.assert_allclose(result.mean("rmse", "global", "examples"), np.sqrt((left**2).mean()), rtol=1e-5)
    with pytest.raises(JaxpflError, match="unknown metric 'rsme': did you mean 'rmse'"):
        result.mean("rsme")
    with pytest.raises(JaxpflError, match="no metric 'accuracy', only bias, far, loss, mae, r2, rmse"):
        _ = result.personalized_accuracy


@pytest.mark.slow
def test_a_ranking_leaves_out_clients_of_one_class():
    """And has other metrics by name; without two classes in any client's test examples it is refused."""

    def with_one_class(clients):
        *rest, (x, y) = clients
        return [*rest, (x, np.zeros_like(y))]

    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 60, FEATURES))
    parts = [list(zip(x[:, at], (x[:, at, 0] > 0).astype(int), strict=True)) for at in (slice(0, 30), slice(30, 60))]
    federation = jaxpfl.stack_clients(parts[0], test=with_one_class(parts[1]))
    given = {**QUICK, "rounds": 10, "lr": 0.3, "metrics": {"sure": "calibration_error", "accuracy": "accuracy"}}
    result = jaxpfl.fit("fedavg", federation, task="ranking", **given)
    auc = result.personalized_score[0]
    assert np.isnan(auc).tolist() == [False, False, False, True]
    assert result.headline == "auc"
    np.testing.assert_allclose(result.mean(), auc[:3].mean(), rtol=1e-6)
    assert (auc[:3] > 0.9).all()
    assert set(result.scores["after"]) >= {"auc", "loss", "sure", "accuracy"}
    alike = jaxpfl.stack_clients(parts[0], test=[(x, np.zeros_like(y)) for x, y in parts[1]])
    with pytest.raises(JaxpflError, match="requires a client with test examples of both classes"):
        jaxpfl.fit("fedavg", alike, task="ranking", **QUICK)


def test_own_task():
    federation = clients_of(LABELS["regression"])
    linear = Model(lambda key, x: jnp.zeros((FEATURES + 1, 1)), lambda w, x, key=None, train=False: x @ w[:-1] + w[-1])
    settings = {name: value for name, value in QUICK.items() if name != "model"}
    own = Task(linear, (FEATURES,), 1, log_cosh, {"loss": log_cosh}, kind="own", headline="loss", lower=True)
    result = jaxpfl.fit("fedavg", federation, task=own, **settings)
    assert np.isfinite(result.mean()).all()
    assert result.headline == "loss"
    with pytest.raises(JaxpflError, match="adaped distills predictions, but the task 'own' defines no distance"):
        jaxpfl.fit("adaped", federation, task=own, **settings)
    with pytest.raises(JaxpflError, match=r"the task has input shape \(2,\), but the data have \(3,\)"):
        jaxpfl.fit("fedavg", federation, task=own._replace(input_shape=(2,)), **settings)
    with pytest.raises(JaxpflError, match=r"Task.headline is 'accuracy', which is not among its metrics: loss"):
        jaxpfl.fit("fedavg", federation, task=own._replace(headline="accuracy"), **settings)


@pytest.mark.parametrize("times", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_overflowing_predictions_score_worst_not_as_absent(times):
    """A mean loss of NaN, and an infinite rmse."""
    huge = Model(
        lambda key, x: jnp.ones(1), lambda w, x, key=None, train=False: times * jnp.exp(1e4 * w) * jnp.ones((len(x), 1))
    )
    own = Task(huge, (FEATURES,), 1, log_cosh, {"loss": log_cosh}, kind="own", headline="loss", lower=True)
    given = {"task": "regression", "model": huge} if times else {"task": own}
    result = jaxpfl.fit("local", clients_of(LABELS["regression"]), rounds=2, **given)
    assert (result.personalized_score == np.inf).all()
    assert (result.mean() == np.inf).all()
    scores = result.scores["after"]
    assert all((scores[name] == np.inf).all() for name in ("loss", "mae") if name in scores)


def simulation(method, data, model, task, **settings):
    own = METHODS[method]
    spec = RunSpec(
        method=own,
        options=settings.pop("options", {}) | OPTIONS.get(method, {}),
        model=model,
        task=task,
        rounds=1,
        cohort=1 if own.asynchronous else None,
        local_steps=2,
        batch_size=4,
        graph="models" if own.graph else None,
        neighbours=1 if own.graph else None,
        **settings,
    )
    return build.simulation_of(spec, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "task"),
    [
        *((method, "regression") for method in ("persfl", "map-kd", "fedem")),
        ("adaped", "binary"),
        ("fedem", "multilabel"),
    ],
)
def test_distillation_and_mixtures_improve_every_task(method, task):
    federation = clients_of(LABELS[task], sizes=(40, 50, 60))
    given = QUICK | {"options": OPTIONS.get(method, {}), "lr": 0.2}
    before, after = (jaxpfl.fit(method, federation, task=task, **{**given, "rounds": r}) for r in (1, 25))
    assert (after.mean("loss") < before.mean("loss") + 1e-6).all()


V, T = 7, 5
NEXT_QUICK = {"rounds": 1, "local_steps": 1, "batch_size": 64}


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


def shifted_by_one(logits, y):
    return nats(logits[:, :-1], y[:, 1:])


def bigram(scale=1.0):
    """Logits of a token are a row of a table."""
    return Model(
        lambda key, x: {"table": scale * jax.random.normal(key, (V, V))},
        lambda params, x, key=None, train=False: params["table"][x],
    )


def task():
    return TASKS["next-token"](classification(bigram(), (T,), V, jnp.int32))


@pytest.mark.slow
def test_loss_distance_and_mixture_are_those_of_numpy(x64):
    rng = np.random.default_rng(3)
    logits, others = rng.normal(size=(2, 6, T, V))
    _, y = sequences(6, 4)
    expected = [nats(logits[s : s + 1], y[s : s + 1]).sum() / T for s in range(6)]
    np.testing.assert_allclose(token_loss(logits, y), expected, rtol=1e-12)
    assert expected[0] == 0  # a sequence without labels
    for defect in (lambda logits, y: nats(logits, np.maximum(y, 0)), shifted_by_one):  # the first counts padding
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


def test_a_round_and_its_scores_are_those_of_numpy(x64):
    """One step of FedAvg on all examples: each token of the federation weighs the same, however long its sequence."""
    data, rate = federation(), 0.7
    given = {"model": bigram(), "task": "next-token", "lr": rate, "seeds": 1, "hyper": {"weight_decay": 0.0}}
    result = jaxpfl.fit("fedavg", data, **NEXT_QUICK, **given)
    start = np.asarray(jax.tree.leaves(simulation("fedavg", data, bigram(), "next-token").init([0]).server)[0])[0]
    (table,) = (np.asarray(leaf)[0] for leaf in jax.tree.leaves(result.state.server))

    clients = [sequences(n, n) for n in (5, 9, 7)]
    places = sum(y.size for _, y in clients)

    def objective(table):
        return sum(nats(table[x], y).sum() for x, y in clients) / places

    steps = 1e-5 * np.eye(V * V).reshape(-1, V, V)  # in each entry of the table
    gradient = np.array([objective(start + step) - objective(start - step) for step in steps]) / 2e-5
    np.testing.assert_allclose(table, start - rate * gradient.reshape(V, V), rtol=1e-7, atol=1e-9)
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


def test_an_own_task_reads_tokens_as_integers():
    """Also if the task does not give the type of its inputs."""
    own = Task(bigram(), (T,), V, shifted_by_one, {"loss": shifted_by_one}, kind="own", headline="loss")
    spec = RunSpec(method=METHODS["fedavg"], task=own)
    assert task_of(spec, federation()).input_dtype == federation().train.examples.x.dtype == np.int32


def test_a_metric_of_the_task_may_be_named():
    specs = (RunSpec(method=METHODS["fedavg"], task="binary", metrics=names) for names in (["loss"], None))
    named, plain = (task_of(spec, clients_of(LABELS["binary"])) for spec in specs)
    assert list(named.metrics) == list(plain.metrics)


def test_the_score_of_one_example_is_its_mean():
    found = means(classification(bigram(), (T,), V), {"accuracy": (jnp.float32(1.0),)}, jnp.int32(1))
    assert found == {"accuracy": 1.0}


def test_a_client_without_labels_is_left_out_of_means():
    one, two = sequences(4, 1), sequences(4, 2)
    silent = two[0], np.full_like(two[1], -1)
    data = jaxpfl.stack_clients([one, two], test=[one, silent])
    result = jaxpfl.fit("fedavg", data, task="next-token", model=bigram(), **NEXT_QUICK)
    scores = result.scores["global"]["accuracy"][-1, 0]
    assert np.isnan(scores).tolist() == [False, True]
    assert np.isfinite(result.mean("perplexity", "global")).all()


def test_diverged_predictions_score_worst():
    broken = bigram()._replace(apply=lambda params, x, key=None, train=False: params["table"][x] * jnp.nan)
    data = federation((5, 6))
    result = jaxpfl.fit("local", data, task="next-token", model=broken, **NEXT_QUICK)
    assert (result.personalized_accuracy == 0).all()
    assert (result.mean("perplexity") == np.inf).all()


def of_kind(method, task, **settings):
    if task == "next-token":
        return simulation(method, federation(), "transformer:8,1", task, **settings)
    return simulation(method, clients_of(LABELS[task]), "mlp-ln:4", task, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "task"),
    [
        *(
            (method, task)
            for method in ("ditto", "scaffold", "fedbuff", "network-lasso")
            for task in ("regression", "next-token")
        ),
        *((method, "regression") for method in ("perfedavg", "mr-mtl")),
        *((method, "next-token") for method in ("fedem", "persfl", "adaped")),
    ],
)
def test_methods_trace_it(method, task):
    """Of each kind of state and upload one: one round, traced."""
    assert of_kind(method, task).program("cpu").eqns


@pytest.mark.parametrize(
    ("method", "task", "settings", "message"),
    [
        ("fedrod", "regression", {}, "fedrod balances classes .*, but the task 'regression' has no classes"),
        ("fedem", "regression", {"loss": "absolute"}, "fedem mixes densities"),
        ("moon", "next-token", {}, "moon requires a task with one prediction per example, got 'next-token'"),
        ("adaped", "next-token", {"options": {"gate": True}}, "adaped.gate .* at least 2 classes, got the task"),
        ("map-kd", "next-token", {"options": {"exact": True}}, "exact = true requires class probabilities"),
        ("persfl", "next-token", {"options": {"temperatures": (2.0,)}}, "persfl.temperatures .*, got next-token"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(method, task, settings, message):
    with pytest.raises(JaxpflError, match=message):
        of_kind(method, task, **settings)


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({}, {"num_classes": 3}, r"number of tokens\) must be greater than the largest label \(6\), got 3"),
        ({"y": lambda y: y[:, 0] + 1}, {}, r"labels of the task 'next-token' must be integers .* got int32 \[8\]"),
        ({"y": lambda y: y[:, :3]}, {}, r"got int32 \[8, 3\] for inputs \['n', 5\]"),
        ({}, {"model": outputs(None, V)}, "vocabulary entries require"),
        ({}, {"augment": "mixup"}, "augment = mixup requires numeric inputs"),
        ({}, {"attack": "label-flip", "attackers": 0.5}, "flips class labels, but the task is 'next-token'"),
    ],
)
def test_what_does_not_fit_next_token_is_refused(data, given, message):
    clients = [sequences(4, seed) for seed in (1, 2)]
    made = [(x, data.get("y", lambda y: y)(y)) for x, y in clients]
    settings = NEXT_QUICK | {"model": "gru:4", "task": "next-token"} | given
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", jaxpfl.stack_clients(made, test=made), **settings)


def test_newcomers_tokens_are_known_or_refused():
    """A token that only an unseen client reads, never as a label."""
    splits = ([(np.full((3, T), V + 2), np.zeros((3, T), int))] for _ in range(3))
    newcomer = jaxpfl.stack_clients(*splits, client_ids=[9])
    given = {**NEXT_QUICK, "task": "next-token", "model": "gru:3", "adapt_rounds": 1, "unseen": newcomer}
    spec = RunSpec(method=METHODS["fedavg"], model="gru:3", task="next-token")
    assert task_of(spec, federation(), newcomer).model.vocabulary == V + 3
    with pytest.raises(JaxpflError, match=f"token ids from 0 to {V - 1}, but the data contain {V + 2}"):
        jaxpfl.fit("fedavg", federation(), num_classes=V, **given)
