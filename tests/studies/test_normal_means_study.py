"""Normal means: the Bayes risk of the simulated populations, and clients of one's own from a summary each."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from command import jaxpfl
from scipy import integrate, special, stats

from jaxpfl.data.sources import csv_text
from jaxpfl.estimators.empirical_bayes import (
    ebbinomial,
    ebbinomial_regression,
    ebnm,
    ebnm_groups,
    ebpoisson,
    ebpoisson_regression,
    fay_herriot,
)
from jaxpfl.studies import normal_means
from jaxpfl.studies.normal_means import NormalMeansSettings
from jaxpfl.support.errors import JaxpflError


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on standard error of a command that ends with status 2, and prints nothing else."""
    said = jaxpfl(capsys, "estimate", "normal-means", *args)
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    return said.err


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def numbered(header: str, *columns: np.ndarray) -> str:
    """Text of a file of clients c0, c1, ..., with these columns."""
    rows = (",".join(map(str, row)) for row in zip(*columns, strict=True))
    return f"id,{header}\n" + "".join(f"c{i},{row}\n" for i, row in enumerate(rows))


def made(tmp_path: Path, text: str, name: str = "own.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "truth", [pytest.param(name, marks=[pytest.mark.slow] * (name != "efron")) for name in normal_means.MIXTURES]
)
def test_the_bayes_risk(truth):
    """Beside a double sum over theta and x."""
    weights, means, sds = (np.array(of) for of in normal_means.MIXTURES[truth])
    x = np.linspace(-15, 15, 601)
    theta = np.linspace(-10, 10, 2001)
    mass = sum(
        w * (stats.norm.pdf(theta, c, t) * 0.01 if t else np.isclose(theta, c).astype(float))
        for w, c, t in zip(weights, means, sds, strict=True)
    )
    joint = stats.norm.pdf(x[:, None], theta) * mass
    marginal = joint.sum(axis=1)
    mean = joint @ theta / marginal
    risk = (joint @ theta**2 - mean**2 * marginal).sum() * 0.05
    with jax.enable_x64(True):
        np.testing.assert_allclose(normal_means.bayes_risk(normal_means.mixture(truth)), risk, rtol=1e-5)


@pytest.mark.parametrize(("share", "size"), [(0.005, 7.0), pytest.param(0.5, 60.0, marks=pytest.mark.slow)])
def test_the_bayes_risk_of_needles(share, size):
    """Beside adaptive quadrature of the posterior variance p (1 - p) size^2, at the tails of either component too."""
    between = np.log((1 - share) / share) / size + size / 2

    def integrand(x):
        p = special.expit(np.log(share / (1 - share)) + size * x - size**2 / 2)
        return p * (1 - p) * size**2 * ((1 - share) * stats.norm.pdf(x) + share * stats.norm.pdf(x, size))

    risk = integrate.quad(integrand, between - 15, between + 15, points=[between], epsabs=0, epsrel=1e-10, limit=500)[0]
    with jax.enable_x64(True):
        theta, population = normal_means.needles(1000, round(1000 * share), size)
        assert np.asarray(theta).tolist() == [size] * round(1000 * share) + [0.0] * round(1000 * (1 - share))
        np.testing.assert_allclose(normal_means.bayes_risk(population), risk, rtol=1e-6, atol=1e-14)


