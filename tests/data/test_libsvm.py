"""LIBSVM text: written here, and the real a9a."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np
import pytest
from data_files import real

from jaxpfl.data import available, federate, load
from jaxpfl.data.sources import libsvm
from jaxpfl.support.errors import JaxpflError

TRAIN = "+1 1:0.5 3:2\n-1 2:1 # a comment\n-1 4:-7\n"
TEST = "-1 1:1\n+1\n"
DENSE = [[0.5, 0, 2, 0], [0, 1, 0, 0], [0, 0, 0, -7]]


@pytest.mark.parametrize("place", ["own", "libsvm/own"])
def test_labels_are_numbered_and_inputs_dense(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(TRAIN)
    source = load("libsvm:own", str(tmp_path))
    np.testing.assert_array_equal(source.x_train, DENSE)
    np.testing.assert_array_equal(source.y_train, [1, 0, 0])
    assert (source.x_train.dtype, source.y_train.dtype, source.num_classes) == (np.float32, np.int32, 2)
    assert (source.x_test, source.y_test, source.inputs) == (None, None, "features")
    path.with_name("own.t").write_text(TEST)
    for name in ("libsvm:own", f"libsvm:{path}"):
        source = load(name, str(tmp_path))
        # The test file's highest feature is 1, and one of its examples is all zeros.
        np.testing.assert_array_equal(source.x_test, [[1, 0, 0, 0], [0, 0, 0, 0]])
        np.testing.assert_array_equal(source.y_test, [0, 1])


def test_compressed_files_and_the_list(tmp_path: Path) -> None:
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "covtype.bz2").write_bytes(bz2.compress(b"1 1:3\n2 2:4\n7 1:1\n"))
    (tmp_path / "libsvm" / "covtype.t.bz2").write_bytes(bz2.compress(b"7 1:3\n"))
    source = load("libsvm:covtype.bz2", str(tmp_path))
    np.testing.assert_array_equal(source.y_train, [0, 1, 2])
    np.testing.assert_array_equal(source.y_test, [2])
    entries = {entry.name: entry.present for entry in available(str(tmp_path))}
    assert not entries["a9a"]


def test_a_compressed_file_is_not_inflated_to_many_times_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libsvm, "_SHORT", 0)
    (tmp_path / "many.bz2").write_bytes(bz2.compress(b"\n" * 10**6))
    with pytest.raises(JaxpflError, match=r"many\.bz2: no LIBSVM text: it inflates to over 100 times its length"):
        load("libsvm:many.bz2", str(tmp_path))


def test_labels_that_are_no_whole_numbers_are_of_a_regression(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0.25 1:1\n-3 2:1\n")
    source = load("libsvm:own", str(tmp_path))
    assert source.task == "regression"
    assert source.num_classes == 1
    np.testing.assert_array_equal(source.y_train, np.float32([0.25, -3]))
    with pytest.raises(JaxpflError, match=r"label 0.25 is no whole number"):
        load("libsvm:own", str(tmp_path), task="classification")
    (tmp_path / "ages").write_text("9 1:1\n7 2:1\n")
    assert load("libsvm:ages", str(tmp_path)).task == "classification"
    ages = load("libsvm:ages", str(tmp_path), task="regression")
    np.testing.assert_array_equal(ages.y_train, np.float32([9, 7]))


def test_several_labels_of_a_line_become_columns(tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.write_text("5,2 1:1\n 2:1\n9 1:3\n2,9 2:2\n")
    path.with_name("own.t").write_text("9,5 1:1\n")
    source = load("libsvm:own", str(tmp_path), task="multilabel")
    assert (source.task, source.y_train.dtype, source.num_classes) == ("multilabel", np.int32, 3)
    np.testing.assert_array_equal(source.y_train, [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1]])  # 2, 5 and 9
    np.testing.assert_array_equal(source.y_test, [[0, 1, 1]])
    with pytest.raises(JaxpflError, match=r"no LIBSVM text: .*lines of several labels are of task = multilabel"):
        load("libsvm:own", str(tmp_path))
    path.with_name("own.t").write_text("9,4 1:1\n")
    with pytest.raises(JaxpflError, match=r"own.t: label 4 is not among the training labels"):
        load("libsvm:own", str(tmp_path), task="multilabel")


def test_two_classes_are_labels_0_and_1_of_a_task_with_one_logit(tmp_path: Path) -> None:
    (tmp_path / "own").write_text(TRAIN)
    for task in ("binary", "ranking"):
        source = load("libsvm:own", str(tmp_path), task=task)
        assert (source.task, source.num_classes, source.y_train.tolist()) == (task, 1, [1, 0, 0])
    (tmp_path / "own").write_text(TRAIN + "3 1:1\n")
    with pytest.raises(JaxpflError, match="labels of the task ranking are of two classes, there are 3"):
        load("libsvm:own", str(tmp_path), task="ranking")


def test_real_a9a() -> None:
    root = real("a9a", "libsvm", "a9a")
    source = load("a9a", root)
    assert source.x_test is not None
    assert (source.x_train.shape, source.x_test.shape) == ((32561, 123), (16281, 123))
    np.testing.assert_array_equal(np.bincount(source.y_train), [24720, 7841])
    assert set(np.unique(source.x_train)) == {0.0, 1.0}
    federation = federate(source, partition="dirichlet", clients=20, alpha=1.0)
    assert federation.train.mask.sum() == 32561
    assert federation.test.mask.sum() == 16281
