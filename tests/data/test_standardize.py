"""Features on one scale, and warnings of data that train to no use."""

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError, JaxpflWarning, data
from jaxpfl.data import Source


def source(scales=(1.0, 1000.0, 0.0), n: int = 60, **changes) -> Source:
    rng = np.random.default_rng(3)
    x = (5 + rng.normal(size=(n, 3)) * np.array(scales)).astype(np.float32)
    return Source("own", x, rng.integers(3, size=n).astype(np.int32), None, None, 3, "own")._replace(**changes)


def test_training_examples_of_all_clients_have_mean_zero_and_deviation_one():
    plain, got = (
        jaxpfl.federate(source(), partition="iid", clients=7, validation_share=0.2, standardize=how)
        for how in (False, True)
    )
    train = got.train.x[got.train.mask]
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(axis=0), [1, 1, 0], atol=1e-5)  # what does not vary is zero
    raw = plain.train.x[plain.train.mask].astype(float)
    mean, deviation = raw.mean(axis=0), np.where(raw.std(axis=0) > 1e-6, raw.std(axis=0), 1)
    for split in ("train", "validation", "test"):
        before, after = getattr(plain, split), getattr(got, split)
        np.testing.assert_allclose(after.x[after.mask], (before.x[before.mask] - mean) / deviation, atol=1e-4)
        assert not after.x[~np.asarray(after.mask)].any()
        np.testing.assert_array_equal(after.y, before.y)


def test_clients_that_arrive_later_are_scaled_as_the_others():
    trained, unseen = jaxpfl.set_apart(jaxpfl.federate(source(), partition="iid", clients=6), 2)
    scaling = data.scaling_of(trained)
    moved = unseen._replace(train=unseen.train.with_examples(x=unseen.train.examples.x + 1e6))
    scaled = data.scaled(unseen, scaling)
    raw = unseen.test.x[unseen.test.mask]
    np.testing.assert_allclose(scaled.test.x[scaled.test.mask], (raw - scaling.mean) / scaling.deviation, rtol=1e-5)
    np.testing.assert_array_equal(data.scaled(moved, scaling).test.x, scaled.test.x)


def test_trees_of_inputs_and_many_blocks(monkeypatch):
    monkeypatch.setattr("jaxpfl.mapped._ENTRIES", 7)
    rng = np.random.default_rng(0)
    clients = [({"a": 3 + rng.normal(size=(n, 2)), "b": 9 * rng.normal(size=n)}, np.zeros(n, int)) for n in (2, 5, 4)]
    federation = jaxpfl.stack_clients(clients)
    got = data.scaled(federation, data.scaling_of(federation))
    for name in ("a", "b"):
        real = got.train.x[name][got.train.mask]
        np.testing.assert_allclose(real.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(real.std(axis=0), 1, atol=1e-6)


@pytest.mark.parametrize("inputs", ["pixels", "tokens"])
def test_what_are_no_features_is_refused(inputs):
    with pytest.raises(JaxpflError, match=f"standardize is for features: own holds {inputs}"):
        jaxpfl.federate(source(inputs=inputs), partition="iid", clients=3, standardize=True)


def clients_of(x, y) -> jaxpfl.Federation:
    return jaxpfl.stack_clients(list(zip(np.split(x, 4), np.split(y, 4), strict=True)))


def test_features_a_thousand_times_apart_are_said_and_rare_ones_are_not():
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=400)
    with pytest.warns(JaxpflWarning, match=r"features differ .* factor of [12]\d\d\d \(feature 0 .*feature 1"):
        data.check_scales(clients_of(rng.normal(size=(400, 2)) * [1.0, 1500.0], y))
    with pytest.raises(JaxpflError, match="--standardize"):
        data.check_scales(clients_of(rng.normal(size=(400, 2)) * [1.0, 1500.0], y), strict=True)
    rare = (rng.random((400, 3)) < [0.5, 0.003, 0.0]).astype(float)
    data.check_scales(clients_of(rare, y))
    data.check_scales(clients_of(rng.normal(size=(400, 2)) * [1.0, 500.0], y))
    data.check_scales(clients_of(rng.integers(10**6, size=(400, 3)), y))  # tokens


def test_amounts_as_labels_are_said_and_classes_are_not():
    from sklearn.datasets import load_diabetes

    x, amounts = load_diabetes(return_X_y=True)
    with pytest.warns(JaxpflWarning, match=r"\d+ different labels in 440 examples.*name the task regression"):
        data.check_labels(clients_of(x[:440], amounts[:440].astype(int)))
    data.check_labels(clients_of(x[:440], amounts[:440]))  # floats are of a regression
    rng = np.random.default_rng(0)
    data.check_labels(clients_of(rng.normal(size=(400, 2)), rng.integers(62, size=400)))
    data.check_labels(clients_of(rng.normal(size=(16, 2)), np.arange(16)))


def test_fit_says_both():
    rng = np.random.default_rng(0)
    given = {"model": "linear", "rounds": 1, "local_steps": 1}
    x = rng.normal(size=(80, 2)) * [1, 1e4]
    with pytest.warns(JaxpflWarning) as said:
        jaxpfl.fit("local", clients_of(x, np.arange(80)), **given)
    text = " | ".join(str(one.message) for one in said)
    assert "features differ in scale" in text
    assert "80 different labels in 80 examples" in text
