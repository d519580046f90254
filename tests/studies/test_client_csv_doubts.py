"""Files that look like clients and are not, or not those: each is refused in a line, and the flags it offers work."""

from pathlib import Path

import numpy as np
import pytest
from test_client_csv import read, suggested

from jaxpfl.cli import main
from jaxpfl.errors import JaxpflError, JaxpflWarning
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data import client_csv, output
from jaxpfl.studies.own_data import gaussian as own_gaussian
from jaxpfl.studies.own_data.csv_columns import CsvLayout

_RNG = np.random.default_rng(5)


def rows(names: list[str], columns: int, *, decimals: int = 2) -> str:
    return "".join(f"{name},{','.join(f'{x:.{decimals}f}' for x in _RNG.normal(9, 2, columns))}\n" for name in names)


K = [f"K{i}" for i in range(4)]
IDS = [str(1000 + i) for i in range(4)]
# name: (text, what the refusal says)
REFUSED = {
    "two values of one name": ("client,value,value\n" + rows(K * 2, 2), "2 columns of values are called 'value'"),
    "R, numbers for ids": ("V1,V2\n" + rows(sorted(IDS * 3), 1), "whole numbers in column V1 could name"),
    "R, wide": ("V1,V2,V3,V4\n" + rows(IDS, 3), "whole numbers in column V1"),
    "R, rows' names": (
        '"","V1","V2"\n' + "".join(f'"{i}",{1000 + i // 2},{i}.5\n' for i in range(1, 9)),
        "whole numbers in column V1",
    ),
    "Excel": ("Column1,Column2\n" + rows(sorted(IDS * 3), 1), "whole numbers in column Column1"),
    "pandas, prefix": ("x0,x1,x2\n" + rows(IDS, 2), "whole numbers in column x0"),
    "German thousands": ("klinik;kosten\nK0;1.234,50\nK0;987,00\nK1;2.345,10\n", "'1.234,50' has thousands sep"),
    "German thousands, no header": (
        "K0;1.234,50\nK0;987,00\nK1;345,10\n",
        "'K0,1.234,50' may be the columns' names or samples",
    ),
    "thousands in quotes": ('clinic,cost\nK0,"1,234.50"\nK0,987.00\nK1,"2,345.10"\n', "'1,234.50' has thousands"),
    "German thousands, points": (
        "klinik;kosten\nK0;1.234\nK0;987\nK1;1.040\n",
        "'1.234' is a decimal number or one in",
    ),
    "thousands of two marks": ("klinik;kosten\nK0;1.234.567\nK0;987\nK1;1.040.000\n", "'1.234.567' has thousands"),
    "space": ("klinik;kosten\nK0;1 234\nK0;987\nK1;1 040\n", "'1 234' has thousands"),
    "space, comma": ("klinik,kosten\nK0,1 234\nK0,2 987\nK1,1 040\n", "'1 234' has thousands"),
    "space, no break": ("klinik;kosten\nK0;1\u00a0234\nK0;2\u202f987\nK1;1\u00a0040\n", "has thousands"),
    "pandas pivot": (",value,value,value\nsample,0,1,2\nclient,,,\n" + rows(K, 3), "line 2: a second row of names"),
    "pandas pivot, two rows": (",value,value,value\nclient,0,1,2\n" + rows(K, 3), "a second row of names, 'client'"),
    "pandas pivot, own words": (",y,y,y\nkind,0,1,2\nplace,,,\n" + rows(K, 3), "3 columns are called 'y'"),
    "clients in columns": ("sample,clinic0,clinic1,clinic2\n" + rows(["0", "1", "2"], 3), "transposed, clients in"),
    "clients in columns, days": ("day,a1,a2,a3\n" + rows(["mon", "tue", "wed"], 3), "transposed, clients in columns"),
    "clients in columns, alone": ("client1,client2,client3\n2.5,3.5,1\n2,3,1\n", "transposed, clients in columns"),
    "numbers of samples, words": ("sampleid,client,value\n" + rows([f"s{i},c{i // 2}" for i in range(6)], 1), "could"),
    "standard errors": ("client,value,value_se\n" + rows(K * 2, 2), "client 'K0' has 2 rows of 2 numbers"),
    "numbers beside": ("client,value,value_n\n" + rows(K * 2, 2), "client 'K0' has 2 rows of 2 numbers"),
    "limits": ("client,value,value_lower\n" + rows(K * 2, 2), "client 'K0' has 2 rows of 2 numbers"),
    "dates for clients": ("date,value\n" + rows(["2020-01-01", "2020-01-02"] * 2, 1), "'date' seems to tell samples"),
    "tab, points": ("klinik\tkosten\nK0\t1.234\nK0\t987\nK1\t1.040\n", "'1.234' is a decimal number or"),
    "Minitab": ("C1,C2\n" + rows(sorted(IDS * 3), 1), "whole numbers in column C1"),
    "weights": ("client,value,weight\n" + rows(K * 2, 2), "client 'K0' has 2 rows of 2 numbers"),
    "a mean beside samples": ("client,s0,s1,s2,mean,sd\n" + rows(K, 5), "do not look like samples of one quantity"),
    "a mean, no word": ("place,s0,s1,total\n" + rows(IDS, 3), "do not look like samples of one quantity"),
    "means of samples": ("client,mean\n" + rows(K * 2, 1), "column 'mean' seems to be computed of samples"),
    "totals": ("hospital,total\n" + rows(sorted(IDS * 2), 1), "column 'total' seems to be computed of samples"),
    "two columns of one name, by pandas": (
        "client,value,value.1\n" + rows(K * 2, 2),
        "columns 'value' and 'value.1' seem to have had one name",
    ),
    "a column twice, by pandas": (
        "client,value,value.1\n" + "".join(f"K{i},{i}.5,{i}.5\n" for i in range(4)),
        "columns 'value' and 'value.1' hold the same numbers",
    ),
    "one number in two ways": (
        "client,value\n007,1.5\n8,2\n7,2.5\n8,3\n007,3.5\n",
        "line 4: clients '007' and '7' are one number in two ways",
    ),
    "whole numbers and fractions": ("client,value\n1,1.5\n2,2\n1.0,2.5\n", "clients '1' and '1.0' are one number"),
    "a unit": ("a,5kg\na,6\nb,7\n", "'a,5kg' may be the columns' names or samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_flags_that_work(tmp_path: Path, name: str):
    text, message = REFUSED[name]
    with pytest.raises(JaxpflError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    for way in filter(None, suggested(said)):
        if way == {"header": "no"}:  # the cell that is no number is named then
            with pytest.raises(JaxpflError, match=r"line 1: .* (is no finite number|has thousands separators)"):
                read(tmp_path, text, CsvLayout(**way))
            continue
        found = read(tmp_path, text, CsvLayout(**way))
        if "seems to be computed" in said:  # the flags say that they are samples
            assert found.understood["values"] in (["mean"], ["total"])
            continue
        assert not {"mean", "sd", "total", "value_se", "value_n", "weight", "value_lower"} & set(
            found.understood["values"]
        )


@pytest.mark.parametrize(
    "word",
    [
        *("total", "Sum", "MEAN", "average", "sd", "std", "n", "Summe", "gesamt", "source", "weight", "Total:"),
        "Grand Total",
    ],
)
@pytest.mark.parametrize("form", ["wide", "long"])
def test_rows_about_the_clients(tmp_path: Path, word: str, form: str):
    header, width = ("client,s0,s1,s2\n", 3) if form == "wide" else ("client,value\n", 1)
    with pytest.raises(JaxpflError, match=f"line 6: '{word}' seems to be a row about the clients, .* remove it"):
        read(tmp_path, header + rows([*K, word], width))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("client,value\n" + rows(["m", "n", "o"], 1), ["m", "n", "o"]),
        ("client,value\n" + rows(["Total Care", "Max", "meaning"], 1), ["Total Care", "Max", "meaning"]),
        ("patient,sensor1,sensor2,sensor3\n" + rows(K, 3), K),
        ("client,x0,x1,x2\n" + rows(IDS, 3), IDS),
        ("V1,V2\n" + rows(K, 1), K),
        ("V1,V2,V3\n2.5,3,4\n2,3,4.5\n", ["0", "1"]),
        ("klinik;kosten\nK0;1.234\nK0;98.7\nK1;140\n", ["K0", "K1"]),
        ("klinik;kosten\nK0;1.234\nK0;9.875\nK1;3\n", ["K0", "K1"]),
        ("klinik;kosten\nK0;1.234\nK0;9.875\nK1;1300\nK1;300\n", ["K0", "K1"]),
        ("patient,cost\n123.456.789,1.5\n123.456.780,2.5\n", ["123.456.789", "123.456.780"]),
        ("place,covid1,covid2\n" + rows(K, 2), K),
    ],
)
def test_what_only_looks_so(tmp_path: Path, text: str, names: list[str]):
    assert read(tmp_path, text).names == names


def test_points_that_are_given_as_decimal(tmp_path: Path):
    text = "klinik;kosten\nK0;1.234\nK0;987\nK1;1.040\n"
    assert [x.tolist() for x in read(tmp_path, text, CsvLayout(decimal="point")).samples] == [[1.234, 987], [1.04]]


def test_numbers_of_samples_name_no_clients(tmp_path: Path):
    text = "sample_id,client,value\n" + rows([f"{i},c{i // 2}" for i in range(7, 13)], 1)
    with pytest.raises(JaxpflError, match="2 rows of 2 numbers") as caught:
        read(tmp_path, text)
    ways = list(suggested(str(caught.value)))
    assert {"id": "client", "value": "value"} in ways
    assert all(way.get("value") != "sample_id" and not way.get("long") for way in ways)


@pytest.mark.slow
def test_names_that_would_be_one_in_the_table(tmp_path: Path):
    (tmp_path / "own.csv").write_text("client,x,stderr_x\n" + rows(K * 3, 2))
    layout = CsvLayout(value="x,stderr_x", long=True)
    with pytest.raises(JaxpflError, match=r"'x' and 'stderr_x' would both be local_stderr_x in estimates.csv"):
        own_gaussian.run(tmp_path / "own.csv", GaussianSettings(), layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sizes_of_which_fourth_powers_are_taken(tmp_path: Path):
    path = tmp_path / "own.csv"
    text = "client,value\n" + rows(K * 3, 1)
    for outlier, refused in ((1e120, True), (1e100, True), (1e69, False)):
        path.write_text(text + f"K0,{outlier:g}\n")
        if refused:
            with pytest.raises(JaxpflError, match=r"value must be of a size between 1e-70 and 1e\+70"):
                own_gaussian.run(path, GaussianSettings())
        else:
            assert np.isfinite(own_gaussian.run(path, GaussianSettings()).columns["personalized"]).all()


@pytest.mark.slow
def test_clipped_messages_are_counted(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\n" + rows(K * 3, 1))
    own = own_gaussian.run(path, GaussianSettings(epsilon=1.0)).result
    assert own["privacy"]["clients_clipped"] == 4
    assert own["notes"][0].startswith("warning: 4 of 4 clients' means lie outside ±")
    own = own_gaussian.run(path, GaussianSettings(epsilon=1.0, radius=20.0)).result
    assert (own["privacy"]["clients_clipped"], own["notes"]) == (0, [])


@pytest.mark.slow
def test_an_empty_interval_is_said_in_words(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\n" + "".join(f"K{i},{1e-3 * i + x}\n" for i in range(9) for x in (-5, 5.5, -0.5)))
    own = own_gaussian.run(path, GaussianSettings()).result
    assert own["estimated"]["sigma_theta_interval"][1] == 0
    said = output.said(own, 0.95)
    assert not any("0 to 0" in line for line in said)
    assert any("check the file" in line for line in said)


def test_names_are_told_without_control_characters(tmp_path: Path):
    escape = "\x1b[31m"
    text = f"client,va{escape}lue\n{escape}a,1\n{escape}a,2\n{escape}b,\nc,3\n"
    lines = client_csv.told(read(tmp_path, text).understood)
    assert all(line.isprintable() for line in lines)
    assert sum(r"\x1b[31m" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "client,value\n" + "".join(f"K{i % 4},{-999 if 3 < i < 6 else i}\n" for i in range(12)),
            "2 cells say -999",
        ),
        ("client,s0,s1\n" + "".join(f"K{i},{i}.5,{9999 if i == 2 else i}\n" for i in range(4)), "a cell says 9999"),
        (
            "client,value a,value b\n" + "".join(f"K{i % 4},{i / 4},{-99 if i == 3 else i / 8}\n" for i in range(12)),
            "a cell of column value b says -99",
        ),
    ],
)
def test_codes_for_missing_values_are_warned_of(tmp_path: Path, text: str, message: str):
    with pytest.warns(JaxpflWarning, match=f"{message}, far from all others: where that is a code") as caught:
        read(tmp_path, text)
    assert len(caught) == 1


@pytest.mark.parametrize("numbers", [[98, 99, 60, 71], [99, 99, 99, 99], [-999, -500, -120, -870], [99, 1, 99, 1]])
def test_numbers_among_their_like_are_no_codes(tmp_path: Path, numbers: list[int]):
    read(tmp_path, "client,value\n" + "".join(f"K{i % 2},{x}\n" for i, x in enumerate(numbers)))


@pytest.mark.slow
def test_names_in_titles_are_no_markup_and_no_formulas(tmp_path: Path, capsys):
    """Rich would obey brackets, matplotlib dollars, and a terminal control characters."""
    names = ["[/x]$a^$", "b\x1b[31m"]
    path = tmp_path / "own[bold]$^$.csv"
    values = "".join(f"K{i % 3},{x:.3f},{y:.3f}\n" for i, (x, y) in enumerate(_RNG.normal(size=(12, 2))))
    path.write_text(f"client,{','.join(names)}\n{values}")
    for study in (["gaussian"], ["mixture", "--components", "2"]):
        folder = tmp_path / study[0]
        main(["estimate", *study, "--csv", str(path), "--long", "--value", "@2,@3", "--output", str(folder)])
        said = capsys.readouterr().out
        assert "[/x]$a^$" in said
        assert r"b\x1b[31m" in said
        assert "\x1b" not in said
        assert list((folder / "plots").glob("*.png"))
