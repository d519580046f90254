"""``jaxpfl estimate``: JSON as the only thing on standard output, tables, folders, the user's own clients, refusals."""

import csv
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl


def test_when(capsys):
    result = jaxpfl(capsys, "estimate", "when", "--clients", "100", "--epsilon", "1")
    assert result.status == 0, result.err
    assert "collaboration" in result.out
    found = jaxpfl(capsys, "estimate", "when", "--clients", "100", "--json").json
    assert 0 < found["gain_over_local"] < found["most_gain"]


def test_own_clients(capsys, tmp_path: Path):
    rng = np.random.default_rng(0)
    path = tmp_path / "own.csv"
    rows = ["client,value"]
    for i in range(30):
        theta = 5 + 0.5 * rng.normal()
        rows += [f"c{i},{theta + rng.normal():.5f}" for _ in range(rng.integers(1, 7))]
    path.write_text("\n".join(rows))
    result = jaxpfl(capsys, "estimate", "gaussian", "--csv", path, "--output", tmp_path / "o", "--json")
    assert (result.status, result.err) == (0, "")
    assert result.json["clients"] == 30
    assert result.json["of"] == "the true values, with one sample of each client left out"
    assert result.json["estimated"]["sigma_x"] == pytest.approx(1, abs=0.3)
    with open(tmp_path / "o" / "estimates.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["client"] for row in table] == [f"c{i}" for i in range(30)]
    for row in table:
        assert float(row["low"]) < float(row["personalized"]) < float(row["high"])
    own = [float(line.split(",")[1]) for line in rows[1:] if line.startswith("c7,")]
    assert float(table[7]["local"]) == pytest.approx(np.mean(own), rel=1e-5)


def test_numbers_that_say_nothing_or_too_much(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\na,0\na,0\nb,0\nb,0\nb,0\n")
    assert "every sample of the file is 0\n" in jaxpfl(capsys, "estimate", "bernoulli", "--csv", path).out
    refused = jaxpfl(capsys, "estimate", "gaussian", "--csv", path).err
    assert f"{path}: every sample of the file is 0, so each client's own mean is exact" in refused
    for power in (200, -200):
        path.write_text(f"client,value\na,1e{power}\na,2e{power}\nb,3e{power}\nb,4e{power}\nb,4e{power}\n")
        for study in ("gaussian", "mixture"):
            more = ["--components", "2"] if study == "mixture" else []
            result = jaxpfl(capsys, "estimate", study, "--csv", path, *more)
            assert (result.status, result.out) == (2, "")
            expected = f"the largest magnitude in value must be from 1e-70 to 1e+70, got 4e{power:+}: use another unit"
            assert expected in result.err
    said = jaxpfl(capsys, "estimate", "gaussian", "--mean", "1e9", "--radius", "1e9", "--clients", "9").err
    assert "JAX_ENABLE_X64=true in the environment" in said


def test_few_clients_are_refused(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    for text, message in (("a,1\na,2.5\n", "at least two clients"), ("a,1\nb,2\n", "every client has a single sample")):
        path.write_text("client,value\n" + text)
        result = jaxpfl(capsys, "estimate", "gaussian", "--csv", path)
        assert (result.status, result.out) == (2, "")
        assert message in result.err
