"""Normal means: the Bayes risk of the simulated populations, and clients of one's own from a summary each."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from normal_means_command import numbered, refused
from scipy import integrate, special, stats

from jaxpfl.cli import main
from jaxpfl.data.sources import csv_text
from jaxpfl.estimators import fay_herriot
from jaxpfl.estimators.normal_means import FAMILIES
from jaxpfl.estimators.rates import ebbinomial, ebpoisson
from jaxpfl.studies import demo_data, mean_populations, normal_means
from jaxpfl.studies.normal_means import NormalMeansOptions, NormalMeansSettings
from jaxpfl.studies.own_data import diagnostics, summary_csv
from jaxpfl.support.errors import JaxpflError


def made(tmp_path: Path, text: str, name: str = "own.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "truth", [pytest.param(name, marks=[pytest.mark.slow] * (name != "efron")) for name in mean_populations.MIXTURES]
)
def test_the_bayes_risk(truth):
    """Beside a double sum over theta and x."""
    weights, means, sds = (np.array(of) for of in mean_populations.MIXTURES[truth])
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
        np.testing.assert_allclose(mean_populations.bayes_risk(mean_populations.mixture(truth)), risk, rtol=1e-5)


@pytest.mark.parametrize(("share", "size"), [(0.005, 7.0), (0.05, 3.0), (0.5, 60.0), (0.5, 3.0)])
def test_the_bayes_risk_of_needles(share, size):
    """Beside adaptive quadrature of the posterior variance p (1 - p) size^2, at the tails of either component too."""
    between = np.log((1 - share) / share) / size + size / 2

    def integrand(x):
        p = special.expit(np.log(share / (1 - share)) + size * x - size**2 / 2)
        return p * (1 - p) * size**2 * ((1 - share) * stats.norm.pdf(x) + share * stats.norm.pdf(x, size))

    risk = integrate.quad(integrand, between - 15, between + 15, points=[between], epsabs=0, epsrel=1e-10, limit=500)[0]
    with jax.enable_x64(True):
        theta, population = mean_populations.needles(1000, round(1000 * share), size)
        assert np.asarray(theta).tolist() == [size] * round(1000 * share) + [0.0] * round(1000 * (1 - share))
        np.testing.assert_allclose(mean_populations.bayes_risk(population), risk, rtol=1e-6, atol=1e-14)


def test_needles_that_cannot_be_are_refused():
    for given, said in (
        ({"nonzero": 0}, "nonzero must be a whole number of at least 1, got 0"),
        ({"nonzero": 1000}, "nonzero must be below the number of clients, 1000, got 1000"),
        ({"size": 0.0}, "size must be > 0 and finite, got 0"),
        ({"size": float("inf")}, "size must be > 0 and finite, got inf"),
        ({"truth": "normal", "nonzero": 5}, "nonzero is of truth needles, and truth is normal, got 5"),
        ({"truth": "sparse", "size": 3.0}, "size is of truth needles, and truth is sparse, got 3"),
    ):
        with pytest.raises(JaxpflError, match=said):
            NormalMeansSettings(**{"truth": "needles", **given}).check()  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_needles_beside_the_bayes_risk():
    """In repetitions with fixed means, the known prior's error is the Bayes risk: four standard errors."""
    given = NormalMeansSettings(truth="needles", nonzero=5, size=4.0, repetitions=40, priors=("npmle",))
    found = normal_means.simulated(given).json["mse"]
    assert abs(found["known prior"]["mean"] - found["known prior"]["closed_form"]) < 4 * found["known prior"]["stderr"]
    errors = [found[name]["mean"] for name in ("known prior", "npmle", "personalized", "local")]
    assert errors == sorted(errors)


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
    assert found["read"] == {"client": "client", "columns": ["estimate", "se"], "ignored": ["remark"]}
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
@pytest.mark.parametrize("prior", ["npmle", "point-normal"])
def test_intervals_have_a_length_where_the_likeliest_prior_is_an_atom(capsys, tmp_path, prior):
    rows = "\n".join(f"{name},{x},{s}" for name, x, s in demo_data.SCHOOLS)
    path = made(tmp_path, f"client,estimate,se\n{rows}\n")
    lengths = {}
    for how, called in (("learned", "parametric"), ("plug-in", "plug-in")):
        out = tmp_path / how
        given = ["estimate", "normal-means", "--csv", str(path), "--prior", prior, "--intervals", how]
        main([*given, "--output", str(out)])
        assert json.loads((out / "summary.json").read_text())["intervals"] == called
        with open(out / "estimates.csv") as file:
            clients = list(csv.DictReader(file))
        lengths[how] = np.array([float(row["high"]) - float(row["low"]) for row in clients])
    assert (lengths["learned"] > 12).all()
    assert (lengths["plug-in"] < 1e-3).all()


