"""CIFAR in its three formats, written here; what is packed or damaged is said in one line."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import available, federate, load
from jaxpfl.support.errors import JaxpflError

RNG = np.random.default_rng(3)
N, T = 4, 6


def images(n: int) -> np.ndarray:
    return RNG.integers(256, size=(n, 32, 32, 3), dtype=np.uint8)


def flat(x: np.ndarray) -> np.ndarray:
    """Rows as the files hold them: red, green, blue planes."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


TRAIN, TEST = [images(N) for _ in range(5)], images(T)
LABELS, TEST_LABELS = [RNG.integers(10, size=N) for _ in range(5)], RNG.integers(10, size=T)


def write_cifar10(root: Path, kind: str, keys: type = bytes) -> Path:
    folder = root / {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[kind]
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, x, y in zip(names, [*TRAIN, TEST], [*LABELS, TEST_LABELS], strict=True):
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(np.hstack([y[:, None].astype(np.uint8), flat(x)]).tobytes())
        else:
            batch = {"data": flat(x), "labels": y.tolist(), "batch_label": name, "filenames": ["a.png"] * len(y)}
            content = {key.encode() if keys is bytes else key: value for key, value in batch.items()}
            (folder / name).write_bytes(pickle.dumps(content, 2))
    return folder


def write_npz(path: Path, **more: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    train = {"x_train": np.concatenate(TRAIN), "y_train": np.concatenate(LABELS)}
    np.savez(path, **train, x_test=TEST, y_test=TEST_LABELS, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [".", "cifar10", "cifar-10"])
@pytest.mark.parametrize("kind", ["python", "python, text keys", "binary", "npz"])
def test_cifar10_is_the_same_in_every_format(tmp_path: Path, kind: str, place: str) -> None:
    if kind == "npz":
        write_npz(tmp_path / place / "cifar10.npz")
    else:
        write_cifar10(tmp_path / place, kind.split(",")[0], str if "text" in kind else bytes)
    source = load("cifar10", str(tmp_path), standardize=False)
    expected = (np.concatenate(TRAIN) / 255).astype(np.float32)
    np.testing.assert_array_equal(source.x_train, expected)
    np.testing.assert_array_equal(source.y_train, np.concatenate(LABELS))
    assert source.x_test is not None
    np.testing.assert_array_equal(source.x_test, (TEST / 255).astype(np.float32))
    np.testing.assert_array_equal(source.y_test, TEST_LABELS)
    assert (source.num_classes, source.superclasses, source.y_train.dtype) == (10, None, np.int32)
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["cifar10"]


FINE = np.arange(200) % 100
TABLE = RNG.permutation(np.repeat(np.arange(20), 5))


def write_cifar100(root: Path, kind: str, coarse: np.ndarray | None = None) -> None:
    x = images(len(FINE))
    coarse = TABLE[FINE] if coarse is None else coarse
    if kind == "npz":
        np.savez(root / "cifar100.npz", x_train=x, y_train=FINE, x_test=x, y_test=FINE, coarse_train=coarse)
        return
    folder = root / {"python": "cifar-100-python", "binary": "cifar-100-binary"}[kind]
    folder.mkdir()
    for name in ("train", "test"):
        if kind == "binary":
            records = np.hstack([coarse[:, None], FINE[:, None], flat(x)]).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            batch = {b"data": flat(x), b"fine_labels": FINE.tolist(), b"coarse_labels": coarse.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, 2))


@pytest.mark.parametrize("kind", ["python", "binary", "npz"])
def test_cifar100_has_fine_labels_and_superclasses(tmp_path: Path, kind: str) -> None:
    write_cifar100(tmp_path, kind)
    source = load("cifar100", str(tmp_path))
    assert source.num_classes == 100
    np.testing.assert_array_equal(source.y_train, FINE)
    np.testing.assert_array_equal(source.superclasses, TABLE)
    federation = federate(source, partition="superclasses", clients=20, superclasses_per_client=2)
    for y, mask in zip(federation.train.y, federation.train.mask, strict=True):
        assert len(np.unique(TABLE[y[mask]])) == 2
        assert len(np.unique(y[mask])) == 10


def test_truncated_and_missing_batches(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path / "bin", "binary")
    batch = (folder / "test_batch.bin").read_bytes()
    (folder / "test_batch.bin").write_bytes(batch[:-1])
    with pytest.raises(JaxpflError, match=rf"truncated: {T * 3073 - 1} bytes are no multiple of a record's 3073"):
        load("cifar10", str(tmp_path / "bin"))
    (folder / "test_batch.bin").write_bytes(batch)
    # Cut at the end of a record: told by the other batches.
    (folder / "data_batch_2.bin").write_bytes((folder / "data_batch_2.bin").read_bytes()[: 3 * 3073])
    with pytest.raises(JaxpflError, match=r"training batches of \[4, 3, 4, 4, 4\] images"):
        load("cifar10", str(tmp_path / "bin"))
    (folder / "data_batch_2.bin").write_bytes(b"")
    with pytest.raises(JaxpflError, match=r"data_batch_2.bin: no images"):
        load("cifar10", str(tmp_path / "bin"))
