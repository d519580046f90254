"""Counts of one's own clients on the command line: the choice of their prior."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.estimators import compare_binomial_priors, compare_poisson_priors
from jaxpfl.estimators.normal_means import best, leads


def written(path: Path, header: str, z: np.ndarray, n: np.ndarray) -> Path:
    path.write_text(header + "\n" + "\n".join(f"{a},{b}" for a, b in zip(z, n, strict=True)) + "\n")
    return path


def two_kinds(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    first = rng.random(40) < 0.5
    if kind == "successes,trials":
        n = np.full(40, 30)
        return rng.binomial(n, np.where(first, 0.1, 0.7)), n
    return rng.poisson(np.where(first, 2.0, 30.0)), np.full(40, 2)


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "normal-means", *map(str, args)])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "compare", "single"),
    [("successes,trials", compare_binomial_priors, "beta"), ("count,exposure", compare_poisson_priors, "gamma")],
)
def test_the_best_prior_of_counts(capsys, tmp_path, header, compare, single):
    z, n = two_kinds(header)
    path = written(tmp_path / "own.csv", header, z, n)
    main(["estimate", "normal-means", "--csv", str(path), "--prior", "best", "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "families of priors, per client" in said
    assert "risk" not in said
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    with jax.enable_x64(True):
        scores = {name: jax.tree.map(np.asarray, of) for name, of in compare(z, n).items()}
        behind = leads(scores)
    rows = {row["prior"]: row for row in found["compared"]}
    assert list(rows) == list(scores)
    assert found["prior"] == best(scores) != single
    for name, row in rows.items():
        np.testing.assert_allclose(row["held_out_log_density"], scores[name].log_densities.mean())
        np.testing.assert_allclose(
            [row["behind"], row["behind_stderr"]], [behind[name].difference, behind[name].stderr]
        )
    np.testing.assert_allclose(found["log_marginal"], rows[found["prior"]]["log_marginal"])


def test_impossible_comparisons_are_refused_in_a_line(capsys, tmp_path):
    path = written(tmp_path / "own.csv", "successes,trials", np.array([2, 0, 0]), np.array([4, 4, 4]))
    own = ("--csv", path, "--prior", "best")
    assert "own.csv: without clients 0, 3, ... (fold 0 of 3): all successes are zero" in refused(capsys, *own)
    assert "components is of a given --prior, and best" in refused(capsys, *own, "--components", "3")
    assert "intervals clients refit a prior to drawn clients" in refused(capsys, *own, "--intervals", "clients")
