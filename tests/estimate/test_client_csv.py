"""Clients of the user's own: both formats, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from jaxpfl.errors import JaxpflError
from jaxpfl.estimate import client_csv


def read(folder: Path, text: str) -> client_csv.Clients:
    path = folder / "own.csv"
    path.write_text(text)
    return client_csv.read(path)


@pytest.mark.parametrize(
    ("text", "names", "samples"),
    [
        ("client,value\na,1\nb,3\na,2.5\n", ["a", "b"], [[1, 2.5], [3]]),
        ("Client, value\na, 1\n\nb,3\n", ["a", "b"], [[1], [3]]),
        ("client,value1,value2\na,1,2\nb,3,4\na,5,6\n", ["a", "b"], [[[1, 2], [5, 6]], [[3, 4]]]),
        ("1,2,3\n4,5\n", ["0", "1"], [[1, 2, 3], [4, 5]]),
        ("1,2,3\n4,,6\n", ["0", "1"], [[1, 2, 3], [4, 6]]),
        ("anna,2,3\nbert,4\n", ["anna", "bert"], [[2, 3], [4]]),
        ("client,x1,x2\n7,2,3\n8,4,\n", ["7", "8"], [[2, 3], [4]]),
        ("x1,x2\n2,3\n4,5\n", ["0", "1"], [[2, 3], [4, 5]]),
        ("client,2000,2004\na,1,2\nb,3,4\n", ["a", "b"], [[1, 2], [3, 4]]),
        ("\ufeffclient,value\na,1e-3\nb,-2\n", ["a", "b"], [[1e-3], [-2]]),
    ],
)
def test_formats(tmp_path: Path, text: str, names: list[str], samples: list):
    found = read(tmp_path, text)
    assert found.names == names
    assert len(found.samples) == len(samples)
    for got, expected in zip(found.samples, samples, strict=True):
        np.testing.assert_array_equal(got, np.array(expected, float))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no clients in it"),
        ("client,value\n", "a header, and no samples below it"),
        ("x1,x2\n", "a header, and no clients below it"),
        ("id,value\n1,2\n1,3\n", "rows of samples need the header client,value, got id,value"),
        ("client,value\na,1\nb,x\n", "line 3: 'x' is no finite number"),
        ("client,value\na,nan\n", "line 2: 'nan' is no finite number"),
        ("1,2\n3,inf\n", "line 2: 'inf' is no finite number"),
        ("client,value\na,1,2\n", "line 2: needs a client and 1 values, got 3 cells"),
        ("client,value\n,1\n", "line 2: needs a client"),
        ("anna,2\nbert,\n", "line 2: client 'bert' has no samples"),
        ("anna,2\nanna,3\n", "line 2: client 'anna' twice"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(JaxpflError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(JaxpflError, match="cannot read"):
        client_csv.read(tmp_path / "none.csv")
