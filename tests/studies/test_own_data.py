"""The user's own clients: intervals that hold, scores only where they mean something, and what is said of privacy."""

import csv
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from command import jaxpfl

from jaxpfl.estimators import gaussian_closed_form
from jaxpfl.estimators.empirical_bayes import unit_level
from jaxpfl.privacy import local_dp
from jaxpfl.studies import bernoulli as own_bernoulli
from jaxpfl.studies import gaussian as own_gaussian
from jaxpfl.studies import own_clients
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_clients import CsvLayout
from jaxpfl.support.errors import JaxpflError

TWO = CsvLayout(value="u,v")


def write(path: Path, clients, columns: str = "value") -> Path:
    """A file of each client's samples, numbers or rows of the columns."""
    rows = [f"c{i}," + ",".join(map(str, np.atleast_1d(x).tolist())) for i, own in enumerate(clients) for x in own]
    path.write_text("\n".join([f"client,{columns}", *rows]))
    return path


def contained(columns: dict) -> bool:
    low, at, high = (np.array(columns[name]) for name in ("low", "personalized", "high"))
    return bool(((low <= at) & (at <= high)).all())


class Asked(Exception):
    """Carries the arguments of a function out of a study before anything is computed."""


def asked(*arguments: Any) -> Any:
    raise Asked(*arguments)


def test_noise_for_a_file_is_that_of_its_own_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_gaussian, "private_release", asked)
    path = write(tmp_path / "own.csv", np.random.default_rng(0).normal(size=(30, 2)))
    with pytest.raises(Asked) as stopped:
        own_gaussian.estimate_file(path, GaussianSettings(epsilon=1.0, delta=1e-3))
    known, stddev = stopped.value.args
    assert known.bound != GaussianSettings().bound
    assert stddev == pytest.approx(local_dp.analytic_gaussian_stddev(1.0, 1e-3, 2 * known.bound))


