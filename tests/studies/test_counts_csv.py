"""Counts of one's own clients on the command line: the choice of their prior, ranks and exceedances."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from normal_means_command import numbered, refused

from jaxpfl.cli import main
from jaxpfl.estimators import (
    compare_binomial_priors,
    compare_poisson_priors,
    ebbinomial,
    ebpoisson,
    learned_bernoulli,
    learned_poisson,
    learned_rates,
)
from jaxpfl.estimators.normal_means import best, leads


def written(path: Path, header: str, z: np.ndarray, n: np.ndarray) -> Path:
    path.write_text(numbered(header, z, n))
    return path


def two_kinds(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    first = rng.random(40) < 0.5
    if kind == "successes,trials":
        n = np.full(40, 30)
        return rng.binomial(n, np.where(first, 0.1, 0.7)), n
    return rng.poisson(np.where(first, 2.0, 30.0)), np.full(40, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "compare", "single"),
    [("successes,trials", compare_binomial_priors, "beta"), ("count,exposure", compare_poisson_priors, "gamma")],
)
def test_the_best_prior_of_counts(capsys, tmp_path, header, compare, single):
    z, n = two_kinds(header)
    path = written(tmp_path / "own.csv", header, z, n)
    main(["estimate", "normal-means", "--csv", str(path), "--prior", "best", "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "families of priors, per client" in said
    assert "risk" not in said
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    with jax.enable_x64(True):
        scores = {name: jax.tree.map(np.asarray, of) for name, of in compare(z, n).items()}
        behind = leads(scores)
    rows = {row["prior"]: row for row in found["compared"]}
    assert list(rows) == list(scores)
    assert found["prior"] == best(scores) != single
    for name, row in rows.items():
        np.testing.assert_allclose(row["held_out_log_density"], scores[name].log_densities.mean())
        np.testing.assert_allclose(
            [row["behind"], row["behind_stderr"]], [behind[name].difference, behind[name].stderr]
        )
    np.testing.assert_allclose(found["log_marginal"], rows[found["prior"]]["log_marginal"])


@pytest.mark.slow
@pytest.mark.parametrize("header", ["successes,trials", "count,exposure"])
@pytest.mark.parametrize("prior", [None, "npmle"])
def test_ranks_and_exceedances_of_a_file(capsys, tmp_path, header, prior):
    z, n = np.array([2, 6, 3, 19, 0, 4]), np.array([10, 12, 10, 20, 10, 11])
    path = written(tmp_path / "own.csv", header, z, n)
    given = ["estimate", "normal-means", "--csv", str(path), *(["--prior", prior] if prior else [])]
    main([*given, "--threshold", "0.45", "--output", str(tmp_path / "out")])
    assert "exceedance in estimates.csv: probability of more than 0.45" in capsys.readouterr().out
    with open(tmp_path / "out" / "estimates.csv") as file:
        rows = list(csv.DictReader(file))
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name != "client"}
    with jax.enable_x64(True):
        if prior is None:
            learned = learned_bernoulli if header == "successes,trials" else learned_poisson
            expected = learned_rates.exceedance(learned.population(z, n), z, n, 0.45)
        else:
            expected = (ebbinomial if header == "successes,trials" else ebpoisson)(z, n, prior=prior).exceedance(0.45)
    np.testing.assert_allclose(columns["exceedance"], expected, rtol=1e-6)
    assert (
        columns["rank_low"] <= columns["rank"].round(1)
    ).all()  # a mean is a little below ranks that are nearly all 6
    assert (columns["rank"].round(1) <= columns["rank_high"]).all()
    assert (columns["rank_low"] < columns["rank_high"]).any()
    assert columns["rank"].argmax() == 3
    assert columns["rank"].argmin() == 4
    np.testing.assert_allclose(columns["rank"].sum(), 21, rtol=1e-5)  # 1 + ... + 6
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["threshold"] == 0.45


def test_bad_thresholds_are_refused_in_a_line(capsys, tmp_path):
    path = written(tmp_path / "own.csv", "successes,trials", np.array([2, 0, 3]), np.array([4, 4, 4]))
    own = ("--csv", path, "--threshold")
    assert "own.csv: threshold must be from 0 to 1 for probabilities, got 40" in refused(capsys, *own, "40")
    path = written(tmp_path / "means.csv", "estimate,se", np.array([2, 0, 3]), np.array([4, 4, 4]))
    own = ("--csv", path, "--threshold", "1")
    assert "threshold is of successes and counts, and means.csv has estimate,se" in refused(capsys, *own)
    assert "threshold is of --csv, and there is none, got 1" in refused(capsys, "--threshold", "1")
    path = tmp_path / "about.csv"
    path.write_text("id,successes,trials,x\na,1,4,1\nb,2,4,2\nc,3,4,1\nd,3,4,2\ne,1,4,3\n")
    own = ("--csv", path, "--covariates", "x", "--threshold")
    assert "about.csv: threshold must be from 0 to 1 for probabilities, got 5" in refused(capsys, *own, "5")


def test_impossible_comparisons_are_refused_in_a_line(capsys, tmp_path):
    path = written(tmp_path / "own.csv", "successes,trials", np.array([2, 0, 0]), np.array([4, 4, 4]))
    own = ("--csv", path, "--prior", "best")
    assert "own.csv: without clients 0, 3, ... (fold 0 of 3): all successes are zero" in refused(capsys, *own)
    assert "components is of a given --prior, and best" in refused(capsys, *own, "--components", "3")
    assert "intervals clients refit a prior to drawn clients" in refused(capsys, *own, "--intervals", "clients")
