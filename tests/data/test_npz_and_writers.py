"""NumPy archives and the digits by their writers; the sources that are made of other sources."""

from __future__ import annotations

import contextlib
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data_files import real

from jaxpfl.data import available, describe, federate, format_description, load, summary, unseen
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

X = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)
Y = np.array([0, 1, 2, 0, 1, 2])
WRITERS = np.array([30, 10, 10, 30, 30, 2349])


def save(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["users", "writer"])
def test_writers_are_numbered_over_both_parts(tmp_path: Path, key: str) -> None:
    arrays = {f"{key}_train": WRITERS, f"{key}_test": np.array([11, 11])}
    save(tmp_path / "writers" / "mnist_by_writer.npz", x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2], **arrays)
    source = load("mnist-writers", str(tmp_path), standardize=False)
    assert source.x_train.shape == (6, 4, 4, 1)
    np.testing.assert_array_equal(source.x_train[..., 0], (X / 255).astype(np.float32))
    np.testing.assert_array_equal(source.user_names, [10, 11, 30, 2349])
    np.testing.assert_array_equal(source.users_train, [2, 0, 0, 2, 2, 3])
    np.testing.assert_array_equal(source.users_test, [1, 1])
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["mnist-writers"]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.float64])
def test_whole_numbers_are_numbers_unless_they_are_said_to_be_tokens(tmp_path: Path, kind: type) -> None:
    answers = X.reshape(6, -1) % 2
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=Y)
    name = f"npz:{tmp_path / 'a.npz'}"
    source = load(name)
    assert (source.x_train.dtype, source.inputs) == (np.float32, "features")
    np.testing.assert_array_equal(source.x_train, answers)
    if kind is np.float64:
        with pytest.raises(JaxpflError, match=r"tokens are integers \[N, T\], x_train is \(6, 16\) of"):
            load(name, tokens=True)
        return
    assert (load(name, tokens=True).inputs, load(name, tokens=True).x_train.dtype) == ("tokens", np.int32)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=Y, vocabulary=np.array(30))
    assert load(name).inputs == "tokens"
    shifted = np.roll(answers, -1, axis=1).astype(np.int64)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=shifted, vocabulary=np.array(30))
    assert (load(name).task, load(name).num_classes) == ("next-token", 30)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=shifted, vocabulary=np.array(1))
    with pytest.raises(JaxpflError, match="vocabulary must be the number of tokens, above the largest, 1"):
        load(name)
    with pytest.raises(JaxpflError, match="tokens is for npz:FILE and leaf:FOLDER: digits is neither"):
        load("digits", tokens=True)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (Y + 1, [1, 2, 3]),
        (Y * 500_000, [0, 500_000, 1_000_000]),
        (Y % 2 * (2**31 - 1), [0, 2**31 - 1]),
        (Y % 2 * 2 - 1, [-1, 1]),
        (Y[:, None] + 1, [1, 2, 3]),
        (Y.astype(np.uint64) + 2**63, [2**63, 2**63 + 1, 2**63 + 2]),
        (Y, None),
    ],
)
def test_classes_are_numbered_and_keep_their_names(tmp_path: Path, labels: np.ndarray, names: list | None) -> None:
    save(tmp_path / "a.npz", x_train=X, y_train=labels, x_test=X[:3], y_test=labels[:3])
    source = load(f"npz:{tmp_path / 'a.npz'}")
    assert (source.task, source.num_classes) == ("classification", len(np.unique(labels)))
    assert (None if source.class_names is None else source.class_names.tolist()) == names
    np.testing.assert_array_equal(source.y_train, np.unique(labels.reshape(-1), return_inverse=True)[1])
    np.testing.assert_array_equal(source.y_test, source.y_train[:3])


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_whole_numbers_as_float_labels_need_a_task(tmp_path: Path, shape: tuple) -> None:
    save(tmp_path / "a.npz", x_train=X, y_train=(np.float32(Y) + 4).reshape(shape))
    name = f"npz:{tmp_path / 'a.npz'}"
    with pytest.raises(JaxpflError, match=r"y_train holds whole numbers as float32: name the task \(--task regression"):
        load(name)
    found = load(name, task="regression")
    assert (found.task, found.y_train.dtype, found.y_train.max()) == ("regression", np.float32, 6)
    found = load(name, task="classification")
    assert (found.task, found.num_classes, found.class_names.tolist()) == ("classification", 3, [4, 5, 6])
    with pytest.raises(JaxpflError, match="labels of the task binary are of two classes, there are 3"):
        load(name, task="binary")
    save(tmp_path / "a.npz", x_train=X, y_train=Y + 0.5)
    with pytest.raises(JaxpflError, match="labels of the task classification are whole numbers, y_train holds others"):
        load(name, task="classification")
    save(tmp_path / "a.npz", x_train=X, y_train=Y - 9)
    assert load(name, task="regression").y_train.min() == -9


