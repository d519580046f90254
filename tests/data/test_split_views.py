"""A split in words and pictures, new clients set apart, and inputs of several arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_files import source_of

from jaxpfl import data
from jaxpfl.core.types import ClientData
from jaxpfl.data import (
    Source,
    Summary,
    describe,
    draw_batches,
    federate,
    format_description,
    pad,
    permute,
    plan_batches,
    plot_split,
    pooled,
    stack_clients,
    summary,
    take,
)
from jaxpfl.data.federate import set_apart


def counts_of(m: int, num_classes: int, **options: object) -> Summary:
    labels = np.random.default_rng(0).integers(num_classes, size=12 * m + num_classes)
    arguments = {"partition": "dirichlet", "alpha": 0.3, "clients": m, **options}
    return summary(federate(source_of(labels), **arguments), num_classes)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "num_classes"), [(1, 2), (1000, 150)])
def test_sizes_of_splits(tmp_path: Path, m: int, num_classes: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path = plot_split(counts_of(m, num_classes, validation_share=0.2), tmp_path / "new" / "split.png")
    assert path == tmp_path / "new" / "split.png"
    assert [file.name for file in path.parent.iterdir()] == ["split.png"]
    with image.open(path) as picture:
        assert (picture.format, picture.width) == ("PNG", 1500)
        assert 500 < picture.height < 1300
        assert len(picture.convert("RGB").getcolors(2**20)) > 50


def test_a_table_of_many_classes_counts_them() -> None:
    text = format_description(describe(counts_of(5, 30)), most_clients=2)
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
        for got, whole in zip(part[1:], federation[1:], strict=True):
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
    federation = stack_clients(clients, test=[clients[1], (inputs(0, kind), np.zeros(0, int))])
    x = federation.train.x
    assert type(x) is kind
    tokens, length = x if kind is Text else (x["tokens"], x["length"])
    assert (tokens.shape, tokens.dtype, length.shape, length.dtype) == ((2, 5, 4), np.int32, (2, 5), np.float32)
    np.testing.assert_array_equal(tokens[0, :3], np.arange(12).reshape(3, 4))
    assert not tokens[0, 3:].any()

    moved = pad(permute(federation, [1, 0]), train_capacity=7)
    tokens = jax.tree.leaves({"a": moved.train.x})[-1] if kind is dict else moved.train.x.tokens
    assert tokens.shape == (2, 7, 4)
    np.testing.assert_array_equal(tokens[0, :5], np.arange(20).reshape(5, 4))


def test_from_a_source_to_a_batch() -> None:
    source = Source("own", inputs(40), np.arange(40) % 4, inputs(8), np.arange(8) % 4, 4, "own")
    federation = federate(source, partition="dirichlet", clients=4, alpha=1.0)
    counts = summary(federation, 4, source)
    assert counts.unused == 0
    described = describe(counts)
    assert described["input_shape"] == {"length": [], "tokens": [4]}
    assert "inputs length scalar, tokens 4" in format_description(described)

    plan = plan_batches(np.asarray(federation.train.size), steps=2, batch_size=3)
    one = jax.tree.map(jnp.asarray, federation.train.client(1))
    assert isinstance(one, ClientData)
    indices, valid = draw_batches(plan, jax.random.key(0), 0, one.size)
    x, y, _ = take(one, indices[0], valid[0], plan)
    assert (x["tokens"].shape, x["tokens"].dtype) == ((3, 4), jnp.int32)
    # The labels are the examples' own, and a row of tokens names its example.
    np.testing.assert_array_equal(x["tokens"][:, 0] // 4 % 4, y)
    assert federate(pooled(source), partition="iid", clients=2).train.x["tokens"].shape[0] == 2
