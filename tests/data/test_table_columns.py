"""The record of a table's columns: the features of new rows are those of the rows from which it was made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from jaxpfl.data import TableColumns, TableOptions, federate, load, open_stored, save_federation
from jaxpfl.data.sources import csv_text
from jaxpfl.support.errors import JaxpflError

ROWS = "city,area,heating,price\nBern,80,gas,10.5\nZug,60,oil,9.25\nBern,40,gas,7\nZug,90,gas,12\n"


def loaded(folder: Path, text: str = ROWS, **options):
    (folder / "own.csv").write_text(text)
    table = TableOptions("price", "city", **options)
    return load("csv:own.csv", str(folder), task="regression", table=table)


def test_the_record_gives_the_features_of_the_table_again(tmp_path: Path) -> None:
    source = loaded(tmp_path)
    assert source.columns is not None
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
        ("Zug,60,oil", "Zug,60,wood", r"line 3: column 'heating' holds 'wood', which is none of .*: gas, oil"),
        ("Zug,60,oil", "Zug,many,oil", r"line 3: area must be a finite number, got 'many'"),
        ("Zug,60,oil", "Zug,1e99,oil", r"line 3: column 'area' holds a number beyond float32's range"),
        ("Zug,60,oil", "Zug,,oil", r"line 3: no value in column 'area': fill it in"),
        ("Zug,60,oil", "Zug,60,NA", r"line 3: no value in column 'heating': fill it in"),
        ("heating", "boiler", r"column of .*new.csv 'heating' \(known: area, boiler, city, price\)"),
    ],
)
def test_rows_that_do_not_fit_the_record_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    columns = loaded(tmp_path).columns
    (tmp_path / "new.csv").write_text(ROWS.replace(old, new))
    assert columns is not None
    with pytest.raises(JaxpflError, match=words):
        columns.apply(csv_text.read(tmp_path / "new.csv"))
