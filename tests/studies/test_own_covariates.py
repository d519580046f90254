"""Samples of one's own clients about covariates: what the command reads, writes and refuses."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from jaxpfl.cli import main
from jaxpfl.estimators import ebbinomial_regression, ebpoisson, ebpoisson_regression, rate_scores, unit_level


def own(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """A file of 40 samples of ten clients, in no order, with two covariates."""
    rng = np.random.default_rng(0)
    client = rng.permutation(np.repeat(np.arange(10), 4))
    x = rng.normal(size=(40, 2))
    y = 5 + x @ [1.0, -2.0] + rng.normal(size=10)[client] + 0.5 * rng.normal(size=40)
    path = tmp_path / "own.csv"
    rows = "\n".join(f"c{client[i]},{float(y[i])!r},{float(x[i, 0])!r},{float(x[i, 1])!r}" for i in range(40))
    path.write_text(f"id,yield,corn,soy\n{rows}\n")
    return path, y, x, client


def test_clients_about_covariates(capsys, tmp_path):
    path, y, x, client = own(tmp_path)
    out = tmp_path / "out"
    options = ("--value", "yield", "--covariates", "soy", "corn", "--level", "0.9")
    main(["estimate", "gaussian", "--csv", str(path), *options, "--json", "--output", str(out)])
    found = json.loads(capsys.readouterr().out)
    with jax.enable_x64(True):
        fit = unit_level(y, x[:, ::-1], [f"c{i}" for i in client])
        low, high = fit.interval(0.9)
        fit = jax.tree.map(np.asarray, fit)
    assert found["target"] == "yield"
    assert [row["name"] for row in found["coefficients"]] == ["intercept", "soy", "corn"]
    np.testing.assert_allclose([row["estimate"] for row in found["coefficients"]], fit.beta, rtol=1e-9)
    np.testing.assert_allclose(found["estimated"]["sigma_theta"] ** 2, fit.between, rtol=1e-9)
    with open(out / "estimates.csv") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["client"])
    assert [row["client"] for row in rows] == [f"c{i}" for i in range(10)]
    columns = {"local": fit.own, "personalized": fit.mean, "personalized_stderr": fit.mse**0.5, "low": low}
    for name, values in {**columns, "high": high, "effect": fit.effect, "residual": fit.residual}.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-8, atol=1e-10)
    assert {of.name for of in (out / "plots").iterdir()} == {"shrinkage.png", "quantiles.png"}
    main(["estimate", "gaussian", "--csv", str(path), "--value", "yield", "--covariates", "corn"])
    said = capsys.readouterr().out
    assert "regression: intercept" in said
    assert "clients differ: likelihood ratio" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--covariates", "korn", "--value", "yield"], "'korn': did you mean 'corn'?"),
        (["--covariates", "corn"], "unknown column of"),
        (["--covariates", "corn", "corn", "--value", "yield"], "value and covariates must be different columns, got"),
        (["--covariates", "yield", "corn", "--value", "yield"], "value and covariates must be different columns, got"),
        (["--covariates", "corn", "--values", "yield"], "covariates need a row for each sample: give --value COLUMN"),
        (["--covariates", "corn", "soy", "--epsilon", "1"], "epsilon is without --covariates"),
        (["--fit", "ml"], "fit is of --covariates, and there are none, got ml"),
    ],
)
def test_what_would_be_ignored_is_refused_in_a_line(capsys, tmp_path, args, said):
    path = own(tmp_path)[0]
    with pytest.raises(SystemExit):
        main(["estimate", "gaussian", "--csv", str(path), *args])
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_frequency_table_of_counts(capsys, tmp_path):
    """Weights are numbers of clients: the fit is that of the clients written out, a row each."""
    counts, number = np.arange(6), np.array([300, 90, 25, 8, 2, 1])
    path, out = tmp_path / "claims.csv", tmp_path / "out"
    path.write_text("client,count,exposure,number\n" + "".join(f"k{z},{z},1,{number[z]}\n" for z in counts))
    command = ["estimate", "normal-means", "--csv", str(path), "--weights", "number"]
    main([*command, "--output", str(out)])
    assert "prior weighted by number" in capsys.readouterr().out
    with open(out / "estimates.csv") as file:
        found = [float(row["personalized"]) for row in csv.DictReader(file)]
    with jax.enable_x64(True):
        each = ebpoisson(np.repeat(counts, number), 1.0)
    np.testing.assert_allclose(
        found, np.asarray(each.mean)[np.searchsorted(np.repeat(counts, number), counts)], rtol=1e-5
    )
    with pytest.raises(SystemExit):
        main([*command, "--prior", "npmle"])
    assert "--weights requires a prior of one component, got --prior npmle" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["successes,trials", "count,exposure"])
def test_counts_about_covariates(capsys, tmp_path, kind):
    rng = np.random.default_rng(0)
    x, n = rng.normal(size=40), rng.integers(5, 50, 40)
    z = rng.binomial(n, 1 / (1 + np.exp(1 - x + 0.5 * rng.normal(size=40))))
    path, out = tmp_path / "own.csv", tmp_path / "out"
    path.write_text(f"client,{kind},age\n" + "\n".join(f"{i},{z[i]},{n[i]},{float(x[i])!r}" for i in range(40)))
    command = ["estimate", "normal-means", "--csv", str(path), "--covariates", "age"]
    main([*command, "--json", "--output", str(out)])
    found = json.loads(capsys.readouterr().out)
    with jax.enable_x64(True):
        fit = (ebbinomial_regression if "trials" in kind else ebpoisson_regression)(z, n, x)
        fit = jax.tree.map(np.asarray, fit)
    np.testing.assert_allclose([row["estimate"] for row in found["coefficients"]], fit.beta, rtol=1e-9)
    assert [row["name"] for row in found["coefficients"]] == ["intercept", "age"]
    with open(out / "estimates.csv") as file:
        rows = list(csv.DictReader(file))
    with jax.enable_x64(True):
        exceedance, scores = fit.exceedance(), rate_scores.scores(fit.rates)
        above = fit.exceedance(0.3)
    assert scores is not None
    columns = {"personalized": fit.mean, "regression": fit.rates.prior_mean, "score": scores, "exceedance": exceedance}
    for name, values in columns.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-9)
    ranks = {name: np.array([float(row[name]) for row in rows]) for name in ("rank", "rank_low", "rank_high")}
    np.testing.assert_allclose(ranks["rank"].sum(), 820, rtol=1e-5)  # 1 + ... + 40
    assert np.corrcoef(stats.rankdata(fit.mean), ranks["rank"])[0, 1] > 0.95
    assert (ranks["rank_low"] < ranks["rank_high"]).any()
    assert found["outlying"] == []
    assert found["threshold"] is None
    assert {of.name for of in (out / "plots").iterdir()} == {"shrinkage.png", "quantiles.png"}
    main([*command, "--threshold", "0.3", "--output", str(tmp_path / "above")])
    said = capsys.readouterr().out
    assert "regression: intercept" in said
    assert "exceedance in estimates.csv: probability of more than 0.3" in said
    with open(tmp_path / "above" / "estimates.csv") as file:
        np.testing.assert_allclose([float(row["exceedance"]) for row in csv.DictReader(file)], above, rtol=1e-9)
    main(command)
    assert "probability of more than its place on the regression" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([*command, "--prior", "npmle"])
    assert "prior is without --covariates" in capsys.readouterr().err
