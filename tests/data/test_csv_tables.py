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


def test_decimal_commas_of_a_table_with_semicolons(tmp_path: Path) -> None:
    source = table(tmp_path, (HEAD + ROWS).replace(",", ";").replace(".", ","))
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


def test_many_whole_numbers_are_of_a_regression(tmp_path: Path) -> None:
    rows = "".join(f"Bern,{i},gas,{i}\nZug,{i},gas,{i}\n" for i in range(21))
    with pytest.warns(JaxpflWarning, match="task = regression, .* 21 different values, whole numbers"):
        assert table(tmp_path, HEAD + rows, task=None).task == "regression"


def test_two_classes_of_one_logit(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS, TableOptions("heating", "city"), "binary")
    assert (source.y_train.tolist(), source.num_classes) == ([0, 1, 0, 0], 1)
    with pytest.raises(JaxpflError, match="column 'price' has 4 different values, not two classes"):
        table(tmp_path, HEAD + ROWS, TableOptions("price", "city"), "binary")


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


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", BY_CITY, "own.csv: the file is empty"),
        ("\n \n", BY_CITY, "own.csv: the file is empty"),
        (HEAD, BY_CITY, "own.csv: a header and no rows"),
        ("1,2,3,4\n" + "5,6,7,8\n", BY_CITY, "line 1: numbers where the names of the columns should be"),
        ("city,,x,price\n" + ROWS, BY_CITY, "line 1: column 2 has no name"),
        ("city,x,x,price\n" + ROWS, BY_CITY, "line 1: two columns are named 'x'"),
        (HEAD + ROWS, TableOptions(), "target = COLUMN is needed, the labels; there are city, area, heating, price"),
        (HEAD + ROWS, TableOptions("prize", "city"), "unknown column of .*own.csv 'prize': did you mean 'price'"),
        (HEAD + ROWS, TableOptions("price", "town"), "unknown column of .*own.csv 'town'"),
        (HEAD + ROWS, TableOptions("price", "price"), "target and client are one column, 'price'"),
        (HEAD + ROWS, BY_CITY._replace(missing="skip"), "unknown treatment of missing values 'skip'"),
        (HEAD + ROWS, TableOptions("city", "heating"), "regression are numbers, column 'city' holds text"),
        (HEAD + ROWS + "Bern,1,gas\n", BY_CITY, "line 6: no value in column 'price'"),
        (HEAD + ROWS + "Bern,1,gas,2,3\n", BY_CITY, "line 6: 5 cells, the header has 4"),
        (HEAD + ROWS + "Bern,,gas,2\n", BY_CITY, "line 6: no value in column 'area': .* --missing drop"),
        (HEAD + ROWS + "Bern,nan,gas,2\n", BY_CITY, "line 6: no value in column 'area'"),
        (HEAD + ROWS + "Bern,old,gas,2\n", BY_CITY, "line 6: column 'area' holds 'old', and numbers in most"),
        (HEAD + ROWS + "Bern,1,gas,inf\n", BY_CITY, "line 6: column 'price' holds 'inf', and numbers in most"),
        (HEAD + ROWS + "Bern,1e300,gas,1\n", BY_CITY, "line 6: column 'area' holds a number beyond 32 bits"),
        (HEAD + "Bern,1,gas,2\nBern,2,oil,3\n", BY_CITY, "column 'city' names one client alone, 'Bern'"),
        ("city,price\nBern,1.5\nZug,2\n", BY_CITY, "no column of features beside price, city"),
        (
            HEAD + "".join(f"Bern,1,note {i},2\nZug,1,note {i}b,3\n" for i in range(5)),
            BY_CITY,
            "column 'heating' has 10 different texts in 10 rows, too many for categories",
        ),
        (HEAD + ROWS + "NA,1,gas,2\n", BY_CITY, "'city': fill .*, or name the words of missing values, without NA, by"),
        (b"city,price\n\xff\xfe\xfd,1\n", BY_CITY, "own.csv line 2: byte 0xff is not UTF-8: .* --encoding latin-1"),
        (HEAD + ROWS, BY_CITY._replace(encoding="base64"), "unknown encoding 'base64': such as latin-1"),
        (b"\xe9", BY_CITY._replace(encoding="ascii"), "line 1: byte 0xe9 is not ascii: name the encoding"),
        *(
            (
                HEAD + "".join(f"Bern,{i}{cell},gas,{i}\nZug,2{cell},oil,3\n" for i in range(3)),
                BY_CITY,
                f"column 'area' holds numbers with a mark, such as '0{cell}': write .* --ignore 'area'",
            )
            for cell in ("%", " %", "€")
        ),
        (HEAD + "Bern,1,$1,2\nZug,2,-$2.50,3\n", BY_CITY, r"'heating' holds numbers with a mark, such as '\$1': write"),
        (HEAD + "Bern,1,gas,4%\nZug,2,oil,5%\n", BY_CITY, "column 'price' holds numbers with a mark, such as '4%'"),
    ],
)
def test_bad_tables_are_refused_in_a_line(tmp_path: Path, text, options, message) -> None:
    with pytest.raises(JaxpflError, match=message) as error:
        table(tmp_path, text, options)
    assert "\n" not in str(error.value)


