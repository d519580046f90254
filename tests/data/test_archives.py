"""NumPy archives, MNIST by its writers, and data read into files piece by piece."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl.data import Source, available, federate, load, pooled, scaled, scaling_of
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, UnwritableError

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
        with pytest.raises(JaxpflError, match=r"tokens must be integers \[N, T\], but x_train is float.* \[6, 16\]"):
            load(name, tokens=True)
        return
    assert (load(name, tokens=True).inputs, load(name, tokens=True).x_train.dtype) == ("tokens", np.int32)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=Y, vocabulary=np.array(30))
    assert load(name).inputs == "tokens"
    shifted = np.roll(answers, -1, axis=1).astype(np.int64)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=shifted, vocabulary=np.array(30))
    assert (load(name).task, load(name).num_classes) == ("next-token", 30)
    save(tmp_path / "a.npz", x_train=answers.astype(kind), y_train=shifted, vocabulary=np.array(1))
    with pytest.raises(JaxpflError, match="vocabulary must be an integer above the largest token, 1"):
        load(name)


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
    with pytest.raises(JaxpflError, match=r"contains whole numbers as float32: set the task \(--task regression"):
        load(name)
    found = load(name, task="regression")
    assert (found.task, found.y_train.dtype, found.y_train.max()) == ("regression", np.float32, 6)
    found = load(name, task="classification")
    assert (found.task, found.num_classes, found.class_names.tolist()) == ("classification", 3, [4, 5, 6])
    with pytest.raises(JaxpflError, match="the task 'binary' requires two classes, but the labels have 3"):
        load(name, task="binary")
    save(tmp_path / "a.npz", x_train=X, y_train=Y + 0.5)
    with pytest.raises(JaxpflError, match="task 'classification' requires whole numbers as labels, but y_train has"):
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
    with pytest.raises(JaxpflError, match=r"y_train: labels must be integers >= -1 \(and below 2\*\*31\), got -2"):
        load("npz:a.npz", str(tmp_path), task="next-token")
    save(tmp_path / "a.npz", x_train=x, y_train=y + 7)  # as many counts of the next week, say
    with pytest.raises(JaxpflError, match=r"at each position of x_train: set the task \(--task next-token"):
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
    np.testing.assert_array_equal(source.y_train, labels.astype(dtype))
    np.testing.assert_array_equal(source.y_test, labels[::-1].astype(dtype))
    federation = federate(source, partition="natural")
    for client, writer in enumerate(np.unique(WRITERS)):
        start, size = (int(of[client]) for of in (federation.train.start, federation.train.size))
        found = federation.train.examples.y[start : start + size]
        np.testing.assert_array_equal(sorted(found.tolist()), sorted(labels[writer == WRITERS].astype(dtype).tolist()))


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
        "(" * 90,
        "{'descr': '|u1'\n 'fortran_order",
    ],
)
def test_headers_are_checked_before_anything_is_inflated(tmp_path: Path, header: str) -> None:
    """16 MiB of zeros in 16 KiB: of a header that does not tell of them, nothing is read."""
    path = tmp_path / "a.npz"
    archived(path, header, bytes(2**24))
    tracemalloc.start()
    with pytest.raises(JaxpflError, match=r"damaged or is not an .npz archive") as error:
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
    with pytest.raises(JaxpflError, match=r"a.npz: its contents need 64 MiB of memory, but only 32 MiB is free"):
        read_npz(path)


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
    save(tmp_path / "a.npz", x_train=x, y_train=y, users_train=who, x_test=x[:9], y_test=y[:9], users_test=who[:9])
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
    save(tmp_path / "a.npz", x_train=RNG.normal(size=(400, 300)), y_train=RNG.integers(5, size=400))
    full = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patched, host_memory.files_in(tmp_path):
        patched.setattr("shutil.disk_usage", lambda place: full)
        with pytest.raises(JaxpflError, match=r"a.npz needs .* in .*, but only 1e\+03 B is free"):
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


MIB = 2**20
CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
import jaxpfl
from jaxpfl import data
from jaxpfl.engine.streamed import rounds

rounds._BYTES = 8 * 2**20  # scaled down as the limit is: clients are scored in blocks, and a few are held at once
name, folder, spare, in_files = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
plan = jaxpfl.ExecutionPlan(clients_in="disk", devices=1)
given = dict(rounds=2, cohort=5, local_steps=2, batch_size=10, model="linear")
small = [(np.ones((20, 60)), np.arange(20) % 5)] * 6
jaxpfl.fit("fedavg", jaxpfl.stack_clients(small, small), **given, plan=plan)  # what the libraries themselves take

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + spare
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
source = data.load(name, str(folder), in_files=in_files)
federation = data.federate(source, partition="natural", test_share=0.2)
jaxpfl.save_federation(federation, folder / "made", source=source)
del source, federation
federation = jaxpfl.open_federation(folder / "made", check=True)
fitted = jaxpfl.fit("fedavg", federation, **given, plan=plan)
size = sum(path.stat().st_size for path in (folder / "made").iterdir())
print(json.dumps([federation.num_clients, size, float(fitted.personalized_accuracy.mean())]))
"""


def in_child(name: str, folder: Path, spare: int, in_files: bool) -> tuple[Any, str]:
    command = [sys.executable, "-c", CHILD, name, str(folder), str(spare), str(in_files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None, done.stderr


@pytest.mark.slow
def test_an_archive_larger_than_the_limit(tmp_path: Path) -> None:
    clients, each, spare = 9000, 200, 224 * MIB
    rng = np.random.default_rng(0)
    y = rng.integers(5, size=clients * each).astype(np.int8)
    some = rng.standard_normal((10_000, 60)).astype(np.float32)
    x = np.resize(some, (clients * each, 60))
    users = np.repeat(np.arange(clients, dtype=np.int16), each)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, users_train=users)
    size = x.nbytes
    del x
    assert size > 1.8 * spare
    found, said = in_child("npz:a.npz", tmp_path, spare, True)
    assert found is not None, said
    assert found[0] == clients
    assert found[1] > size
    found, said = in_child("npz:a.npz", tmp_path, spare, False)
    assert found is None
    assert "of memory" in said.splitlines()[-1]
