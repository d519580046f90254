"""Clients of the user's own: whatever the layout and dialect, the same clients, or a refusal that says how to go on."""

import csv
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpfl.data.sources.csv_text import SEPARATORS
from jaxpfl.errors import JaxpflError
from jaxpfl.studies.own_data import client_csv
from jaxpfl.studies.own_data.csv_columns import CsvLayout

_RNG = np.random.default_rng(3)
X = np.round(9.68 + 1.9 * _RNG.normal(size=(12, 1)) + 0.9 * _RNG.normal(size=(12, 6)), 3).tolist()
NUMBERS = [str(1000 + i) for i in range(12)]
SMALL = [str(1 + i) for i in range(12)]
WORDS = [f"c{i:02}" for i in range(12)]


def read(folder: Path, text: str, layout: CsvLayout | None = None) -> client_csv.Clients:
    path = folder / "own.csv"
    path.write_bytes(text.encode())
    return client_csv.read(path, layout)


def wide(header: list[str] | None, ids: list[str] | None, extra: int = 0) -> list[list[str]]:
    """A row for each client; ``extra``: numbers of rows from 1 before it."""
    rows = [([ids[i]] if ids else []) + list(map(str, own)) for i, own in enumerate(X)]
    return ([header] if header else []) + [[str(i + extra)] * bool(extra) + row for i, row in enumerate(rows)]


def long(header: list[str] | None, ids: list[str], form: str) -> list[list[str]]:
    """A row for each sample: of the client, value, number of the sample, number of the row, and text, by letter."""
    rows = [
        [{"c": name, "v": str(x), "j": str(j), "s": f"s{j}", "t": f"ward {i % 3}"}.get(letter, "") for letter in form]
        for i, (name, own) in enumerate(zip(ids, X, strict=True))
        for j, x in enumerate(own)
    ]
    for number, row in enumerate(rows, start=1):
        for place, letter in enumerate(form):
            row[place] = str(number) if letter == "r" else row[place]
    return ([header] if header else []) + rows


S = [f"s{j}" for j in range(6)]
COUNT = [str(j) for j in range(6)]
YEARS = [str(2000 + 4 * j) for j in range(6)]
# name: (rows, ids of the clients where the file has any, whether it is to be read without a question)
LAYOUTS = {
    "as documented": (long(["client", "value"], WORDS, "cv"), WORDS, True),
    "value first": (long(["value", "client"], NUMBERS, "vc"), NUMBERS, True),
    "other names": (long(["hospital", "stay"], NUMBERS, "cv"), NUMBERS, True),
    "words for ids": (long(["ward", "stay"], WORDS, "cv"), WORDS, True),
    "numbers for ids, no word": (long(["ward", "stay"], NUMBERS, "cv"), NUMBERS, False),
    "R write.csv, long": (long(["", "client", "value"], NUMBERS, "rcv"), NUMBERS, True),
    "R write.csv, long, words": (long(["", "ward", "stay"], WORDS, "rcv"), WORDS, True),
    "R write.csv, long, no word": (long(["", "ward", "stay"], NUMBERS, "rcv"), NUMBERS, False),
    "R read.csv of it": (long(["X", "client", "value"], NUMBERS, "rcv"), NUMBERS, True),
    "R write.table": (long(["client", "value"], NUMBERS, "rcv"), NUMBERS, True),
    "pandas reset_index": (long(["index", "client", "value"], WORDS, "rcv"), WORDS, True),
    "pandas melt": (long(["client", "variable", "value"], WORDS, "csv"), WORDS, False),
    "numbered samples": (long(["client", "visit", "value"], WORDS, "cjv"), WORDS, False),
    "client and place": (long(["client", "ward", "value"], WORDS, "ctv"), WORDS, False),
    "no header, words": (long(None, WORDS, "cv"), WORDS, True),
    "no header, numbers": (long(None, NUMBERS, "cv"), NUMBERS, False),
    "no header, value first": (long(None, NUMBERS, "vc"), NUMBERS, False),
    "wide, client": (wide(["client", *S], WORDS), WORDS, True),
    "wide, id": (wide(["id", *S], NUMBERS), NUMBERS, True),
    "wide, small ids": (wide(["subject_id", *S], SMALL), SMALL, True),
    "wide, other name": (wide(["ward", *S], NUMBERS), NUMBERS, True),
    "wide, years": (wide(["county", *YEARS], WORDS), WORDS, True),
    "wide, years, numbers": (wide(["place", *YEARS], NUMBERS), NUMBERS, True),
    "wide, years, no word": (wide(["place", *YEARS], WORDS), WORDS, False),
    "wide, unlike names": (wide(["client", "mon", "tue", "wed", "thu", "fri", "sat"], WORDS), WORDS, False),
    "wide, pandas": (wide(["", *COUNT], NUMBERS), NUMBERS, True),
    "wide, pandas, words": (wide(["", *COUNT], WORDS), WORDS, True),
    "wide, pandas, index name": (wide(["place", *COUNT], WORDS), WORDS, True),
    "wide, pandas, both": (wide(["", "client", *S], WORDS, extra=1), WORDS, True),
    "wide, pandas, without index": (wide(COUNT, None), None, False),
    "wide, pandas, of one name": (wide(["client", "x", *(f"x.{j}" for j in range(1, 6))], WORDS), WORDS, True),
    "wide, one name for all": (wide(["day", "client", *["x"] * 6], WORDS, extra=1), WORDS, False),
    "wide, R": (wide(["", *S], SMALL), SMALL, True),
    "wide, R write.table": (wide(S, SMALL), SMALL, True),
    "wide, id and more": (wide(["", "id", *S], NUMBERS, extra=1), NUMBERS, True),
    "wide, samples alone": (wide(S, None), None, True),
    "wide, no header": (wide(None, None), None, True),
    "wide, no header, words": (wide(None, WORDS), WORDS, True),
    "wide, no header, numbers": (wide(None, NUMBERS), NUMBERS, False),
    "wide, no header, small": (wide(None, SMALL), SMALL, False),
}


