"""Features on one scale, and warnings of data that train to no use."""

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflWarning, data
from jaxpfl.data import Source, scaled, scaling_of, single


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
    monkeypatch.setattr("jaxpfl.support.host_memory._ENTRIES", 7)
    rng = np.random.default_rng(0)
    clients = [({"a": 3 + rng.normal(size=(n, 2)), "b": 9 * rng.normal(size=n)}, np.zeros(n, int)) for n in (2, 5, 4)]
    federation = jaxpfl.stack_clients(clients)
    got = data.scaled(federation, data.scaling_of(federation))
    for name in ("a", "b"):
        real = got.train.x[name][got.train.mask]
        np.testing.assert_allclose(real.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(real.std(axis=0), 1, atol=1e-6)


STAMPS = 1.7e12 + np.cumsum(np.random.default_rng(0).integers(1, 30_000, 400)).astype(float)
"""Times in milliseconds, which single precision tells apart by two minutes."""


def stamped(kind, folder):
    """A federation of ten clients with these times as their only feature, by different ways."""
    x, y, clients = STAMPS[:, None], np.arange(400) % 2, np.arange(400) % 10
    own = [(x[clients == i], y[clients == i]) for i in range(10)]
    others = [(x + 1.0, y) for x, y in own]
    if kind == "alike":
        return jaxpfl.stack_clients(own, test=others)
    if kind == "ragged":
        return jaxpfl.stack_clients([*own[:9], (own[9][0].tolist(), own[9][1])], test=others)
    if kind == "csv":
        lines = [f"c{client},{stamp:.0f},{label}" for client, stamp, label in zip(clients, STAMPS, y, strict=True)]
        (folder / "a.csv").write_text("\n".join(["client,stamp,label", *lines]))
        table = data.TableOptions("label", "client")
        source = jaxpfl.load(f"csv:{folder / 'a.csv'}", table=table, task="classification")
    elif kind == "libsvm":
        (folder / "a").write_text("\n".join(f"{label} 1:{stamp:.0f}" for stamp, label in zip(STAMPS, y, strict=True)))
        source = jaxpfl.load("libsvm:a", str(folder))
    elif kind == "source":
        source = Source("own", x, y.astype(np.int32), None, None, 2, "")
    else:
        np.savez(folder / "a.npz", x_train=x.astype(kind.split()[0]), y_train=y)
        source = jaxpfl.load(f"npz:{folder / 'a.npz'}", in_files="files" in kind)
    return jaxpfl.federate(source, clients=10, partition="iid", test_share=0.2)


@pytest.mark.parametrize("kind", ["alike", "ragged", "csv", "libsvm", "source", "float64", "int64", "float64 files"])
def test_digits_are_cut_after_standardization(kind, tmp_path):
    federation = stamped(kind, tmp_path)
    given = np.unique(federation.train.examples.x)
    assert given.dtype == np.float64
    made = scaled(federation, scaling_of(federation)).train.examples.x
    assert made.dtype == np.float32
    np.testing.assert_allclose(np.unique(made), (given - given.mean()) / given.std(), atol=1e-6)
    with pytest.warns(JaxpflWarning, match=rf"of feature 0 {len(given)} distinct values become \d\d in single"):
        cut = single(federation)
    np.testing.assert_array_equal(cut.train.examples.x, federation.train.examples.x.astype(np.float32))
    assert cut.test.examples.x.dtype == np.float32


def test_lost_digits_are_said_by_a_fit_and_of_labels(tmp_path):
    federation = stamped("alike", tmp_path)
    with pytest.warns(JaxpflWarning, match="400 distinct values become .* in single precision: use --standardize"):
        jaxpfl.fit("local", federation, model="linear", rounds=1, local_steps=1)
    with pytest.warns(JaxpflWarning, match="of the labels 400 distinct values become .*: subtract an offset"):
        jaxpfl.stack_clients([(np.ones((400, 1)), STAMPS)] * 2)
    years = jaxpfl.stack_clients([(np.arange(2000.0, 2020)[:, None], np.arange(20) % 2)] * 2)
    assert years.train.examples.x.dtype == np.float32
