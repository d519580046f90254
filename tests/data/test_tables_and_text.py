"""Tables, LIBSVM text and texts of one's own: columns of labels and clients, windows that share nothing."""

from __future__ import annotations

import bz2
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import real

import jaxpfl
from jaxpfl.data import TableOptions, available, describe, federate, format_description, load, summary
from jaxpfl.data.sources import libsvm
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

HEAD = "city,area,heating,price\n"
ROWS = "Bern,80,gas,10.5\nZug,60,oil,9.25\nBern,40,gas,7\nZug,90,gas,12\n"
BY_CITY = TableOptions("price", "city")


def table(folder: Path, text: str | bytes, options: TableOptions = BY_CITY, task: str | None = "regression"):
    path = folder / "own.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load("csv:own.csv", str(folder), task=task, table=options)


def test_numbers_stay_texts_become_a_feature_each_and_clients_have_their_names(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS)
    np.testing.assert_array_equal(source.x_train, [[80, 1, 0], [60, 0, 1], [40, 1, 0], [90, 1, 0]])
    np.testing.assert_array_equal(source.y_train, np.float32([10.5, 9.25, 7, 12]))
    assert source.users_train.tolist() == [0, 1, 0, 1]
    assert source.user_names.tolist() == ["Bern", "Zug"]
    federation = federate(source, partition="natural", test_share=0.5, standardize=True)
    assert federation.num_clients == 2
    assert federation.train.examples.y.dtype == np.float32


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators(tmp_path: Path, mark: str) -> None:
    source = table(tmp_path, (HEAD + ROWS).replace(",", mark))
    np.testing.assert_array_equal(source.y_train, np.float32([10.5, 9.25, 7, 12]))


@pytest.mark.parametrize(
    ("target", "task", "classes", "words"),
    [
        ("price", "regression", 1, "contains 4 different values, real numbers"),
        ("heating", "classification", 2, "contains 2 different values, text"),
        ("area", "classification", 4, "contains 4 different values, whole numbers"),
    ],
)
def test_the_task_follows_the_labels_and_is_said(tmp_path: Path, target, task, classes, words) -> None:
    with pytest.warns(JaxpflWarning, match=rf"column '{target}' {words}, so task = {task}: set the task"):
        source = table(tmp_path, HEAD + ROWS, TableOptions(target, "city"), None)
    assert (source.task, source.num_classes) == (task, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table(tmp_path, HEAD + ROWS, TableOptions(target, "city"), task).task == task


def test_words_of_missing_values_and_the_encoding_are_named(tmp_path: Path) -> None:
    text = "land,size,zone\nNA,1,Nord\nZürich,?,na\nNA,3,none\nBern,4,Nord\n".encode("latin-1")
    options = TableOptions("zone", "land", "drop", missing_words="?, -", encoding="latin-1")
    with pytest.warns(JaxpflWarning, match="1 of 4 rows lack a value and are left out"):
        source = table(tmp_path, text, options, "classification")
    assert (source.user_names.tolist(), source.class_names.tolist()) == (["Bern", "NA"], ["Nord", "none"])


def test_a_path_is_found_in_the_given_folder_then_here_then_in_the_data_folder(tmp_path: Path, monkeypatch) -> None:
    def price(data_dir: str | None = None) -> float:
        return float(load("csv:own.csv", data_dir, task="regression", table=BY_CITY).y_train[0])

    folders = [tmp_path / name for name in ("usual", "here", "given")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "own.csv").write_text((HEAD + ROWS).replace("10.5", str(number)))
    monkeypatch.setenv("JAXPFL_DATA_DIR", str(folders[0]))
    monkeypatch.chdir(folders[1])
    with pytest.warns(
        JaxpflWarning, match=rf"csv:own.csv is read from the current folder: to read {folders[0]}/own.csv, use"
    ):
        assert price() == 1
    assert price("../given") == 2
    Path("own.csv").unlink()
    assert price() == 0
    monkeypatch.chdir(folders[0])
    (folders[2] / "own.csv").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the data folder is the present folder
        assert (price(), price("../given")) == (0, 0)
    with pytest.raises(JaxpflError, match=r"given/none.csv: no such file; a relative path is also tried"):
        load("csv:none.csv", "../given", table=BY_CITY)


def test_a_column_may_be_left_out(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS, BY_CITY._replace(ignore=("heating",)))
    np.testing.assert_array_equal(source.x_train, [[80], [60], [40], [90]])


TAGS = "site,x,calm,dry,y\na,1,0,1,2.5\na,2,1,1,3\nb,3,0,0,4\nb,4,1,0,5\n"


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        ("calm,dry", "multilabel", "calm, dry contain only 0 and 1"),
        ("y, calm", "regression", "y, calm contain numbers other than 0 and 1"),
    ],
)
def test_several_columns_of_labels(tmp_path: Path, target, task, words) -> None:
    with pytest.warns(JaxpflWarning, match=f"columns {words}, so task = {task}"):
        source = table(tmp_path, TAGS, TableOptions(target, "site"), None)
    wanted = {"calm,dry": [[0, 1], [1, 1], [0, 0], [1, 0]], "y, calm": [[2.5, 0], [3, 1], [4, 0], [5, 1]]}[target]
    np.testing.assert_array_equal(source.y_train, wanted)
    assert source.y_train.dtype == (np.int32 if task == "multilabel" else np.float32)
    assert (source.task, source.num_classes) == (task, 2)
    np.testing.assert_array_equal(source.x_train[:, 0], [1, 2, 3, 4])
    named = table(tmp_path, TAGS, TableOptions("calm,dry", "site"), "regression")
    assert named.y_train.dtype == np.float32


