"""The regression studies as commands: one JSON object on standard output, plots, and refusals in one line."""

import json

import pytest
from command import jaxpfl

SMALL = {
    "regression": ["--clients", "40", "--samples", "6", "--dim", "4", "--em-steps", "5", "--gradient-steps", "20"],
    "regression-mixture": ["--clients", "40", "--samples", "3", "6", "--dim", "5", "--iterations", "40"],
    "logistic-regression": ["--clients", "30", "--samples", "8", "--dim", "3", "--steps", "50"],
}
FOUND = {
    "regression": {"local", "fedavg", "known", "algorithm-4", "personalized"},
    "regression-mixture": {
        f"{name}, n = {n}" for name in ("local", "algorithm-1", "algorithm-6", "personalized", "known") for n in (3, 6)
    },
    "logistic-regression": {"local", "fedavg", "known", "personalized"},
}


@pytest.mark.slow
@pytest.mark.parametrize("study", ["regression", "regression-mixture", "logistic-regression"])
def test_results_and_plots(capsys, tmp_path, study):
    result = jaxpfl(
        capsys, "estimate", study, *SMALL[study], "--repetitions", "3", "--json", "--output", tmp_path / "out"
    )
    assert result.status == 0, result.err
    assert result.json["study"] == study
    assert set(result.json["mse"]) == FOUND[study]
    for name, row in result.json["mse"].items():
        assert row["mean"] > 0
        assert row["stderr"] > 0
        known = name.replace(name.split(",")[0], "known")
        assert row["mean"] > 0.9 * result.json["mse"][known]["mean"]
    written = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    assert written == {path.split("/")[1] for path in result.json["plots"]}
    assert len(written) == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == result.json


def test_the_table_names_every_estimator(capsys):
    result = jaxpfl(capsys, "estimate", "regression", *SMALL["regression"], "--repetitions", "1")
    assert result.status == 0, result.err
    for word in (*FOUND["regression"], "gain over fedavg: known"):
        assert word in result.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["regression", "--samples", "1"], "samples must be at least 2 and finite, got 1"),
        (["regression", "--noise-variance", "0"], "noise_variance must be > 0 and finite, got 0.0"),
        (["regression-mixture", "--samples", "0"], "samples must be a whole number of at least 1, got 0"),
        (["regression-mixture", "--floor", "-1"], "floor must be > 0 and finite, got -1.0"),
        (["logistic-regression", "--steps", "0"], "steps must be a whole number of at least 1, got 0"),
        (["logistic-regression", "--clients", "1"], "clients must be at least 2 and finite, got 1"),
    ],
)
def test_refusals(capsys, args, message):
    result = jaxpfl(capsys, "estimate", *args, "--json")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"error: {message}\n"