def test_intervals_by_drawn_clients_are_refused_where_nothing_is_refitted(capsys, tmp_path):
    path = made(tmp_path, "id,count,exposure\na,1,2\nb,5,2\n")
    said = refused(capsys, "--csv", path, "--intervals", "clients")
    assert "intervals clients refit a prior to drawn clients, which is not for a Beta or Gamma prior" in said
    path = made(tmp_path, "id,estimate,se\na,1,2\nb,5,2\n")
    assert "which is not for the normal prior" in refused(capsys, "--csv", path, "--intervals", "clients")


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


@pytest.mark.slow
def test_successes_under_mixtures(capsys, tmp_path):
    z, n = np.array([1, 5, 0, 9, 2, 11]), np.array([10, 12, 4, 12, 9, 12])
    path = made(tmp_path, numbered("successes,trials", z, n))
    with jax.enable_x64(True):
        fits = {name: jax.tree.map(np.asarray, ebbinomial(z, n, prior=name)) for name in ("beta-mixture", "npmle")}
    for prior, fit in fits.items():
        out = tmp_path / prior
        main(["estimate", "normal-means", "--csv", str(path), "--prior", prior, "--output", str(out)])
        assert ("components: " in capsys.readouterr().out) == (prior == "beta-mixture")
        with open(out / "estimates.csv") as file:
            clients = list(csv.DictReader(file))
        np.testing.assert_allclose([float(row["personalized"]) for row in clients], fit.mean, rtol=1e-7)
        for row in clients:
            assert 0 <= float(row["low"]) <= float(row["personalized"]) <= float(row["high"]) <= 1
        found = json.loads((out / "summary.json").read_text())
        np.testing.assert_allclose(found["log_marginal"], fit.log_marginal)
        np.testing.assert_allclose(found["estimated"]["mean"], fit.prior.weights @ fit.prior.means)


@pytest.mark.slow
def test_counts_under_mixtures(capsys, tmp_path):
    z, e = np.array([1, 5, 0, 90, 2, 110]), np.array([1.5, 2.0, 1.0, 2.5, 1.0, 3.0])
    path = made(tmp_path, numbered("count,exposure", z, e))
    with jax.enable_x64(True):
        fit = jax.tree.map(np.asarray, ebpoisson(z, e, prior="gamma-mixture"))
    given = ["estimate", "normal-means", "--csv", str(path), "--prior", "gamma-mixture"]
    main([*given, "--output", str(tmp_path / "out")])
    assert "components: " in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    np.testing.assert_allclose(found["log_marginal"], fit.log_marginal)
    np.testing.assert_allclose(found["estimated"]["mean"], fit.prior.weights @ fit.prior.means)
    within = fit.prior.weights @ (fit.prior.means / fit.prior.sizes)
    between = fit.prior.weights @ (fit.prior.means - fit.prior.weights @ fit.prior.means) ** 2
    np.testing.assert_allclose(found["estimated"]["sigma_theta"] ** 2, within + between)
    with open(tmp_path / "out" / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["personalized"]) for row in clients], fit.mean, rtol=1e-7)


@pytest.mark.slow
def test_estimates_about_covariates(capsys, tmp_path):
    rng = np.random.default_rng(0)
    z, s = np.stack([rng.normal(size=12), rng.integers(1950, 2000, 12)], axis=1), rng.uniform(0.5, 1, 12)
    x = 3 + 2 * z[:, 0] + rng.normal(size=12)
    rows = "\n".join(f"c{i},{x[i]},{s[i]},{z[i, 1]:g},{z[i, 0]}" for i in range(12))
    path = made(tmp_path, f"ID,estimate,se,Year,income\n{rows}\n")
    out = tmp_path / "out"
    own = ("--csv", str(path), "--covariates", "Income", "year", "--fit", "ml", "--level", "0.9")
    main(["estimate", "normal-means", *own, "--json", "--output", str(out)])
    found = json.loads(capsys.readouterr().out)
    with jax.enable_x64(True):
        fit = fay_herriot(x, s, z, fit="ml")
        low, high = fit.interval(0.9)
        risk = fit.risk
    fit = jax.tree.map(np.asarray, fit)
    with open(out / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
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
    assert found["outlying"] == []
    assert {of.name for of in (out / "plots").iterdir()} == {"shrinkage.png", "quantiles.png"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--covariates", "incme"],
            "own.csv 'incme': did you mean 'income'? (known: estimate, gap, half, id, inco",
        ),
        (["--covariates", "se"], "own.csv: column 'se' is asked for twice"),
        (["--covariates", "income", "INCOME"], "own.csv: column 'income' is asked for twice"),
        (["--covariates", "note"], "own.csv line 2: note must be a finite number, got 'a'"),
        (["--covariates", "gap"], "own.csv line 3: gap must be a finite number, got ''"),
        (["--covariates", "income", "half"], "covariate 'half' is a linear combination of the intercept and the cov"),
        (["--covariates", "income"], "own.csv: 2 coefficients need at least 5 clients, got 4"),
        (["--covariates", "income", "--prior", "npmle"], "prior is without --covariates"),
        (["--fit", "ml"], "fit is of --covariates or --groups, and there are none, got ml"),
    ],
)
def test_bad_covariates_are_refused_in_a_line(capsys, tmp_path, arguments, said):
    rows = "a,1,1,2,1,1,a\nb,2,1,4,2,,a\nc,3,1,5,2.5,1,a\nd,3,1,9,4.5,1,a\n"
    path = made(tmp_path, f"id,estimate,se,income,half,gap,note\n{rows}")
    assert said in refused(capsys, "--csv", path, *arguments)


