"""Data sets with natural clients: small files of the formats of the school data and the county elections."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from jaxpfl import JaxpflError
from jaxpfl.data import available, federate, load, load_elections
from jaxpfl.runs.presets import preset

SIZES = (4, 2, 7)


def cells(arrays, column=False):
    found = np.empty(len(arrays), object)
    found[:] = arrays
    return found.reshape(-1, 1) if column else found.reshape(1, -1)


def write_school(folder, x=None, y=None, **more):
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 2, (n, 3)).astype(np.uint8) for n in SIZES] if x is None else x
    y = [rng.integers(1, 71, (n, 1)).astype(np.uint8) for n in SIZES] if y is None else y
    (folder / "school").mkdir(exist_ok=True)
    savemat(folder / "school" / "school.mat", {"X": cells(x), "Y": cells(y)} | more)
    return x, y


def test_schools_are_users_and_scores_real_labels(tmp_path):
    x, y = write_school(tmp_path)
    source = load("school", str(tmp_path))
    np.testing.assert_array_equal(source.x_train, np.concatenate(x))
    np.testing.assert_array_equal(source.y_train, np.concatenate(y)[:, 0])
    assert source.x_train.dtype == source.y_train.dtype == np.float32
    assert (source.task, source.num_classes) == ("regression", 1)
    assert source.users_train is not None
    assert np.bincount(source.users_train).tolist() == list(SIZES)
    assert source.description == "13 pupils of 3 schools, 3 features"
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["school"]
    assert preset("school", None)["partition"] == "natural"
    federation = federate(source, partition="natural", test_share=0.5)
    assert federation.num_clients == 3
    assert sorted(np.asarray(federation.train.size) + np.asarray(federation.test.size)) == sorted(SIZES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"y": [np.ones((n, 1)) for n in SIZES[:2]]}, "X has 3 schools, Y has 2"),
        ({"y": [np.ones((n + 1, 1)) for n in SIZES]}, "school 0 has X of shape .4, 3. and Y of shape .5, 1."),
        ({"x": [np.ones((n, n)) for n in SIZES]}, "school 1 has X of shape"),
        ({"x": [np.full((n, 3), np.nan) for n in SIZES]}, "X: example 0 holds a NaN"),
        ({"x": ["abc", "d", "e"]}, "X of cell 0 must be real numbers"),
        ({"X": np.ones((3, 3))}, "X must be a cell array"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path, content, message):
    write_school(tmp_path, **content)
    with pytest.raises(JaxpflError, match=message) as refused:
        load("school", str(tmp_path))
    assert "\n" not in str(refused.value)


HEADER = "fips,win_2016,win_2000,dem_2000,rep_2000"


def write_counties(folder: Path, *lines: str) -> str:
    (folder / "elections").mkdir(exist_ok=True)
    (folder / "elections" / "county_winners_2000_2020.csv").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_reads_winners_by_year(tmp_path: Path):
    found = load_elections(write_counties(tmp_path, HEADER, "01001,R,D,5,4", "56045,D,D,1,0"))
    assert found.counties.tolist() == ["01001", "56045"]
    assert found.years.tolist() == [2000, 2016]
    np.testing.assert_array_equal(found.republican, [[0, 1], [0, 0]])
    assert found.votes is None  # which 2016 lacks


def test_reads_votes_if_all_elections_have_them(tmp_path: Path):
    header = "fips,win_2004,rep_2004,dem_2004,win_2000,dem_2000,rep_2000"
    found = load_elections(write_counties(tmp_path, header, "01001,R,7,3,D,5,4", "56045,D,0,2,D,1,0"))
    assert found.votes is not None
    np.testing.assert_array_equal(found.votes, [[[5, 4], [3, 7]], [[1, 0], [2, 0]]])
    for bad in ("-1", "1.5", "", "x", "1e3"):
        with pytest.raises(JaxpflError, match=f"line 2: rep_2004 must be a whole number of votes, got '{bad}'"):
            load_elections(write_counties(tmp_path, header, f"01001,R,{bad},3,D,5,4"))
