"""The demos beside the figures that were published of their data."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.data.sources.elections import Elections
from jaxpfl.estimators import ebbinomial
from jaxpfl.studies import demo
from jaxpfl.studies.demo import DemoSettings
from jaxpfl.support.errors import JaxpflError


def test_batters_have_the_published_errors(capsys):
    """Efron and Morris 1975: 17.58 and 5.00 on the arcsine scale, with the weight .209."""
    main(["estimate", "demo", "batting", "--json"])
    found = json.loads(capsys.readouterr().out)
    total = found["total_squared_error"]
    assert round(total["local"], 2) == 17.58
    assert round(total["personalized"], 2) == 5.00
    assert round(found["weight"], 3) == 0.209
    assert total["personalized"] < total["normal prior"] < total["global"] < total["local"]
    averages = found["total_squared_error_of_averages"]
    assert (round(averages["local"], 3), round(averages["personalized"], 3)) == (0.075, 0.022)
    assert len(found["clients"]) == found["number_of_clients"] == 18
    assert all(row["low"] < row["personalized"] < row["high"] for row in found["clients"])
    assert sum(row["low"] <= row["later"] <= row["high"] for row in found["clients"]) >= 16


def test_schools_have_the_published_mean():
    """Rubin 1981: 7.69 with a standard error of 4.07; the likeliest spread is zero, and the intervals are not."""
    found = demo.run(DemoSettings("schools")).json
    assert {name: round(value, 2) for name, value in found["pooled"].items()} == {"mean": 7.69, "stderr": 4.07}
    assert found["sigma_theta"] == 0
    low, high = found["plug_in_interval"]
    assert low == high
    assert "total_squared_error" not in found
    for row in found["clients"]:
        assert row["high"] - row["low"] > 25
    spread = {name: np.ptp([row[name] for row in found["clients"]]) for name in ("local", "personalized")}
    assert 0 < spread["personalized"] < spread["local"] / 2


def test_counties_of_made_up_elections():
    """The Beta prior's estimate errs less than a county's own share."""
    rng = np.random.default_rng(0)
    won = (rng.random((400, 6)) < rng.beta(1, 2, 400)[:, None]).astype(float)
    elections = Elections(np.array([f"{i:05d}" for i in range(400)]), np.arange(2000, 2024, 4), won)
    results = demo.run(DemoSettings("elections"), elections)
    total = results.json["total_squared_error"]
    assert total["personalized"] < min(total["local"], total["global"])
    np.testing.assert_allclose(total["local"], ((won[:, :5].mean(axis=1) - won[:, 5]) ** 2).sum())
    assert "clients" not in results.json
    assert sum(row["counties"] for row in results.json["by_wins"]) == 400
    assert results.json["held_out_year"] == 2020


def made_up(counties: int = 300) -> Elections:
    """Counties of ten states with votes: two elections, of which the second is nearly the first."""
    rng = np.random.default_rng(0)
    state = np.arange(counties) % 10
    logits = rng.normal(size=10)[state] + 0.7 * rng.normal(size=counties)
    size = rng.integers(60, 3000, (counties, 2))
    p = 1 / (1 + np.exp(-logits[:, None] - 0.2 * rng.normal(size=(counties, 2))))
    republican = rng.binomial(size, p)
    votes = np.stack([size - republican, republican], axis=2)
    codes = np.array([f"{g:02d}{i:03d}" for i, g in enumerate(state)])
    return Elections(codes, np.array([2016, 2020]), (votes[..., 1] > votes[..., 0]).astype(float), votes)


@pytest.mark.slow
def test_polls_of_made_up_counties():
    """The estimates and coverage of the plain prior are those of its fit; states and the election before are worth it.
    Of 300 counties 95 % intervals cover 285 on average, more than 269 in all but 2e-4 of the seeds."""
    elections = made_up()
    assert elections.votes is not None
    found = demo.run(DemoSettings("polls"), elections).json
    votes = elections.votes[:, 1]
    truth = votes[:, 1] / votes.sum(axis=1)
    z = np.random.default_rng(0).hypergeometric(votes[:, 1], votes[:, 0], 20)
    with jax.enable_x64(True):
        fit = ebbinomial(z, 20)
        own, low, high = (np.asarray(of) for of in (fit.mean, *fit.interval(0.95)))
    total = found["total_squared_error"]
    np.testing.assert_allclose(total["local"], ((z / 20 - truth) ** 2).sum())
    np.testing.assert_allclose(total["personalized"], ((own - truth) ** 2).sum())
    covered = found["intervals"]
    np.testing.assert_allclose(covered["personalized"]["coverage"], np.mean((low <= truth) & (truth <= high)))
    assert total["about before"] < total["in states"] < total["personalized"] < total["local"]
    assert covered["about before"]["length"] < covered["in states"]["length"] < covered["personalized"]["length"]
    assert min(of["coverage"] for of in covered.values()) > 269 / 300
    assert found["states"] == 10


def test_polls_need_enough_votes():
    elections = made_up()
    assert elections.votes is not None
    few = elections.votes.copy()
    few[4, 1] = [3, 2]
    with pytest.raises(JaxpflError, match="the example polls needs 20 votes of a county, got 5 of 04004"):
        demo.run(DemoSettings("polls"), elections._replace(votes=few))
    with pytest.raises(JaxpflError, match="the example polls needs votes of all elections"):
        demo.run(DemoSettings("polls"), elections._replace(votes=None))


@pytest.mark.slow
def test_real_counties(capsys):
    """The figures of docs/estimation.md."""
    if not (Path(os.environ.get("JAXPFL_DATA_DIR", "/nowhere")) / "elections").is_dir():
        pytest.skip("no elections in JAXPFL_DATA_DIR")
    totals = {}
    for example in ("elections", "polls"):
        main(["estimate", "demo", example, "--json"])
        totals[example] = json.loads(capsys.readouterr().out)["total_squared_error"]
    elections = {"local": 176.3, "personalized": 169.1, "about votes": 165.2}
    polls = {"local": 32.1, "personalized": 23.2, "about votes": 20.7, "in states": 20.7, "about before": 2.0}
    for name, expected in elections.items():
        assert round(totals["elections"][name], 1) == expected
    for name, expected in polls.items():
        assert round(totals["polls"][name], 1) == expected


@pytest.mark.slow
@pytest.mark.parametrize("example", ["batting", "schools"])
def test_tables_and_plots(tmp_path, capsys, example):
    main(["estimate", "demo", example, "--output", str(tmp_path / "out")])
    assert "personalized" in capsys.readouterr().out
    assert (tmp_path / "out" / "plots" / "shrinkage.png").stat().st_size > 10_000
    shutil.rmtree(tmp_path / "out")


def test_bad_values_are_refused_in_a_line(capsys, tmp_path):
    with pytest.raises(JaxpflError, match="level must be > 0 and < 1, got 1"):
        DemoSettings(level=1.0).check()
    for args, said in (
        (["bating"], "EXAMPLE must be batting, schools, elections or polls, got 'bating': did you mean batting?"),
        (["elections", "--data-dir", str(tmp_path)], "data set 'elections': no file"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["estimate", "demo", *args])
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
