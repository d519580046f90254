"""Private priors of a file's successes and counts on the command line: the claim, the output, and refusals."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from normal_means_command import numbered, refused

from jaxpfl.cli import main
from jaxpfl.core.randomness import named
from jaxpfl.estimators import ebbinomial
from jaxpfl.estimators.private_rates import private_ebbinomial, private_ebpoisson
from jaxpfl.studies.own_data import private_fits


@pytest.fixture(scope="module")
def data() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    n, e = rng.integers(10, 60, 300), rng.uniform(2, 6, 300).round(3)
    return {
        "successes,trials": (rng.binomial(n, rng.beta(2, 6, 300)), n),
        "count,exposure": (rng.poisson(rng.gamma(2, 0.7, 300) * e), e),
    }


def written(folder: Path, header: str, data: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    path = folder / "own.csv"
    path.write_text(numbered(header, *data[header]))
    return path


@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize("most", [None, 25])
def test_the_claim(delta, most):
    said = "\n".join(
        private_fits.said({"epsilon": 2.0, "delta": delta, "cells": 33, "sizes": [10, 20], "most_events": most})
    )
    if delta is None:
        assert "private: epsilon 2, pure, by a randomised bit of each client for each of 33 cells" in said
    else:
        assert "private: adding or removing a client, epsilon 2, delta 1e-06, noise on counts of 33 cells" in said
    public = "trials of 10, 20" if most is None else "exposures of 10, 20, counts of at most 25"
    assert f"taken for public: {public}" + ", who took part" * (delta is None) + "\n" in said
    assert "not private: all else in this summary (clients, tests, warnings) and the rows of estimates.csv" in said
    assert "keep the seed to yourself" in said


def test_no_two_releases_share_their_noise(monkeypatch):
    """Also not at two epsilons: bits that change between them from the same draws would say which way they lie."""
    keys = []

    def keep(key, *of, **more):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        raise InterruptedError

    monkeypatch.setattr(private_fits, "private_ebbinomial", keep)
    monkeypatch.setattr(private_fits, "private_ebnm", keep)
    z, n, grid = np.arange(3.0), np.full(3, 9.0), {"range": (-1.0, 9.0), "error_range": (1.0, 9.0)}
    given = {"components": None, "delta": None, "epsilon": 1.0, "sizes": (5.0,), "most_events": None, "prior": "npmle"}
    changes = [{}, {"epsilon": 2.0}, {"delta": 1e-6}]
    for change in changes:
        options = SimpleNamespace(**given | grid | change)
        with pytest.raises(InterruptedError):
            private_fits.of_counts("successes", z, n, 0, None, options)
        with pytest.raises(InterruptedError):
            private_fits.fitted(z, n, 0, options)
    with pytest.raises(InterruptedError):
        private_fits.of_counts("successes", z, n, 0, None, SimpleNamespace(**given | {"sizes": (6.0,)}))
    assert len(set(keys)) == len(keys) == 7


@pytest.mark.slow
def test_the_claim_and_the_output_of_successes(capsys, tmp_path, data):
    path = written(tmp_path, "successes,trials", data)
    own = ["estimate", "normal-means", "--csv", str(path), "--epsilon", "8", "--sizes", "10", "20"]
    main([*own, "--output", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "the prior alone is private: epsilon 8, pure, by a randomised bit of each client for each of 33 cells" in said
    )
    assert "taken for public: trials of 10, 20, who took part" in said
    assert "not private: all else in this summary (clients, tests, warnings) and the rows of estimates.csv" in said
    assert "log likelihood" not in said
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["privacy"] == {
        "epsilon": 8, "delta": None, "form": "local", "cells": 33, "sizes": [10, 20], "most_events": None
    }  # fmt: skip
    assert found["intervals"] == "plug-in"
    assert "log_marginal" not in found
    z, n = (np.array(of, float) for of in data["successes,trials"])
    with jax.enable_x64(True):
        key = named(jax.random.key(found["settings"]["seed"]), z, n, (10.0, 20.0), None, 8.0, None)
        fit: Any = private_ebbinomial(key, z, n, [10, 20], epsilon=8.0)
        plain, exceedance = ebbinomial(z, n), fit.exceedance()
    assert found["estimated"]["mean"] == float(fit.prior_mean) != float(plain.prior_mean)
    with open(tmp_path / "out" / "estimates.csv") as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["personalized"]) for row in rows], fit.mean, rtol=1e-9)
    np.testing.assert_allclose([float(row["exceedance"]) for row in rows], exceedance, rtol=1e-9)


@pytest.mark.slow
def test_the_claim_and_the_output_of_counts(capsys, tmp_path, data):
    path = written(tmp_path, "count,exposure", data)
    own = ["estimate", "normal-means", "--csv", str(path), "--epsilon", "2", "--delta", "1e-6", "--sizes", "2"]
    own += ["--most-events", "25", "--prior", "gamma-mixture", "--json"]
    main(own)
    found = json.loads(capsys.readouterr().out)
    assert found["privacy"] == {
        "epsilon": 2, "delta": 1e-6, "form": "central", "cells": 27, "sizes": [2], "most_events": 25
    }  # fmt: skip
    z, e = (np.array(of, float) for of in data["count,exposure"])
    with jax.enable_x64(True):
        key = named(jax.random.key(found["settings"]["seed"]), z, e, (2.0,), 25, 2.0, 1e-6)
        fit: Any = private_ebpoisson(key, z, e, [2.0], 25, epsilon=2.0, delta=1e-6, prior="gamma-mixture")
        np.testing.assert_allclose(found["estimated"]["mean"], fit.prior.weights @ fit.prior.means)
    main(own[:-1])
    said = " ".join(capsys.readouterr().out.split())
    assert "adding or removing a client, epsilon 2, delta 1e-06, noise on counts of 27 cells" in said
    assert "taken for public: exposures of 2, counts of at most 25 not private" in said


@pytest.mark.slow
def test_noise_that_hides_all_counts_is_told(capsys, tmp_path, data):
    path = written(tmp_path, "successes,trials", data)
    main(["estimate", "normal-means", "--csv", str(path), "--epsilon", "0.001", "--sizes", "10", "--json"])
    assert "warning: the noise hides the counts of all cells: nothing was learned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "more", "said"),
    [
        (
            "successes,trials",
            [],
            "own.csv: sizes must be public numbers of trials, or exposures, with epsilon, got none",
        ),
        (
            "successes,trials",
            ["--sizes", "1"],
            "own.csv: sizes must be different public numbers of at least 2, got [1]",
        ),
        ("successes,trials", ["--sizes", "10", "10"], "sizes must be different public numbers"),
        ("successes,trials", ["--sizes", "9.5"], "sizes must be a whole number of at least 1, got 9.5"),
        ("successes,trials", ["--sizes", "nan"], "sizes"),
        ("successes,trials", ["--sizes", "1e9"], "must make at most 100000 cells, got 1000000001"),
        ("successes,trials", ["--sizes", "9", "--most-events", "5"], "most_events is of count,exposure, and successes"),
        ("successes,trials", ["--sizes", "9", "--range", "0", "1"], "range is of estimate,se, and own.csv has succ"),
        ("successes,trials", ["--sizes", "9", "--prior", "best"], "prior best is without --epsilon"),
        ("successes,trials", ["--sizes", "9", "--covariates", "x"], "covariates is without --epsilon"),
        ("successes,trials", ["--sizes", "9", "--delta", "2"], "delta must be > 0 and < 1, got 2"),
        ("count,exposure", ["--sizes", "2"], "own.csv: most_events, the greatest thinned count, must be a public"),
        ("count,exposure", ["--sizes", "2", "--most-events", "0"], "most must be a whole number of at least 1, got 0"),
        ("count,exposure", ["--sizes", "-2", "--most-events", "5"], "exposures must be"),
    ],
)
def test_impossible_requests_are_refused_in_a_line(capsys, tmp_path, data, header, more, said):
    path = written(tmp_path, header, data)
    assert said in refused(capsys, "--csv", path, "--epsilon", "1", *more)


def test_flags_that_would_do_nothing_are_refused(capsys, tmp_path, data):
    path = written(tmp_path, "successes,trials", data)
    assert "sizes needs epsilon, without which nothing is private" in refused(capsys, "--csv", path, "--sizes", "9")
    assert "epsilon must be > 0" in refused(capsys, "--csv", path, "--epsilon", "-1", "--sizes", "9")
    other = tmp_path / "means.csv"
    other.write_text("id,estimate,se\na,1,1\nb,2,1\nc,3,1\n")
    own = ("--csv", other, "--epsilon", "1", "--range", "0", "4", "--error-range", "0.5", "1")
    assert "sizes is of successes and counts, and means.csv has est" in refused(capsys, *own, "--sizes", "9")
    assert "sizes is of --csv, and there is none" in refused(capsys, "--sizes", "9")
