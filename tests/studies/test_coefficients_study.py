"""Regressions of a table's clients: dense formulas, other units and orders of rows, the F test, bad tables."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxpfl.cli import main
from jaxpfl.estimators.empirical_bayes import differences
from jaxpfl.studies.coefficients import STUDY, CoefficientsOptions

ROWS = tuple[list[str], np.ndarray, list[str], np.ndarray]


def houses(m: int = 25, seed: int = 0) -> ROWS:
    """Clients, areas, kinds of heating and prices; the base price and that of an area are correlated."""
    rng = np.random.default_rng(seed)
    who, area, heating, price = [], [], [], []
    for i in range(m):
        base, per = rng.multivariate_normal([200, 3.0], [[2500, 20], [20, 0.5]])
        for _ in range(rng.integers(1, 8)):
            who.append(f"c{i:02d}")
            area.append(round(rng.uniform(30, 150), 1))
            heating.append(str(rng.choice(["gas", "pump"])))
            price.append(base + per * area[-1] + 20 * (heating[-1] == "pump") + rng.normal(0, 15))
    return who, np.array(area), heating, np.array(price)


def write(folder: Path, rows: ROWS, name: str = "houses.csv") -> Path:
    path = folder / name
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["city", "area", "heating", "price"])
        out.writerows(zip(*rows, strict=True))
    return path


def run(path: Path, **more: Any) -> dict[str, Any]:
    options = CoefficientsOptions(csv=path, target="price", client="city", **more)
    return STUDY.run(options=options).json


def written(folder: Path, path: Path, *more: str) -> dict[str, np.ndarray]:
    main(["estimate", "coefficients", "--csv", str(path), "--target", "price", "--client", "city",
          "--output", str(folder), *more])  # fmt: skip
    with open(folder / "estimates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("houses")
    path = write(folder, houses())
    columns = written(folder / "out", path)
    return path, columns, json.loads((folder / "out" / "summary.json").read_text())


NAMES = ("intercept", "area", "heating=pump")


def part(columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    return np.stack([columns[f"{name}:{of}"].astype(float) for of in NAMES], axis=1)


def test_estimates_are_those_of_dense_formulas_in_the_tables_units(table):
    """With the population of the summary: posterior means, and errors that count the mean's own."""
    _, columns, summary = table
    who, area, heating, price = houses()
    x = np.stack([np.ones(len(area)), area, np.array(heating) == "pump"], axis=1).astype(float)
    spread = np.array([row["sigma_theta"] for row in summary["coefficients"]])
    covariance, mu = np.outer(spread, spread) * summary["correlations"], [r["mean"] for r in summary["coefficients"]]
    own = [np.array(who) == name for name in columns["client"]]
    v = [x[at] @ covariance @ x[at].T + summary["sigma"] ** 2 * np.eye(at.sum()) for at in own]
    of_mean = np.linalg.inv(sum(x[at].T @ np.linalg.solve(of, x[at]) for at, of in zip(own, v, strict=True)))
    of_labels = sum(x[at].T @ np.linalg.solve(of, price[at]) for at, of in zip(own, v, strict=True))
    np.testing.assert_allclose(mu, of_mean @ of_labels, rtol=1e-3)
    for i, (at, of) in enumerate(zip(own, v, strict=True)):
        gain = covariance @ x[at].T @ np.linalg.inv(of)
        kept = np.eye(3) - gain @ x[at]
        np.testing.assert_allclose(part(columns, "personalized")[i], mu + gain @ (price[at] - x[at] @ mu), rtol=1e-5)
        error = np.sqrt(np.diag(kept @ covariance + kept @ of_mean @ kept.T))
        np.testing.assert_allclose(part(columns, "personalized_stderr")[i], error, rtol=1e-5)
    reach = part(columns, "high") - part(columns, "personalized")
    np.testing.assert_allclose(reach, stats.norm.ppf(0.975) * part(columns, "personalized_stderr"), rtol=1e-9)
    many = columns["examples"].astype(int) >= 5
    for i in np.flatnonzero(many):
        at = own[i]
        if np.linalg.matrix_rank(x[at]) == 3:
            np.testing.assert_allclose(
                part(columns, "local")[i], np.linalg.lstsq(x[at], price[at], rcond=None)[0], rtol=1e-6
            )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_units_and_the_order_of_rows_change_nothing_else(tmp_path, rank):
    who, area, heating, price = houses()
    turned = np.random.default_rng(1).permutation(len(who))
    other = [who[i] for i in turned], (10 * area + 3)[turned], [heating[i] for i in turned], 0.01 * price[turned] - 7
    a = written(tmp_path / "a", write(tmp_path, (who, area, heating, price), "a.csv"), "--rank", str(rank))
    b = written(tmp_path / "b", write(tmp_path, other, "b.csv"), "--rank", str(rank))
    assert (a["client"] == b["client"]).all()
    for name in ("personalized", "low", "high"):
        got, want = part(b, name), part(a, name)
        np.testing.assert_allclose(got[:, 1], 0.001 * want[:, 1], rtol=1e-6)
        np.testing.assert_allclose(got[:, 2], 0.01 * want[:, 2], rtol=1e-6)
    want = 0.01 * (part(a, "personalized")[:, 0] - 0.3 * part(a, "personalized")[:, 1]) - 7
    np.testing.assert_allclose(part(b, "personalized")[:, 0], want, rtol=1e-6)


