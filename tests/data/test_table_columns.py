"""The record of a table's columns: the features of new rows are those of the rows from which it was made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from jaxpfl.data import TableColumns, TableOptions, federate, fills_of, load, open_stored, save_federation
from jaxpfl.data.federate import number_held
from jaxpfl.data.sources import csv_text
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

ROWS = "city,area,heating,price\nBern,80,gas,10.5\nZug,60,oil,9.25\nBern,40,gas,7\nZug,90,gas,12\n"


def loaded(folder: Path, text: str = ROWS, **options):
    (folder / "own.csv").write_text(text)
    table = TableOptions("price", "city", **options)
    return load("csv:own.csv", str(folder), task="regression", table=table)


def test_the_record_gives_the_features_of_the_table_again(tmp_path: Path) -> None:
    source = loaded(tmp_path)
    assert source.columns.feature_names == ("area", "heating = gas", "heating = oil")
    federation = federate(source, partition="natural", test_share=0.5)
    save_federation(federation, tmp_path / "saved", source=source)
    assert open_stored(tmp_path / "saved").source.columns == source.columns
    columns = TableColumns.from_json(json.loads(json.dumps(source.columns.to_json())))
    assert columns == source.columns
    frame = pandas.read_csv(tmp_path / "own.csv")[["heating", "price", "area"]]
    for rows in (csv_text.read(tmp_path / "own.csv"), frame):
        np.testing.assert_array_equal(columns.apply(rows), source.x_train)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Zug,60,oil", "Zug,60,wood", r"line 3: column 'heating' contains 'wood', which is not one of .*: gas, oil"),
        ("Zug,60,oil", "Zug,many,oil", r"line 3: area must be a finite number, got 'many'"),
        ("Zug,60,oil", "Zug,1e99,oil", r"line 3: column 'area' contains a number beyond float32's range"),
        ("Zug,60,oil", "Zug,,oil", r"line 3: no value in column 'area': fill it in"),
        ("Zug,60,oil", "Zug,60,NA", r"line 3: no value in column 'heating': fill it in"),
        ("heating", "boiler", r"column of .*new.csv 'heating' \(known: area, boiler, city, price\)"),
    ],
)
def test_rows_that_do_not_fit_the_record_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    columns = loaded(tmp_path).columns
    (tmp_path / "new.csv").write_text(ROWS.replace(old, new))
    with pytest.raises(JaxpflError, match=words):
        columns.apply(csv_text.read(tmp_path / "new.csv"))


def gappy(folder: Path, missing: str, rows: int = 240, **options):
    """Table of three clients in which a third of the sizes and of the kinds are missing."""
    rng = np.random.default_rng(3)
    lines = ["city,size,kind,price"]
    for row in range(rows):
        size = "" if rng.random() < 0.35 else f"{rng.normal(1e6 * (row % 3), 1):.3f}"
        kind = "NA" if rng.random() < 0.35 else rng.choice(["a", "b", "c"], p=[0.2, 0.2, 0.6])
        lines.append(f"{'xyz'[row % 3]},{size},{kind},{row}")
    (folder / "gaps.csv").write_text("\n".join(lines))
    return load("csv:gaps.csv", str(folder), task="regression", table=TableOptions("price", "city", missing, **options))


@pytest.mark.parametrize("missing", ["impute", "impute-client"])
def test_missing_values_are_those_of_the_training_rows(tmp_path: Path, missing: str) -> None:
    source = gappy(tmp_path, missing)
    federation = federate(source, partition="natural", test_share=0.4, validation_share=0.2)
    assert source.columns.words == "size or missing; kind (3 categories) or missing"
    columns = TableColumns.from_json(json.loads(json.dumps(fills_of(federation, source.columns).to_json())))
    frame = pandas.read_csv(tmp_path / "gaps.csv")  # the labels number the rows
    train = federation.train.flat().y.astype(int)
    for client, city in enumerate("xyz"):
        own = frame.iloc[[row for row in train if missing == "impute" or frame.city[row] == city]]
        size, kind = own["size"].median(), own.kind.mode()[0]
        for split in federation.all_splits:
            view = split.client(client)
            rows = frame.iloc[view.y[view.mask].astype(int)]
            assert rows["size"].isna().any()
            wanted = [rows["size"].fillna(size), rows["size"].isna()]
            wanted += [*(rows.kind.fillna(kind) == level for level in "abc"), rows.kind.isna()]
            np.testing.assert_array_equal(view.x[view.mask], np.stack(wanted, axis=1).astype(view.x.dtype))
            found = columns.of_client(client).apply(rows).astype(view.x.dtype)
            np.testing.assert_array_equal(found, view.x[view.mask])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["x,,1", "x,,2", "y,,3", "y,,4"], "column 'size' has no value: leave it out with --ignore size"),
        (["x,5,1", "x,,2", "y,,3", "y,,4"], "column 'size' has no value in any training row: leave it out with"),
        (["x,5,1", "x,2,", "y,3,3", "y,4,4"], "line 3: no value in column 'price'"),
        (["x,5,1", ",2,3", "y,3,3", "y,4,4"], "line 3: no value in column 'city'"),
    ],
)
def test_what_cannot_be_imputed_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    text = "\n".join(["city,size,price", *lines])

    def split(seed: int) -> None:
        federate(loaded(tmp_path, text, missing="impute"), partition="natural", test_share=0.5, split_seed=seed)

    with pytest.raises(JaxpflError, match=words):
        list(map(split, range(20)))  # the only value is in a test row for some seed


@pytest.mark.parametrize(
    ("dates", "days"),
    [
        (["2025-01-02", "1969-12-31", "2025-01-02T12:00+02:00"], [20090, -1, 20090 + 10 / 24]),
        (["3/1/2025", "13/1/2025", "31/12/1969"], [20091, 20101, -1]),
        (["1/3/2025", "1/13/2025", "12/31/1969"], [20091, 20101, -1]),
        (["03.01.2025", "04.01.2025", ""], [20091, 20092, 20091]),
        (["20250103", "NA", "20250103"], [20091, 20091, 20091]),
    ],
)
def test_dates_become_days(tmp_path: Path, dates: list[str], days: list[float]) -> None:
    rows = [f"{'xy'[i % 2]},{date},{i}" for i, date in enumerate([*dates, dates[0]])]
    source = loaded(tmp_path, "\n".join(["city,day,price", *rows]), missing="impute", date=("day",))
    federation = federate(source, partition="natural", test_share=0.0)
    assert source.columns is not None
    columns = TableColumns.from_json(json.loads(json.dumps(fills_of(federation, source.columns).to_json())))
    found = columns.apply(csv_text.read(tmp_path / "own.csv"))
    np.testing.assert_allclose(found[:, 0], [*days, days[0]])
    assert columns.feature_names == (("day", "day missing") if {"", "NA"} & set(dates) else ("day",))


@pytest.mark.parametrize(
    ("dates", "words"),
    [
        (["3/1/2025", "4/1/2025"], "column 'day' contains '3/1/2025', and no row shows which number is the day"),
        (
            ["13/1/2025", "1/13/2025"],
            "line 3: column 'day' contains '1/13/2025', not a date: write it like the other rows",
        ),
        (["2025-02-28", "2025-02-29"], "line 3: column 'day' contains '2025-02-29', not a date"),
        (["1/2/25", "45000"], "line 2: column 'day' contains '1/2/25', not a date"),
    ],
)
def test_what_may_be_no_date_is_refused(tmp_path: Path, dates: list[str], words: str) -> None:
    lines = [f"{city},{date},1" for city, date in zip("xy", dates, strict=True)]
    with pytest.raises(JaxpflError, match=words):
        loaded(tmp_path, "\n".join(["city,day,price", *lines]), date=("day",))


STAYS = ["x,2025-01-03", "x,2025-01-01", "x,2025-01-02", "y,2025-01-05", "y,2025-01-01", "x,2025-01-04"]


def test_rows_from_a_day_on_are_the_test_rows(tmp_path: Path) -> None:
    text = "\n".join(["city,day,price,age", *(f"{stay},{i},{i}" for i, stay in enumerate(STAYS))])
    source = loaded(tmp_path, text, date=("day",), split_date="2025-01-04", ignore=("day",))
    federation = federate(source, partition="natural", validation_share=0.3)
    found = [split.flat().y.astype(int).tolist() for split in federation.all_splits]
    assert found == [[1, 2, 4], [0], [5, 3]]  # the validation row is the last of x; y has a single training row
    assert federation.input_shape == (1,)
    pooled = federate(source, partition="iid", clients=1)
    assert sorted(pooled.test.flat().y) == [3, 5]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"split_date": "2025-01-01"}, "no row is before split_date = 2025-01-01"),
        ({"split_date": "2025-01-06"}, "no row is on or after split_date"),
        ({"split_date": "1/2/2025"}, "split_date must be a date such as 2025-01-31, got '1/2/2025'"),
        ({"split_date": "2025-01-02", "date": ()}, "split_date = 2025-01-02 requires date"),
        ({"split_date": "2025-01-02", "person": "age"}, "splits a person's rows: leave out split_date or person"),
        ({"date": ("city",)}, "date must not name the client column, got city"),
        ({"person": "price"}, "person must differ from target and client"),
    ],
)
def test_dates_and_persons_that_do_not_fit_are_refused(tmp_path: Path, given, words: str) -> None:
    text = "\n".join(["city,day,price,age", *(f"{stay},{i},{i}" for i, stay in enumerate(STAYS))])
    with pytest.raises(JaxpflError, match=words):
        loaded(tmp_path, text, **{"date": ("day",)} | given)


@pytest.mark.parametrize("per_person", [1, 2, 5])
def test_the_rows_of_a_person_stay_together(tmp_path: Path, per_person: int) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{'xyz'[i % 3]},p{i // 3 // per_person},{rng.normal():.3f},{i}" for i in range(180)]
    persons = 180 // 3 // per_person
    with pytest.warns(
        JaxpflWarning, match=f"{persons} of {persons} persons in column 'name' have rows at several clients, and"
    ):
        source = loaded(tmp_path, "\n".join(["city,name,size,price", *rows]), person="name")
    assert source.columns.feature_names == ("size",)
    federation = federate(source, partition="natural", test_share=0.3, validation_share=0.2)
    for client in range(3):
        views = [split.client(client) for split in federation.all_splits]
        found = [{int(row) // 3 // per_person for row in view.y[view.mask]} for view in views]
        tested = number_held(persons, 0.3)
        validated = number_held(persons - tested, 0.2)
        assert [len(own) for own in found] == [persons - tested - validated, validated, tested]
        assert len(set.union(*found)) == persons
    with pytest.raises(JaxpflError, match="partition = iid would divide a person's rows among clients"):
        federate(source, partition="iid", clients=3)


def test_wide_texts_and_undeclared_dates_are_reported(tmp_path: Path) -> None:
    rows = [f"{'xy'[i % 2]},2025-01-{1 + i % 31:02},{i % 32:x}z,{i}" for i in range(93)]
    text = "\n".join(["city,day,code,price", *rows])
    with pytest.warns(JaxpflWarning) as warned:
        source = loaded(tmp_path, text)
    assert source.x_train.shape == (93, 63)
    dated, wide = (str(one.message) for one in warned)
    assert dated.endswith("leave it out with --ignore 'day', or read it as dates with --date 'day'")
    assert "column 'code' becomes 32 features, one per value; to avoid this, leave it out with --ignore" in wide
