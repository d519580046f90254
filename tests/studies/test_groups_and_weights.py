"""Clients of one's own in groups, and weighted: what the command reads, writes and refuses."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from test_normal_means_study import made, refused

from jaxpfl.cli import main
from jaxpfl.estimators import ebnm, ebnm_groups


def own(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, np.ndarray]:
    """A file of 24 pupils in six schools, with their x, s and schools."""
    rng = np.random.default_rng(0)
    group, s = np.tile(np.arange(6), 4), rng.uniform(0.5, 1, 24)
    x = 1.5 * rng.normal(size=6)[group] + rng.normal(size=24)
    rows = "\n".join(f"p{i},s{group[i]},{x[i]},{s[i]},{i % 5}" for i in range(24))
    return made(tmp_path, f"id,School,estimate,se,people\n{rows}\n"), x, s, group


@pytest.mark.slow
def test_a_private_prior(capsys, tmp_path):
    path = own(tmp_path)[0]
    command = ["estimate", "normal-means", "--csv", str(path), "--epsilon", "2", "--range", "-8", "8"]
    main([*command, "--error-range", "0.5", "1", "--delta", "1e-6", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["privacy"] == {
        "epsilon": 2, "delta": 1e-6, "form": "central", "cells": 64, "range": [-8, 8], "error_range": [0.5, 1]
    }  # fmt: skip
    main([*command, "--error-range", "0.5", "1", "--prior", "normal"])
    said = capsys.readouterr().out
    said = " ".join(said.split())
    assert "the prior alone is private: epsilon 2, pure, by a randomised bit of each client for each of 64" in said
    assert "not private: all else in this summary" in said
    assert "keep the seed to yourself" in said
    assert "error_range must be two public numbers with epsilon, got []" in refused(capsys, *command[2:])
    for more, why in (
        (("--prior", "best"), "prior best is without --epsilon"),
        (("--center", "1"), "center is without --epsilon"),
        (("--groups", "school"), "groups is without --epsilon"),
    ):
        assert why in refused(capsys, *command[2:], "--error-range", "0.5", "1", *more)
    assert "range needs epsilon" in refused(capsys, "--csv", path, "--range", "-8", "8")


@pytest.mark.slow
def test_clients_in_groups(capsys, tmp_path):
    path, x, s, group = own(tmp_path)
    out = tmp_path / "out"
    options = ("--groups", "school", "--fit", "ml", "--level", "0.9")
    main(["estimate", "normal-means", "--csv", str(path), *options, "--json", "--output", str(out)])
    found = json.loads(capsys.readouterr().out)
    with jax.enable_x64(True):
        fit = ebnm_groups(x, s, group, fit="ml")
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
    with open(out / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
    assert [row["group"] for row in clients] == [f"s{g}" for g in group]
    columns = {"personalized": fit.mean, "personalized_stderr": fit.mse**0.5, "low": ends[0], "high": ends[1]}
    for name, values in {**columns, "group_mean": fit.group_mean[group], "residual": fit.residual}.items():
        np.testing.assert_allclose([float(row[name]) for row in clients], values, rtol=1e-9, atol=1e-12)
    with open(out / "groups.csv") as file:
        groups = list(csv.DictReader(file))
    assert [(row["group"], row["clients"]) for row in groups] == [(f"s{g}", "4") for g in range(6)]
    columns = {"mean": fit.group_mean, "stderr": fit.group_mse**0.5, "low": group_ends[0], "high": group_ends[1]}
    for name, values in columns.items():
        np.testing.assert_allclose([float(row[name]) for row in groups], values, rtol=1e-9, atol=1e-12)
    assert found["outlying"] == []
    assert found["groups_outlying"] == []
    plots = {of.name for of in (out / "plots").iterdir()}
    assert plots == {"shrinkage.png", "quantiles.png", "group-quantiles.png"}
    main(["estimate", "normal-means", "--csv", str(path), *options])
    assert "learned of 6 groups by ml: mean" in (said := capsys.readouterr().out)
    assert "groups differ: likelihood ratio" in said
    assert "of the groups, no group is outlying under the fitted prior" in said


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["normal", "npmle"])
def test_weighted_clients(capsys, tmp_path, prior):
    path, x, s, _ = own(tmp_path)
    out, w = tmp_path / "out", np.arange(24) % 5
    main(
        ["estimate", "normal-means", "--csv", str(path), "--weights", "People", "--prior", prior, "--output", str(out)]
    )
    assert f"prior weighted by people: as by {w.sum() ** 2 / (w**2).sum():.4g} equal cl" in capsys.readouterr().out
    with jax.enable_x64(True):
        fit = ebnm(x, s, prior=prior, weights=w)
        low, high = fit.interval()
        low, high = np.minimum(low, fit.mean), np.maximum(high, fit.mean)  # an NPMLE's mean may lie between atoms
    with open(out / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
    for name, values in {"personalized": fit.mean, "personalized_stderr": fit.sd, "low": low, "high": high}.items():
        np.testing.assert_allclose([float(row[name]) for row in clients], values, rtol=1e-6, atol=1e-9)
    found = json.loads((out / "summary.json").read_text())
    np.testing.assert_allclose(found["log_marginal"], fit.log_marginal)
    assert found["weights"]["column"] == "people"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "shcool"], "own.csv 'shcool': did you mean 'school'? (known: estimate, gap"),
        (["--groups", "se"], "own.csv: column 'se' is asked for twice"),
        (["--groups", "gap"], "own.csv line 3: no name in column 'gap', got ''"),
        (["--groups", "id"], "own.csv: column 'id' is asked for twice"),
        (["--groups", "school"], "own.csv: needs at least 3 groups, got 2"),
        (["--groups", "school", "--covariates", "minus"], "groups is without --covariates"),
        (["--groups", "school", "--prior", "npmle"], "prior is without --groups"),
        (["--groups", "school", "--weights", "zero"], "weights is without --groups"),
        (["--weights", "people"], "own.csv 'people' (known: estimate, gap"),
        (["--weights", "zero"], "own.csv: weights must be > 0 for at least 2 clients, got 0"),
        (["--weights", "minus"], "own.csv line 3: minus must be at least 0, got '-1'"),
        (["--weights", "nan"], "own.csv line 2: nan must be a finite number, got 'nan'"),
        (["--weights", "zero", "--prior", "best"], "weights is of a given --prior"),
        (["--weights", "zero", "--covariates", "minus"], "weights is without --covariates"),
        (["--weights", "zero", "--covariates", "zero"], "weights is without --covariates"),
    ],
)
def test_bad_groups_and_weights_are_refused_in_a_line(capsys, tmp_path, arguments, said):
    path = made(
        tmp_path,
        "id,estimate,se,school,gap,minus,nan,zero\n"
        "a,1,1,u,x,1,nan,0\nb,2,1,u,,-1,1,0\nc,3,1,v,x,2,1,0\nd,3,2,v,x,1,1,0\n",
    )
    assert said in refused(capsys, "--csv", path, *arguments)


def test_groups_and_weights_of_other_summaries_and_without_a_file_are_refused(capsys, tmp_path):
    path = made(tmp_path, "id,count,exposure,school\nx,1,2,a\ny,1,3,b\n")
    for name in ("groups", "weights"):
        said = refused(capsys, "--csv", path, f"--{name}", "exposure")
        assert "own.csv: column 'exposure' is asked for twice" in said
        assert f"{name} is of --csv, and there is none, got school" in refused(capsys, f"--{name}", "school")
    said = refused(capsys, "--csv", path, "--groups", "school")
    assert "groups is of estimate,se, and own.csv has count,exposure" in said
