"""Metrics by name: their values beside scikit-learn's, and which task has which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn import metrics as sklearns

from jaxpfl import JaxpflError
from jaxpfl.models import TASKS, PerClient, Task
from jaxpfl.models.base import Model
from jaxpfl.models.metrics import NAMED_METRICS, by_name, of_task
from jaxpfl.runs.scores import HEADLINES

N, REAL, CLASSES = 60, 47, 4
RNG = np.random.default_rng(0)
VALID = np.arange(N) < REAL


def value(name, kind, predictions, y):
    """The metric under jit, and vmapped over a client whose real examples are others."""
    metric = NAMED_METRICS[name][kind]
    assert isinstance(metric, PerClient)
    given = [np.stack([a, np.roll(a, 5, axis=0)]) for a in (predictions, y, VALID)]
    both = jax.jit(jax.vmap(metric.function))(*given)
    np.testing.assert_allclose(both[1], both[0], rtol=1e-5)  # the order of the examples is nothing to it
    return float(both[0])


@pytest.mark.parametrize("there", [CLASSES, 3, 2])
def test_scores_of_classes_are_scikit_learns(there):
    """Over the classes that a client's examples have."""
    logits = RNG.normal(size=(N, CLASSES)).astype(np.float32)
    y = RNG.integers(there, size=N).astype(np.int32)
    logits[np.arange(N), y] += 1.0
    real, truth = logits[:REAL].astype(np.float64), y[:REAL]
    for scale in (1, 40):  # by 40 the odds are beyond what a probability in single precision tells apart
        odds = [scale * real[:, k] - logsumexp(scale * np.delete(real, k, axis=1), axis=1) for k in range(there)]
        want = np.mean([sklearns.roc_auc_score(truth == k, odds[k]) for k in range(there)])
        found = value("auc", "classification", np.float32(scale) * logits, y)
        assert found == pytest.approx(want, abs=1e-6)
        rounded = [jax.nn.softmax(np.float32(scale) * logits[:REAL])[:, k] for k in range(there)]
        by_share = np.mean([sklearns.roc_auc_score(truth == k, rounded[k]) for k in range(there)])
        assert (abs(by_share - want) > 1e-3) == (scale == 40)
    guess = real.argmax(axis=1)
    want = sklearns.recall_score(truth, guess, labels=np.arange(there), average="macro")
    assert value("balanced_accuracy", "classification", logits, y) == pytest.approx(want, abs=1e-6)


def test_scores_of_one_logit_are_those_of_two_classes():
    logit = RNG.normal(size=(N, 1)).astype(np.float32)
    logit[::7] = 0  # the label 0
    y = (RNG.random(N) < 0.3).astype(np.int32)
    truth, guess = y[:REAL], logit[:REAL, 0] > 0
    for kind in ("binary", "ranking"):
        got = value("macro_f1", kind, logit, y), value("balanced_accuracy", kind, logit, y)
        want = sklearns.f1_score(truth, guess, average="macro"), sklearns.balanced_accuracy_score(truth, guess)
        assert got == pytest.approx(want, abs=1e-6)


def test_the_auc_of_labels_leaves_out_those_of_one_value():
    logits, y = RNG.normal(size=(N, 3)).astype(np.float32), (RNG.random((N, 3)) < 0.4).astype(np.int32)
    y[:, 1] = 1
    want = np.mean([sklearns.roc_auc_score(y[:REAL, k], logits[:REAL, k]) for k in (0, 2)])
    assert value("auc", "multilabel", logits, y) == pytest.approx(want, abs=1e-6)


def test_examples_of_one_class_have_no_auc_and_predictions_that_are_no_numbers_the_worst():
    logits, one = RNG.normal(size=(N, CLASSES)).astype(np.float32), np.zeros(N, np.int32)
    assert np.isnan(jax.jit(NAMED_METRICS["auc"]["classification"].function)(logits, one, VALID))
    y = np.arange(N, dtype=np.int32) % CLASSES
    broken = np.full_like(logits, np.nan)
    assert value("auc", "classification", broken, y) == 0
    assert value("balanced_accuracy", "classification", broken, y) == 0


def test_every_task_has_what_the_table_says():
    model = Model(lambda key, x: jnp.zeros(()), lambda params, x, key=None, train=False: x)
    built = {kind: make(Task(model, (3,), 1)) for kind, make in TASKS.items()}
    for name, by_task in NAMED_METRICS.items():
        for kind, metric in by_task.items():
            assert (name in built[kind].metrics) == (metric is None), (name, kind)
    assert by_name("perplexity,accuracy") == {"perplexity": "perplexity", "accuracy": "accuracy"}
    for task in built.values():
        assert next(iter(task.metrics)) == task.headline  # by which `headline.of_names` tells it
        assert HEADLINES[task.headline].lower == task.lower


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("acuracy", "unknown metric 'acuracy': did you mean 'accuracy'"),
        (["auc", "macro-f1"], "unknown metric 'macro-f1': did you mean 'macro_f1'"),
        ("auc,", "metrics are names with commas between them, got 'auc,'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(metrics, message):
    with pytest.raises(JaxpflError, match=message):
        by_name(metrics)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("auc", "regression", r"needs classes, or labels 0 and 1 \(task classification or .*whose metrics are a, b"),
        ("rmse", "binary", r"rmse needs labels that are numbers \(task regression\); this run's task is binary"),
        ("balanced_accuracy", "multilabel", "needs one class of each example"),
        ("perplexity", "classification", r"needs a label at each position \(task next-token\)"),
    ],
)
def test_a_metric_of_other_tasks_is_refused_with_the_reason(name, kind, message):
    with pytest.raises(JaxpflError, match=message):
        of_task(name, kind, ["a", "b"])