def test_a_table_says_what_a_reader_needs(table):
    path, _, summary = table
    assert summary["clients"] == 25
    assert summary["read"]["coefficients"] == list(NAMES)
    # A fifth of the clients have one example, which says nothing where it is held out.
    errors = {name: row["mean"] for name, row in summary["mse"].items()}
    assert errors["personalized"] < 0.6 * min(errors["local"], errors["pooled"])
    assert summary["clients_differ"]["p_value"] < 1e-6
    without = run(path, no_intercept=True)
    assert without["read"]["coefficients"] == ["area", "heating=gas", "heating=pump"]


def test_the_test_that_clients_differ_by_hand_and_under_one_regression():
    """Two clients by the textbook's sums; then 300 tables of one regression, p-values uniform by Kolmogorov's test
    (false alarms: 1e-4), with clients of one and two examples of three coefficients among them."""
    rng = np.random.default_rng(0)
    x, y = np.stack([np.ones(12), rng.normal(size=12)], axis=1), rng.normal(size=12)
    users = np.repeat([0, 1], [5, 7])

    def left(rows):
        return np.linalg.lstsq(x[rows], y[rows], rcond=None)[1][0]

    apart = left(users == 0) + left(users == 1)
    want = (left(users >= 0) - apart) / 2 / (apart / 8)
    found = differences.of_regressions(x, y, users)
    assert found is not None
    assert found.statistic == pytest.approx(want, rel=1e-9)
    assert found.p_value == pytest.approx(stats.f.sf(want, 2, 8), rel=1e-9)

    users, p_values = np.repeat(np.arange(6), [1, 2, 2, 5, 6, 9]), []
    for _ in range(300):
        x = np.hstack([np.ones((len(users), 1)), rng.normal(size=(len(users), 2))])
        made = differences.of_regressions(x, x @ [1.0, 2.0, -1.0] + rng.normal(size=len(users)), users)
        assert made is not None
        p_values.append(made.p_value)
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    assert differences.of_regressions(np.ones((3, 1)), np.arange(3.0), np.arange(3)) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--target", "price"),
            "no column is called client or id, of city, area, heating, price: write --client city, or --client area",
        ),
        (("--target", "prise", "--client", "city"), "price"),
        (("--client", "city"), "target = COLUMN is needed"),
        (("--target", "price,area", "--client", "city"), "one column of labels at a time"),
        (("--target", "heating", "--client", "city"), "holds text"),
        (("--target", "price", "--client", "city", "--rank", "4"), "rank must be from 0 to the 3 coefficients, got 4"),
        (("--target", "price", "--client", "city", "--level", "1"), "level"),
        (("--target", "price", "--client", "city", "--samples", "9"), "samples is of simulated data"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, arguments, said):
    path = write(tmp_path, houses(6))
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", "coefficients", "--csv", str(path), *arguments])
    assert stopped.value.code
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([7.0] * 4, "column 'more' is the same in every row"),
        ([1.0, 2.0, 3.0, 4.0], "'more' is a linear combination of the intercept and the columns before it"),
    ],
)
def test_columns_that_tell_nothing_are_named(tmp_path, capsys, column, said):
    path = tmp_path / "a.csv"
    rows = zip("aabb", (2.0, 4.0, 6.0, 8.0), column, (1.0, 2.5, 2.0, 3.0), strict=True)
    path.write_text("city,area,more,price\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        main(["estimate", "coefficients", "--csv", str(path), "--target", "price", "--client", "city"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a,1,2\nb,2,3\nc,4,3\nd,2,9\ne,5,5\nf,1,1\ng,3,2\n", "every client has a single example"),
        ("a,1,2\na,2,3\nb,1,5\n", "3 examples are too few for a population of 6 numbers"),
    ],
)
def test_tables_that_cannot_tell_noise_from_differences_are_refused(tmp_path, capsys, rows, said):
    path = tmp_path / "a.csv"
    path.write_text("city,area,price\n" + rows)
    with pytest.raises(SystemExit):
        main(["estimate", "coefficients", "--csv", str(path), "--target", "price", "--client", "city"])
    assert said in capsys.readouterr().err


