"""Augmentation against NumPy: each function on given draws, and the round of a method on augmented batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_setup import clients, stack

import jaxpfl
from jaxpfl import JaxpflError, Model
from jaxpfl.algorithms.parts import augmentation
from jaxpfl.core.randomness import Purpose, stream

B, H, W, C, CLASSES = 40, 5, 6, 2, 3


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).normal(size=(B, H, W, C))


@pytest.mark.usefixtures("float64")
def test_a_flip_mirrors_half_of_the_images(images):
    got = np.asarray(augmentation.flipped(jax.random.key(1), images))
    mirrored = np.array([not np.array_equal(a, b) for a, b in zip(got, images, strict=True)])
    np.testing.assert_array_equal(got, np.where(mirrored[:, None, None, None], np.flip(images, axis=2), images))
    assert 8 < mirrored.sum() < 32


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("padding", [1, 4])
def test_a_crop_is_a_window_of_the_padded_image(images, padding):
    """Every corner is drawn about as often."""
    wide = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    seen = np.zeros((2 * padding + 1,) * 2)
    for seed in range(6):
        got = np.asarray(augmentation.cropped(jax.random.key(seed), images, padding))
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


@pytest.mark.usefixtures("float64")
def test_mixup_mixes_inputs_and_labels_alike(images):
    """By a permutation of the valid examples; the loss is the mixture's for a loss that is linear in the target."""
    y, valid = np.arange(B), np.arange(B) < 30
    x, labels = augmentation.mixed(jax.random.key(2), jnp.asarray(images), jnp.asarray(y), jnp.asarray(valid), 0.7)
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
    share = np.asarray(jax.vmap(lambda key: augmentation.mixed(key, x, y, valid, alpha)[1].share)(keys), float)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(share.mean() - 0.5) < 5 * np.sqrt(variance / n)
    assert abs(share.var() - variance) < 5 * 0.25 / np.sqrt(n)


def federation(shape=(H, W, C), dtype: type = np.float32):
    rng = np.random.default_rng(1)

    def client(n):
        return rng.normal(size=(n, *shape)).astype(dtype), rng.integers(0, CLASSES, n).astype(np.int32)

    return stack([client(n) for n in (9, 6)], [client(5) for _ in range(2)], (0, 1))


def linear():
    def init(key, x):
        return {"w": jnp.zeros((int(np.prod(x.shape[1:])), CLASSES))}

    return Model(init, lambda params, x, key=None, train=False: x.reshape(len(x), -1) @ params["w"])


def fitted(method="fedavg", augment: str | None = "flip+crop:padding=1+mixup", data=None, **more):
    given = {"model": linear(), "rounds": 2, "batch_size": 20, "local_steps": 2, "num_classes": CLASSES} | more
    data = federation() if data is None else data
    return jaxpfl.fit(method, data, augment=augment, lr=0.3, hyper={"lr_decay": 1.0, "weight_decay": 0.0}, **given)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_run_is_numpys_on_the_augmented_batches():
    """Draws are those of the step's named stream; the scores are of the examples as they are."""
    data, chain = federation(dtype=np.float64), augmentation.parse("flip+crop:padding=1+mixup")
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
def test_methods_take_it_under_any_plan(method):
    def loss(augment, **plan):
        plan = jaxpfl.ExecutionPlan(**plan)
        given = {"model": "mlp:4", "batch_size": 4, "plan": plan}
        return fitted(method, augment, **given).history["train_loss"]

    want = loss("flip+mixup", clients="map")
    np.testing.assert_allclose(loss("flip+mixup", clients="vmap"), want, rtol=1e-4)
    np.testing.assert_allclose(loss("flip+mixup", clients_in="host"), want, rtol=1e-4)
    assert not np.allclose(want, loss(None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flop", "unknown augmentation 'flop': did you mean 'flip'"),
        ("flip+flip", r"augment = flip\+flip: flip can be named once"),
        ("mixup+flip", r"augment = mixup\+flip: mixup must be the last"),
        ("crop:padding=0", "augmentation crop:padding must be a whole number of at least 1, got 0"),
        ("crop:pad=1", "unknown argument of augmentation crop 'pad'"),
        ("mixup:alpha=0", "augmentation mixup:alpha must be > 0 and finite, got 0"),
        ("flip:", "an augmentation is NAME or NAME:argument=value"),
    ],
)
def test_what_is_no_augmentation_is_refused(text, message):
    with pytest.raises(JaxpflError, match=message):
        fitted(augment=text)


def test_what_it_is_not_for_is_refused():
    vectors = federation(shape=(7,))
    with pytest.raises(
        JaxpflError, match=r"augment = crop is of images \[height, width, channels\], inputs are \(7,\)"
    ):
        fitted(augment="crop", data=vectors)
    with pytest.raises(JaxpflError, match="augment = mixup is of classes, and the task is regression"):
        fitted(augment="mixup", task="regression", num_classes=None, data=federation(), model="linear")
    for method, why in (
        ("fedem", "does not mix what this method knows"),
        ("fedproto", "fedproto reads them"),
        ("fedpac", "fedpac reads them"),
    ):
        with pytest.raises(JaxpflError, match=f"augment = mixup .*{why}"):
            fitted(method, "mixup", model="mlp:4")