def test_needles_that_cannot_be_are_refused():
    for given, said in (
        ({"nonzero": 0}, "nonzero must be a whole number >= 1, got 0"),
        ({"nonzero": 1000}, "nonzero must be below the number of clients, 1000, got 1000"),
        ({"size": float("inf")}, "size must be > 0 and finite, got inf"),
        ({"truth": "normal", "nonzero": 5}, "nonzero applies to truth needles, not to normal: leave out nonzero = 5"),
    ):
        with pytest.raises(JaxpflError, match=said):
            NormalMeansSettings(**{"truth": "needles", **given}).check()  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_estimates_with_standard_errors(capsys, tmp_path):
    effects, errors = (28, 8, -3, 7, -1, 1, 18, 12), (15, 10, 16, 11, 9, 11, 10, 18)
    rows = "\n".join(f"{name},{x},{s},note" for name, x, s in zip("ABCDEFGH", effects, errors, strict=True))
    path = made(tmp_path, f"School,Estimate,SE,remark\n{rows}\n".replace("School", "client"))
    found = jaxpfl(capsys, "estimate", "normal-means", "--csv", path, "--json", "--output", tmp_path / "out").json
    assert found["read"] == {"client": "client", "columns": ["estimate", "se"], "ignored": ["remark"]}
    assert {name: round(value, 2) for name, value in found["pooled"].items()} == {"mean": 7.69, "stderr": 4.07}
    assert found["plots"] == ["plots/shrinkage.png"]
    clients = rows_of(tmp_path / "out" / "estimates.csv")
    assert [row["client"] for row in clients] == list("ABCDEFGH")
    for row in clients:  # the likeliest spread is zero, and nothing is the surer for it
        assert float(row["low"]) < float(row["personalized"]) < float(row["high"])
        assert float(row["personalized_stderr"]) > 5
        assert float(row["lfsr"]) > 0.01


@pytest.mark.slow
def test_successes_and_counts(capsys, tmp_path):
    z, n = np.array([1, 5, 0, 9]), np.array([10, 12, 4, 20])
    with jax.enable_x64(True):
        fits = {("successes,trials", "normal"): ebbinomial(z, n), ("count,exposure", "normal"): ebpoisson(z, n)}
        fits |= {("count,exposure", "npmle"): ebpoisson(z, n, "npmle")}
    for (header, prior), fit in fits.items():
        path = made(tmp_path, numbered(header, z, n))
        out = tmp_path / f"{header},{prior}"
        said = jaxpfl(capsys, "estimate", "normal-means", "--csv", path, "--prior", prior, "--output", out).out
        assert f"read as: {header} of 4 clients" in said
        clients = rows_of(out / "estimates.csv")
        np.testing.assert_allclose([float(row["personalized"]) for row in clients], fit.mean, rtol=1e-9)
        assert [row["client"] for row in clients] == ["c0", "c1", "c2", "c3"]
        for row in clients:
            assert 0 <= float(row["low"]) <= float(row["personalized"]) <= float(row["high"])


