"""``jaxpfl estimate``: JSON as the only thing on standard output, tables, folders, the user's own clients, refusals."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl

FEW = ["--clients", "40", "--samples", "4", "--repetitions", "5"]


def test_gaussian_json(capsys):
    result = jaxpfl(capsys, "estimate", "gaussian", *FEW, "--epsilon", "2", "--dim", "2", "--bits", "3", "--json")
    assert (result.status, result.err) == (0, "")
    found = result.json
    for name in ("local", "personalized", "private", "global", "quantized"):
        assert set(found["mse"][name]) == {"mean", "stderr", "closed_form"}
        assert found["mse"][name]["closed_form"] > 0
    assert found["gain_over_local"] == pytest.approx(
        1 - found["mse"]["personalized"]["mean"] / found["mse"]["local"]["mean"]
    )
    again = jaxpfl(capsys, "estimate", "gaussian", *FEW, "--epsilon", "2", "--dim", "2", "--bits", "3", "--json").json
    assert again == found
    other = jaxpfl(capsys, "estimate", "gaussian", *FEW, "--seed", "1", "--json").json
    assert other["mse"]["local"]["mean"] != found["mse"]["local"]["mean"]


@pytest.mark.slow
def test_bernoulli_table_and_folder(capsys, tmp_path: Path):
    result = jaxpfl(
        capsys, "estimate", "bernoulli", *FEW, "--prior", "beta:2,6", "--epsilon", "1", "--output", tmp_path / "o"
    )
    assert result.status == 0, result.err
    for word in ("local", "personalized", "known prior", "printed private", "gain over local"):
        assert word in result.out
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["mse"]["known prior"]["closed_form"] > 0
    assert len(summary["plots"]) == 2
    for plot in summary["plots"]:
        assert (tmp_path / "o" / plot).read_bytes().startswith(b"\x89PNG")


def test_when(capsys, tmp_path: Path):
    result = jaxpfl(capsys, "estimate", "when", "--clients", "100", "--epsilon", "1", "--output", tmp_path / "o")
    assert result.status == 0, result.err
    assert "collaboration" in result.out
    assert (tmp_path / "o" / "plots" / "phases.png").read_bytes().startswith(b"\x89PNG")
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
    assert result.json["of"] == "held-out samples"
    assert result.json["estimated"]["sigma_x"] == pytest.approx(1, abs=0.3)
    with open(tmp_path / "o" / "estimates.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["client"] for row in table] == [f"c{i}" for i in range(30)]
    for row in table:
        assert float(row["low"]) < float(row["personalized"]) < float(row["high"])
    own = [float(line.split(",")[1]) for line in rows[1:] if line.startswith("c7,")]
    assert float(table[7]["local"]) == pytest.approx(np.mean(own), rel=1e-5)
    private = jaxpfl(capsys, "estimate", "gaussian", "--csv", path, "--epsilon", "4", "--radius", "6", "--json")
    assert private.json["mse"]["private"]["mean"] > 0


def test_own_clients_of_zeros_and_ones(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    rng = np.random.default_rng(0)
    path.write_text(
        "\n".join(",".join(map(str, (rng.uniform(size=8) < p).astype(int))) for p in rng.beta(2, 2, size=40))
    )
    result = jaxpfl(capsys, "estimate", "bernoulli", "--csv", path, "--epsilon", "3")
    assert result.status == 0, result.err
    assert "40 clients" in result.out
    path.write_text("0,1\n1,2\n")
    result = jaxpfl(capsys, "estimate", "bernoulli", "--csv", path)
    assert (result.status, result.out) == (2, "")
    assert "client '1': samples must be 0 or 1" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gaussian", "--epsilon", "0"], "epsilon must be > 0 and finite, got 0.0"),
        (["gaussian", "--sigma-x", "-1"], "sigma_x must be at least 0"),
        (["gaussian", "--csv", "none.csv"], "cannot read none.csv"),
        (["bernoulli", "--prior", "bta:1,2"], "unknown prior 'bta': did you mean 'beta'?"),
        (["mixture", "--components", "0"], "components must be a whole number of at least 1"),
        (["elections", "--data-dir", "nowhere"], "data set 'elections': no file"),
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


def test_few_clients_are_refused(capsys, tmp_path: Path):
    path = tmp_path / "own.csv"
    for text, message in (("a,1,2\n", "at least two clients"), ("a,1\nb,2\n", "every client has a single sample")):
        path.write_text(text)
        result = jaxpfl(capsys, "estimate", "gaussian", "--csv", path)
        assert (result.status, result.out) == (2, "")
        assert message in result.err


def test_help_lists_the_group_and_its_commands(capsys):
    assert "estimate" in jaxpfl(capsys, "--help").out
    text = jaxpfl(capsys, "estimate", "--help").out
    for name in ("gaussian", "bernoulli", "mixture", "elections", "when"):
        assert name in text
    flags = jaxpfl(capsys, "estimate", "gaussian", "--help").out
    for flag in (
        "--clients",
        "--samples",
        "--sigma-theta",
        "--sigma-x",
        "--dim",
        "--repetitions",
        "--mechanism",
        "--bits",
    ):
        assert flag in flags
