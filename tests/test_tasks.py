"""Tasks beyond classification: regression, binary and multilabel, and the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError, Model, Task
from jaxpfl.engine import build
from jaxpfl.engine.spec import RunSpec

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
@pytest.mark.parametrize("task", METRICS)
def test_a_task_is_learned(task):
    federation = clients_of(LABELS[task], sizes=(60, 80, 70))
    after = jaxpfl.fit("fedavg", federation, task=task, **{**QUICK, "rounds": 40, "lr": 0.3})
    assert sorted(set(after.scores["global"])) == METRICS[task]
    assert (after.mean() < 0.7).all() if task == "regression" else (after.mean() > 0.8).all()


def test_vectors_of_labels_are_learned():
    federation = clients_of(lambda s: s, sizes=(60, 80, 70))
    assert federation.train.examples.y.shape == (210, 2)
    result = jaxpfl.fit("fedavg", federation, task="regression", **{**QUICK, "rounds": 40, "lr": 0.3})
    assert (result.mean("r2", model="global") > 0.8).all()


@pytest.mark.parametrize("loss", ["poisson", pytest.param("quantile:q=0.9", marks=pytest.mark.slow)])
def test_losses_train(loss):
    federation = clients_of(lambda s: np.abs(s[:, 0]))
    result = jaxpfl.fit("fedavg", federation, task="regression", loss=loss, **QUICK)
    assert np.isfinite(result.personalized_score).all()
    assert result.headline == "rmse"


def test_labels_without_a_named_task_are_refused():
    with pytest.raises(JaxpflError, match=r"labels are float32, .* name the task, such as regression"):
        jaxpfl.fit("fedavg", clients_of(LABELS["regression"]), **QUICK)
    with pytest.raises(JaxpflError, match=r"labels are several for each example.*multilabel, regression or next-token"):
        jaxpfl.fit("fedavg", clients_of(LABELS["multilabel"]), **QUICK)


@pytest.mark.parametrize(
    ("labels", "given", "message"),
    [
        ("regression", {"task": "binary"}, "labels of the task binary must be 0 or 1, got"),
        ("multilabel", {"task": "binary"}, r"binary are \[n\], got 2 for each example: use multilabel"),
        ("binary", {"task": "multilabel"}, r"multilabel are \[n, labels\], got \[n\]: use binary"),
        ("regression", {"task": "regresion"}, "unknown task 'regresion': did you mean 'regression'"),
        ("regression", {"task": "regression", "loss": "poisson"}, "labels of the loss poisson must be >= 0, got -"),
        ("regression", {"task": "regression", "label_smoothing": 0.1}, "label_smoothing = 0.1 is of classes"),
        ("binary", {"loss": "squared"}, "loss = squared is of the task regression, this run's is classification"),
        ("binary", {"metrics": {"loss": lambda p, y: y}}, "the metric 'loss' is the task's own"),
        ("binary", {"metrics": {"mine": 3}}, "the metric 'mine' must be a function of predictions and labels, got 3"),
        ("binary", {"metrics": {"mine": lambda p, y: y.mean()}}, "metric 'mine' must be one number for each of"),
        ("binary", {"metrics": {"mine": jaxpfl.per_client(lambda p, y, valid: y)}}, "'mine' must be one number for a"),
        ("binary", {"task": 3}, "task must be a name or a Task, got 3"),
        ("binary", {"metrics": {"mine": "rmse"}}, "the metric rmse needs labels that are numbers"),
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
    with pytest.raises(JaxpflError, match=f"the model returns a {what} and must return one array of real numbers"):
        jaxpfl.fit("fedavg", clients_of(lambda s: np.arange(len(s)) % 3), **QUICK | {"model": model})


@pytest.mark.parametrize(
    ("labels", "shape", "given", "message"),
    [
        ("classes", (None, 2), {}, r"returns \[n, 2\] for n examples, and 3 classes need \[n, 3\]$"),
        ("classes", (None, 4), {"num_classes": 5}, r"returns \[n, 4\] for n examples, and 5 classes need \[n, 5\]$"),
        ("binary", (None,), {}, r"returns \[n\] for n examples, and 2 classes need \[n, 2\], or task = binary"),
        ("binary", (None, 2), {"task": "binary"}, r"returns \[n, 2\] .* and binary with labels \[n\] needs 1 of each"),
        ("multilabel", (None, 3), {"task": "multilabel"}, r"multilabel with labels \[n, 2\] needs 2 of each"),
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
    for test, unseen, given in ((more, None, {}), (clients, more, {}), (clients, None, {"task": own})):
        new = None if unseen is None else jaxpfl.stack_clients(clients, test=unseen)
        with pytest.raises(JaxpflError, match=r"and \d classes need"):
            jaxpfl.fit("fedavg", jaxpfl.stack_clients(clients, test=test), unseen=new, **model, **given)
    with pytest.raises(JaxpflError, match="num_classes is 2 but labels go up to 2"):
        jaxpfl.fit("fedavg", jaxpfl.stack_clients(clients, test=clients), task=own._replace(num_classes=2), **model)
    below = jaxpfl.stack_clients(clients, test=clients)
    below = below._replace(train=below.train.with_examples(y=below.train.examples.y - 1))
    with pytest.raises(JaxpflError, match="labels of the task classification must be >= 0, got -1"):
        jaxpfl.fit("fedavg", below, **model)
    two = jaxpfl.stack_clients([(x, y % 2) for x, y in clients], test=clients[:2])
    with pytest.warns(jaxpfl.JaxpflWarning, match=r"returns \[n, 4\] .* there are 3 classes: num_classes = 4 if"):
        jaxpfl.fit("fedavg", two, **model | {"model": outputs(None, 4)})


def test_own_metrics_and_their_means():
    metrics = {
        "far": lambda predictions, y: (jnp.abs(predictions[:, 0] - y) > 1).astype(jnp.float32),
        "bias": jaxpfl.per_client(lambda predictions, y, valid: ((predictions[:, 0] - y) * valid).sum() / valid.sum()),
    }
    federation = clients_of(LABELS["regression"])
    result = jaxpfl.fit("fedavg", federation, task="regression", metrics=metrics, **QUICK)
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
    with pytest.raises(JaxpflError, match="no metric 'accuracy', it has bias, far, loss, mae, r2, rmse"):
        _ = result.personalized_accuracy


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
    with pytest.raises(JaxpflError, match="no client has both labels among its test examples"):
        jaxpfl.fit("fedavg", alike, task="ranking", **QUICK)


def test_own_task_and_loss():
    def loss(predictions, y):
        return jnp.log(jnp.cosh(predictions[:, 0] - y))

    federation = clients_of(LABELS["regression"])
    by_loss = jaxpfl.fit("fedavg", federation, task="regression", loss=loss, **QUICK)
    linear = Model(
        lambda key, x: jnp.zeros((FEATURES + 1, 1)),
        lambda w, x, key=None, train=False: x @ w[:-1] + w[-1],
    )
    own = Task(linear, (FEATURES,), 1, loss, {"loss": loss}, kind="own", headline="loss", lower=True)
    result = jaxpfl.fit("fedavg", federation, task=own, **QUICK)
    assert np.isfinite([by_loss.mean(), result.mean()]).all()
    assert result.headline == "loss"
    with pytest.raises(JaxpflError, match="adaped distils predictions, and the task 'own' has no distance"):
        jaxpfl.fit("adaped", federation, task=own, **QUICK)
    with pytest.raises(JaxpflError, match=r"the task is for inputs \(2,\), the data have \(3,\)"):
        jaxpfl.fit("fedavg", federation, task=own._replace(input_shape=(2,)), **QUICK)
    with pytest.raises(JaxpflError, match=r"Task.headline is 'accuracy', which is not among its metrics: loss"):
        jaxpfl.fit("fedavg", federation, task=own._replace(headline="accuracy"), **QUICK)


def test_overflowing_predictions_score_worst_not_as_absent():
    federation = clients_of(LABELS["regression"])
    huge = Model(
        lambda key, x: jnp.ones(1), lambda w, x, key=None, train=False: jnp.exp(1e4 * w) * jnp.ones((len(x), 1))
    )
    result = jaxpfl.fit("local", federation, task="regression", **{**QUICK, "model": huge})
    assert (result.personalized_score == np.inf).all()
    assert (result.mean() == np.inf).all()


REFUSED = {
    ("fedrod", "squared"): "fedrod balances classes by their counts: the task 'regression' has none",
    ("fedproto", "squared"): "fedproto needs prototypes of classes: the task 'regression' has none",
    ("knn-per", "squared"): "knn-per lets examples vote for classes: the task 'regression' has none",
    ("fedpac", "squared"): "fedpac aligns features by classes: the task 'regression' has none",
    ("fedem", "absolute"): "fedem mixes densities",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "scaffold", "perfedavg", "mr-mtl", "fedbuff", "network-lasso"])
def test_methods_trace_a_regression(method):
    """Of each kind of state and upload one, beside those that distil or mix (below): one round, traced."""
    assert simulation_of(method, clients_of(LABELS["regression"]), "squared").program("cpu").eqns


@pytest.mark.parametrize(("method", "loss"), REFUSED)
def test_what_makes_no_sense_is_refused_with_its_reason(method, loss):
    with pytest.raises(JaxpflError, match=REFUSED[method, loss]):
        simulation_of(method, clients_of(LABELS["regression"]), loss)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("adaped", {"gate": True}, "adaped.gate compares with a guess among classes: .* got regression"),
        ("map-kd", {"exact": True}, "the exact normaliser is of the probabilities of a classification: this task"),
        (
            "map-kd",
            {"distance": "square"},
            "the distance square is of the probabilities of a classification",
        ),
        ("persfl", {"temperatures": (2.0, 3.0)}, "persfl.temperatures soften class probabilities"),
    ],
)
def test_options_of_classes_are_refused(method, options, message):
    with pytest.raises(JaxpflError, match=message):
        simulation_of(method, clients_of(LABELS["regression"]), "squared", options)


def simulation_of(method, federation, loss, options=None):
    return build.simulation_of(
        RunSpec(
            method=METHODS[method],
            options=OPTIONS.get(method, {}) | (options or {}),
            model="mlp-ln:4",
            task="regression",
            loss=loss,
            rounds=1,
            cohort=1 if METHODS[method].asynchronous else None,
            local_steps=2,
            batch_size=4,
            neighbours=1 if METHODS[method].graph else None,
        ),
        federation,
    )


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