@pytest.mark.slow
def test_estimates_about_covariates(capsys, tmp_path):
    rng = np.random.default_rng(0)
    z, s = np.stack([rng.normal(size=12), rng.integers(1950, 2000, 12)], axis=1), rng.uniform(0.5, 1, 12)
    x = 3 + 2 * z[:, 0] + rng.normal(size=12)
    path = made(tmp_path, "ID" + numbered("estimate,se,Year,income", x, s, z[:, 1], z[:, 0]).removeprefix("id"))
    out = tmp_path / "out"
    own = ("--csv", str(path), "--covariates", "Income", "year", "--level", "0.9")
    found = jaxpfl(capsys, "estimate", "normal-means", *own, "--json", "--output", str(out)).json
    with jax.enable_x64(True):
        fit = fay_herriot(x, s, z)
        low, high = fit.interval(0.9)
        risk = fit.risk
    fit = jax.tree.map(np.asarray, fit)
    clients = rows_of(out / "estimates.csv")
    assert [row["client"] for row in clients] == [f"c{i}" for i in range(12)]
    columns = {"personalized": fit.mean, "personalized_stderr": fit.mse**0.5, "low": low, "high": high}
    for name, values in {**columns, "regression": fit.regression, "residual": fit.residual}.items():
        np.testing.assert_allclose([float(row[name]) for row in clients], values, rtol=1e-9, atol=1e-12)
    assert [row["name"] for row in found["coefficients"]] == ["intercept", "income", "Year"]
    np.testing.assert_allclose([row["estimate"] for row in found["coefficients"]], fit.beta)
    errors = np.diag(fit.beta_covariance) ** 0.5
    np.testing.assert_allclose([row["stderr"] for row in found["coefficients"]], errors)
    p_values = [row["p_value"] for row in found["coefficients"]]
    np.testing.assert_allclose(p_values, 2 * stats.norm.sf(np.abs(fit.beta) / errors), rtol=1e-6)
    np.testing.assert_allclose([found["risk"]["personalized"], found["clients_differ"]["p_value"]], [risk, fit.p_value])
    assert found["read"] == {"client": "ID", "columns": ["estimate", "se", "income", "Year"], "ignored": []}
    assert {of.name for of in (out / "plots").iterdir()} == {"shrinkage.png"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--covariates", "incme"], "own.csv 'incme': did you mean 'income'? (known: estimate, gap, half, id, inco"),
        (["--covariates", "se"], "own.csv: column 'se' is used twice"),
        (["--covariates", "gap"], "own.csv line 3: gap must be a finite number, got ''"),
        (["--covariates", "income", "half"], "covariate 'half' is a linear combination of the intercept and the cov"),
        (["--covariates", "income"], "own.csv: 2 coefficients require at least 5 clients, got 4"),
        (["--covariates", "income", "--prior", "npmle"], "prior is not available with --covariates"),
    ],
)
def test_bad_covariates_are_refused_in_a_line(capsys, tmp_path, arguments, said):
    rows = "a,1,1,2,1,1,a\nb,2,1,4,2,,a\nc,3,1,5,2.5,1,a\nd,3,1,9,4.5,1,a\n"
    path = made(tmp_path, f"id,estimate,se,income,half,gap,note\n{rows}")
    assert said in refused(capsys, "--csv", path, *arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,estimate,se\na,1,0\nb,2,1\n", "line 2: se must be > 0, got '0'"),
        ("id,estimate,se\na,1,1\nb,2\n", "line 3: se must be a finite number, got ''"),
        ("id,count,exposure\na,1.5,4\nb,2,4\n", "line 2: count must be a whole number of at least 0, got '1.5'"),
        ("id,successes,trials\na,1,2.5\nb,2,4\n", "line 2: trials must be a whole number, got '2.5'"),
        ("client,value\na,1\na,2\nb,3\n", "for a file with a row for each sample, use jaxpfl estimate gaussian"),
        ("id,successes,trials\na,5,4\nb,2,4\n", "line 2: successes must be at most the trials, got '5'"),
        ("id,estimate,Se,SE\na,1,1,1\n", "unknown column of"),
        ("id,estimate,se\nx,1,1\nx,2,1\n", "line 3: client 'x' is also in line 2"),
        ("area,estimate,se\na,1,1\nb,2,1\n", "client or id (available: area, estimate, se): write --client area"),
        (
            "a,b c,count,exposure\n1,x,1,1\n",
            "client or id (available: a, b c, count, exposure): write --client a, or --client 'b c'",
        ),
        ("id,successes,trials\nEngland,6,12\na,4,8\nb,2,4\n", "client 'England' is the sum of all others: remove"),
    ],
)
def test_bad_files_are_refused_in_a_line(tmp_path, text, said):
    with pytest.raises(JaxpflError) as error:
        normal_means.read(csv_text.read(made(tmp_path, text)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_requests_are_refused_in_a_line(capsys, tmp_path):
    one = made(tmp_path, "id,estimate,se\na,1,1\n", "one.csv")
    ones = made(tmp_path, "id,successes,trials\na,2,2\nb,1,2\n", "ones.csv")
    for said, *arguments in (
        ("one.csv: at least 2 clients are required to estimate a prior", "--csv", one),
        ("prior applies to files with estimate,se, but ones.csv has", "--csv", ones, "--prior", "point-normal"),
        ("components applies to files with estimate,se, but ones.csv has", "--csv", ones, "--components", "2"),
        ("truth applies to simulated clients, not to --csv", "--csv", one, "--truth", "normal"),
        ("level must be > 0 and < 1, got 2", "--csv", one, "--level", "2"),
        ("level requires --csv: leave out level = 0.5", "--level", "0.5"),
        ("No such file", "--csv", tmp_path / "none.csv"),
        ("did you mean npmle", "--csv", one, "--prior", "npml"),
    ):
        assert said in refused(capsys, *arguments)
    with pytest.raises(JaxpflError, match=r"truth must be one of sparse, .*, efron, normal, needles, got 'dense'"):
        NormalMeansSettings(truth="dense").check()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("client", [None, "region"])
def test_clients_are_named_whatever_else_is_in_the_file(tmp_path, client):
    text = "id,region,estimate,se\n" + "".join(f"{9 - i},r{i},{i % 3}.5,1\n" for i in range(8))
    found = normal_means.read(csv_text.read(made(tmp_path, text)), client=client)
    assert found.names == ([f"r{i}" for i in range(8)] if client else [str(9 - i) for i in range(8)])
    assert (found.client, found.ignored) == ((client, ["id"]) if client else ("id", ["region"]))


def pupils(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """A file of 24 pupils in six schools, with their x, s and schools."""
    rng = np.random.default_rng(0)
    group, s = np.tile(np.arange(6), 4), rng.uniform(0.5, 1, 24)
    x = 1.5 * rng.normal(size=6)[group] + rng.normal(size=24)
    rows = "\n".join(f"p{i},s{group[i]},{x[i]},{s[i]},{i % 5}" for i in range(24))
    return made(tmp_path, f"id,School,estimate,se,people\n{rows}\n"), x, s, group


@pytest.mark.slow
def test_clients_in_groups(capsys, tmp_path):
    path, x, s, group = pupils(tmp_path)
    out = tmp_path / "out"
    options = ("--groups", "school", "--level", "0.9")
    found = jaxpfl(capsys, "estimate", "normal-means", "--csv", path, *options, "--json", "--output", out).json
    with jax.enable_x64(True):
        fit = ebnm_groups(x, s, group)
        ends, group_ends = fit.interval(0.9), fit.group_interval(0.9)
        risk = float(fit.risk)
    fit = jax.tree.map(np.asarray, fit)
    assert found["read"] == {"client": "id", "columns": ["estimate", "se", "school"], "ignored": ["people"]}
    assert found["groups"] == 6
    np.testing.assert_allclose(found["estimated"]["sigma_groups"] ** 2, fit.between)
    np.testing.assert_allclose(found["estimated"]["sigma_theta"] ** 2, fit.within, atol=1e-12)
    np.testing.assert_allclose(
        [found["groups_differ"]["p_value"], found["risk"]["personalized"]], [fit.group_p_value, risk]
    )
    clients = rows_of(out / "estimates.csv")
    assert [row["group"] for row in clients] == [f"s{g}" for g in group]
    columns = {"personalized": fit.mean, "personalized_stderr": fit.mse**0.5, "low": ends[0], "high": ends[1]}
    for name, values in {**columns, "group_mean": fit.group_mean[group], "residual": fit.residual}.items():
        np.testing.assert_allclose([float(row[name]) for row in clients], values, rtol=1e-9, atol=1e-12)
    groups = rows_of(out / "groups.csv")
    assert [(row["group"], row["clients"]) for row in groups] == [(f"s{g}", "4") for g in range(6)]
    columns = {"mean": fit.group_mean, "stderr": fit.group_mse**0.5, "low": group_ends[0], "high": group_ends[1]}
    for name, values in columns.items():
        np.testing.assert_allclose([float(row[name]) for row in groups], values, rtol=1e-9, atol=1e-12)
    said = jaxpfl(capsys, "estimate", "normal-means", "--csv", path, *options).out
    assert "estimated from 6 groups: mean" in said
    assert "groups differ: likelihood ratio" in said


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["normal", "npmle"])
def test_weighted_clients(capsys, tmp_path, prior):
    path, x, s, _ = pupils(tmp_path)
    out, w = tmp_path / "out", np.arange(24) % 5
    given = ("--csv", path, "--weights", "People", "--prior", prior, "--output", out)
    said = jaxpfl(capsys, "estimate", "normal-means", *given).out
    assert f"weighted by people, equivalent to {w.sum() ** 2 / (w**2).sum():.4g} equal w" in said
    with jax.enable_x64(True):
        fit = ebnm(x, s, prior=prior, weights=w)
        low, high = fit.interval()
        low, high = np.minimum(low, fit.mean), np.maximum(high, fit.mean)  # an NPMLE's mean may lie between atoms
    clients = rows_of(out / "estimates.csv")
    for name, values in {"personalized": fit.mean, "personalized_stderr": fit.sd, "low": low, "high": high}.items():
        np.testing.assert_allclose([float(row[name]) for row in clients], values, rtol=1e-6, atol=1e-9)
    found = json.loads((out / "summary.json").read_text())
    np.testing.assert_allclose(found["log_marginal"], fit.log_marginal)
    assert found["weights"]["column"] == "people"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "shcool"], "own.csv 'shcool': did you mean 'school'? (known: estimate, gap"),
        (["--groups", "gap"], "own.csv line 3: no name in column 'gap', got ''"),
        (["--groups", "school"], "own.csv: at least 3 groups are required"),
        (["--groups", "school", "--covariates", "minus"], "groups is not available with --covariates"),
        (["--groups", "school", "--prior", "npmle"], "prior is not available with --groups"),
        (["--groups", "school", "--weights", "zero"], "weights is not available with --groups"),
        (["--weights", "zero"], "own.csv: at least 2 clients must have weights > 0, got 0"),
        (["--weights", "minus"], "own.csv line 3: minus must be at least 0, got '-1'"),
        (["--weights", "zero", "--covariates", "minus"], "weights is not available with --covariates"),
    ],
)
def test_bad_groups_and_weights_are_refused_in_a_line(capsys, tmp_path, arguments, said):
    path = made(
        tmp_path,
        "id,estimate,se,school,gap,minus,nan,zero\n"
        "a,1,1,u,x,1,nan,0\nb,2,1,u,,-1,1,0\nc,3,1,v,x,2,1,0\nd,3,2,v,x,1,1,0\n",
    )
    assert said in refused(capsys, "--csv", path, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["successes,trials", "count,exposure"])
