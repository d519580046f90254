"""Records of a sweep: whole lines only; and its columnar file, the table that `load_sweep` gives."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pandas
import pytest
from pandas.testing import assert_frame_equal

from jaxpfl.runs.records import FAILED, Journal, Record, load_sweep, rows
from jaxpfl.runs.sweep.sweep import write_best
from jaxpfl.support.errors import JaxpflError, UnwritableError
from jaxpfl.support.files import write_table

ONE = Record("local", {"lr": 0.1, "clients": 10}, 0, metrics={"validation_accuracy": 0.5}, seconds=1.0, group="g0")
TWO = dataclasses.replace(ONE, seed=1, metrics={"validation_accuracy": float("nan")})


def test_a_record_is_named_by_its_content():
    assert ONE.id == dataclasses.replace(ONE, settings={"clients": 10, "lr": 0.1}, seconds=2.0).id
    assert len({ONE.id, TWO.id, dataclasses.replace(ONE, method="fedavg").id}) == 3


def test_what_is_written_is_read(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append([ONE])
    journal.append([TWO])
    assert b"left" not in journal.path.read_bytes()  # as in journals of earlier versions, which had no counts
    assert journal.read() == [ONE, dataclasses.replace(TWO, metrics={"validation_accuracy": None})]


@pytest.mark.parametrize("cut", range(2, 200, 7))
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path, cut: int):
    journal = Journal(tmp_path)
    journal.append([ONE])
    journal.append([TWO])
    os.truncate(journal.path, journal.path.stat().st_size - cut)
    assert journal.read() == [ONE]
    journal.append([TWO])
    assert [record.seed for record in journal.read()] == [0, 1]


def test_records_that_were_appended_together_count_together(tmp_path: Path):
    """Those of one program: with some of them missing, a smaller program would round in another order."""
    first, third = dataclasses.replace(ONE, seed=7), dataclasses.replace(ONE, seed=8)
    journal = Journal(tmp_path)
    journal.append([first])
    whole = journal.path.stat().st_size
    journal.append([ONE, TWO, third])
    written = journal.path.read_bytes()
    for size in range(whole, len(written) - 1):  # the last byte is the line's end alone
        journal.path.write_bytes(written[:size])
        assert journal.read() == [first]
    journal.path.write_bytes(written[: whole + 300])
    journal.append([ONE, TWO, third])
    assert [record.seed for record in journal.read()] == [7, 0, 1, 8]


def test_a_folder_that_was_taken_away_is_not_made_anew(tmp_path: Path):
    gone = tmp_path / "gone"
    for write in (lambda: Journal(gone).append([ONE]), lambda: write_best(gone / "best", "local", {})):
        with pytest.raises(UnwritableError, match="No such file or directory"):
            write()
    assert not gone.exists()


def test_a_changed_number_is_seen(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append([ONE, TWO])
    journal.path.write_bytes(journal.path.read_bytes().replace(b"0.5", b"0.6"))
    with pytest.raises(JaxpflError, match=r"main\.jsonl line 1 is damaged: delete the line to have its run"):
        journal.read()


def test_rows_have_the_same_columns():
    other = Record("adaped", {"adaped.psi_init": 1.0}, 0, metrics={"gradients": 3.0})
    first, second = rows([ONE, other])
    assert first.keys() == second.keys()
    assert first["adaped.psi_init"] is None
    assert second["lr"] is None


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path):
    with pytest.raises(JaxpflError, match="is not a sweep folder"):
        load_sweep(tmp_path)


def test_the_record_of_the_most_rounds_counts_and_of_these_the_first_that_did_not_fail(tmp_path: Path):
    run = {"method": "fedavg", "settings": {"lr": 0.1}, "seed": 0}
    journal = Journal(tmp_path)
    for status, rounds, counts in [
        ("stopped", 9, "stopped"),
        ("stopped", 3, "stopped"),
        ("failed", 9, "stopped"),
        ("failed", 27, "failed"),
        ("done", 27, "done"),
    ]:
        journal.append([Record(**run, status=status, rounds=rounds)])
        assert [one.status for one in journal.read()] == [counts]


COMMON = {"lr": 0.1, "clients": 10, "standardize": True}


def run_of(seed: int = 0, method: str = "local", **settings: Any) -> Record:
    return Record(method, COMMON | settings, seed, metrics={"validation_accuracy": 0.5, "epsilon": None}, seconds=0.1)


def written(folder: Path, records: list[Record]) -> pandas.DataFrame:
    """The file as a sweep writes it, read by pandas."""
    write_table(folder / "results.parquet", pandas.DataFrame(rows(records)))
    return pandas.read_parquet(folder / "results.parquet")


def test_columns_of_one_type_keep_it(tmp_path: Path):
    failed = Record("adaped", {**COMMON, "adaped.psi_init": 1.0, "model": "cnn"}, 0, FAILED, "out of memory")
    records = [run_of(), run_of(1), failed]
    Journal(tmp_path).append(records)
    table = written(tmp_path, records)
    assert_frame_equal(table, load_sweep(tmp_path))
    assert table.clients.dtype == "int64"
    assert table["adaped.psi_init"].tolist()[2] == 1.0


def test_an_axis_of_text_and_numbers_is_text(tmp_path: Path):
    values = ["0.1m", 10, 2.5, True, 1]
    records = [run_of(cohort=value) for value in values] + [run_of(method="pooled")]
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
        written(tmp_path / "missing", [run_of()])
    assert "\n" not in str(error.value)
