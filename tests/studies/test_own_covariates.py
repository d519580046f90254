"""Samples of one's own clients about covariates: what the command reads, writes and refuses."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.estimators.empirical_bayes import unit_level


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
    assert {of.name for of in (out / "plots").iterdir()} == {"shrinkage.png"}
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
    ],
)
def test_what_would_be_ignored_is_refused_in_a_line(capsys, tmp_path, args, said):
    path = own(tmp_path)[0]
    with pytest.raises(SystemExit):
        main(["estimate", "gaussian", "--csv", str(path), *args])
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