def test_the_key_of_private_bits_knows_which_samples_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A sample 0 is not a missing one."""
    monkeypatch.setattr(own_clients, "estimates", asked)
    keys = set()
    for clients in ([[0, 1, 1], [1, 0]], [[0, 1, 1], [1, 0, 0]]):
        with pytest.raises(Asked) as stopped:
            own_bernoulli.estimate_file(write(tmp_path / "own.csv", clients), BernoulliSettings(epsilon=1.0))
        keys.add(tuple(np.asarray(jax.random.key_data(stopped.value.args[1])).tolist()))
    assert len(keys) == 2


@pytest.mark.slow
def test_clients_that_look_alike_have_no_sure_probability(tmp_path: Path):
    """Six clients of five samples, all of .4 or .6: the moments say v = 0, the intervals do not take it for true."""
    ones = [2, 3, 3, 2, 2, 2]
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    own = own_bernoulli.estimate_file(path, BernoulliSettings())
    assert own.result["estimated"]["variance"] == 0
    assert contained(own.columns)
    assert (np.subtract(own.columns["high"], own.columns["low"]) > 0.4).all()


@pytest.mark.parametrize(
    "ones", [*(pytest.param(o, marks=pytest.mark.slow) for o in ([0, 0, 0], [0, 5])), [0, 0, 5, 5, 1]]
)
def test_an_interval_holds_its_estimate_at_the_edge(tmp_path: Path, ones: list[int]):
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    columns = own_bernoulli.estimate_file(path, BernoulliSettings()).columns
    assert contained(columns)
    assert min(columns["low"]) >= 0
    assert max(columns["high"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 40])
def test_means_have_intervals_that_hold_them(tmp_path: Path, m: int):
    rng = np.random.default_rng(m)
    sizes = rng.integers(2, 9, size=m)
    own = own_gaussian.estimate_file(
        write(tmp_path / "own.csv", [rng.normal(size=n) for n in sizes]), GaussianSettings()
    )
    assert contained(own.columns)
    # Wider than what is known for sure of the mean of all, narrower than three times a client's own.
    width = np.subtract(own.columns["high"], own.columns["low"])
    sigma = own.result["estimated"]["sigma_x"]
    assert (width > 2 * sigma / np.sqrt(sizes.sum())).all()
    assert (width < 12 * sigma / np.sqrt(sizes)).all()


@pytest.mark.slow
def test_pairs_are_estimated_and_not_scored(tmp_path: Path):
    """With a sample of each held out no variance is left to learn: no table, one reason, all estimates."""
    rng = np.random.default_rng(0)
    path = write(tmp_path / "own.csv", 0.5 * rng.normal(size=(30, 1)) + rng.normal(size=(30, 2)))
    own = own_gaussian.estimate_file(path, GaussianSettings())
    assert "mse" not in own.result
    assert "no client has 3 samples" in own.result["not_scored"]
    assert np.abs(np.subtract(own.columns["personalized"], own.columns["local"])).min() > 0
    assert contained(own.columns)
    bits = write(tmp_path / "bits.csv", rng.integers(0, 2, size=(30, 2)))
    assert "not_scored" in own_bernoulli.estimate_file(bits, BernoulliSettings()).result
    more = write(tmp_path / "more.csv", [*rng.normal(size=(29, 2)), rng.normal(size=3)])
    assert own_gaussian.estimate_file(more, GaussianSettings()).result["mse"]["local"]["mean"] > 0


@pytest.mark.slow
def test_settings_and_privacy_are_in_the_result(tmp_path: Path):
    rng = np.random.default_rng(0)
    path = write(tmp_path / "own.csv", rng.normal(size=(20, 4)))
    plain = own_gaussian.estimate_file(path, GaussianSettings(seed=3)).result
    assert plain["settings"] == {"epsilon": None, "seed": 3}
    assert "privacy" not in plain
    given = GaussianSettings(epsilon=2.0, delta=1e-6, radius=2.0, sigma_x=1.0)
    private = own_gaussian.estimate_file(path, given)
    public = {"sigma_theta": 0.1, "sigma_x": 1.0, "radius": 2.0}
    assert private.public is not None
    clip = pytest.approx(private.public.bound, rel=1e-6)
    assert private.result["privacy"] == {
        "epsilon": 2.0,
        "delta": 1e-6,
        "mechanism": "analytic",
        "clipped_to": clip,
        "clients_clipped": 0,
        **public,
    }
    assert private.public.bound > 2
    assert private.result["settings"] == {**public, "epsilon": 2.0, "delta": 1e-6, "mechanism": "analytic", "seed": 0}
    bit = own_gaussian.estimate_file(path, GaussianSettings(epsilon=2.0, mechanism="one-bit")).result
    assert bit["privacy"]["delta"] == 0
    bits = own_bernoulli.estimate_file(
        write(tmp_path / "bits.csv", rng.integers(0, 2, size=(9, 4))), BernoulliSettings(epsilon=1.0)
    ).result
    assert bits["privacy"] == {"epsilon": 1.0, "delta": 0.0, "mechanism": "one-bit"}
    assert bits["settings"] == {"epsilon": 1.0, "seed": 0}


@pytest.mark.slow
def test_clipped_messages_are_counted(tmp_path: Path):
    path = write(tmp_path / "own.csv", np.random.default_rng(5).normal(9, 2, (4, 3)))
    own = own_gaussian.estimate_file(path, GaussianSettings(epsilon=1.0)).result
    assert own["privacy"]["clients_clipped"] == 4
    assert own["notes"][0].startswith("warning: 4 of 4 clients' means lie outside ±")
    own = own_gaussian.estimate_file(path, GaussianSettings(epsilon=1.0, radius=20.0)).result
    assert (own["privacy"]["clients_clipped"], own["notes"]) == (0, [])


@pytest.mark.slow
def test_a_column_in_other_units_changes_nothing_of_the_others(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = 0.4 * rng.normal(size=(14, 1, 2)) + rng.normal(size=(14, 5, 2))
    plain, moved = (
        own_gaussian.estimate_file(write(tmp_path / f"{k}.csv", each, "u,v"), GaussianSettings(), TWO)
        for k, each in enumerate((x, x * [1, 1000] + [0, 7000]))
    )
    for name in ("local", "personalized", "low", "high"):
        np.testing.assert_allclose(moved.columns[f"{name}_u"], plain.columns[f"{name}_u"], rtol=1e-9)
        expected = 7000 + 1000 * np.array(plain.columns[f"{name}_v"])
        np.testing.assert_allclose(moved.columns[f"{name}_v"], expected, rtol=1e-9)
    for column in "uv":
        a, b = plain.result["columns"][column], moved.result["columns"][column]
        assert b["gain_over_local"] == pytest.approx(a["gain_over_local"], rel=1e-6)
        assert b["clients_differ"]["p_value"] == pytest.approx(a["clients_differ"]["p_value"], rel=1e-6)
    alone = own_gaussian.estimate_file(write(tmp_path / "alone.csv", x[:, :, 0]), GaussianSettings())
    np.testing.assert_allclose(alone.columns["personalized"], plain.columns["personalized_u"], rtol=1e-12)
    assert alone.result["gain_over_local"] == pytest.approx(plain.result["columns"]["u"]["gain_over_local"])


@pytest.mark.slow
def test_the_gain_is_of_the_error_about_the_true_mean(tmp_path: Path):
    """Leave-one-out of six samples: the gain of five, 69 %, which noise of variance 1 had made 13 %."""
    m, n, st = 1500, 6, 0.3
    rng = np.random.default_rng(0)
    x = st * rng.normal(size=(m, 1)) + rng.normal(size=(m, n))
    result = own_gaussian.estimate_file(write(tmp_path / "own.csv", x), GaussianSettings()).result
    s2 = 1 / (n - 1)
    exact = 1 - float(gaussian_closed_form.personalized(m, s2, st**2)) / s2
    gained = result["gains"]["personalized"]
    assert abs(gained["mean"] - exact) < 4 * gained["stderr"]
    assert gained["stderr"] < 0.03
    assert result["mse"]["local"]["mean"] == pytest.approx(s2, rel=0.06)
    raw = result["held_out_errors"]
    assert raw["local"]["mean"] == pytest.approx(1 + s2, rel=0.06)
    assert 1 - raw["personalized"]["mean"] / raw["local"]["mean"] < 0.2
    low, high = result["estimated"]["sigma_theta_interval"]
    assert low < st < high
    assert result["clients_differ"]["p_value"] < 1e-6


@pytest.mark.slow
def test_levels_and_what_is_said(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = np.array([1.0] * 10 + [9.0] * 2)[:, None] * rng.normal(size=(12, 6))
    path = write(tmp_path / "own.csv", x)
    wide, narrow = (own_gaussian.estimate_file(path, GaussianSettings(), level=level) for level in (0.99, 0.5))
    width = [np.subtract(own.columns["high"], own.columns["low"]) for own in (wide, narrow)]
    assert (width[0] > 2 * width[1]).all()
    assert (wide.result["level"], narrow.result["level"]) == (0.99, 0.5)
    said = own_clients.population_lines(wide.result, 0.99)
    assert "(99 %: 0 to " in said[0]
    assert said[1].startswith("no sign that clients differ: Welch")
    assert "the noise differs between clients: Bartlett's test, p = " in said[2]
    assert wide.columns["sigma_x"][11] > 2 * wide.columns["sigma_x"][0]
    assert wide.columns["local_stderr"][11] > 2 * wide.columns["local_stderr"][0]
    with pytest.raises(JaxpflError, match="level must be > 0 and < 1, got 1"):
        own_gaussian.estimate_file(path, GaussianSettings(), level=1)


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


@pytest.mark.slow
def test_clients_about_covariates(capsys, tmp_path):
    path, y, x, client = own(tmp_path)
    out = tmp_path / "out"
    options = ("--value", "yield", "--covariates", "soy", "corn", "--level", "0.9")
    found = jaxpfl(capsys, "estimate", "gaussian", "--csv", path, *options, "--json", "--output", out).json
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
    said = jaxpfl(capsys, "estimate", "gaussian", "--csv", path, *options[:5]).out
    assert "regression: intercept" in said
    assert "clients differ: likelihood ratio" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--covariates", "korn", "--value", "yield"], "'korn': did you mean 'corn'?"),
        (["--covariates", "corn"], "unknown column of"),
        (["--covariates", "yield", "corn", "--value", "yield"], "value and covariates must be different columns, got"),
        (["--covariates", "corn", "--values", "yield"], "covariates require a row for each sample: give --value"),
        (["--covariates", "corn", "soy", "--epsilon", "1"], "epsilon is not available with --covariates"),
    ],
)
def test_what_would_be_ignored_is_refused_in_a_line(capsys, tmp_path, args, said):
    refused = jaxpfl(capsys, "estimate", "gaussian", "--csv", own(tmp_path)[0], *args)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert said in refused.err