def comma(cell: str) -> str:
    return cell.replace(".", ",") if re.fullmatch(r"-?\d+\.\d+", cell) else cell


def written(rows: list[list[str]], separator: str = ",", *, quote: int = csv.QUOTE_MINIMAL, end: str = "\n") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, quoting=quote, lineterminator=end).writerows(rows)
    return file.getvalue()


def commas(rows: list[list[str]]) -> list[list[str]]:
    return [[comma(cell) for cell in row] for row in rows]


def aligned(rows: list[list[str]]) -> str:
    return "\n".join("  ".join((f'"{cell}"' if not cell or " " in cell else cell).rjust(7) for cell in r) for r in rows)


DIALECTS = {
    "comma": lambda rows: written(rows),
    "quoted, CRLF": lambda rows: written(rows, quote=csv.QUOTE_ALL, end="\r\n"),
    "BOM, blank lines": lambda rows: "\ufeff" + written(rows).replace("\n", "\n\n", 3),
    "semicolon": lambda rows: written(rows, ";"),
    "semicolon, decimal comma": lambda rows: written(commas(rows), ";"),
    "comma, decimal comma in quotes": lambda rows: written(commas(rows), quote=csv.QUOTE_ALL),
    "tab, decimal comma": lambda rows: written(commas(rows), "\t"),
    "bar": lambda rows: written(rows, "|"),
    "Excel": lambda rows: "sep=;\r\n" + written(commas(rows), ";", end="\r\n"),
    "whitespace": aligned,
    "comma at the end": lambda rows: written([[*row, ""] for row in rows]),
}


def suggested(message: str) -> Iterator[dict]:
    """The flags that a refusal offers."""
    for way in re.split(r", or ", message.rsplit("give ", 1)[1]) if "give --" in message else []:
        words = shlex.split(way)
        flags = {}
        while words and words[0].startswith("--"):
            name = words.pop(0)[2:]
            flags[name] = True if name in ("long", "wide") else words.pop(0)
        yield flags


def same(found: client_csv.Clients, ids: list[str] | None) -> bool:
    return [own.tolist() for own in found.samples] == X and (ids is None or found.names == ids)


def reached(folder: Path, text: str, ids: list[str] | None, layout: CsvLayout, depth: int = 3) -> bool:
    """True if some of the suggestions lead to the clients."""
    try:
        return same(read(folder, text, layout), ids)
    except JaxpflError as error:
        message = str(error)
        assert "\n" not in message
        ways = list(suggested(message))
        assert ways, message
        return depth > 0 and any(reached(folder, text, ids, replace(layout, **way), depth - 1) for way in ways)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_clients_or_a_way_to_them(tmp_path: Path, name: str):
    rows, ids, clear = LAYOUTS[name]
    for dialect, write in DIALECTS.items():
        if "R write.table" in name and dialect == "comma at the end":
            continue  # a header that is a cell short, and ends with a separator, seems to name the rows' numbers
        text = write(rows)
        try:
            found = read(tmp_path, text)
        except JaxpflError:
            assert not clear, dialect
            assert reached(tmp_path, text, ids, CsvLayout()), dialect
        else:
            assert same(found, ids), (dialect, found.understood)


CELL = st.decimals(-1000, 1000, allow_nan=False, places=2).map(str)