def test_tokens_with_a_label_at_each_position(tmp_path: Path) -> None:
    x, y = np.arange(12).reshape(3, 4), np.where(np.arange(12) % 5, np.arange(1, 13), -1).reshape(3, 4)
    save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:1] + 20, y_test=y[:1])
    source = load("npz:a.npz", str(tmp_path), task="next-token")
    assert (source.task, source.inputs, source.num_classes) == ("next-token", "tokens", 24)
    assert source.y_train.dtype == np.int32
    np.testing.assert_array_equal(source.y_train, y)
    save(tmp_path / "a.npz", x_train=x, y_train=y - 1)
    with pytest.raises(JaxpflError, match="y_train must be integers >= -1 and at most 2147483647, got -2"):
        load("npz:a.npz", str(tmp_path), task="next-token")
    save(tmp_path / "a.npz", x_train=x, y_train=y + 7)  # as many counts of the next week, say
    with pytest.raises(JaxpflError, match=r"at each position of x_train: name the task \(--task next-token"):
        load("npz:a.npz", str(tmp_path))
    found = load("npz:a.npz", str(tmp_path), task="regression")
    assert (found.inputs, found.x_train.dtype, found.y_train.max()) == ("features", np.float32, 19)
    save(tmp_path / "a.npz", x_train=x.astype(float), y_train=y)
    assert load("npz:a.npz", str(tmp_path)).task == "regression"


@pytest.mark.parametrize(
    ("labels", "task", "dtype"),
    [
        (Y / 4 - 0.5, "regression", np.float32),
        (np.stack([Y / 4, -Y], axis=1), "regression", np.float32),
        (np.float16(Y) + np.float16(0.5), "regression", np.float32),
        (np.stack([Y > 0, Y > 1], axis=1).astype(np.int64), "multilabel", np.int32),
        (np.stack([Y, Y], axis=1), "regression", np.int32),
    ],
)
@pytest.mark.parametrize("in_files", [False, True])
def test_labels_that_are_numbers_or_several_keep_their_values_and_clients(
    tmp_path: Path, labels: np.ndarray, task: str, dtype: type, in_files: bool
) -> None:
    numbers = X.reshape(6, -1) / 100
    own = {"users_train": WRITERS, "x_test": numbers[::-1], "y_test": labels[::-1], "users_test": WRITERS[::-1]}
    save(tmp_path / "a.npz", x_train=numbers, y_train=labels, **own)
    source = load("npz:a.npz", str(tmp_path), in_files=in_files)
    assert (source.task, source.y_train.dtype) == (task, dtype)
    assert source.y_test is not None
    np.testing.assert_array_equal(source.y_train, labels.astype(dtype))
    np.testing.assert_array_equal(source.y_test, labels[::-1].astype(dtype))
    federation = federate(source, partition="natural")
    for client, writer in enumerate(np.unique(WRITERS)):
        start, size = (int(of[client]) for of in (federation.train.start, federation.train.size))
        found = federation.train.examples.y[start : start + size]
        np.testing.assert_array_equal(sorted(found.tolist()), sorted(labels[writer == WRITERS].astype(dtype).tolist()))


@pytest.mark.slow
def test_real_writers() -> None:
    """The setting of FEMNIST's stand-in: 66 clients of 3 writers each; the test writers are unseen."""
    root = real("MNIST by writer", "writers", "mnist_by_writer.npz")
    source = load("mnist-writers", root)
    assert source.users_train is not None
    sizes = np.bincount(source.users_train)
    assert (sizes[sizes > 0].min(), np.median(sizes[sizes > 0]), sizes.max()) == (19, 116, 131)
    assert (len(np.unique(source.users_train)), source.x_train.shape) == (539, (60000, 28, 28, 1))

    with pytest.warns(JaxpflWarning, match="297 of 297 test users have no training examples"):
        federation = federate(source, partition="natural", clients=66, users_per_client=3, test_share=0.12)
    counts = summary(federation, 10, source)
    held = sum(int(sizes.sum()) for sizes in counts.sizes.values())
    assert counts.unused == 70000 - held
    assert counts.sizes["train"].min() >= 3 * 17
    assert (counts.sizes["test"] >= 1).all()
    assert "left out" in format_description(describe(counts))
    assert federate(unseen(source), partition="natural").num_clients == 297


def archived(path: Path, header: str, data: bytes, method: int = zipfile.ZIP_DEFLATED) -> None:
    """An archive whose one array has a header of its own making."""
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (10,), }",  # less than there is
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 4000000000), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (10,",
        "(" * 90,
        "{'descr': '|u1'\n 'fortran_order",
    ],
)
def test_headers_are_checked_before_anything_is_inflated(tmp_path: Path, header: str) -> None:
    """64 MiB of zeros in 64 KiB: of a header that does not tell of them, nothing is read."""
    path = tmp_path / "a.npz"
    archived(path, header, bytes(2**26))
    tracemalloc.start()
    with pytest.raises(JaxpflError, match=r"damaged, or no .npz archive") as error:
        load("npz:a.npz", str(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert peak < 2**22


def test_an_archive_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    archived(path, "{'descr': '|u1', 'fortran_order': False, 'shape': (67108864,), }", bytes(2**26))
    monkeypatch.setattr(host_memory, "free", lambda: 2**25)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(JaxpflError, match=r"a.npz: what it holds needs 64 MiB of memory, 32 MiB are free"):
        read_npz(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_cut_anywhere(tmp_path: Path, method: int) -> None:
    path = tmp_path / "a.npz"
    archived(path, "{'descr': '|u1', 'fortran_order': False, 'shape': (100,), }", bytes(range(100)), method)
    whole = path.read_bytes()
    assert len(read_npz(path)["x_train"]) == 100
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end] + whole[end + 1 :])
        with contextlib.suppress(JaxpflError):
            read_npz(path)
