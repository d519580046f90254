"""The demos beside the figures that were published of their data."""

import json
import shutil

import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.data.sources.elections import Elections
from jaxpfl.errors import JaxpflError
from jaxpfl.studies import demo
from jaxpfl.studies.demo import DemoSettings


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
        (["bating"], "EXAMPLE must be batting, schools or elections, got 'bating': did you mean batting?"),
        (["elections", "--data-dir", str(tmp_path)], "data set 'elections': no file"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["estimate", "demo", *args])
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