@given(
    clients=st.lists(st.lists(CELL, min_size=1, max_size=5), min_size=2, max_size=6),
    ids=st.sampled_from(("words", "numbers", "spaces", "quotes")),
    layout=st.sampled_from(("long", "value first", "wide", "no header")),
    dialect=st.sampled_from(sorted(set(DIALECTS) - {"whitespace", "comma at the end"})),
    missing=st.sampled_from(("", "NA", "NaN", "null")),
)
@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_was_written_is_read_back(tmp_path, clients, ids, layout, dialect, missing):
    """With the flags that say what a file is, every file is read; without them, never as something else."""
    form = {"words": "c{}", "numbers": "{}", "spaces": "Ward {} b", "quotes": 'the "{}", so called'}[ids]
    names = [form.format(7 * i + 1) for i in range(len(clients))]
    flags = CsvLayout(id="client", value="value", long=True, header="yes")
    if layout in ("long", "value first"):
        rows = [[name, x] for name, own in zip(names, clients, strict=True) for x in own]
        rows = [["client", "value"], *rows, [names[0], missing]]
        rows = [row[::-1] for row in rows] if layout == "value first" else rows
    else:
        width = max(map(len, clients))
        rows = [[n, *own, *[missing] * (width - len(own))] for n, own in zip(names, clients, strict=True)]
        flags = CsvLayout(id="@1", wide=True, header="no")
        if layout == "wide":
            rows = [["client", *(f"x{j}" for j in range(width))], *rows]
            flags = replace(flags, header="yes")
    decimal = "comma" if "decimal comma" in dialect or dialect == "Excel" else "point"
    separator = (
        "semicolon" if dialect == "Excel" else next((n for n in SEPARATORS if n in dialect.split(",")[0]), "comma")
    )
    flags = replace(flags, decimal=decimal, sep=separator)
    text = DIALECTS[dialect](rows)
    expected = [list(map(float, own)) for own in clients]
    found = read(tmp_path, text, flags)
    assert (found.names, [own.tolist() for own in found.samples]) == (names, expected)
    try:
        guessed = read(tmp_path, text)
    except JaxpflError:
        return
    assert [own.tolist() for own in guessed.samples] == expected


@pytest.mark.parametrize(
    ("text", "names", "samples"),
    [
        ("Client, value\na, 1\n\nb,3\n", ["a", "b"], [[1], [3]]),
        ("client,value1,value2\na,1,2\nb,3,4\na,5,6\n", ["a", "b"], [[[1, 2], [5, 6]], [[3, 4]]]),
        ("client,value1,value2\na,1,2\nb,3,NA\na,5,6\nb,2,1\n", ["a", "b"], [[[1, 2], [5, 6]], [[2, 1]]]),
        ("1.5,2,3\n4.5,5\n", ["0", "1"], [[1.5, 2, 3], [4.5, 5]]),
        ("1.5,2,3\n4.5,,6.5\n", ["0", "1"], [[1.5, 2, 3], [4.5, 6.5]]),
        ("anna,2,3.5\nbert,4\n", ["anna", "bert"], [[2, 3.5], [4]]),
        ("client,x1,x2\n7,2,3\n8,4,\n", ["7", "8"], [[2, 3], [4]]),
        ("client,x1,x2\n7,2,3\n8,N/A,null\n9,4,NaN\n", ["7", "9"], [[2, 3], [4]]),
        ("\ufeffclient,value\na,1e-3\nb,-2\n", ["a", "b"], [[1e-3], [-2]]),
        ('client,value\n"a, b",.5\nb,+2.\n', ["a, b", "b"], [[0.5], [2]]),
        ("client,win\na,TRUE\na,FALSE\nb,true\n", ["a", "b"], [[1, 0], [1]]),
        ("1,0,1\n0,0,1\n1,1,1\n", ["0", "1", "2"], [[1, 0, 1], [0, 0, 1], [1, 1, 1]]),
    ],
)
def test_formats(tmp_path: Path, text: str, names: list[str], samples: list):
    found = read(tmp_path, text)
    assert found.names == names
    assert [own.tolist() for own in found.samples] == samples


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no clients in it"),
        ("client,value\n", "a header, and no clients below it"),
        ("client,value\na,1\nb,x\n", "line 3: 'x' is no finite number"),
        ("client,value\na,1\nb,1e999\n", "line 3: '1e999' is no finite number"),
        ("client,value\na,1\nb,1_0\n", "line 3: '1_0' is no finite number"),
        ("client,value\na,1.5\nb,inf\nc,2\n", "line 3: 'inf' is no finite number"),
        ("client;value\na;1,5\nb;1.5\n", "line 2: '1,5' is no finite number"),
        ("client,value\na,1,2\nb,2\n", "line 2: more cells than the header has names (2)"),
        ("client,value\n,1\nb,2\n", "line 2: no client's name, got ''"),
        ("anna,2.5,3\nanna,3,4\n", "client 'anna' has 2 rows of 2 numbers"),
        ("client,value\na,\nb,NA\n", "no client has a sample"),
        ("client;value\na;1,234\nb;2,345\n", "line 2: '1,234' is a decimal number or one in thousands"),
        ('client,value\n"a,1\nb,2\n', "cannot read"),
        ("value\n1.5\n2.5\n", "no column names the clients"),
        (
            "3,4,5\n1,2,6\n",
            "whole numbers in column @1 could name the clients or be samples: give --id @1, or --id none",
        ),
        ("a,b\nx,y\nz,w\n", "no column of numbers"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(JaxpflError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (CsvLayout(long=True, wide=True), "long and wide are two layouts"),
        (CsvLayout(id="clint"), "did you mean 'client'?"),
        (CsvLayout(id="@9"), "id must be a column's name or @1 to @4, got '@9'"),
        (CsvLayout(id="x"), "2 columns are called 'x': give their place, @3 or @4"),
        (CsvLayout(id="client", value="client"), "column 'client' cannot be both id and value"),
        (CsvLayout(id="client", value="ward..x"), "2 columns are called 'x'"),
        (CsvLayout(id="client", value="ward,@3"), "line 2: 'east' is no finite number"),
        (CsvLayout(value=""), "value must name at least one column"),
    ],
)
def test_flags_that_the_file_has_no_columns_for(tmp_path: Path, layout: CsvLayout, message: str):
    with pytest.raises(JaxpflError, match=re.escape(message)):
        read(tmp_path, "client,ward,x,x\na,east,1,2\na,west,3,4\nb,west,3,5\n", layout)


