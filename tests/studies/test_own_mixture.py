"""Kinds of the user's own clients: found again, likely by their own samples, in any units of the columns."""

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from jaxpfl.studies import mixture
from jaxpfl.studies.mixture import MixtureSettings
from jaxpfl.support.errors import JaxpflError

CENTERS = np.array([[10.0, -2.0], [14.0, 1.0], [20.0, 0.0]])


def write(path: Path, units: tuple[float, float] = (1.0, 1.0)) -> tuple[np.ndarray, list[np.ndarray]]:
    """Clients of three kinds with two columns, in these units; returns the kinds, [60], and each one's samples."""
    rng = np.random.default_rng(0)
    kinds = rng.choice(3, size=60, p=(0.5, 0.3, 0.2))
    samples = [(CENTERS[kind] + (1.5, 0.5) * rng.normal(size=(rng.integers(3, 8), 2))) * units for kind in kinds]
    rows = [f"c{i},{mass},{size}" for i, own in enumerate(samples) for mass, size in own.tolist()]
    path.write_text("\n".join(["client,mass,size", *rows]))
    return kinds, samples


GIVEN = MixtureSettings(components=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[mixture.Kinds, np.ndarray, list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("kinds")
    kinds, samples = write(folder / "own.csv")
    return mixture.fit_kinds(folder / "own.csv", GIVEN, mixture.CsvLayout(value="mass,size")), kinds, samples


def test_kinds_are_found(made):
    found, kinds, _ = made
    np.testing.assert_array_equal(found.kind, kinds)
    result = found.result
    assert [kind["clients"] for kind in result["kinds"]] == np.bincount(kinds).tolist()
    for kind, center in zip(result["kinds"], CENTERS, strict=True):
        assert (np.abs(np.subtract(kind["center"], center)) < 4 * np.array(kind["stderr"])).all()
    np.testing.assert_allclose(result["sigma_x"], (1.5, 0.5), rtol=0.1)
    errors = [((values - CENTERS[kinds]) ** 2).mean() for values in (found.local, found.personalized)]
    assert errors[1] < 0.2 * errors[0]


def test_probabilities_and_likelihood_are_those_of_the_samples(made):
    """From the samples one by one, in double precision."""
    found, _, samples = made
    assert found.columns["client"] == [f"c{i}" for i in range(60)]
    result = found.result
    total = 0.0
    for i, own in enumerate(samples):
        logs = [
            np.log(kind["share"]) + norm.logpdf(own, kind["center"], result["sigma_x"]).sum()
            for kind in result["kinds"]
        ]
        total += np.logaddexp.reduce(logs)
        expected = np.exp(logs - np.logaddexp.reduce(logs))
        likely = [found.columns[f"probability_{j}"][i] for j in (1, 2, 3)]
        np.testing.assert_allclose(likely, expected, atol=1e-9)
        estimate = expected @ np.array([kind["center"] for kind in result["kinds"]])
        np.testing.assert_allclose(found.personalized[i], estimate, rtol=1e-6)
        np.testing.assert_allclose(found.columns["local_mass"][i], own[:, 0].mean())
    assert result["log_likelihood"] == pytest.approx(total, rel=1e-9)
    assert result["bic"] == pytest.approx(10 * np.log(60) - 2 * total, rel=1e-9)  # 6 of centers, 2 shares, 2 variances


def test_units_change_nothing(made, tmp_path: Path):
    found, *_ = made
    write(tmp_path / "own.csv", units=(1000.0, 1e-6))
    other = mixture.fit_kinds(tmp_path / "own.csv", GIVEN, mixture.CsvLayout(value="mass,size"))
    np.testing.assert_array_equal(other.kind, found.kind)
    np.testing.assert_allclose(other.personalized / (1000.0, 1e-6), found.personalized, rtol=1e-6)


def test_files(made, tmp_path: Path):
    found, *_ = made
    assert [path.name for path in mixture.write_kinds(tmp_path / "plots", found)] == ["kinds.png"]
    with open(tmp_path / "estimates.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    names = "client samples local_mass local_size personalized_mass personalized_size kind probability_1"
    assert list(rows[0])[:8] == names.split()


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({"components": 5}, "a,1\na,2\nb,3\nb,4\n", r"csv: components must be <= 2 \(the number of clients\), got 5"),
        ({"epsilon": 1.0}, "a,1\na,2\nb,3\n", "epsilon is not available with --csv, as its estimates are not private"),
        ({"radius": 2.0}, "a,1\na,2\nb,3\n", "radius applies to simulated clients, not to --csv"),
        ({"components": 2}, "a,1\na,1\nb,3\nb,3\n", "column value must vary within at least one client"),
        ({"components": 2}, "a,1\nb,3\n", "every client has a single sample"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict, text: str, message: str):
    path = tmp_path / "own.csv"
    path.write_text("client,value\n" + text)
    with pytest.raises(JaxpflError, match=message):
        mixture.fit_kinds(path, MixtureSettings(**changes))
