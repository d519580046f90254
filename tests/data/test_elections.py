"""The county elections: small files of the same format, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import load_elections
from jaxpfl.support.errors import JaxpflError

HEADER = "fips,win_2016,win_2000,dem_2000,rep_2000"


def write(folder: Path, *lines: str) -> str:
    (folder / "elections").mkdir(exist_ok=True)
    (folder / "elections" / "county_winners_2000_2020.csv").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_reads_winners_by_year(tmp_path: Path):
    found = load_elections(write(tmp_path, HEADER, "01001,R,D,5,4", "56045,D,D,1,0"))
    assert found.counties.tolist() == ["01001", "56045"]
    assert found.years.tolist() == [2000, 2016]
    np.testing.assert_array_equal(found.republican, [[0, 1], [0, 0]])
    assert found.votes is None  # which 2016 lacks


def test_reads_votes_if_all_elections_have_them(tmp_path: Path):
    header = "fips,win_2004,rep_2004,dem_2004,win_2000,dem_2000,rep_2000"
    found = load_elections(write(tmp_path, header, "01001,R,7,3,D,5,4", "56045,D,0,2,D,1,0"))
    assert found.votes is not None
    np.testing.assert_array_equal(found.votes, [[[5, 4], [3, 7]], [[1, 0], [2, 0]]])
    for bad in ("-1", "1.5", "", "x", "1e3"):
        with pytest.raises(JaxpflError, match=f"line 2: rep_2004 must be a whole number of votes, got '{bad}'"):
            load_elections(write(tmp_path, header, f"01001,R,{bad},3,D,5,4"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER, "01001,R,X,5,4"), "line 2: win_2000 must be R or D, got 'X'"),
        ((HEADER, "01001,R"), "line 2: win_2000 must be R or D, got None"),
        ((HEADER, "1001,R,D,5,4"), "line 2: fips must be five digits and distinct, got '1001'"),
        ((HEADER, "01001,R,D,5,4", "01001,R,D,5,4"), "line 3: fips must be five digits and distinct"),
        ((HEADER,), "needs a header with fips and at least two columns"),
        (("county,win_2000,win_2004", "01001,R,D"), "needs a header with fips"),
        (("fips,win_2000", "01001,R"), "at least two columns"),
        (("",), "needs a header"),
    ],
)
def test_malformed_files_are_refused_in_one_line(tmp_path: Path, lines: tuple[str, ...], message: str):
    with pytest.raises(JaxpflError) as caught:
        load_elections(write(tmp_path, *lines))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path):
    with pytest.raises(JaxpflError, match="no file"):
        load_elections(str(tmp_path))
    (tmp_path / "elections").mkdir()
    (tmp_path / "elections" / "county_winners_2000_2020.csv").write_bytes(b"\xff\xfe\x00fips,\x00")
    with pytest.raises(JaxpflError, match="no CSV text"):
        load_elections(str(tmp_path))
