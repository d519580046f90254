"""Records of a sweep: whole lines only."""

import dataclasses
import os
from pathlib import Path

import pytest

import jaxpfl
from jaxpfl.runs.records import Journal, Record, load_sweep, rows
from jaxpfl.runs.sweep.sweep import write_best
from jaxpfl.support.errors import JaxpflError, UnwritableError

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


def test_a_sweep_is_a_data_frame(tmp_path: Path):
    Journal(tmp_path).append([ONE, TWO])
    table = jaxpfl.load_sweep(tmp_path)
    assert list(table.columns[:4]) == ["method", "lr", "clients", "seed"]
    assert table.groupby("method").validation_accuracy.mean()["local"] == 0.5


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
