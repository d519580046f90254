"""Stacked clients: the flat store, its views, a split in words and pictures, features on one scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_files import source_of

import jaxpfl
from jaxpfl import data
from jaxpfl.core.types import ClientData
from jaxpfl.data.federate import set_apart
from jaxpfl.data.stack import Examples
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

SIZES = (3, 5, 2)


def clients(sizes: tuple[int, ...] = SIZES) -> list[Examples]:
    return [(np.full((n, 2), i + 1.0), np.arange(n) % 3) for i, n in enumerate(sizes)]


def test_the_store_and_its_padded_views() -> None:
    federation = data.stack_clients(clients(), test=clients((1, 0, 4)))
    train = federation.train
    np.testing.assert_array_equal(train.examples.x, np.concatenate([x for x, _ in clients()]))
    np.testing.assert_array_equal(train.examples.y, np.concatenate([y for _, y in clients()]))
    np.testing.assert_array_equal(train.start, [0, 3, 8])
    np.testing.assert_array_equal(federation.test.start, [0, 0, 1])
    assert (train.x.shape, train.y.shape, train.mask.shape) == ((3, 5, 2), (3, 5), (3, 5))
    assert (train.x.dtype, train.y.dtype, train.mask.dtype) == (np.float32, np.int32, bool)
    np.testing.assert_array_equal(train.size, SIZES)
    np.testing.assert_array_equal(federation.test.size, [1, 0, 4])
    assert federation.validation.x.shape == (3, 0, 2)
    np.testing.assert_array_equal(federation.client_ids, [0, 1, 2])
    assert federation.input_shape == (2,)


def test_integer_inputs_stay_integers_and_mixed_ones_become_floats() -> None:
    tokens = [(np.array([[1, 2]]), np.array([0]))]
    assert data.stack_clients(tokens).train.x.dtype == np.int32
    assert data.stack_clients(tokens + clients()).train.x.dtype == np.float32


def test_dropping_empty_clients_keeps_the_ids_of_the_others() -> None:
    sizes = (3, 0, 2, 0)
    with pytest.warns(JaxpflWarning, match=r"2 of 4 clients have no training data \(namely 1, 3\): they are left out"):
        federation = data.stack_clients(clients(sizes), test=clients((1, 9, 2, 9)), drop_empty=True)
    np.testing.assert_array_equal(federation.client_ids, [0, 2])
    np.testing.assert_array_equal(federation.train.size, [3, 2])
    np.testing.assert_array_equal(federation.test.size, [1, 2])
    np.testing.assert_array_equal(federation.train.x[1, :2], np.full((2, 2), 3.0))
    with pytest.raises(JaxpflError, match=r"2 of 2 clients have no training data \(namely 0, 1\): no client is left"):
        data.stack_clients([([], []), ([], [])], drop_empty=True)  # type: ignore[list-item]


def test_batches_larger_than_a_client() -> None:
    federation = data.stack_clients(clients())
    data.check_batch_size(federation, 2, strict=True)
    with pytest.warns(JaxpflWarning, match="batch size 4 is larger .* of 2 of 3 clients .*smallest has 2") as seen:
        data.check_batch_size(federation, 4)
    assert len(seen) == 1
    with pytest.raises(JaxpflError, match="of 2 of 3 clients"):
        data.check_batch_size(federation, 4, strict=True)


def test_summary_and_description() -> None:
    federation = data.stack_clients(clients(), test=clients((1, 0, 4)), client_ids=[5, 6, 9])
    federation = federation._replace(train=federation.train.bounded(8))
    counts = data.summary(federation, num_classes=4)
    np.testing.assert_array_equal(counts.class_counts, [[1, 1, 1, 0], [2, 2, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(counts.classes_held, [3, 3, 2])
    np.testing.assert_array_equal(counts.holders, [3, 3, 2, 0])
    described = data.describe(counts)
    assert json.loads(json.dumps(described)) == described
    assert described["examples_per_client"]["train"] == {"min": 2, "median": 3.0, "max": 5}
    assert described["capacity"] == {"train": 8, "validation": 0, "test": 4}
    assert described["per_client"][2] == {
        "client_id": 9,
        "train": 2,
        "validation": 0,
        "test": 4,
        "class_counts": [1, 1, 0, 0],
    }
    text = data.format_description(described, most_clients=2)
    assert "3 clients, 4 classes, inputs 2" in text
    assert "... and 1 more clients" in text


def _rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(2, size=n)


@pytest.mark.parametrize("copies", [1, 12])
@pytest.mark.parametrize("tree", [False, True])
def test_test_examples_that_are_trained_on_are_counted(copies: int, tree: bool) -> None:
    (x, y), (x_test, y_test) = _rows(40), _rows(12, seed=1)
    places = np.arange(copies)
    x_test[places], y_test[places] = x[places + 7], y[places + 7]
    other = x[:1].copy(), 1 - y[:1]  # of another label: it is no copy
    x_test, y_test = np.concatenate([x_test, other[0]]), np.concatenate([y_test, other[1]])
    of = (lambda a: {"a": a[:, :1], "b": a[:, 1:]}) if tree else (lambda a: a)
    train = [(of(x[:20]), y[:20]), (of(x[20:]), y[20:])]
    said = rf"^{copies} of 13 test examples are training examples too, with the same features and label: use a"
    with pytest.warns(JaxpflWarning, match=said):
        data.stack_clients(train, test=[(of(x_test), y_test), (of(x_test[:0]), y_test[:0])])
    users = np.zeros(40, np.int32)
    source = data.Source("own", of(x), y, of(x_test), y_test, 2, "", users_train=users, users_test=users[:13])
    for partition in ("iid", "natural"):
        with pytest.warns(JaxpflWarning, match=said):
            data.federate(source, partition=partition, clients=1)


def test_chance_repeats_of_discrete_features_are_no_leak() -> None:
    rng = np.random.default_rng(3)
    parts = [(rng.integers(2, size=(n, 6)).astype(np.float32), rng.integers(2, size=n)) for n in (60, 60)]
    data.stack_clients(parts[:1], test=parts[1:])


def counts_of(m: int, num_classes: int, **options: object) -> data.Summary:
    labels = np.random.default_rng(0).integers(num_classes, size=12 * m + num_classes)
    arguments = {"partition": "dirichlet", "alpha": 0.3, "clients": m, **options}
    return data.summary(data.federate(source_of(labels), **arguments), num_classes)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "num_classes"), [(1, 2), (1000, 150)])
def test_sizes_of_splits(tmp_path: Path, m: int, num_classes: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path = data.plot_split(counts_of(m, num_classes, validation_share=0.2), tmp_path / "new" / "split.png")
    assert path == tmp_path / "new" / "split.png"
    assert [file.name for file in path.parent.iterdir()] == ["split.png"]
    with image.open(path) as picture:
        assert (picture.format, picture.width) == ("PNG", 1500)
        assert 500 < picture.height < 1300
        assert len(picture.convert("RGB").getcolors(2**20)) > 50


def test_a_table_of_many_classes_counts_them() -> None:
    text = data.format_description(data.describe(counts_of(5, 30)), most_clients=2)
    assert "training examples by class" not in text
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("client"))
    assert head.split() == ["client", "train", "classes"]
    assert lines[lines.index(head) + 3] == "... and 3 more clients"


@pytest.fixture(scope="module")
def federation():
    return data.federate(data.load("digits"), clients=20, classes_per_client=3)


def test_everybody_is_trained_or_unseen(federation):
    trained, unseen = set_apart(federation, 6)
    assert (trained.num_clients, unseen.num_clients) == (14, 6)
    ids = np.concatenate([trained.client_ids, unseen.client_ids])
    np.testing.assert_array_equal(np.sort(ids), federation.client_ids)
    for part in (trained, unseen):
        rows = np.flatnonzero(np.isin(federation.client_ids, part.client_ids))
        for got, whole in zip(part.all_splits, federation.all_splits, strict=True):
            assert len(got.examples.y) == got.size.sum()  # nobody's examples are left out of the store
            for own, row in enumerate(rows):
                n = whole.size[row]
                assert got.size[own] == n
                np.testing.assert_array_equal(got.x[own, :n], whole.x[row, :n])
                np.testing.assert_array_equal(got.y[own, :n], whole.y[row, :n])


def test_the_seed_decides(federation):
    first, again, other = (set_apart(federation, 6, seed)[1].client_ids for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    # PCG64's raw integers and IEEE operations: the same on every platform.
    assert first.tolist() == [3, 4, 8, 12, 13, 15]


def test_everyone_is_equally_likely(federation):
    """2000 draws of 5 of 20: each client 500 times, at 4.5 standard deviations (false alarm below 2e-4 for all)."""
    ids = federation._replace(**dict.fromkeys(("train", "validation", "test"), federation.train.emptied()))
    drawn = np.concatenate([set_apart(ids, 5, seed)[1].client_ids for seed in range(2000)])
    counts = np.bincount(drawn, minlength=20)
    assert np.abs(counts - 500).max() < 4.5 * np.sqrt(2000 * 0.25 * 0.75)


class Text(NamedTuple):
    tokens: Any
    length: Any


def inputs(n: int, kind: type = dict) -> Any:
    tokens = np.arange(n * 4, dtype=np.uint8).reshape(n, 4)
    length = np.linspace(0.0, 1.0, n)
    return Text(tokens, length) if kind is Text else {"tokens": tokens, "length": length}


@pytest.mark.parametrize("kind", [dict, Text])
def test_stacking_trees(kind: type) -> None:
    clients = [(inputs(n, kind), np.arange(n) % 3) for n in (3, 5)]
    federation = data.stack_clients(clients, test=[clients[1], (inputs(0, kind), np.zeros(0, int))])
    x = federation.train.x
    assert type(x) is kind
    tokens, length = x if kind is Text else (x["tokens"], x["length"])
    assert (tokens.shape, tokens.dtype, length.shape, length.dtype) == ((2, 5, 4), np.int32, (2, 5), np.float32)
    np.testing.assert_array_equal(tokens[0, :3], np.arange(12).reshape(3, 4))
    assert not tokens[0, 3:].any()

    moved = federation.rows([1, 0])
    moved = moved._replace(train=moved.train.bounded(7))
    tokens = jax.tree.leaves({"a": moved.train.x})[-1] if kind is dict else moved.train.x.tokens
    assert tokens.shape == (2, 7, 4)
    np.testing.assert_array_equal(tokens[0, :5], np.arange(20).reshape(5, 4))


def test_from_a_source_to_a_batch() -> None:
    source = data.Source("own", inputs(40), np.arange(40) % 4, inputs(8), np.arange(8) % 4, 4, "own")
    federation = data.federate(source, partition="dirichlet", clients=4, alpha=1.0)
    counts = data.summary(federation, 4, source)
    assert counts.unused == 0
    described = data.describe(counts)
    assert described["input_shape"] == {"length": [], "tokens": [4]}
    assert "inputs length scalar, tokens 4" in data.format_description(described)

    plan = data.plan_batches(np.asarray(federation.train.size), steps=2, batch_size=3)
    one = jax.tree.map(jnp.asarray, federation.train.client(1))
    assert isinstance(one, ClientData)

    @jax.jit
    def batch(one: ClientData) -> Any:
        indices, valid = data.draw_batches(plan, jax.random.key(0), 0, one.size)
        return data.take(one, indices[0], valid[0], plan)

    x, y, _ = batch(one)
    assert (x["tokens"].shape, x["tokens"].dtype) == ((3, 4), jnp.int32)
    # The labels are the examples' own, and a row of tokens names its example.
    np.testing.assert_array_equal(x["tokens"][:, 0] // 4 % 4, y)
    assert data.federate(data.pooled(source), partition="iid", clients=2).train.x["tokens"].shape[0] == 2


def source(scales=(1.0, 1000.0, 0.0), n: int = 60, **changes) -> data.Source:
    rng = np.random.default_rng(3)
    x = (5 + rng.normal(size=(n, 3)) * np.array(scales)).astype(np.float32)
    return data.Source("own", x, rng.integers(3, size=n).astype(np.int32), None, None, 3, "own")._replace(**changes)


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
    arrived = data.scaled(unseen, scaling)
    raw = unseen.test.x[unseen.test.mask]
    np.testing.assert_allclose(arrived.test.x[arrived.test.mask], (raw - scaling.mean) / scaling.deviation, rtol=1e-5)
    np.testing.assert_array_equal(data.scaled(moved, scaling).test.x, arrived.test.x)


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
        source = data.Source("own", x, y.astype(np.int32), None, None, 2, "")
    else:
        np.savez(folder / "a.npz", x_train=x.astype(kind.split()[0]), y_train=y)
        source = jaxpfl.load(f"npz:{folder / 'a.npz'}", in_files="files" in kind)
    return jaxpfl.federate(source, clients=10, partition="iid", test_share=0.2)


@pytest.mark.parametrize("kind", ["alike", "ragged", "csv", "libsvm", "source", "float64", "int64", "float64 files"])
def test_digits_are_cut_after_standardization(kind, tmp_path):
    federation = stamped(kind, tmp_path)
    given = np.unique(federation.train.examples.x)
    assert given.dtype == np.float64
    made = data.scaled(federation, data.scaling_of(federation)).train.examples.x
    assert made.dtype == np.float32
    np.testing.assert_allclose(np.unique(made), (given - given.mean()) / given.std(), atol=1e-6)
    with pytest.warns(JaxpflWarning, match=rf"feature 0: {len(given)} distinct values become \d\d in single"):
        cut = data.single(federation)
    np.testing.assert_array_equal(cut.train.examples.x, federation.train.examples.x.astype(np.float32))
    assert cut.test.examples.x.dtype == np.float32


def test_lost_digits_are_said_by_a_fit_and_of_labels(tmp_path):
    federation = stamped("alike", tmp_path)
    with pytest.warns(JaxpflWarning, match="400 distinct values become .* in single precision; use --standardize"):
        jaxpfl.fit("local", federation, model="linear", rounds=1, local_steps=1)
    with pytest.warns(JaxpflWarning, match="labels: 400 distinct values become .*; subtract an offset"):
        jaxpfl.stack_clients([(np.ones((400, 1)), STAMPS)] * 2)
    years = jaxpfl.stack_clients([(np.arange(2000.0, 2020)[:, None], np.arange(20) % 2)] * 2)
    assert years.train.examples.x.dtype == np.float32
