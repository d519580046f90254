"""Tables where the terminal is narrow, and output where it shows ASCII alone."""

import io
import sys

import pytest

from jaxpfl.support.console import Console, new_table, settle


def shown(monkeypatch, encoding: str = "utf-8") -> str:
    """A table of one row, as it is printed."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    table = new_table("accuracy of the clients", "± over seeds")
    table.add_column("method", no_wrap=True)
    for name in ("personalized", "global", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("fedavg-ft", "97.68 ±0.24", "95.00 ±0.43", "92.39")
    settle()
    Console().print(table)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


BLOCK = {"fedavg-ft", "personalized 97.68 ±0.24", "global 95.00 ±0.43", "worst 92.39"}
ROW = {"method personalized global worst", "fedavg-ft 97.68 ±0.24 95.00 ±0.43 92.39"}


@pytest.mark.parametrize(("columns", "shows"), [(40, BLOCK), (52, ROW), (63, ROW)])
def test_a_narrow_terminal_loses_no_figure(monkeypatch, columns: int, shows: set[str]):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(monkeypatch).splitlines()
    assert max(map(len, lines)) <= columns
    assert shows <= {" ".join(line.split()) for line in lines}


def test_a_file_is_wider_than_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = new_table("wide")
    for name in ("a" * 60, "b" * 60):
        table.add_column(name, no_wrap=True)
    table.add_row("first", "last")
    Console().print(table)
    head, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith((" a", " first")))
    assert head.split() == ["a" * 60, "b" * 60]
    assert row.split() == ["first", "last"]


def test_what_cannot_be_encoded_is_replaced_and_aligned(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = shown(monkeypatch, "ascii")
    head, row = (line for line in text.splitlines() if "worst" in line or "fedavg" in line)
    assert "97.68 ?0.24" in row
    assert head.rindex("worst") + len("worst") == row.rindex("92.39") + len("92.39")


def test_a_notebook_gets_text(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a stream that calls itself a terminal
    assert shown(monkeypatch).splitlines()[0].strip() == "accuracy of the clients"
