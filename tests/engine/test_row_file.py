"""Rows of a file: what calls write, its map shows; types that NumPy's format does not know; damage."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.engine.streamed.disk import RowFile

SHAPE = (2, 5, 3)


def made(folder: Path, dtype=np.float32, shape=SHAPE) -> Path:
    np.lib.format.open_memmap(folder / "rows.npy", "w+", dtype, shape)
    return folder / "rows.npy"


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, jnp.bfloat16])
@pytest.mark.parametrize("most", [None, 5])
def test_rows_are_those_of_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype, most: int | None):
    if most:  # a system that takes a few bytes at a time
        monkeypatch.setattr(os, "preadv", lambda file, parts, at, read=os.preadv: read(file, [parts[0][:most]], at))
        monkeypatch.setattr(os, "pwrite", lambda file, part, at, write=os.pwrite: write(file, part[:most], at))
    file = RowFile.existing(made(tmp_path, dtype), SHAPE, np.dtype(dtype))
    rng, wanted = np.random.default_rng(0), np.zeros(SHAPE, dtype)
    for _ in range(20):
        numbers = rng.permutation(10)[: rng.integers(0, 11)]
        if rng.random() < 0.5:
            numbers.sort()  # with neighbours, which are read and written at once
        rows = rng.integers(0, 100, (len(numbers), 3)).astype(dtype)
        wanted.reshape(10, 3)[numbers] = rows
        file.put(numbers, rows)
        np.testing.assert_array_equal(file.array, wanted)
        again = np.append(numbers, numbers[:1])  # a row may be read twice
        np.testing.assert_array_equal(file.take(again), wanted.reshape(10, 3)[again])
    assert file.array.dtype == file.take(np.arange(2)).dtype == dtype


@pytest.mark.parametrize(("shape", "dtype"), [((2, 5, 4), np.float32), (SHAPE, np.float64)])
def test_another_array_is_refused(tmp_path: Path, shape: tuple[int, ...], dtype):
    with pytest.raises(JaxpflError, match=r"rows.npy is damaged: it contains \(2, 5, 3\) of float32$"):
        RowFile.existing(made(tmp_path), shape, np.dtype(dtype))


def test_a_file_that_became_shorter(tmp_path: Path):
    path = made(tmp_path)
    file = RowFile.existing(path, SHAPE, np.dtype(np.float32))
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(JaxpflError, match=r"rows\.npy is damaged: it ends at byte"):
        file.take(np.array([0, 9]))
