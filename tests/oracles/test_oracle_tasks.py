"""Tasks and data against NumPy: least squares with its distillation and scores; augmented batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CLASSES, clients, on_host, run_method, stack

import jaxpfl
from jaxpfl import JaxpflError, Model, Task
from jaxpfl.algorithms.parts import augmentation
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.models.base import regression_task

# --- least squares of a linear model --------------------------------------------------------------

INPUTS, TAU, TURNS, RATE = 3, 2, 3, 0.05
LENGTHS, PLACES = (6, 9, 14, 4), (3, 11, 0, 7)


def problem():
    rng = np.random.default_rng(3)

    def examples(n, w):
        x = rng.normal(size=(n, INPUTS))
        return x, x @ w + 0.3 * rng.normal(size=n)

    rules = rng.normal(size=(len(LENGTHS), INPUTS))
    pairs = [(examples(n, w), examples(5 + i, w)) for i, (n, w) in enumerate(zip(LENGTHS, rules, strict=True))]
    return stack([train for train, _ in pairs], [test for _, test in pairs], PLACES)


def linear() -> Task:
    start = np.linspace(-0.2, 0.4, INPUTS)
    model = Model(lambda key, x: jnp.asarray(start), lambda w, x, key=None, train=False: (x @ w)[:, None])
    return regression_task(Task(model, (INPUTS,), 1))


def gradient(w, x, y):
    return x.T @ (x @ w - y) / len(y)


def by_adaped(data, mu, psi=2.0, c=5.0, rate_psi=0.05, floor=0.5, defect=""):
    """With the divergence |b - a|^2 / 2 of predictions; ``half``: |b - a|^2."""
    scale = 2 if defect == "half" else 1
    own = [mu] * len(data)
    for _ in range(TURNS):
        new = []
        for i, (x, y) in enumerate(data):
            theta, m, p = own[i], mu, psi
            for _ in range(TAU):
                pull = scale * x.T @ (x @ (theta - m)) / len(y) / (2 * p)
                theta = theta - RATE * (gradient(theta, x, y) + pull)
                m = m + RATE * scale * x.T @ (x @ (theta - m)) / len(y) / (2 * p)
                f = scale * np.mean((x @ (theta - m)) ** 2) / 2
                p = max(p - rate_psi * (1 / (2 * p) - c * f / (2 * p**2)), floor)
            own[i] = theta
            new.append((m, p))
        mu, psi = np.mean([m for m, _ in new], axis=0), np.mean([p for _, p in new])
    return own, mu


HYPER = {"lr": RATE, "weight_decay": 0.0, "lr_decay": 1.0, "lr_global": RATE, "psi_init": 2.0}


@pytest.mark.slow
def test_rounds_and_scores_of_least_squares():
    federation, start = problem(), np.linspace(-0.2, 0.4, INPUTS)
    got = run_method("adaped", HYPER, rounds=TURNS, problem=federation, task=linear(), steps=TAU)
    own, mu = by_adaped(clients(federation.train), start)
    found, test = on_host(dict(got.simulation.evaluate(got.state))), clients(federation.test)
    for which, models in {"after": own, "global": [mu] * len(test)}.items():
        for i, ((x, y), w) in enumerate(zip(test, models, strict=True)):
            left = x @ w - y
            want = {"rmse": np.sqrt(np.mean(left**2)), "mae": np.mean(np.abs(left)), "loss": np.mean(left**2) / 2}
            want["r2"] = 1 - np.sum(left**2) / np.sum((y - y.mean()) ** 2)
            for name, value in want.items():
                np.testing.assert_allclose(found[which][name][i], value, rtol=1e-9)


def test_another_distance_would_be_seen():
    data, start = clients(problem().train), np.linspace(-0.2, 0.4, INPUTS)
    right, wrong = (by_adaped(data, start, defect=defect)[1] for defect in ("", "half"))
    assert np.abs(right - wrong).max() > 1e-3


# --- augmentation ---------------------------------------------------------------------------------

B, H, W, C = 40, 5, 6, 2


@pytest.fixture
def images():
    return np.random.default_rng(0).normal(size=(B, H, W, C))


def test_a_flip_mirrors_half_of_the_images(images):
    got = np.asarray(augmentation.flipped(jax.random.key(1), images))
    mirrored = np.array([not np.array_equal(a, b) for a, b in zip(got, images, strict=True)])
    np.testing.assert_array_equal(got, np.where(mirrored[:, None, None, None], np.flip(images, axis=2), images))
    assert 8 < mirrored.sum() < 32


@pytest.mark.parametrize("padding", [1, 4])
def test_a_crop_is_a_window_of_the_padded_image(images, padding):
    """Every corner is drawn about as often."""
    wide = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    seen, cropped = np.zeros((2 * padding + 1,) * 2), jax.jit(partial(augmentation.cropped, padding=padding))
    for seed in range(6):
        got = np.asarray(cropped(jax.random.key(seed), images))
        for one, around in zip(got, wide, strict=True):
            matches = [
                (i, j)
                for i in range(2 * padding + 1)
                for j in range(2 * padding + 1)
                if np.array_equal(one, around[i : i + H, j : j + W])
            ]
            assert matches
            seen[matches[0]] += 1
    if padding == 1:
        assert seen.min() > 0.5 * seen.mean()


def test_mixup_mixes_inputs_and_labels_alike(images):
    """By a permutation of the valid examples; the loss is the mixture's for a loss that is linear in the target."""
    y, valid = np.arange(B), np.arange(B) < 30
    x, labels = jax.jit(augmentation.mixed)(jax.random.key(2), images, y, valid, 0.7)
    second, share = np.asarray(labels.second), float(labels.share)
    assert 0 < share < 1
    np.testing.assert_array_equal(labels.first, y)
    assert sorted(second[:30]) == list(range(30))
    assert not np.array_equal(second[:30], y[:30])
    np.testing.assert_allclose(x, share * images + (1 - share) * images[second], rtol=1e-12)