def test_columns_are_chosen_by_name_and_place(tmp_path: Path):
    text = "stay,ward,age\n1.5,7,30\n2.5,8,40\n3.5,7,30\n"
    for value, samples in (("stay", [[1.5, 3.5], [2.5]]), ("@3", [[30, 30], [40]])):
        found = read(tmp_path, text, CsvLayout(id="ward", value=value))
        assert (found.names, [own.tolist() for own in found.samples]) == (["7", "8"], samples)
    both = read(tmp_path, text, CsvLayout(id="ward", value="stay,age"))
    assert both.columns == ["stay", "age"]
    assert both.samples[0].tolist() == [[1.5, 30], [3.5, 30]]
    assert both.understood["ignored"] == []
    wide = read(tmp_path, "who,a,b,c\nx,1,2,3\ny,4,5,6\n", CsvLayout(value="a..c", wide=True))
    assert (wide.names, wide.samples[1].tolist()) == (["x", "y"], [4, 5, 6])


def test_what_was_understood(tmp_path: Path):
    text = '"";"client";"value"\n"1";10;1,5\n"2";20;NA\n"3";10;2,5\n"4";30;3,5\n'
    found = read(tmp_path, text)
    assert found.understood == {
        "layout": "long",
        "header": True,
        "separator": "semicolon",
        "decimal": "comma",
        "id": "client",
        "values": ["value"],
        "ignored": ["column 1"],
        "missing": 1,
        "without_samples": ["20"],
        "clients": 2,
        "samples": {"min": 1, "median": 1.5, "max": 2},
        "first": {"client": "10", "size": 2, "samples": [1.5, 2.5]},
    }
    assert client_csv.told(found.understood) == [
        "read as: long, a row for each sample; a header; separator semicolon, decimal comma",
        "clients: client; samples: value; not used: column 1",
        "2 clients of 1 to 2 (median 1.5) samples; the first, 10: 1.5, 2.5",
        "cells without a number, left out: 1",
        "clients without a sample, left out: 1 (20)",
    ]


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(JaxpflError, match="cannot read"):
        client_csv.read(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes("a,1\n\xe9,2\n".encode("latin-1"))
    with pytest.raises(JaxpflError, match="cannot read"):
        client_csv.read(tmp_path / "latin.csv")


def test_text_of_windows(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_bytes("client\tvalue\r\nä\t1,5\r\nä\t2,5\r\nb\t3\r\n".encode("utf-16"))
    found = client_csv.read(path)
    assert (found.names, [own.tolist() for own in found.samples]) == (["ä", "b"], [[1.5, 2.5], [3]])


def test_flags_of_every_suggestion_are_known():
    for way in itertools.chain(
        suggested("x: give --id @1 --value a..b, or --id none --wide"), suggested("give --sep comma")
    ):
        assert set(way) <= set(vars(CsvLayout()))
