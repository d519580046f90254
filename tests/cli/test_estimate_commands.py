"""``jaxpfl estimate``: JSON as the only thing on standard output, tables, folders, the user's own clients, refusals."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import jaxpfl


def test_when(capsys, tmp_path: Path):
    result = jaxpfl(capsys, "estimate", "when", "--clients", "100", "--epsilon", "1", "--output", tmp_path / "o")
    assert result.status == 0, result.err
    assert "collaboration" in result.out
    assert (tmp_path / "o" / "plots" / "phases.png").read_bytes().startswith(b"\x89PNG")
    found = jaxpfl(capsys, "estimate", "when", "--clients", "100", "--json").json
    assert 0 < found["gain_over_local"] < found["most_gain"]


def test_when_offers_what_it_takes(capsys):
    """Nothing is simulated: no repetitions, no seed, no mean, no uploads."""
    flags = set(re.findall(r"--[a-z][a-z-]+", jaxpfl(capsys, "estimate", "when", "--help").out)) - {"--help"}
    given = {
        "--mechanism": "one-bit",
        "--clients": "30",
        "--samples": "4",
        "--dim": "1",
        "--bits": "3",
        "--delta": "0.1",
    }
    args = [part for flag in sorted(flags - {"--json", "--output"}) for part in (flag, given.get(flag, "0.5"))]
    assert flags >= {"--clients", "--sigma-theta", "--radius", "--epsilon", *given}
    found = jaxpfl(capsys, "estimate", "when", *args, "--json")
    assert found.status == 0, found.err
    assert found.json["settings"] | {"bits": 3, "epsilon": 0.5} == found.json["settings"]
    refused = jaxpfl(capsys, "estimate", "when", "--repetitions", "20")
    assert (refused.status, refused.out) == (2, "")
    assert "--repetitions" in refused.err


def wide(path: Path, rows: Any) -> list[Any]:
    """Options of a file with a row for each client, c0, c1, ..."""
    header = ",".join(["client", *(f"s{j}" for j in range(len(rows[0])))])
    path.write_text("\n".join([header, *(f"c{i},{','.join(map(str, row))}" for i, row in enumerate(rows))]))
    return ["--csv", path, "--values", f"s0..s{len(rows[0]) - 1}"]


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
    assert result.json["of"] == "the true values, a sample of each client left out"
    assert result.json["estimated"]["sigma_x"] == pytest.approx(1, abs=0.3)
    with open(tmp_path / "o" / "estimates.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["client"] for row in table] == [f"c{i}" for i in range(30)]
    for row in table:
        assert float(row["low"]) < float(row["personalized"]) < float(row["high"])
    own = [float(line.split(",")[1]) for line in rows[1:] if line.startswith("c7,")]
    assert float(table[7]["local"]) == pytest.approx(np.mean(own), rel=1e-5)


@pytest.mark.slow
def test_own_clients_of_zeros_and_ones(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    rng = np.random.default_rng(0)
    x = [(rng.uniform(size=8) < p).astype(int) for p in rng.beta(2, 2, size=40)]
    result = jaxpfl(capsys, "estimate", "bernoulli", *wide(path, x), "--epsilon", "3")
    assert result.status == 0, result.err
    assert "40 clients" in result.out
    result = jaxpfl(capsys, "estimate", "bernoulli", *wide(path, [[0, 1], [1, 2]]))
    assert (result.status, result.out) == (2, "")
    assert "client 'c1': samples must be 0 or 1" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gaussian", "--epsilon", "0"], "epsilon must be > 0 and finite, got 0.0"),
        (["gaussian", "--sigma-x", "-1"], "sigma_x must be > 0 and finite, got -1.0"),
        (["gaussian", "--sigma-x", "0"], "sigma_x must be > 0 and finite, got 0.0"),
        (
            ["gaussian", "--mechanism", "one-bit"],
            "mechanism needs epsilon, without which nothing is private",
        ),
        (["gaussian", "--csv", "none.csv"], "cannot read none.csv"),
        (
            ["gaussian", "--csv", "none.csv", "--mean", "0.5"],
            "mean is of simulated data, which a CSV file takes",
        ),
        (["gaussian", "--csv", "none.csv", "--uploads", "5", "--epsilon", "1"], "uploads is of simulated data"),
        (
            ["gaussian", "--csv", "none.csv", "--bits", "3", "--epsilon", "1"],
            "bits needs epsilon and mechanism",
        ),
        (["gaussian", "--csv", "none.csv", "--radius", "3"], "radius needs epsilon, without which all is learned"),
        (["bernoulli", "--csv", "none.csv", "--prior", "uniform"], "prior is of simulated data"),
        (["gaussian", "--level", "0.9"], "level requires --csv, got 0.9"),
        (["bernoulli", "--csv", "none.csv", "--level", "95"], "level must be > 0 and < 1, got 95"),
        (["gaussian", "--client", "a"], "client requires --csv, got a"),
        (["bernoulli", "--values", "a"], "values requires --csv, got a"),
        (["normal-means", "--client", "a"], "client requires --csv, got a"),
        (["bernoulli", "--prior", "bta:1,2"], "unknown prior 'bta': did you mean 'beta'?"),
        (["mixture", "--components", "0"], "components must be a whole number of at least 1"),
        (["elections", "--data-dir", "nowhere"], "data set 'elections': no file"),
        (["elections", "--epsilon"], "epsilon must be at least one value, got none"),
        (["when", "--sigma-x", "0"], "sigma_x must be > 0"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path: Path, monkeypatch, args: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    result = jaxpfl(capsys, "estimate", *args, "--json")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.slow
def test_own_clients_far_from_zero(capsys, tmp_path: Path):
    """Every number moves with the data, whatever they are shifted by: to the last digits that a file's numbers have."""
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(40, 1)) + rng.normal(size=(40, 5)), 6)
    found = {}
    for shift in (0.0, 2e6, 1.7e9):
        path, folder = tmp_path / "own.csv", tmp_path / f"{shift:g}"
        result = jaxpfl(capsys, "estimate", "gaussian", *wide(path, x + shift), "--output", folder, "--json")
        assert (result.status, result.err) == (0, "")
        with open(folder / "estimates.csv") as file:
            rows = list(csv.DictReader(file))
        table = [[float(row[name]) for name in ("local", "personalized", "low", "high")] for row in rows]
        found[shift] = np.array(table) - shift, result.json
    table, plain = found[0.0]
    np.testing.assert_allclose(table[:, 0], x.mean(axis=1), atol=1e-12)
    for shift in (2e6, 1.7e9):
        moved, far = found[shift]
        np.testing.assert_allclose(moved, table, atol=1e-5)
        assert far["gain_over_local"] == pytest.approx(plain["gain_over_local"], abs=1e-5)
        assert far["estimated"]["mean"] - shift == pytest.approx(plain["estimated"]["mean"], abs=1e-5)
        assert far["estimated"]["sigma_theta"] == pytest.approx(plain["estimated"]["sigma_theta"], rel=1e-5)