def test_counts_about_covariates(capsys, tmp_path, kind):
    rng = np.random.default_rng(0)
    x, n = rng.normal(size=40), rng.integers(5, 50, 40)
    z = rng.binomial(n, 1 / (1 + np.exp(1 - x + 0.5 * rng.normal(size=40))))
    path, out = made(tmp_path, numbered(f"{kind},age", z, n, x)), tmp_path / "out"
    given = ("--csv", path, "--covariates", "age", "--json", "--output", out)
    found = jaxpfl(capsys, "estimate", "normal-means", *given).json
    with jax.enable_x64(True):
        fit = (ebbinomial_regression if "trials" in kind else ebpoisson_regression)(z, n, x)
        variance = float((fit.rates.prior_sd**2).mean())
        fit = jax.tree.map(np.asarray, fit)
    np.testing.assert_allclose([row["estimate"] for row in found["coefficients"]], fit.beta, rtol=1e-9)
    assert [row["name"] for row in found["coefficients"]] == ["intercept", "age"]
    np.testing.assert_allclose(found["estimated"]["sigma_theta"] ** 2, variance, rtol=1e-9)
    rows = rows_of(out / "estimates.csv")
    columns = {"personalized": fit.mean, "regression": fit.rates.prior_mean}
    for name, values in columns.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-9)
