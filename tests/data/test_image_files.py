"""IDX files and CIFAR in its formats, written here; the digits; the real MNIST where it is at hand."""

from __future__ import annotations

import gzip
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data_files import real

from jaxpfl.data import available, federate, load
from jaxpfl.data.sources.idx import read_idx, read_idx_pair
from jaxpfl.data.sources.registry import source_names
from jaxpfl.support.errors import JaxpflError

IMAGES = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3
LABELS = np.array([0, 1, 2, 0, 1, 2], np.uint8)


def idx_bytes(array: np.ndarray, code: int = 0x08) -> bytes:
    header = bytes((0, 0, code, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_set(folder: Path, *, zipped: bool = False, dot: str = "-", prefix: str = "", test: str = "t10k") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", 6), (test, 3)):
        for kind, array in ((f"images{dot}idx3", IMAGES[:n]), (f"labels{dot}idx1", LABELS[:n])):
            content = idx_bytes(array)
            name = f"{prefix}{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            (folder / name).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("place", ["mnist", "."])
def test_mnist_is_found_under_all_its_names(tmp_path: Path, zipped: bool, dot: str, place: str) -> None:
    write_set(tmp_path / place, zipped=zipped, dot=dot)
    source = load("mnist", str(tmp_path), standardize=False)
    assert source.x_train.shape == (6, 4, 3, 1)
    assert source.x_train.dtype == np.float32
    np.testing.assert_array_equal(source.x_train[..., 0], (IMAGES / 255).astype(np.float32))
    np.testing.assert_array_equal(source.y_train, LABELS)
    assert source.y_train.dtype == np.int32
    assert source.x_test.shape == (3, 4, 3, 1)
    assert source.num_classes == 3


def test_labels_from_one_are_the_first_classes(tmp_path: Path) -> None:
    """As those of EMNIST's letters, 1 to 26."""
    write_set(tmp_path / "letters")
    for labels in (tmp_path / "letters").glob("*labels*"):
        count = labels.read_bytes()[7]
        labels.write_bytes(idx_bytes(np.arange(count, dtype=np.uint8) % 3 + 7))
    source = load("letters", str(tmp_path))
    assert (source.num_classes, source.y_train.tolist()) == (3, [0, 1, 2, 0, 1, 2])
    assert source.class_names.tolist() == [7, 8, 9]


def test_other_sets_by_folder_by_name_and_with_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "fashion-mnist")
    write_set(tmp_path / "emnist", prefix="emnist-balanced-", test="test", zipped=True)
    monkeypatch.setenv("JAXPFL_DATA_DIR", str(tmp_path))
    for name in ("fashion-mnist", "idx:fashion-mnist", "emnist", "idx:emnist", f"idx:{tmp_path / 'emnist'}"):
        source = load(name, standardize=False)
        assert source.x_train.shape == (6, 4, 3, 1)
        assert source.x_test is not None
    write_set(tmp_path / "emnist", prefix="emnist-letters-")
    with pytest.raises(JaxpflError, match=r"has files of several data sets .*emnist-letters-train-images"):
        load("idx:emnist")
    listed = {entry.name: entry.present for entry in available()}
    assert [listed[name] for name in ("digits", "mnist", "fashion-mnist", "kmnist")] == [True, False, True, False]
    assert "emnist" not in listed  # two sets in one folder are no set


def test_the_list_names_what_load_knows_and_every_gap_is_one_line(tmp_path: Path) -> None:
    listed = {entry.name: entry for entry in available(str(tmp_path))}
    named = {name for name in source_names() if ":" not in name}
    assert named <= set(listed)
    for name in named - {"digits", "planted"}:
        assert not listed[name].present
        assert "\n" not in listed[name].note
        with pytest.raises(JaxpflError) as error:
            load(name, str(tmp_path))
        assert str(error.value) == listed[name].note
    prefixed = {"csv:FILE", "idx:FOLDER", "leaf:FOLDER", "libsvm:PATH", "npz:FILE", "planted:SETTINGS"}
    prefixed |= {"text:FOLDER", "tfds:NAME"}
    assert set(source_names()) - named == prefixed


def test_digits() -> None:
    pytest.importorskip("sklearn")
    source = load("digits", standardize=False)
    assert source.x_train.shape == (1797, 8, 8, 1)
    assert (source.x_train.min(), source.x_train.max()) == (0.0, 1.0)
    assert source.x_test is None
    np.testing.assert_array_equal(np.bincount(source.y_train), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])


@pytest.mark.slow
def test_real_mnist() -> None:
    source = load("mnist", real("MNIST", "mnist"), standardize=False)
    assert source.x_train.shape == (60000, 28, 28, 1)
    assert source.x_test.shape == (10000, 28, 28, 1)
    np.testing.assert_array_equal(source.y_train[:5], [5, 0, 4, 1, 9])
    np.testing.assert_array_equal(source.y_test[:5], [7, 2, 1, 0, 4])
    assert float(source.x_train.mean()) == pytest.approx(0.13066, abs=1e-5)


