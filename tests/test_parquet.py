"""The columnar file of a sweep: the table that `load_sweep` gives, value for value."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from pandas.testing import assert_frame_equal

from jaxpfl import load_sweep
from jaxpfl.runs.records import FAILED, Journal, Record, rows
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import read_table as read_results
from jaxpfl.support.files import write_table

COMMON = {"lr": 0.1, "clients": 10, "standardize": True}


def record(seed: int = 0, method: str = "local", **settings: Any) -> Record:
    return Record(method, COMMON | settings, seed, metrics={"validation_accuracy": 0.5, "epsilon": None}, seconds=0.1)


def write_results(path: Path, records: list[Record]) -> list[str]:
    """Writes the file as a sweep does."""
    return write_table(path, pandas.DataFrame(rows(records)))


def both(folder: Path, records: list[Record]) -> tuple[pandas.DataFrame, list[str]]:
    """The table read back and the columns written as text, after a comparison with `load_sweep`."""
    Journal(folder).append(records)
    as_text = write_results(folder / "results.parquet", records)
    table = read_results(folder / "results.parquet")
    assert_frame_equal(table, load_sweep(folder))
    return table, as_text


def test_columns_of_one_type_are_read_back_by_anyone(tmp_path: Path):
    failed = Record("adaped", {**COMMON, "adaped.psi_init": 1.0, "model": "cnn"}, 0, FAILED, "out of memory")
    table, as_text = both(tmp_path, [record(), record(1), failed])
    assert as_text == []
    assert_frame_equal(table, pandas.read_parquet(tmp_path / "results.parquet"))
    assert table.clients.dtype == "int64"
    assert table["adaped.psi_init"].tolist()[2] == 1.0


def test_an_axis_of_text_and_numbers_keeps_both(tmp_path: Path):
    values = ["0.1m", 10, 2.5, True, 1]
    records = [record(cohort=value) for value in values] + [record(method="pooled")]
    table, as_text = both(tmp_path, records)
    assert as_text == ["cohort"]
    found = table.cohort.tolist()
    assert found[:5] == values
    assert [type(value) for value in found[:5]] == [type(value) for value in values]
    assert found[5] is None
    plain = pandas.read_parquet(tmp_path / "results.parquet").cohort.tolist()
    assert plain[:5] == ["0.1m", "10", "2.5", "true", "1"]


def test_a_sweep_without_records_is_an_empty_table(tmp_path: Path):
    write_results(tmp_path / "results.parquet", [])
    assert read_results(tmp_path / "results.parquet").empty


@pytest.mark.parametrize("content", [b"", b"no parquet at all", None])
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None):
    path = tmp_path / "results.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JaxpflError, match=r"cannot read .*results\.parquet") as error:
        read_results(path)
    assert "\n" not in str(error.value)
