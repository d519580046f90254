"""Data sets read into files, piece by piece: the numbers and the errors of those that are read into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl.data import Source, load, pooled, scaled, scaling_of
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, JaxpflWarning, UnwritableError

RNG = np.random.default_rng(4)


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def both(name: str, folder: Path, **how: Any) -> tuple[Source, Source]:
    """The data set in memory and in files, which are the same."""
    memory, there = (load(name, str(folder), in_files=in_files, **how) for in_files in (False, True))
    assert not host_memory.is_mapped(memory.x_train)
    assert host_memory.is_mapped(there.x_train)
    assert_same(tuple(memory), tuple(there))
    return memory, there


def leaf_file(path: Path, users: dict[str, tuple[list, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(users), "num_samples": [], "user_data": own}, ensure_ascii=False))


def users(names: str, d: int = 784) -> dict[str, tuple[list, list]]:
    sizes = {name: int(RNG.integers(2, 7)) for name in names}
    return {
        f"{u}{n}": (RNG.uniform(size=(n, d)).round(3).tolist(), RNG.integers(9, size=n).tolist())
        for u, n in sizes.items()
    }


@pytest.mark.parametrize("standardize", [False, True])
def test_leafs_numbers(tmp_path: Path, standardize: bool) -> None:
    train = users("dacbe")
    names = list(train)
    leaf_file(tmp_path / "own/train/a.json", {name: train[name] for name in names[:3]} | {"zz": ([], [])})
    leaf_file(tmp_path / "own/train/b.json", {name: train[name] for name in names[3:]})
    leaf_file(tmp_path / "own/test/a.json", {name: (x[:1], y[:1]) for name, (x, y) in train.items()})
    with pytest.warns(JaxpflWarning, match=r"left out 1 clients without examples \(zz\)"):
        memory, there = both("leaf:own", tmp_path, standardize=standardize)
    for how in (
        {"partition": "natural"},
        {"partition": "iid", "clients": 3, "validation_share": 0.3, "pool_test": True},
        {"partition": "clusters", "clusters": 2, "clients": 4},
    ):
        one, other = (jaxpfl.federate(source, **how) for source in (memory, there))
        assert host_memory.is_mapped(other.train.examples.x)
        assert_same(one, other)
        assert (one.train.capacity, one.train.chunk) == (other.train.capacity, other.train.chunk)
    for a, b in zip(jaxpfl.set_apart(one, 1), jaxpfl.set_apart(other, 1), strict=True):
        assert host_memory.is_mapped(b.train.examples.x)
        assert_same(a, b)


def archive(path: Path, **arrays: Any) -> None:
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize("kind", ["pixels", "colours", "features", "tokens", "by columns"])
def test_npz_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("jaxpfl.data.sources.npz._BYTES", 1000)
    x = {
        "pixels": RNG.integers(256, size=(40, 6, 5)).astype(np.uint8),
        "colours": RNG.integers(256, size=(40, 6, 5, 3)).astype(np.uint8),
        "features": RNG.normal(size=(40, 7)),
        "tokens": RNG.integers(90, size=(40, 7)),
        "by columns": np.asfortranarray(RNG.normal(size=(40, 7, 2)).astype(np.float32)),
    }[kind]
    y, who = RNG.integers(5, size=40), np.repeat(list("cabd"), 10)
    archive(tmp_path / "a.npz", x_train=x, y_train=y, users_train=who, x_test=x[:9], y_test=y[:9], users_test=who[:9])
    memory, there = both("npz:a.npz", tmp_path)
    assert_same(*(jaxpfl.federate(s, partition="natural", pool_test=True) for s in (memory, there)))
    if memory.inputs == "features":
        one, other = (jaxpfl.federate(s, partition="iid", clients=3, standardize=True) for s in (memory, there))
        assert host_memory.is_mapped(other.train.examples.x)
        assert_same(one, other)
        assert_same(scaled(one, scaling_of(one)), scaled(other, scaling_of(other)))
    assert_same(tuple(pooled(memory)), tuple(pooled(there)))


def test_sets_that_are_read_at_once_can_be_in_files(tmp_path: Path) -> None:
    memory, there = both("digits", tmp_path)
    assert_same(*(jaxpfl.federate(s, clients=5, classes_per_client=3) for s in (memory, there)))


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path / "a.npz", x_train=RNG.normal(size=(400, 300)), y_train=RNG.integers(5, size=400))
    full = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patched, host_memory.files_in(tmp_path):
        patched.setattr("shutil.disk_usage", lambda place: full)
        with pytest.raises(JaxpflError, match=r"a.npz: .* are needed in .*, 1e\+03 B are free there"):
            load("npz:a.npz", str(tmp_path), in_files=True)

    def refuse(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with (
        pytest.raises(UnwritableError, match=f"cannot write to {tmp_path}: No space left"),
        host_memory.files_in(tmp_path),
    ):
        load("npz:a.npz", str(tmp_path), in_files=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
