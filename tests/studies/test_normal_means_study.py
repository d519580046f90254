"""Normal means: the Bayes risk of the simulated populations, and clients of one's own from a summary each."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from jaxpfl.cli import main
from jaxpfl.errors import JaxpflError
from jaxpfl.estimators.rates import ebbinomial, ebpoisson
from jaxpfl.studies import demo_data, normal_means
from jaxpfl.studies.normal_means import NormalMeansOptions, NormalMeansSettings
from jaxpfl.studies.own_data import summary_csv


def made(tmp_path: Path, text: str, name: str = "own.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "normal-means", *map(str, args)])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    "truth", [pytest.param(name, marks=[pytest.mark.slow] * (name != "efron")) for name in normal_means.TRUTHS]
)
def test_the_bayes_risk(truth):
    """Beside a double sum over theta and x."""
    weights, means, sds = (np.array(of) for of in normal_means.TRUTHS[truth])
    x = np.linspace(-15, 15, 3001)
    theta = np.linspace(-10, 10, 2001)
    mass = sum(
        w * (stats.norm.pdf(theta, c, t) * 0.01 if t else np.isclose(theta, c).astype(float))
        for w, c, t in zip(weights, means, sds, strict=True)
    )
    joint = stats.norm.pdf(x[:, None], theta) * mass
    marginal = joint.sum(axis=1)
    mean = joint @ theta / marginal
    risk = (joint @ theta**2 - mean**2 * marginal).sum() * 0.01
    with jax.enable_x64(True):
        np.testing.assert_allclose(normal_means.bayes_risk(truth), risk, rtol=1e-5)


@pytest.mark.slow
def test_richer_priors_come_near_the_bayes_risk():
    """1000 clients, of which 50 are at 5: the NPMLE errs by 51 in total in Koenker and Mizera 2014, Table 1."""
    given = NormalMeansSettings(repetitions=12, priors=("scale-mixture", "npmle"))
    found = normal_means.simulated(given).json["mse"]
    assert abs(1000 * found["npmle"]["mean"] - 51) < 4 * 1000 * found["npmle"]["stderr"]
    errors = [found[name]["mean"] for name in ("known prior", "npmle", "scale-mixture", "personalized", "local")]
    assert errors == sorted(errors)
    assert abs(found["known prior"]["mean"] - found["known prior"]["closed_form"]) < 4 * found["known prior"]["stderr"]


@pytest.mark.slow
def test_estimates_with_standard_errors(capsys, tmp_path):
    rows = "\n".join(f"{name},{x},{s},note" for name, x, s in demo_data.SCHOOLS)
    path = made(tmp_path, f"School,Estimate,SE,remark\n{rows}\n".replace("School", "client"))
    main(["estimate", "normal-means", "--csv", str(path), "--json", "--output", str(tmp_path / "out")])
    found = json.loads(capsys.readouterr().out)
    assert found["read"] == {"columns": ["estimate", "se"], "ignored": ["remark"]}
    assert {name: round(value, 2) for name, value in found["pooled"].items()} == {"mean": 7.69, "stderr": 4.07}
    assert found["plots"] == ["plots/shrinkage.png", "plots/quantiles.png"]
    with open(tmp_path / "out" / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
    assert [row["client"] for row in clients] == list("ABCDEFGH")
    for row in clients:  # the likeliest spread is zero, and nothing is the surer for it
        assert float(row["low"]) < float(row["personalized"]) < float(row["high"])
        assert float(row["personalized_stderr"]) > 5
        assert float(row["lfsr"]) > 0.01
        assert float(row["rank_low"]) < float(row["rank"]) < float(row["rank_high"])


@pytest.mark.slow
def test_successes_and_counts(capsys, tmp_path):
    z, n = np.array([1, 5, 0, 9]), np.array([10, 12, 4, 20])
    with jax.enable_x64(True):
        fits = {"successes,trials": ebbinomial(z, n), "count,exposure": ebpoisson(z, n)}
    for header, fit in fits.items():
        path = made(tmp_path, header + "\n" + "\n".join(f"{a},{b}" for a, b in zip(z, n, strict=True)) + "\n")
        out = tmp_path / header
        main(["estimate", "normal-means", "--csv", str(path), "--output", str(out)])
        assert f"read as: {header} of 4 clients" in capsys.readouterr().out
        with open(out / "estimates.csv") as file:
            clients = list(csv.DictReader(file))
        np.testing.assert_allclose([float(row["personalized"]) for row in clients], fit.mean, rtol=1e-9)
        assert [row["client"] for row in clients] == ["0", "1", "2", "3"]
        for row in clients:
            assert 0 <= float(row["low"]) <= float(row["personalized"]) <= float(row["high"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("estimate,se\n1,0\n2,1\n", "line 2: se must be > 0, got '0'"),
        ("estimate,se\n1,x\n2,1\n", "line 2: se must be a finite number, got 'x'"),
        ("estimate,se\n1,1\n2\n", "line 3: se must be a finite number, got ''"),
        ("estimate,sd\n1,1\n", "no pair of columns in 'estimate,sd': needs estimate,se or successes,trials or count"),
        ("estimate,se,count,exposure\n1,1,1,1\n", "several pairs of columns"),
        ("estimate,se,se\n1,1,1\n", "2 columns are called se"),
        ("a,estimate,se\nx,1,1\nx,2,1\n", "line 3: client 'x' is in line 2 too"),
        ("a,estimate,se\nx,1,1\n,2,1\n", "line 3: no client's name"),
        ("estimate,se\n1,1,7\n2,1\n", "line 2: more cells than the header has names (2)"),
        ("estimate,se\n", "needs a header and a row for each client below it"),
    ],
)
def test_bad_files_are_refused_in_a_line(tmp_path, text, said):
    with pytest.raises(JaxpflError) as error:
        summary_csv.read(made(tmp_path, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_requests_are_refused_in_a_line(capsys, tmp_path):
    one = made(tmp_path, "estimate,se\n1,1\n", "one.csv")
    ones = made(tmp_path, "successes,trials\n3,2\n1,2\n", "ones.csv")
    assert "one.csv: needs at least 2 clients, got 1" in refused(capsys, "--csv", one)
    assert "ones.csv: successes must be at most trials, got 3 of 2 for client 0" in refused(capsys, "--csv", ones)
    assert "prior is of estimate,se, and ones.csv has successes,trials" in refused(
        capsys, "--csv", ones, "--prior", "npmle"
    )
    assert "truth is of simulated data" in refused(capsys, "--csv", one, "--truth", "normal")
    assert "level must be > 0 and < 1, got 2" in refused(capsys, "--csv", one, "--level", "2")
    assert "level is of --csv, and there is none, got 0.5" in refused(capsys, "--level", "0.5")
    assert "No such file" in refused(capsys, "--csv", tmp_path / "none.csv")
    assert "did you mean npmle" in refused(capsys, "--csv", one, "--prior", "npml")
    with pytest.raises(JaxpflError, match="truth must be sparse, two-point, efron, normal, got 'dense'"):
        NormalMeansSettings(truth="dense").check()  # pyright: ignore[reportArgumentType]
    assert NormalMeansOptions().csv is None
