"""Clients of the user's own: by the names of the columns in any dialect, or a refusal that says what to write."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpfl.studies import own_clients
from jaxpfl.studies.own_clients import CsvLayout
from jaxpfl.support.errors import JaxpflError

OTHER = {"encoding": "cp1252", "missing_words": "."}


def read(folder: Path, text: str | bytes, layout: CsvLayout | None = None) -> own_clients.Clients:
    path = folder / "own.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return own_clients.read(path, layout)


def comma(cell: str) -> str:
    return cell.replace(".", ",") if re.fullmatch(r"-?\d+\.\d+", cell) else cell


def written(rows: list[list[str]], separator: str = ",", *, quote: int = csv.QUOTE_MINIMAL, end: str = "\n") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, quoting=quote, lineterminator=end).writerows(rows)
    return file.getvalue()


def commas(rows: list[list[str]]) -> list[list[str]]:
    return [[comma(cell) for cell in row] for row in rows]


def aligned(rows: list[list[str]]) -> str:
    quoted = [
        ['"' + cell.replace('"', '""') + '"' if not cell or set(cell) & {" ", '"'} else cell for cell in r]
        for r in rows
    ]
    return "\n".join("  ".join(cell.rjust(7) for cell in row) for row in quoted)


DIALECTS = {
    "comma": lambda rows: written(rows),
    "quoted, CRLF": lambda rows: written(rows, quote=csv.QUOTE_ALL, end="\r\n"),
    "BOM, blank lines": lambda rows: "\ufeff\n" + written(rows, end="\n\n"),
    "semicolon": lambda rows: written(rows, ";"),
    "semicolon, decimal comma": lambda rows: written(commas(rows), ";"),
    "comma, decimal comma in quotes": lambda rows: written(commas(rows), quote=csv.QUOTE_ALL),
    "tab, decimal comma": lambda rows: written(commas(rows), "\t"),
    "bar": lambda rows: written(rows, "|"),
    "Excel": lambda rows: "sep=;\r\n" + written(commas(rows), ";", end="\r\n"),
    "whitespace": aligned,
    "comma at the end": lambda rows: written([[*row, ""] for row in rows]),
}
CELL = st.decimals(-1000, 1000, allow_nan=False, places=2).map(str)


@given(
    clients=st.lists(st.lists(CELL, min_size=1, max_size=5), min_size=2, max_size=6),
    ids=st.sampled_from(("c{}", "{}", "Ward {} b", 'the "{}", so called', "Total {}\nof all")),
    layout=st.sampled_from(("long", "value first", "wide")),
    dialect=st.sampled_from(sorted(DIALECTS)),
    missing=st.sampled_from(("", "NA", "NaN", "null")),
    known=st.booleans(),
)
@settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_is_read_back(tmp_path, clients, ids, layout, dialect, missing, known):
    names = [ids.format(7 * i + 1) for i in range(len(clients))]
    own, value = ("Id", "value") if known else ("the ward", "stay")
    if "whitespace" in dialect:
        own, names = own.replace(" ", "_"), [name.replace("\n", " ") for name in names]
    width = max(map(len, clients))
    if layout == "wide":
        rows = [[own, *(f"x{j}" for j in range(width))]]
        rows += [[n, *each, *[missing] * (width - len(each))] for n, each in zip(names, clients, strict=True)]
        flags: dict[str, Any] = {"values": f"x0..x{width - 1}"}
    else:
        rows = [[name, x] for name, each in zip(names, clients, strict=True) for x in each]
        rows = [[own, value], *rows, [names[0], missing]]
        rows = [row[::-1] for row in rows] if layout == "value first" else rows
        flags = {} if known else {"value": value}
    found = read(tmp_path, DIALECTS[dialect](rows), CsvLayout(client=None if known else own, **flags))
    assert found.names == names
    assert [each.tolist() for each in found.samples] == [list(map(float, each)) for each in clients]


@pytest.mark.parametrize(
    ("text", "layout", "names", "samples"),
    [
        ("Client, value\na, 1\n\nb,3\n", {}, ["a", "b"], [[1], [3]]),
        ("id,client,value\n1,a,2\n2,b,3\n3,a,5\n", {}, ["a", "b"], [[2, 5], [3]]),
        ("id,v,w\na,1,2\nb,3,NA\na,5,6\nb,2,1\n", {"value": "v, w"}, ["a", "b"], [[[1, 2], [5, 6]], [[2, 1]]]),
        ("who,v,x\na,1,2\nb,3,9\n", {"client": "Who", "value": "X"}, ["a", "b"], [[2], [9]]),
        ("client,x1,n,x2\n7,2,99,3\n8,4,99,\n9,N/A,1,null\n", {"values": "x1,x2"}, ["7", "8"], [[2, 3], [4]]),
        ("client,x1,x2\n7,2,3\n8,4\n", {"values": "x1..x2"}, ["7", "8"], [[2, 3], [4]]),
        ('client,"a, b"\n"a, b",.5\nb,+2.\n', {"value": "a, b"}, ["a, b", "b"], [[0.5], [2]]),
        ("client,value\na,TRUE\na,FALSE\nb,true\n", {}, ["a", "b"], [[1, 0], [1]]),
        ("client;value\na;1.234\na;987\nb;1\n", {"decimal": "point"}, ["a", "b"], [[1.234, 987], [1]]),
        ("klinik;value\nK0;1.234\nK1;9.875\nK1;1300\n", {"client": "klinik"}, ["K0", "K1"], [[1.234], [9.875, 1300]]),
        ("client;value\na;1,234\nb;2,5\n", {}, ["a", "b"], [[1.234], [2.5]]),
        ("client,value\nTotal,1\nNA of all,1\nn,3\n", {}, ["Total", "NA of all", "n"], [[1], [1], [3]]),
        ("client,a,b\nx,1,0\ny,0,1\nz,1,1\n", {"values": "a,b"}, ["x", "y", "z"], [[1, 0], [0, 1], [1, 1]]),
        ("client,a,b\nx,1,2\ny,1,2\n", {"values": "a,b"}, ["x", "y"], [[1, 2], [1, 2]]),
        ("client\tvalue\r\nä\t1,5\r\nä\t2,5\r\nb\t3\r\n".encode("utf-16"), {}, ["ä", "b"], [[1.5, 2.5], [3]]),
        ("client,value\nä,1\nNA,.\nNA,3".encode("cp1252"), OTHER, ["ä", "NA"], [[1], [3]]),
    ],
)
def test_formats(tmp_path: Path, text: str | bytes, layout: dict, names: list[str], samples: list):
    found = read(tmp_path, text, CsvLayout(**layout))
    assert (found.names, [own.tolist() for own in found.samples]) == (names, samples)


@pytest.mark.parametrize(
    ("text", "layout", "message"),
    [
        ("", {}, "own.csv: the file is empty"),
        ("client,value\n", {}, "own.csv: the file has a header but no rows"),
        ("1.5,2,3\n4.5,5,6\n", {}, "line 1: expected column names, got numbers: add a header"),
        ("client,,value\na,1,2\n", {}, "line 1: column 2 has no name"),
        ("client,value,value\na,1,2\n", {}, "line 1: two columns are named 'value'"),
        ("client,value\na,1\n\nb,x\n", {}, "line 4: value must be a finite number, got 'x'"),
        ('client,value\n"a\nb",1\nb,1e999\n', {}, "line 4: value must be a finite number, got '1e999'"),
        ("client;value\na;1.234,50\nb;5,5\n", {}, "must be a finite number with a decimal comma, got '1.234,50'"),
        ("client;value\na;1,5\nb;1.5\n", {}, "line 2: value must be a finite number, got '1,5'"),
        ("\nclient,value\na,1,2\nb,2\n", {}, "line 3 has 3 cells, but the header has 2"),
        ("client,value\n,1\nb,2\n", {}, "line 2: no name in column 'client', got ''"),
        ("client,a,b\nx,2.5,3\nx,3,4\n", {"values": "a,b"}, "line 3: client 'x' is also in line 2"),
        ("client,value\na,\nb,NA\n", {}, "no client has a sample"),
        ("client;value\na;1,234\nb;2,345\n", {}, "line 2: the mark in '1,234' may separate decimals or thousands"),
        ('client,value\n"a,1\nb,2\n', {}, "cannot read"),
        ("client,value\n\xe9,2\n".encode("latin-1"), {}, "line 2: byte 0xe9 is not UTF-8: name the encoding, such as"),
        ("client,value\nNA,2\nb,1\n", {}, "got 'NA'; to change which words mean a missing value, use --missing-words"),
        ("value\n1.5\n", {}, "no column is called client or id (available: value): add one with the clients' names"),
        ("Batch,Yield\na,1\n", {}, "no column is called value (columns: Batch, Yield): write --client Batch --value Y"),
        (
            "id,s0,s1\na,1,2\n",
            {},
            "write --value COLUMN[,COLUMN] (a row for each sample), or --values s0..s1 (a row for",
        ),
        (
            "x y,b,c\na,1,2\n",
            {"client": "x y"},
            "write --value COLUMN[,COLUMN] (a row for each sample), or --values b..c",
        ),
        ("a,b,c\na,1,2\n", {}, "write --client COLUMN --value COLUMN[,COLUMN] (a row for each sample), or --client"),
        ("client,x\na,1\n", {"value": "x", "values": "x"}, "give value (a row for each sample) or values (a row for"),
        ("client,x\na,1\n", {"client": "clint", "value": "x"}, "did you mean 'client'?"),
        ("client,x,X\na,1,2\n", {"value": "client..y"}, "unknown column of"),
        ("client,a,b\nx,1,2\n", {"values": "b..a"}, "'b..a' selects no column: the first column of a range must come"),
        ("client,x,y\na,east,2\n", {"value": "x,y"}, "line 2: x must be a finite number, got 'east'"),
        ("client,value\na,1.1\nEngland,3.4\nb,2.3\n", {}, "client 'England' is the sum of all others: remove that row"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, text: str | bytes, layout: dict, message: str):
    with pytest.raises(JaxpflError) as caught:
        read(tmp_path, text, CsvLayout(**layout))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_understood(tmp_path: Path):
    text = '"row";"client";"value"\n"1";10;1,5\n"2";20;NA\n"3";10;2,5\n"4";30;3,5\n'
    found = read(tmp_path, text)
    assert found.understood == {
        "layout": "long",
        "separator": "semicolon",
        "decimal": "comma",
        "client": "client",
        "values": ["value"],
        "ignored": ["row"],
        "missing": 1,
        "without_samples": ["20"],
        "clients": 2,
        "samples": {"min": 1, "median": 1.5, "max": 2},
        "first": {"client": "10", "size": 2, "samples": [1.5, 2.5]},
    }
    assert own_clients.how_it_was_read({"read": found.understood}) == [
        "read as: a row for each sample; separator semicolon, decimal comma",
        "clients: client; samples: value; not used: row",
        "2 clients with 1 to 2 (median 1.5) samples; the first is 10: 1.5, 2.5",
        "cells without a number, left out: 1",
        "clients without a sample, left out: 1 (20)",
        "",
    ]


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=2, max_size=6),
    place=st.integers(0, 5),
)
@settings(derandomize=True, deadline=None)
def test_a_row_of_sums_is_refused_whatever_its_name(counts, place):
    """Decimals too, whose sums are rounded; a hundredth more is no sum."""
    rows = np.array(counts) * 0.1 + np.arange(1, len(counts) + 1)[:, None]
    place = min(place, len(rows))
    with_sum = np.insert(rows, place, rows.sum(axis=0), axis=0)
    names = [f"c{i}" for i in range(len(with_sum))]
    with pytest.raises(JaxpflError, match=f"client 'c{place}' is the sum of all others"):
        own_clients.refuse_sum(Path("own.csv"), names, with_sum)
    with_sum[place] += 0.01
    own_clients.refuse_sum(Path("own.csv"), names, with_sum)