def test_other_data_have_no_columns_and_a_missing_file_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(JaxpflError, match=r"target is for tables, csv:FILE: digits is none"):
        load("digits", table=BY_CITY)
    with pytest.raises(JaxpflError, match=r"cannot read .*none.csv"):
        load("csv:none.csv", str(tmp_path), table=BY_CITY)
    (tmp_path / "here.csv").write_text(HEAD + ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JaxpflError, match=r"data/here.csv: no such file.*; --data-dir \. is the present one"):
        load("csv:here.csv", "data", table=BY_CITY)


def test_a_client_with_one_row_is_named(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS + "Chur,1,gas,3\n")
    with pytest.raises(JaxpflError, match=r"1 of 3 clients have too few examples to be tested \(client 1\)"):
        federate(source, partition="natural")


def test_a_column_may_be_left_out(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS, BY_CITY._replace(ignore=("heating",)))
    np.testing.assert_array_equal(source.x_train, [[80], [60], [40], [90]])


def test_a_value_may_be_missing_from_an_ignored_column(tmp_path: Path) -> None:
    source = table(tmp_path, HEAD + ROWS + "Bern,20,,2\n", BY_CITY._replace(ignore=("heating",)))
    assert source.x_train.shape == (5, 1)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("heat", "unknown column of .* 'heat': did you mean 'heating'"),
        ("city", "ignore = city: it is the column of the clients"),
        ("price", "ignore = price: it is the column of the labels"),
    ],
)
def test_a_column_that_cannot_be_ignored(tmp_path: Path, column: str, words: str) -> None:
    with pytest.raises(JaxpflError, match=words):
        table(tmp_path, HEAD + ROWS, BY_CITY._replace(ignore=(column,)))


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


@pytest.mark.parametrize(
    ("text", "target", "task", "message"),
    [
        (TAGS, "calm,dry,calm", None, "target names the column 'calm' twice"),
        (TAGS, "calm,site", None, "target and client are one column, 'site'"),
        (TAGS, "calm,wet", None, "unknown column of .*own.csv 'wet'"),
        (TAGS, "calm,", None, "unknown column of .*own.csv ''"),
        (TAGS, "calm,dry", "classification", "several columns of labels are of multilabel or regression"),
        (TAGS, "calm,y", "multilabel", r"own.csv line 2: labels of multilabel are 0 or 1, column 'y' holds 2.5"),
        (TAGS.replace(",2.5", ",high"), "calm,y", None, "column 'y' holds 'high', and numbers in most other rows"),
        (TAGS, "calm", "multilabel", "one column of labels is of classification, binary, ranking or regression"),
    ],
)
def test_several_columns_that_are_no_labels(tmp_path: Path, text, target, task, message) -> None:
    with pytest.raises(JaxpflError, match=message) as error:
        table(tmp_path, text, TableOptions(target, "site"), task)
    assert "\n" not in str(error.value)
