"""``jaxpfl estimate histogram``: its table, plots and export on small users, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import jaxpfl

SMALL = [
    *("estimate", "histogram", "--users", "80", "--tokens", "40", "--components", "2", "--clusters", "2"),
    *("--samples", "30", "--samples-spread", "0.5", "--rounds", "3", "--private-rounds", "2", "--em-steps", "2"),
    *("--kept-tokens", "10", "--candidates", "20", "--repetitions", "2", "--block", "32"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run in a folder: summary, plots, and the export of private centers."""
    folder = tmp_path_factory.mktemp("histogram")
    from jaxpfl.cli import main

    out, archive = str(folder / "run"), str(folder / "own.npz")
    main([*SMALL, "--epsilon", "3", "15", "--output", out, "--export", archive, "--export-epsilon", "15"])
    return folder


@pytest.mark.slow
def test_summary(made: Path):
    found = json.loads((made / "run" / "summary.json").read_text())
    assert found["floor"] == 1e-6
    assert found["users"] == {"clients": 56, "validation": 16, "unseen": 8}
    exact, private = found["rows"]["non-private"], found["rows"]["epsilon 15"]
    for name in found["printed"]:
        assert name in exact
        assert name == "Local" or name in private
    for row in [*exact.values(), *private.values()]:
        assert np.isfinite([row["mean"], row["unseen"]]).all()
        assert row["mean"] >= 0
    assert exact["Bayes, population known"]["mean"] < exact["FedAvg + FT"]["mean"] < exact["FedAvg"]["mean"]
    assert private["Algorithm 2"]["interval"] > 0
    assert exact["FedAvg"]["interval"] == pytest.approx(0, abs=1e-6)  # nothing random but the data, which are one
    wrong = found["misclustering"]["wrong"]["Algorithm 2"]
    assert len(wrong) == 4
    assert all(0 <= share <= 0.5 for share in wrong)  # of two clusters
    spent = found["privacy"]["epsilon 15"]
    releases = {name: len(own["releases"]) for name, own in spent.items() if "releases" in own}
    three = dict.fromkeys(("IFCA", "Algorithm 2", "Standardised"), 3)
    assert releases == three | {"FedAvg": 1, "FedAvg, denoised": 1, "Algorithm 2 + DimRed": 4}
    for name in releases:
        assert spent[name]["epsilon"] == pytest.approx(15, rel=1e-4)
        assert spent[name]["relation"] == "add-or-remove-one"
    assert sorted(found["plots"]) == [f"plots/{n}.png" for n in ("cluster-tokens", "kl-epsilon", "misclustering")]
    assert all((made / "run" / plot).stat().st_size > 5000 for plot in found["plots"])


@pytest.mark.slow
def test_export(made: Path):
    with np.load(made / "own.npz") as own:
        assert own["histograms"].shape == (56, 40)
        np.testing.assert_allclose(own["histograms"].sum(axis=1), 1, rtol=1e-4)
        assert own["histograms"].min() > 0
        assert own["centers"].shape == (2, 40)
        assert set(own["cluster"]) <= {0, 1}
        assert (len(own["users"]), len(own["vocabulary"])) == (56, 40)


@pytest.mark.slow
def test_table_and_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Users of one's own from a CSV file, without privacy: the floor stands above the table."""
    rng = np.random.default_rng(0)
    lines = ["user,token,count"]
    for user in range(60):
        counts = rng.multinomial(40, rng.dirichlet(np.ones(15)))
        lines += [f"u{user},w{token},{count}" for token, count in enumerate(counts) if count]
    path = tmp_path / "counts.csv"
    path.write_text("\n".join(lines))
    result = jaxpfl(
        capsys,
        *("estimate", "histogram", "--data", f"csv:{path}", "--rounds", "2", "--repetitions", "1", "--em-steps", "2"),
        *("--epsilon", "--export", tmp_path / "own.npz"),
    )
    assert result.status == 0, result.err
    assert "s = 1e-06" in result.out
    assert "after the data: tokens 15, least_tokens 20, kept_tokens 1, candidates 15\n" in result.out
    with np.load(tmp_path / "own.npz") as own:
        assert own["histograms"].shape == (42, 15)
    assert "Algorithm 2, blended + FT" in result.out
    assert "Bayes" not in result.out
    assert "no eps covers that" in result.out
    refused = jaxpfl(capsys, "estimate", "histogram", "--data", f"csv:{path}", "--tokens", "30", "--kept-tokens", "40")
    assert (refused.status, refused.out) == (2, "")
    assert f"tokens must be at most 15 (those of csv:{path}), got 30" in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "twitter"], "data must be synthetic, irc, csv:FILE or leaf:FOLDER, got 'twitter'"),
        (["--data", "csv:nowhere.csv"], "cannot read nowhere.csv"),
        (["--epsilon", "100"], "epsilon 100 is too large for the printed calibration of 5 rounds"),
        (["--floor", "0.1"], "floor must be > 0 and below 1/1000, got 0.1"),
        (["--epsilon", "1e6"], "epsilon must be at most 200, got 1e+06"),
        (["--kept-tokens", "2000"], "kept_tokens must be at most 1000"),
        (["--lam", "2"], "lam must be >= 0 and <= 1, got 2.0"),
        (["--export-epsilon", "2"], "export_epsilon must be one of --epsilon 1, 3, 8, 15, got 2"),
        (["--export", "no/such/folder/a.npz"], "export: no folder no/such/folder"),
    ],
)
def test_refused_in_one_line(capsys: pytest.CaptureFixture[str], options, message):
    result = jaxpfl(capsys, "estimate", "histogram", *options)
    assert result.status == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert "Traceback" not in result.err