@pytest.mark.slow
def test_what_is_said_of_own_clients(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    rows = ["a,1,1700000003.5", "a,2,1700000004", "a,1.5,1700000003.75", "b,3,1700000003", "b,3,1700000004.5"]
    path.write_text("\n".join(["client,value1,value2", *rows]))
    own = ["--csv", path, "--value", "value1,value2"]
    said = jaxpfl(capsys, "estimate", "gaussian", *own).out
    assert "learned of all: mean 2.2" in said
    assert "learned of all: mean 1700000003.7" in said
    assert "--output FOLDER" in said
    assert said.count("±") == 4  # in titles and captions alone: two clients have no standard error
    said = jaxpfl(capsys, "estimate", "gaussian", *own, "--output", tmp_path / "o").out
    assert "--output FOLDER" not in said
    assert "(summary.json, estimates.csv, plots/)" in said
    alike = jaxpfl(capsys, "estimate", "gaussian", *wide(path, [[1, 1], [2, 2]]))
    assert (alike.status, alike.out) == (2, "")
    assert "every client's samples are all alike" in alike.err


def test_how_a_file_was_read_is_said(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("ward;visit;stay\n7;1;1,5\n8;1;2,5\n7;2;2\n8;2;2,25\n8;3;2,5\n7;3;2,75\n")
    refused = jaxpfl(capsys, "estimate", "gaussian", "--csv", path)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "no column is called value, of ward, visit, stay: write --client COLUMN --value COLUMN" in refused.err
    own = ["estimate", "gaussian", "--csv", path, "--client", "ward", "--value", "stay"]
    said = jaxpfl(capsys, *own)
    assert said.status == 0, said.err
    assert said.out.splitlines()[:3] == [
        "read as: a row for each sample; separator semicolon, decimal comma",
        "clients: ward; samples: stay; not used: visit",
        "2 clients of 3 samples; the first, 7: 1.5, 2, 2.75",
    ]
    found = jaxpfl(capsys, *own, "--json").json
    assert found["read"]["first"] == {"client": "7", "size": 3, "samples": [1.5, 2.0, 2.75]}


def test_numbers_that_say_nothing_or_too_much(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\na,0\na,0\nb,0\nb,0\nb,0\n")
    assert "every sample of the file is 0\n" in jaxpfl(capsys, "estimate", "bernoulli", "--csv", path).out
    refused = jaxpfl(capsys, "estimate", "gaussian", "--csv", path).err
    assert f"{path}: every sample of the file is 0: a client's own mean makes no error to avoid" in refused
    for power in (200, -200):
        path.write_text(f"client,value\na,1e{power}\na,2e{power}\nb,3e{power}\nb,4e{power}\nb,4e{power}\n")
        for study in ("gaussian", "mixture"):
            more = ["--components", "2"] if study == "mixture" else []
            result = jaxpfl(capsys, "estimate", study, "--csv", path, *more)
            assert (result.status, result.out) == (2, "")
            assert f"value must be of a size between 1e-70 and 1e+70, got 4e{power:+}: take another unit" in result.err
    said = jaxpfl(capsys, "estimate", "gaussian", "--mean", "1e9", "--radius", "1e9", "--clients", "9").err
    assert "JAX_ENABLE_X64=true in the environment" in said


def test_few_clients_are_refused(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    for text, message in (("a,1\na,2.5\n", "at least two clients"), ("a,1\nb,2\n", "every client has a single sample")):
        path.write_text("client,value\n" + text)
        result = jaxpfl(capsys, "estimate", "gaussian", "--csv", path)
        assert (result.status, result.out) == (2, "")
        assert message in result.err