def test_covariates_of_few_counts_and_without_a_file_are_refused(capsys, tmp_path):
    path = made(tmp_path, "id,successes,trials,income\na,1,2,1\nb,1,3,2\n")
    assert "2 coefficients need at least 4 clients, got 2" in refused(capsys, "--csv", path, "--covariates", "income")
    assert "fit is of estimate,se, and own.csv has succ" in refused(
        capsys, "--csv", path, "--covariates", "income", "--fit", "ml"
    )
    assert "covariates is of --csv, and there is none" in refused(capsys, "--covariates", "income")


def test_outlying_clients(tmp_path):
    scores = np.array([0.3, -5.0, 1.0, 2.4, 4.0, -0.2])
    names = ["a", "b$x$", "c", "d", "e", "f"]
    found = diagnostics.outlying(scores, names)
    assert [row["client"] for row in found] == ["b$x$", "e"]  # 2.4 is not beyond the 1 - .05 / 12 quantile, 2.64
    np.testing.assert_allclose(found[1]["p_value"], 2 * stats.norm.sf(4.0))
    assert diagnostics.told(found) == "outlying under the fitted prior, in standard deviations: b$x$ (-5), e (+4)"
    assert diagnostics.told([]) == "no client is outlying under the fitted prior"
    assert " and 2 more" in diagnostics.told(found * 4)
    assert diagnostics.quantiles(tmp_path, scores, names, "title").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_outlying_clients_are_rare_in_files_that_fit():
    """One occurs in 5 % of 2000 files, to 4.4 standard errors: a false alarm once in 1e5 runs of another seed."""
    scores = np.random.default_rng(0).normal(size=(2000, 40))
    rate = np.mean([len(diagnostics.outlying(own, [str(i) for i in range(40)])) > 0 for own in scores])
    assert abs(rate - 0.05) < 4.4 * (0.05 * 0.95 / 2000) ** 0.5
    many = np.random.default_rng(0).normal(size=9000)
    assert len(diagnostics.outlying(many, [str(i) for i in range(9000)])) < 3