def test_a_column_whose_name_has_a_comma(tmp_path: Path) -> None:
    source = table(
        tmp_path, TAGS.replace("calm,dry", '"calm,dry",z'), TableOptions("calm,dry", "site"), "classification"
    )
    assert source.y_train.tolist() == [0, 1, 0, 1]


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
    with pytest.raises(JaxpflError, match=r"many\.bz2 is not LIBSVM text: it unpacks to over 100 times its size"):
        load("libsvm:many.bz2", str(tmp_path))


def test_labels_that_are_no_whole_numbers_are_of_a_regression(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0.25 1:1\n-3 2:1\n")
    source = load("libsvm:own", str(tmp_path))
    assert source.task == "regression"
    assert source.num_classes == 1
    np.testing.assert_array_equal(source.y_train, np.float32([0.25, -3]))
    with pytest.raises(JaxpflError, match=r"got the label 0.25"):
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
    with pytest.raises(JaxpflError, match=r"not LIBSVM text: .*if lines have several labels, set task = multilabel"):
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
    with pytest.raises(JaxpflError, match="the task 'ranking' requires two classes, but the labels have 3"):
        load("libsvm:own", str(tmp_path), task="ranking")


@pytest.mark.slow
def test_real_a9a() -> None:
    root = real("a9a", "libsvm", "a9a")
    source = load("a9a", root)
    assert (source.x_train.shape, source.x_test.shape) == ((32561, 123), (16281, 123))
    np.testing.assert_array_equal(np.bincount(source.y_train), [24720, 7841])
    assert set(np.unique(source.x_train)) == {0.0, 1.0}
    federation = federate(source, partition="dirichlet", clients=20, alpha=1.0)
    assert federation.train.mask.sum() == 32561
    assert federation.test.mask.sum() == 16281


T = 4


def written(folder: Path, texts: dict[str, bytes]) -> str:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return f"text:{folder}"


def numbered(n: int, start: int = 0) -> bytes:
    """Bytes that all differ, and say where they are."""
    return bytes(range(start, start + n))


def test_files_and_subfolders_are_clients_whose_windows_share_no_byte(tmp_path):
    texts = {"b.txt": numbered(23), "a/2.txt": b"yz", "a/1/x.txt": b"uvwx", "a/.hidden": b"?", ".git/x": b"?"}
    texts["a/__pycache__/m.pyc"] = b"\xff\xfe"
    source = load(written(tmp_path, texts), window=T)
    assert source.user_names.tolist() == ["a", "b.txt"]
    assert source.users_train.tolist() == [0] + 4 * [1]
    assert (source.x_train.dtype, source.y_train.dtype, source.num_classes) == (np.int32, np.int32, 256)
    assert (source.task, source.inputs, source.x_test) == ("next-token", "tokens", None)
    whole = np.concatenate([source.x_train, source.y_train[:, -1:]], axis=1)
    assert bytes(whole[0].tolist()) == b"uvwxy"  # in the order of the paths; the tail is left out
    np.testing.assert_array_equal(whole[1:].reshape(-1), np.arange(20))
    np.testing.assert_array_equal(source.x_train[:, 1:], source.y_train[:, :-1])


def test_tokens_with_a_label_are_counted_not_averaged():
    y = np.array([[1, 2, -1], [-1, -1, -1], [200, -1, -1]])
    parts = [(np.zeros((n, 3), np.int32), y[:n]) for n in (3, 1)]
    federation = jaxpfl.stack_clients(parts, test=parts[::-1])
    described = describe(summary(federation, 201, task="next-token"))
    assert described["tokens"] == {"train": 5, "validation": 0, "test": 5}
    assert [one["tokens"]["train"] for one in described["per_client"]] == [3, 2]
    assert described["tokens_per_client"]["test"] == {"min": 2, "median": 2.5, "max": 3}
    text = format_description(described)
    assert "2 clients, 10 tokens with a label, inputs 3" in text
    assert "mean" not in text
    assert "class_counts" not in described["per_client"][0]


def test_the_last_windows_of_each_user_of_a_client_are_held_out(tmp_path):
    name = written(tmp_path, {"a": numbered(50), "b": numbered(45, 50), "c": numbered(5, 95), "d": numbered(25, 100)})
    source = load(name, window=T)
    split: dict[str, Any] = {"partition": "natural", "users_per_client": 2, "test_share": 0.3, "validation_share": 0.25}
    federation = jaxpfl.federate(source, **split)
    starts = [0, 50, 95, 100, 128]
    found = []
    for client in range(2):
        parts = [
            part.x[client][: part.size[client]] for part in (federation.train, federation.validation, federation.test)
        ]
        for low, high in zip(starts[2 * client :], starts[2 * client + 1 : 2 * client + 3], strict=False):
            train, validation, test = (part[(part[:, 0] >= low) & (part[:, 0] < high)] for part in parts)
            found.append((len(train), len(validation), len(test)))
            if len(test):
                assert train.max() < validation.min() <= validation.max() < test.min()
    # 0.3 of 10 and 9 windows are 3 and 2.7, then 0.25 of 7 and 6; of 1 and 5 they are 0.3 and 1.5, then 0.25 and 0.75.
    assert found == [(5, 2, 3), (5, 1, 3), (1, 0, 0), (2, 1, 2)]


def test_clients_without_text_are_left_out_and_said(tmp_path):
    name = written(tmp_path, {"a/x": b"", "a/y": b"", "b": b"long enough"})
    with pytest.warns(JaxpflWarning, match=r"skipped 1 client without examples \(a\)"):
        source = load(name, window=T)
    assert source.user_names.tolist() == ["b"]
    (tmp_path / "b").write_bytes(b"")
    with (
        pytest.warns(JaxpflWarning, match="skipped 2 clients without examples"),
        pytest.raises(JaxpflError, match="contains no text"),
    ):
        load(name, window=T)