def test_standardized_by_the_training_pixels(tmp_path):
    write_set(tmp_path / "mnist")
    raw, source = (load("mnist", str(tmp_path), standardize=flag) for flag in (False, True))
    assert float(source.x_train.mean()) == pytest.approx(0, abs=1e-6)
    assert float(source.x_train.std()) == pytest.approx(1, abs=1e-6)
    slope = np.diff(source.x_test.ravel()[:2]) / np.diff(raw.x_test.ravel()[:2])
    np.testing.assert_allclose(slope, 1 / raw.x_train.std(), rtol=1e-5)


def test_a_gzip_stream_is_not_inflated_beyond_its_header(tmp_path: Path) -> None:
    """16 MiB of zeros behind an image of 12 bytes, headers that promise more than there can be, and other labels."""
    header = bytes((0, 0, 8, 3)) + np.array([1, 3, 4], ">u4").tobytes()
    endless, large = header[:4] + b"\x7f" * 12, header[:4] + np.array([16, 1024, 1024], ">u4").tobytes()
    for name, start in (("long", header), ("short", endless), ("good", large)):
        (tmp_path / name).write_bytes(gzip.compress(start + bytes(2**24)))
    (tmp_path / "plain").write_bytes(endless + bytes(30))
    (tmp_path / "labels").write_bytes(idx_bytes(LABELS))
    tracemalloc.start()
    for name, message in (
        ("long", r"too long: the shape .* requires 12 bytes"),
        ("short", r"truncated: the shape .* requires \d+ bytes"),
        ("plain", r"truncated: the shape .* requires \d+ bytes"),
        ("good", r"contains 16 images but .* contains 6 labels"),
    ):
        with pytest.raises(JaxpflError, match=message):
            read_idx_pair(tmp_path / name, tmp_path / "labels") if name == "good" else read_idx(tmp_path / name, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


RNG = np.random.default_rng(3)
N, T = 4, 6


def images(n: int) -> np.ndarray:
    return RNG.integers(256, size=(n, 32, 32, 3), dtype=np.uint8)


def flat(x: np.ndarray) -> np.ndarray:
    """Rows as the files hold them: red, green, blue planes."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


TRAIN, TEST = [images(N) for _ in range(5)], images(T)
CIFAR_LABELS, TEST_LABELS = [RNG.integers(10, size=N) for _ in range(5)], RNG.integers(10, size=T)


def write_cifar10(root: Path, kind: str, keys: type = bytes) -> None:
    folder = root / {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[kind]
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, x, y in zip(names, [*TRAIN, TEST], [*CIFAR_LABELS, TEST_LABELS], strict=True):
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(np.hstack([y[:, None].astype(np.uint8), flat(x)]).tobytes())
        else:
            batch = {"data": flat(x), "labels": y.tolist(), "batch_label": name, "filenames": ["a.png"] * len(y)}
            content = {key.encode() if keys is bytes else key: value for key, value in batch.items()}
            (folder / name).write_bytes(pickle.dumps(content, 2))


@pytest.mark.parametrize("place", [".", "cifar10", "cifar-10"])
@pytest.mark.parametrize("kind", ["python", "python, text keys", "binary", "npz"])
def test_cifar10_is_the_same_in_every_format(tmp_path: Path, kind: str, place: str) -> None:
    if kind == "npz":
        (tmp_path / place).mkdir(exist_ok=True)
        train = {"x_train": np.concatenate(TRAIN), "y_train": np.concatenate(CIFAR_LABELS)}
        np.savez(tmp_path / place / "cifar10.npz", **train, x_test=TEST, y_test=TEST_LABELS)
    else:
        write_cifar10(tmp_path / place, kind.split(",")[0], str if "text" in kind else bytes)
    source = load("cifar10", str(tmp_path), standardize=False)
    expected = (np.concatenate(TRAIN) / 255).astype(np.float32)
    np.testing.assert_array_equal(source.x_train, expected)
    np.testing.assert_array_equal(source.y_train, np.concatenate(CIFAR_LABELS))
    np.testing.assert_array_equal(source.x_test, (TEST / 255).astype(np.float32))
    np.testing.assert_array_equal(source.y_test, TEST_LABELS)
    assert (source.num_classes, source.superclasses, source.y_train.dtype) == (10, None, np.int32)
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["cifar10"]


FINE = np.arange(200) % 100
TABLE = RNG.permutation(np.repeat(np.arange(20), 5))


def write_cifar100(root: Path, kind: str) -> None:
    x = images(len(FINE))
    coarse = TABLE[FINE]
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
