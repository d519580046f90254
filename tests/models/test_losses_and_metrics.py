"""Losses by name against their formulas, metrics against scikit-learn's, and which task has which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn import metrics as sklearn

from jaxpfl import JaxpflError
from jaxpfl.engine.evaluate import HEADLINES
from jaxpfl.models import TASKS, PerClient, Task, metrics
from jaxpfl.models.base import Model
from jaxpfl.models.metrics import NAMED_METRICS, parse_metrics

A = np.array([[0.3], [-1.7], [2.0], [0.0]])
Y = np.array([0.0, 1.0, 3.0, 0.0])
R = A[:, 0] - Y


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("squared", R**2 / 2),
        ("absolute", np.abs(R)),
        ("huber", np.where(np.abs(R) <= 1, R**2 / 2, np.abs(R) - 0.5)),
        ("huber:delta=2", np.where(np.abs(R) <= 2, R**2 / 2, 2 * (np.abs(R) - 1))),
        ("quantile:q=0.9", np.where(R < 0, -0.9 * R, 0.1 * R)),
        ("poisson", np.exp(A[:, 0]) - Y * A[:, 0]),
    ],
)
def test_losses(name, wanted):
    loss = metrics.parse_loss(name).function
    np.testing.assert_allclose(loss(jnp.asarray(A), jnp.asarray(Y)), wanted, rtol=1e-5)
    both = loss(jnp.asarray(np.hstack([A, A])), jnp.asarray(np.stack([Y, Y], 1)))  # a vector's loss is the sum
    np.testing.assert_allclose(both, 2 * wanted, rtol=1e-5)


def test_predictions_are_never_broadcast_against_labels():
    loss = metrics.parse_loss("squared").function
    for wrong in (jnp.zeros((4, 4)), jnp.zeros((4, 2)), jnp.zeros((1, 4))):
        with pytest.raises(JaxpflError, match="one value for each label"):
            loss(wrong, jnp.zeros(4))


@pytest.mark.parametrize("name", ["squared", "poisson"])
def test_divergences_are_those_of_the_densities(name):
    """KL(p_b || p_a) is the expected difference of the losses, under the distribution of the teacher b."""
    found = metrics.parse_loss(name)
    rng = np.random.default_rng(0)
    b, a = 0.4, 0.9
    y = rng.normal(b, 1, 400_000) if name == "squared" else rng.poisson(np.exp(b), 400_000)
    n = len(y)
    gap = [found.function(jnp.full((n, 1), v), jnp.asarray(y, jnp.float32)).mean() for v in (a, b)]
    wanted = found.divergence(jnp.array([[b]]), jnp.array([[a]]))[0]
    np.testing.assert_allclose(gap[0] - gap[1], wanted, rtol=0.03)


def test_the_divergence_of_logits_is_that_of_bernoulli_distributions():
    b, a = np.array([[0.4, -3.0]]), np.array([[1.9, 0.0]])
    p, q = 1 / (1 + np.exp(-b)), 1 / (1 + np.exp(-a))
    wanted = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(axis=1)
    np.testing.assert_allclose(metrics.bernoulli_divergence(jnp.asarray(b), jnp.asarray(a)), wanted, rtol=1e-5)


def test_mixtures_predict_the_mean():
    weights, predictions = jnp.array([0.25, 0.75]), jnp.array([[[1.0]], [[-2.0]]])
    means = {"squared": lambda a: a, "poisson": np.exp}
    for name, of in means.items():
        found = metrics.parse_loss(name).mixture(weights, predictions)[0, 0]
        np.testing.assert_allclose(of(found), 0.25 * of(1.0) + 0.75 * of(-2.0), rtol=1e-5)
    p = jax.nn.sigmoid(metrics.LOGISTIC.mixture(weights, predictions)[0, 0])
    np.testing.assert_allclose(p, 0.25 / (1 + np.exp(-1)) + 0.75 / (1 + np.exp(2)), rtol=1e-5)


def padded(*arrays, more=3):
    return [jnp.asarray(np.concatenate([a, np.zeros((more, *a.shape[1:]), a.dtype)])) for a in arrays]


def scored(metric, predictions, y):
    """The metric with padding, which must not count."""
    p, labels, valid = padded(predictions, y, np.ones(len(y), bool))
    return float(jax.jit(metric.function)(p, labels, valid))


def test_regression_metrics_are_scikit_learns():
    rng = np.random.default_rng(1)
    y = rng.normal(50, 2, 40).astype(np.float32)
    a = (y + rng.normal(size=40)).astype(np.float32)[:, None]
    same = lambda predictions: predictions  # noqa: E731
    np.testing.assert_allclose(scored(metrics.rmse(same), a, y), sklearn.mean_squared_error(y, a[:, 0]) ** 0.5, 1e-5)
    np.testing.assert_allclose(scored(metrics.r2(same), a, y), sklearn.r2_score(y, a[:, 0]), rtol=1e-4)
    assert np.isnan(scored(metrics.r2(same), a, np.full(40, 3.0, np.float32)))
    a[3] = np.inf
    assert scored(metrics.rmse(same), a, y) == np.inf
    assert scored(metrics.r2(same), a, y) == -np.inf


def test_the_auc_is_scikit_learns_with_ties():
    rng = np.random.default_rng(2)
    y = rng.integers(2, size=60)
    a = np.round(rng.normal(size=60) + y, 1).astype(np.float32)[:, None]
    np.testing.assert_allclose(scored(metrics.auc, a, y), sklearn.roc_auc_score(y, a[:, 0]), rtol=1e-6)
    assert np.isnan(scored(metrics.auc, a, np.ones(60, int)))
    assert scored(metrics.auc, np.full((60, 1), np.nan, np.float32), y) == 0


def test_the_auc_of_a_client_with_more_pairs_than_an_integer_holds():
    rng = np.random.default_rng(5)
    y = np.arange(140_000) % 2  # 4.9e9 pairs
    a = (y + rng.normal(size=len(y))).astype(np.float32)[:, None]
    np.testing.assert_allclose(scored(metrics.auc, a, y), sklearn.roc_auc_score(y, a[:, 0]), rtol=1e-5)


def test_macro_f1_is_scikit_learns_over_the_classes_that_occur():
    rng = np.random.default_rng(3)
    a, y = rng.normal(size=(30, 7)).astype(np.float32), rng.integers(3, size=30)
    np.testing.assert_allclose(scored(metrics.macro_f1, a, y), sklearn.f1_score(y, a.argmax(1), average="macro"), 1e-5)
    a, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(2, size=(30, 4))
    np.testing.assert_allclose(scored(metrics.macro_f1, a, y), sklearn.f1_score(y, a > 0, average="macro"), 1e-5)


def test_the_calibration_error_of_a_known_table():
    # Confidence .9 for all ten: nine are right, then five.
    logit = np.full((10, 1), np.log(9), np.float32)
    assert scored(metrics.calibration_error, logit, np.arange(10) < 9) == pytest.approx(0, abs=1e-6)
    assert scored(metrics.calibration_error, logit, np.arange(10) < 5) == pytest.approx(0.4, abs=1e-6)
    two = np.hstack([np.zeros_like(logit), logit])
    assert scored(metrics.calibration_error, two, (np.arange(10) < 5).astype(int)) == pytest.approx(0.4, abs=1e-6)


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
        want = np.mean([sklearn.roc_auc_score(truth == k, odds[k]) for k in range(there)])
        found = value("auc", "classification", np.float32(scale) * logits, y)
        assert found == pytest.approx(want, abs=1e-6)
        rounded = [jax.nn.softmax(np.float32(scale) * logits[:REAL])[:, k] for k in range(there)]
        by_share = np.mean([sklearn.roc_auc_score(truth == k, rounded[k]) for k in range(there)])
        assert (abs(by_share - want) > 1e-3) == (scale == 40)
    guess = real.argmax(axis=1)
    want = sklearn.recall_score(truth, guess, labels=np.arange(there), average="macro")
    assert value("balanced_accuracy", "classification", logits, y) == pytest.approx(want, abs=1e-6)


def test_scores_of_one_logit_are_those_of_two_classes():
    logit = RNG.normal(size=(N, 1)).astype(np.float32)
    logit[::7] = 0  # the label 0
    y = (RNG.random(N) < 0.3).astype(np.int32)
    truth, guess = y[:REAL], logit[:REAL, 0] > 0
    for kind in ("binary", "ranking"):
        got = value("macro_f1", kind, logit, y), value("balanced_accuracy", kind, logit, y)
        want = sklearn.f1_score(truth, guess, average="macro"), sklearn.balanced_accuracy_score(truth, guess)
        assert got == pytest.approx(want, abs=1e-6)


def test_the_auc_of_labels_leaves_out_those_of_one_value():
    logits, y = RNG.normal(size=(N, 3)).astype(np.float32), (RNG.random((N, 3)) < 0.4).astype(np.int32)
    y[:, 1] = 1
    want = np.mean([sklearn.roc_auc_score(y[:REAL, k], logits[:REAL, k]) for k in (0, 2)])
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
    assert parse_metrics("perplexity,accuracy") == {"perplexity": "perplexity", "accuracy": "accuracy"}
    for task in built.values():
        assert next(iter(task.metrics)) == task.headline  # by which `headline.of_names` tells it
        assert HEADLINES[task.headline].lower == task.lower
