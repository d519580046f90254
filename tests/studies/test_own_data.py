"""The user's own clients: intervals that hold, scores only where they mean something, and what is said of privacy."""

from pathlib import Path

import numpy as np
import pytest

from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_data import bernoulli as own_bernoulli
from jaxpfl.studies.own_data import gaussian as own_gaussian


def write(path: Path, clients) -> Path:
    header = ",".join(f"s{j}" for j in range(max(map(len, clients))))
    path.write_text("\n".join([header, *(",".join(repr(float(x)) for x in own) for own in clients)]))
    return path


def contained(columns: dict) -> bool:
    low, at, high = (np.array(columns[name]) for name in ("low", "personalized", "high"))
    return bool(((low <= at) & (at <= high)).all())


def test_clients_that_look_alike_have_no_sure_probability(tmp_path: Path):
    """Six clients of five samples, all of .4 or .6: the moments say v = 0, the intervals do not take it for true."""
    ones = [2, 3, 3, 2, 2, 2]
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    own = own_bernoulli.run(path, BernoulliSettings())
    assert own.result["estimated"]["variance"] == 0
    assert contained(own.columns)
    assert (np.subtract(own.columns["high"], own.columns["low"]) > 0.4).all()


@pytest.mark.parametrize(
    "ones", [[0, 0, 0], *(pytest.param(o, marks=pytest.mark.slow) for o in ([5, 5], [0, 5])), [0, 0, 5, 5, 1]]
)
def test_an_interval_holds_its_estimate_at_the_edge(tmp_path: Path, ones: list[int]):
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    columns = own_bernoulli.run(path, BernoulliSettings()).columns
    assert contained(columns)
    assert min(columns["low"]) >= 0
    assert max(columns["high"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 3, 5, 40])
def test_means_have_intervals_that_hold_them(tmp_path: Path, m: int):
    rng = np.random.default_rng(m)
    sizes = rng.integers(2, 9, size=m)
    own = own_gaussian.run(write(tmp_path / "own.csv", [rng.normal(size=n) for n in sizes]), GaussianSettings())
    assert contained(own.columns)
    # Wider than what is known for sure of the mean of all, narrower than three times a client's own.
    width = np.subtract(own.columns["high"], own.columns["low"])
    sigma = own.result["estimated"]["sigma_x"]
    assert (width > 2 * sigma / np.sqrt(sizes.sum())).all()
    assert (width < 12 * sigma / np.sqrt(sizes)).all()


@pytest.mark.slow
def test_pairs_are_estimated_and_not_scored(tmp_path: Path):
    """With a sample of each held out no variance is left to learn: no table, one reason, all estimates."""
    rng = np.random.default_rng(0)
    path = write(tmp_path / "own.csv", 0.5 * rng.normal(size=(30, 1)) + rng.normal(size=(30, 2)))
    own = own_gaussian.run(path, GaussianSettings())
    assert "mse" not in own.result
    assert "no client has 3 samples" in own.result["not_scored"]
    assert np.abs(np.subtract(own.columns["personalized"], own.columns["local"])).min() > 0
    assert contained(own.columns)
    bits = write(tmp_path / "bits.csv", rng.integers(0, 2, size=(30, 2)))
    assert "not_scored" in own_bernoulli.run(bits, BernoulliSettings()).result
    more = write(tmp_path / "more.csv", [*rng.normal(size=(29, 2)), rng.normal(size=3)])
    assert own_gaussian.run(more, GaussianSettings()).result["mse"]["local"]["mean"] > 0


@pytest.mark.slow
def test_settings_and_privacy_are_in_the_result(tmp_path: Path):
    rng = np.random.default_rng(0)
    path = write(tmp_path / "own.csv", rng.normal(size=(20, 4)))
    plain = own_gaussian.run(path, GaussianSettings(seed=3)).result
    assert plain["settings"] == {"epsilon": None, "seed": 3}
    assert "privacy" not in plain
    given = GaussianSettings(epsilon=2.0, delta=1e-6, radius=2.0, sigma_x=1.0)
    private = own_gaussian.run(path, given)
    public = {"sigma_theta": 0.1, "sigma_x": 1.0, "radius": 2.0}
    assert private.public is not None
    clip = pytest.approx(private.public.bound, rel=1e-6)
    assert private.result["privacy"] == {
        "epsilon": 2.0,
        "delta": 1e-6,
        "mechanism": "analytic",
        "clipped_to": clip,
        "clients_clipped": 0,
        **public,
    }
    assert private.public.bound > 2
    assert private.result["settings"] == {
        **public,
        "epsilon": 2.0,
        "delta": 1e-6,
        "mechanism": "analytic",
        "seed": 0,
    }
    bit = own_gaussian.run(path, GaussianSettings(epsilon=2.0, mechanism="one-bit")).result
    assert bit["privacy"]["delta"] == 0
    bits = own_bernoulli.run(
        write(tmp_path / "bits.csv", rng.integers(0, 2, size=(9, 4))), BernoulliSettings(epsilon=1.0)
    ).result
    assert bits["privacy"] == {"epsilon": 1.0, "delta": 0.0, "mechanism": "one-bit"}
    assert bits["settings"] == {"epsilon": 1.0, "seed": 0}
