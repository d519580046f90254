"""``jaxpfl estimate histogram``: its table, plots and export on small users, and the rows of the paper's table.

The program of the private rows takes longer to compile than all else here, so there is one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpfl.benchmarks.papers import registry as papers
from jaxpfl.benchmarks.papers import results, run
from jaxpfl.benchmarks.papers.way import Way
from jaxpfl.cli import main
from jaxpfl.studies import registry

SMALL = [
    *("estimate", "histogram", "--users", "80", "--tokens", "40", "--components", "2", "--clusters", "2"),
    *("--samples", "30", "--samples-spread", "0.5", "--rounds", "3", "--private-rounds", "2", "--em-steps", "2"),
    *("--kept-tokens", "10", "--candidates", "20", "--repetitions", "2", "--block", "32"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One run in a folder: summary, plots, and the export of private centers. Later runs have those results of this
    that they ask for."""
    folder, study, kept = tmp_path_factory.mktemp("histogram"), registry.get("histogram"), []

    def once(given: Any, *more: Any) -> Any:
        kept[:] = kept or [study.results(given, *more)]
        columns = ("non-private", *(f"epsilon {epsilon:g}" for epsilon in given.epsilon))
        return kept[0]._replace(series={name: own for name, own in kept[0].series.items() if name.endswith(columns)})

    out, archive = str(folder / "run"), str(folder / "own.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "get", {"histogram": replace(study, results=once)}.get)
        main([*SMALL, "--epsilon", "3", "15", "--output", out, "--export", archive, "--export-epsilon", "15"])
        yield folder


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
    three = dict.fromkeys(("IFCA", "Algorithm 2", "Standardized"), 3)
    assert releases == three | {"FedAvg": 1, "FedAvg, denoised": 1, "Algorithm 2 + DimRed": 4}
    for name in releases:
        assert spent[name]["epsilon"] == pytest.approx(15, rel=1e-4)
        assert spent[name]["relation"] == "add-or-remove-one"
    assert sorted(found["plots"]) == [f"plots/{n}.png" for n in ("kl-epsilon", "misclustering")]
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
@pytest.mark.usefixtures("made")
def test_the_papers_rows_are_rows_of_the_study(tmp_path: Path):
    """Those that `jaxpfl papers run histograms-table1 --quick` shows, of this run of the study."""
    one = papers.get("histograms-table1")
    found = run.run(one, Way(results.place(tmp_path, one, quick=True), quick=True))
    assert len(found.rows) == len(one.cases[0].estimates)
    assert all(np.isfinite(row.ours) for row in found.rows)
    assert all(row.difference is None and "not comparable" in row.note for row in found.rows)
    assert results.of_folder(tmp_path).results == [found]
