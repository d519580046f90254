"""The columnar file of a sweep: the table that `load_sweep` gives, with mixed columns as text."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from pandas.testing import assert_frame_equal

from jaxpfl import load_sweep
from jaxpfl.runs.records import FAILED, Journal, Record, rows
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import write_table

COMMON = {"lr": 0.1, "clients": 10, "standardize": True}


def record(seed: int = 0, method: str = "local", **settings: Any) -> Record:
    return Record(method, COMMON | settings, seed, metrics={"validation_accuracy": 0.5, "epsilon": None}, seconds=0.1)


def written(folder: Path, records: list[Record]) -> pandas.DataFrame:
    """The file as a sweep writes it, read by pandas."""
    write_table(folder / "results.parquet", pandas.DataFrame(rows(records)))
    return pandas.read_parquet(folder / "results.parquet")


def test_columns_of_one_type_keep_it(tmp_path: Path):
    failed = Record("adaped", {**COMMON, "adaped.psi_init": 1.0, "model": "cnn"}, 0, FAILED, "out of memory")
    records = [record(), record(1), failed]
    Journal(tmp_path).append(records)
    table = written(tmp_path, records)
    assert_frame_equal(table, load_sweep(tmp_path))
    assert table.clients.dtype == "int64"
    assert table["adaped.psi_init"].tolist()[2] == 1.0


def test_an_axis_of_text_and_numbers_is_text(tmp_path: Path):
    values = ["0.1m", 10, 2.5, True, 1]
    records = [record(cohort=value) for value in values] + [record(method="pooled")]
    Journal(tmp_path).append(records)
    found = written(tmp_path, records).cohort
    assert found[:5].tolist() == ["0.1m", "10", "2.5", "true", "1"]
    assert found.isna().tolist() == [False] * 5 + [True]
    kept = load_sweep(tmp_path).cohort.tolist()
    assert kept[:5] == values
    assert [type(value) for value in kept[:5]] == [type(value) for value in values]


def test_a_sweep_without_records_is_an_empty_table(tmp_path: Path):
    assert written(tmp_path, []).empty


def test_a_table_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(JaxpflError, match=r"cannot write to .*results\.parquet") as error:
        written(tmp_path / "missing", [record()])
    assert "\n" not in str(error.value)
