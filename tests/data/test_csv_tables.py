"""Tables of one's own: ``csv:FILE`` with columns of labels and of clients."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxpfl import JaxpflError, JaxpflWarning, federate, load
from jaxpfl.data import TableOptions

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
    assert source.users_train is not None
    assert source.users_train.tolist() == [0, 1, 0, 1]
    assert source.user_names is not None
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
        ("price", "regression", 1, "holds 4 different values, real numbers"),
        ("heating", "classification", 2, "holds 2 different values, text"),
        ("area", "classification", 4, "holds 4 different values, whole numbers"),
    ],
)
def test_the_task_follows_the_labels_and_is_said(tmp_path: Path, target, task, classes, words) -> None:
    with pytest.warns(JaxpflWarning, match=rf"task = {task}, as column '{target}' {words}: name the task"):
        source = table(tmp_path, HEAD + ROWS, TableOptions(target, "city"), None)
    assert (source.task, source.num_classes) == (task, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table(tmp_path, HEAD + ROWS, TableOptions(target, "city"), task).task == task


def test_rows_with_missing_values_go_when_asked_for(tmp_path: Path) -> None:
    text = HEAD + ROWS + "Bern,,gas,3\nZug,1,oil,NA\n"
    with pytest.warns(JaxpflWarning, match="left out 2 of 6 rows, which lack a value"):
        source = table(tmp_path, text, BY_CITY._replace(missing="drop"))
    assert len(source.y_train) == 4


def test_words_of_missing_values_and_the_encoding_are_named(tmp_path: Path) -> None:
    text = "land,size,zone\nNA,1,Nord\nZürich,?,na\nNA,3,none\nBern,4,Nord\n".encode("latin-1")
    options = TableOptions("zone", "land", "drop", missing_words="?, -", encoding="latin-1")
    with pytest.warns(JaxpflWarning, match="left out 1 of 4 rows"):
        source = table(tmp_path, text, options, "classification")
    assert source.user_names is not None
    assert source.class_names is not None
    assert (source.user_names.tolist(), source.class_names.tolist()) == (["Bern", "NA"], ["Nord", "none"])


def test_other_data_have_no_columns_and_a_missing_file_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(JaxpflError, match=r"target is for tables, csv:FILE: digits is none"):
        load("digits", table=BY_CITY)
    with pytest.raises(JaxpflError, match=r"cannot read .*none.csv"):
        load("csv:none.csv", str(tmp_path), table=BY_CITY)
    (tmp_path / "here.csv").write_text(HEAD + ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JaxpflError, match=r"data/here.csv: no such file.*; --data-dir \. is the present one"):
        load("csv:here.csv", "data", table=BY_CITY)


def test_a_column_may_be_left_out(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS, BY_CITY._replace(ignore=("heating",)))
    np.testing.assert_array_equal(source.x_train, [[80], [60], [40], [90]])


TAGS = "site,x,calm,dry,y\na,1,0,1,2.5\na,2,1,1,3\nb,3,0,0,4\nb,4,1,0,5\n"


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        ("calm,dry", "multilabel", "calm, dry hold 0 and 1 alone"),
        ("y, calm", "regression", "y, calm hold other numbers than 0 and 1"),
    ],
)
def test_several_columns_of_labels(tmp_path: Path, target, task, words) -> None:
    with pytest.warns(JaxpflWarning, match=f"task = {task}, as columns {words}"):
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