@pytest.mark.slow
def test_the_best_prior_of_a_file(capsys, tmp_path):
    rng = np.random.default_rng(0)
    theta = np.where(rng.random(60) < 0.2, 6.0, 0.0)
    path = made(tmp_path, numbered("estimate,se", theta + rng.normal(size=60), np.ones(60)))
    main(["estimate", "normal-means", "--csv", str(path), "--prior", "best", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row["prior"]: row for row in found["compared"]}
    assert set(rows) == set(FAMILIES)
    assert found["prior"] == max(rows, key=lambda prior: rows[prior]["held_out_log_density"]) != "normal"
    np.testing.assert_allclose(found["log_marginal"], rows[found["prior"]]["log_marginal"])
    np.testing.assert_allclose(found["risk"]["personalized"], rows[found["prior"]]["risk"], rtol=1e-6)
    assert rows[found["prior"]]["behind"] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,estimate,se\na,1,0\nb,2,1\n", "line 2: se must be > 0, got '0'"),
        ("id,estimate,se\na,1,x\nb,2,1\n", "line 2: se must be a finite number, got 'x'"),
        ("id,estimate,se\na,1,1\nb,2\n", "line 3: se must be a finite number, got ''"),
        (
            "id,estimate,sd\na,1,1\n",
            "no pair of columns in id, estimate, sd: needs estimate,se or successes,trials or c",
        ),
        ("id,Yi,vi\na,1,1\n", "yi,vi are an effect and its variance: call yi estimate, and the root of vi se"),
        ("id,count,exposure\na,1.5,4\nb,2,4\n", "line 2: count must be a whole number of at least 0, got '1.5'"),
        ("id,successes,trials\na,1,2.5\nb,2,4\n", "line 2: trials must be a whole number, got '2.5'"),
        ("client,value\na,1\na,2\nb,3\n", "a row for each sample is for jaxpfl estimate gaussian"),
        ("id,successes,trials\na,5,4\nb,2,4\n", "line 2: successes must be at most the trials, got '5'"),
        ("id,estimate,se,count,exposure\na,1,1,1,1\n", "several pairs of columns"),
        ("id,estimate,se,se\na,1,1,1\n", "line 1: two columns are named 'se'"),
        ("id,estimate,Se,SE\na,1,1,1\n", "unknown column of"),
        ("id,estimate,se\nx,1,1\nx,2,1\n", "line 3: client 'x' is in line 2 too"),
        ("id,estimate,se\nx,1,1\n,2,1\n", "line 3: no name in column 'id', got ''"),
        ("id,estimate,se\na,1,1,7\nb,2,1\n", "line 2: 4 cells, the header has 3"),
        ("id,estimate,se\n", "own.csv: a header and no rows"),
        ("id,region,estimate,se\n1,a,1,1\n1,b,1,1\n", "line 3: client '1' is in line 2 too"),
        ("estimate,se\n1,1\n2,1\n", "client or id, of estimate, se: add one with the clients' names"),
        ("area,estimate,se\na,1,1\nb,2,1\n", "client or id, of area, estimate, se: write --client area"),
        (
            "a,b c,count,exposure\n1,x,1,1\n",
            "client or id, of a, b c, count, exposure: write --client a, or --client 'b c'",
        ),
        ("id,successes,trials\nEngland,6,12\na,4,8\nb,2,4\n", "client 'England' is the sum of all others: remove"),
        ("id,count,exposure\na,4,.8\nUSA,6,1.2\nb,2,.4\n", "client 'USA' is the sum of all others: remove that row"),
        ("id,estimate,se\na,4,3\nb,2,4\nall,6,5\n", "client 'all' is the sum of all others: remove that row"),
    ],
)
def test_bad_files_are_refused_in_a_line(tmp_path, text, said):
    with pytest.raises(JaxpflError) as error:
        summary_csv.read(csv_text.read(made(tmp_path, text)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_requests_are_refused_in_a_line(capsys, tmp_path):
    one = made(tmp_path, "id,estimate,se\na,1,1\n", "one.csv")
    ones = made(tmp_path, "id,successes,trials\na,2,2\nb,1,2\n", "ones.csv")
    assert "one.csv: needs at least 2 clients, got 1" in refused(capsys, "--csv", one)
    assert "prior is of estimate,se, and ones.csv has successes,trials" in refused(
        capsys, "--csv", ones, "--prior", "point-normal"
    )
    assert "components is of --prior beta-mixture or npmle, got 2" in refused(
        capsys, "--csv", ones, "--components", "2"
    )
    assert "prior beta-mixture is of successes,trials, and one.csv has estimate,se" in refused(
        capsys, "--csv", one, "--prior", "beta-mixture"
    )
    counts = made(tmp_path, "id,count,exposure\na,3,2\nb,1,2\n", "counts.csv")
    assert "prior beta-mixture is of successes,trials, and counts.csv has count,exposure" in refused(
        capsys, "--csv", counts, "--prior", "beta-mixture"
    )
    assert "prior gamma-mixture is of count,exposure, and one.csv has estimate,se" in refused(
        capsys, "--csv", one, "--prior", "gamma-mixture"
    )
    assert "components is of --prior gamma-mixture or npmle, got 2" in refused(
        capsys, "--csv", counts, "--components", "2"
    )
    assert "components is of a given --prior, and best compares without" in refused(
        capsys, "--csv", one, "--prior", "best", "--components", "9"
    )
    assert "truth is of simulated data" in refused(capsys, "--csv", one, "--truth", "normal")
    assert "level must be > 0 and < 1, got 2" in refused(capsys, "--csv", one, "--level", "2")
    assert "level is of --csv, and there is none, got 0.5" in refused(capsys, "--level", "0.5")
    assert "No such file" in refused(capsys, "--csv", tmp_path / "none.csv")
    assert "did you mean npmle" in refused(capsys, "--csv", one, "--prior", "npml")
    with pytest.raises(JaxpflError, match="truth must be sparse, two-point, efron, normal, needles, got 'dense'"):
        NormalMeansSettings(truth="dense").check()  # pyright: ignore[reportArgumentType]
    assert NormalMeansOptions().csv is None


@pytest.mark.parametrize("client", [None, "region"])
def test_clients_are_named_whatever_else_is_in_the_file(tmp_path, client):
    text = "id,region,estimate,se\n" + "".join(f"{9 - i},r{i},{i % 3}.5,1\n" for i in range(8))
    found = summary_csv.read(csv_text.read(made(tmp_path, text)), client=client)
    assert found.names == ([f"r{i}" for i in range(8)] if client else [str(9 - i) for i in range(8)])
    assert (found.client, found.ignored) == ((client, ["id"]) if client else ("id", ["region"]))