def test_coefficients_without_spread_or_without_variation(tmp_path, capsys):
    """The likeliest spread is 0, which is said; a client of a constant area has no coefficient of its own of it."""
    rng = np.random.default_rng(0)
    who = [f"c{i}" for i in range(30) for _ in range(5)]
    area = rng.normal(size=150)
    area[:5] = 2.5
    noise = rng.normal(size=(30, 5, 1))
    for own, x in zip(noise, area.reshape(30, 5), strict=True):
        design = np.stack([np.ones(5), x], axis=1)
        own -= design @ np.linalg.lstsq(design, own, rcond=None)[0]  # every client has the same least squares
    rows = who, area, ["gas"] * 150, 10 + 2 * area + noise.ravel()
    path = write(tmp_path, rows)
    columns = written(tmp_path / "out", path, "--ignore", "heating")
    said = " ".join(capsys.readouterr().out.split())
    assert "no spread between clients found: intercept, area (the likeliest sigma_theta is 0)" in said
    assert np.isnan([columns[f"local:{name}"][0].astype(float) for name in ("intercept", "area")]).all()
    assert np.isfinite(columns["local:area"][1:].astype(float)).all()
    assert np.isfinite(columns["personalized:area"].astype(float)).all()


def test_labels_without_noise_are_warned_of(tmp_path, capsys):
    who, area, heating, _ = houses()
    exact = np.array([float(name[1:]) for name in who]) + 2 * area
    path = write(tmp_path, (who, area, heating, exact))
    main(["estimate", "coefficients", "--csv", str(path), "--target", "price", "--client", "city"])
    assert "warning: no noise is left" in " ".join(capsys.readouterr().out.split())


def test_a_column_that_would_be_taken_for_the_intercept_is_refused(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("city,intercept,price\na,1,2\na,2,3\nb,3,5\nb,4,4\n")
    with pytest.raises(SystemExit):
        main(["estimate", "coefficients", "--csv", str(path), "--target", "price", "--client", "city"])
    assert "two coefficients would be called 'intercept'" in capsys.readouterr().err


def test_options_of_a_table_are_refused_without_one(capsys):
    with pytest.raises(SystemExit):
        main(["estimate", "coefficients", "--target", "price"])
    assert "target requires --csv" in capsys.readouterr().err
