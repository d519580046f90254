"""Counts of categories of one's own clients: what the command reads, writes and refuses."""

import csv
import json

import jax
import numpy as np
import pytest
from test_normal_means_study import made, refused

from jaxpfl.cli import main
from jaxpfl.estimators import ebmultinomial, learned_bernoulli
from jaxpfl.studies.own_data import categories


@pytest.mark.slow
def test_counts_of_categories(capsys, tmp_path):
    c = np.array([[1, 2, 3], [4, 0, 9], [1, 12, 3], [3, 3, 3]])
    rows = "\n".join(f"{a},{name},{b},{d}" for name, (a, b, d) in zip("abcd", c, strict=True))
    path, out = made(tmp_path, f"Count:Red,Client,count:blue,count:none\n{rows}\n"), tmp_path / "out"
    main(["estimate", "normal-means", "--csv", str(path), "--level", "0.9", "--json", "--output", str(out),
          "--intervals", "plug-in"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    with jax.enable_x64(True):
        fit = ebmultinomial(c)
        low, high = fit.interval(0.9)
    fit = jax.tree.map(np.asarray, fit)
    assert found["read"] == {
        "client": "Client",
        "columns": ["count:Red", "count:blue", "count:none"],
        "ignored": [],
    }
    assert found["plots"] == [f"plots/shrinkage-{k}.png" for k in (1, 2, 3)]
    np.testing.assert_allclose([row["mean"] for row in found["categories"]], fit.prior_mean)
    spread = np.sqrt(fit.prior_mean * (1 - fit.prior_mean) / (1 + fit.prior_size))
    np.testing.assert_allclose([row["sigma_theta"] for row in found["categories"]], spread)
    np.testing.assert_allclose([found["prior_size"], found["clients_differ"]["p_value"]], [fit.prior_size, fit.p_value])
    with open(out / "estimates.csv") as file:
        clients = list(csv.DictReader(file))
    assert [(row["client"], row["counts"]) for row in clients] == [("a", "6"), ("b", "13"), ("c", "16"), ("d", "9")]
    columns = {"local": c / c.sum(axis=1, keepdims=True), "personalized": fit.mean, "personalized_stderr": fit.sd}
    for part, values in {**columns, "low": np.minimum(low, fit.mean), "high": np.maximum(high, fit.mean)}.items():
        for k, name in enumerate(("Red", "blue", "none")):
            np.testing.assert_allclose([float(row[f"{part}:{name}"]) for row in clients], values[:, k], rtol=1e-8)
    wide_low, wide_high, _ = categories.integrated(c, 0.9)
    assert (wide_high - wide_low > np.asarray(high - low)).mean() > 0.5
    main(["estimate", "normal-means", "--csv", str(path)])
    assert "read as: counts of 3 categories of 4 clients, named by Client" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,count:a\nx,1\n", "own.csv: needs at least two columns count:NAME, got count:a alone"),
        ("id,count:a,count:\nx,1,2\n", "own.csv: column 'count:' has no category's name"),
        ("id,count:a,count:a\nx,1,2\n", "own.csv line 1: two columns are named 'count:a'"),
        ("id,count:a,Count:a\nx,1,2\n", "own.csv: 2 columns are called count:a"),
        ("count:a,count:b,estimate,se\n1,2,3,4\n", "own.csv: has columns estimate,se and count:NAME: keep one kind"),
        ("id,count:a,count:b\nx,1,2\ny,1,2.5\n", "line 3: count:b must be a whole number of at least 0, got 2.5"),
        ("id,count:a,count:b\nx,1,-2\n", "own.csv line 2: count:b must be a whole number of at least 0, got -2"),
        ("id,count:a,count:b\nx,1,2\ny,1\n", "own.csv line 3: count:b must be a finite number, got ''"),
        ("id,count:a,count:b\nx,1,2,7\n", "own.csv line 2: 4 cells, the header has 3"),
        ("id,count:a,count:b\nx,1,2\ny,3,2\nUSA,4,4\n", "own.csv: client 'USA' is the sum of all others"),
        ("id,count:a,count:b\nx,1,2\ny,0,0\n", "own.csv line 3: a client without any count: leave it out"),
        ("id,count:a,count:b\nx,1,0\ny,3,0\n", "own.csv: category 'b' has no counts: leave it out"),
        ("count:a,count:b,id\n1,2,x\n3,1,x\n", "own.csv line 3: client 'x' is in line 2 too"),
        ("count:a,count:b,name\n1,2,x\n3,1,y\n", "no column is called client or id, of count:a, count:b, name: write"),
        ("id,count:a,count:b\nx,1,2\n", "counts must be of at least 2 clients and 2 categories, got shape (1, 2)"),
    ],
)
def test_bad_counts_of_categories_are_refused_in_a_line(capsys, tmp_path, text, said):
    assert said in refused(capsys, "--csv", made(tmp_path, text))


def test_options_of_other_summaries_are_refused(capsys, tmp_path):
    path = made(tmp_path, "id,count:a,count:b\nx,1,2\ny,3,4\n")
    for option, value in (("prior", "npmle"), ("weights", "count:a"), ("groups", "x"), ("components", "3")):
        said = f"{option} is of other summaries, and own.csv has count:NAME, got {value}"
        assert said in refused(capsys, "--csv", path, f"--{option}", value)


def test_intervals_of_two_categories_are_those_of_a_probability():
    c = np.array([[1, 9], [4, 6], [0, 8], [3, 3]])
    low, high, stderr = categories.integrated(c, 0.9)
    one = learned_bernoulli.believed(c[:, 0], c.sum(axis=1), 0.9)
    np.testing.assert_allclose([low[:, 0], high[:, 0], stderr[:, 0]], one)
    np.testing.assert_allclose([1 - high[:, 1], 1 - low[:, 1]], one[:2], rtol=0.02, atol=2e-3)


@pytest.mark.slow
def test_intervals_of_categories_cover():
    """Shares of 12 clients that are all alike, and that differ: 95 % less four standard errors over files, a false
    alarm in about 3e-5 of the seeds if coverage is 95 %."""
    rng = np.random.default_rng(0)
    pooled = np.array([0.5, 0.3, 0.2])
    for size in (np.inf, 10.0):
        covered = []
        for _ in range(60):
            theta = np.tile(pooled, (12, 1)) if np.isinf(size) else rng.dirichlet(size * pooled, 12)
            low, high, _ = categories.integrated(np.stack([rng.multinomial(20, own) for own in theta]), 0.95)
            covered.append(((low <= theta) & (theta <= high)).mean())
        assert np.mean(covered) > 0.95 - 4 * np.std(covered, ddof=1) / len(covered) ** 0.5