def test_shares_are_of_the_beta_distribution():
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1)), five standard errors."""
    alpha, n = 0.4, 2000
    x, y, valid = jnp.zeros((1, 1, 1, 1)), jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    keys = jax.random.split(jax.random.key(0), n)
    draw = jax.jit(jax.vmap(lambda key: augmentation.mixed(key, x, y, valid, alpha)[1].share))
    share = np.asarray(draw(keys), float)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(share.mean() - 0.5) < 5 * np.sqrt(variance / n)
    assert abs(share.var() - variance) < 5 * 0.25 / np.sqrt(n)


def image_federation(shape=(H, W, C), dtype: type = np.float32):
    rng = np.random.default_rng(1)

    def client(n):
        return rng.normal(size=(n, *shape)).astype(dtype), rng.integers(0, CLASSES, n).astype(np.int32)

    return stack([client(n) for n in (9, 6)], [client(5) for _ in range(2)], (0, 1))


def linear_classifier():
    def init(key, x):
        return {"w": jnp.zeros((int(np.prod(x.shape[1:])), CLASSES))}

    return Model(init, lambda params, x, key=None, train=False: x.reshape(len(x), -1) @ params["w"])


def fitted(method="fedavg", augment: str | None = "flip+crop:padding=1+mixup", data=None, **more):
    given = {
        "model": linear_classifier(),
        "rounds": 2,
        "batch_size": 20,
        "local_steps": 2,
        "num_classes": CLASSES,
    } | more
    data = image_federation() if data is None else data
    return jaxpfl.fit(method, data, augment=augment, lr=0.3, hyper={"lr_decay": 1.0, "weight_decay": 0.0}, **given)


@pytest.mark.slow
def test_a_run_is_numpys_on_the_augmented_batches():
    """Draws are those of the step's named stream; the scores are of the examples as they are."""
    data, chain = image_federation(dtype=np.float64), augmentation.parse("flip+crop:padding=1+mixup")
    fit, mu = fitted(data=data), np.zeros((H * W * C, CLASSES))
    start = fit.simulation.init([0])
    run_key = start.key[0]
    for r in range(2):
        new = []
        for i, n in enumerate((9, 6)):
            local = stream(run_key, Purpose.LOCAL_WORK, r, i)
            w, x = mu, np.zeros((9, H, W, C))
            y = np.zeros(9, int)
            x[:n], y[:n] = clients(data.train)[i]
            for t in range(2):
                key = stream(jax.random.fold_in(local, t), Purpose.AUGMENTATION, 0)
                seen, labels = chain(key, jnp.asarray(x), jnp.asarray(y), jnp.arange(9) < n)
                seen, share = np.asarray(seen)[:n].reshape(n, -1), float(labels.share)
                target = share * np.eye(CLASSES)[y[:n]] + (1 - share) * np.eye(CLASSES)[np.asarray(labels.second)[:n]]
                logits = seen @ w
                q = np.exp(logits - logits.max(axis=1, keepdims=True))
                q /= q.sum(axis=1, keepdims=True)
                w = w - 0.3 * seen.T @ (q - target) / n
            new.append(w)
        mu = np.average(new, axis=0, weights=(9, 6))
    np.testing.assert_allclose(fit.state.server["w"][0], mu, rtol=1e-9, atol=1e-12)
    x, y = clients(data.test)[0]
    right = ((x.reshape(5, -1) @ mu).argmax(axis=1) == y).mean()
    np.testing.assert_allclose(fit.scores["global"]["accuracy"][-1, 0, 0], right)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adaped", "perfedavg"])
def test_methods_take_augmentation_under_any_plan(method):
    def loss(augment, **plan):
        plan = jaxpfl.ExecutionPlan(**plan)
        return fitted(method, augment, model="mlp:4", batch_size=4, plan=plan).history["train_loss"]

    want = loss("flip+mixup", clients="map")
    other = {"clients": "vmap"} if method == "adaped" else {"clients_in": "host"}
    np.testing.assert_allclose(loss("flip+mixup", **other), want, rtol=1e-4)
    assert not np.allclose(want, loss(None, clients="map"))


REGRESSION = {"task": "regression", "num_classes": None, "model": "linear"}


@pytest.mark.parametrize(
    ("method", "text", "more", "message"),
    [
        ("fedavg", "flop", {}, "unknown augmentation 'flop': did you mean 'flip'"),
        ("fedavg", "flip+flip", {}, r"augment = flip\+flip names flip twice"),
        ("fedavg", "mixup+flip", {}, r"augment = mixup\+flip: mixup must come last"),
        ("fedavg", "crop:padding=0", {}, "crop:padding must be a whole number >= 1, got 0"),
        ("fedavg", "crop:pad=1", {}, "unknown argument of augmentation crop 'pad'"),
        ("fedavg", "mixup:alpha=0", {}, "mixup:alpha must be > 0 and finite, got 0"),
        ("fedavg", "flip:", {}, "the augmentation must be NAME or NAME:argument=value"),
        ("fedavg", "mixup", REGRESSION, "augment = mixup requires a classification task, got regression"),
        ("fedem", "mixup", {"model": "mlp:4"}, "augment = mixup.* a value for each example"),
        ("fedproto", "mixup", {"model": "mlp:4"}, "fedproto does not support augment = mixup"),
        ("fedpac", "mixup", {"model": "mlp:4"}, "fedpac does not support augment = mixup"),
    ],
)
def test_augmentations_that_are_refused(method, text, more, message):
    with pytest.raises(JaxpflError, match=message):
        fitted(method, text, **more)
