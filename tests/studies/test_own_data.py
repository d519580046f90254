"""The user's own clients: intervals that hold, scores only where they mean something, and what is said of privacy."""

from pathlib import Path

import numpy as np
import pytest

from jaxpfl.cli import main
from jaxpfl.studies import bernoulli as own_bernoulli
from jaxpfl.studies import gaussian as own_gaussian
from jaxpfl.studies import own_clients
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.gaussian import GaussianSettings
from jaxpfl.studies.own_clients import CsvLayout
from jaxpfl.support.errors import JaxpflError

_RNG = np.random.default_rng(5)
K = [f"K{i}" for i in range(4)]


def rows(names: list[str], columns: int) -> str:
    return "".join(f"{name},{','.join(f'{x:.2f}' for x in _RNG.normal(9, 2, columns))}\n" for name in names)


def write(path: Path, clients) -> Path:
    rows = [f"c{i},{float(x)!r}" for i, own in enumerate(clients) for x in own]
    path.write_text("\n".join(["client,value", *rows]))
    return path


def contained(columns: dict) -> bool:
    low, at, high = (np.array(columns[name]) for name in ("low", "personalized", "high"))
    return bool(((low <= at) & (at <= high)).all())


def test_clients_that_look_alike_have_no_sure_probability(tmp_path: Path):
    """Six clients of five samples, all of .4 or .6: the moments say v = 0, the intervals do not take it for true."""
    ones = [2, 3, 3, 2, 2, 2]
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    own = own_bernoulli.estimate_file(path, BernoulliSettings())
    assert own.result["estimated"]["variance"] == 0
    assert contained(own.columns)
    assert (np.subtract(own.columns["high"], own.columns["low"]) > 0.4).all()


@pytest.mark.parametrize(
    "ones", [[0, 0, 0], *(pytest.param(o, marks=pytest.mark.slow) for o in ([5, 5], [0, 5])), [0, 0, 5, 5, 1]]
)
def test_an_interval_holds_its_estimate_at_the_edge(tmp_path: Path, ones: list[int]):
    path = write(tmp_path / "own.csv", [[1] * z + [0] * (5 - z) for z in ones])
    columns = own_bernoulli.estimate_file(path, BernoulliSettings()).columns
    assert contained(columns)
    assert min(columns["low"]) >= 0
    assert max(columns["high"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 3, 5, 40])
def test_means_have_intervals_that_hold_them(tmp_path: Path, m: int):
    rng = np.random.default_rng(m)
    sizes = rng.integers(2, 9, size=m)
    own = own_gaussian.estimate_file(
        write(tmp_path / "own.csv", [rng.normal(size=n) for n in sizes]), GaussianSettings()
    )
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
    own = own_gaussian.estimate_file(path, GaussianSettings())
    assert "mse" not in own.result
    assert "no client has 3 samples" in own.result["not_scored"]
    assert np.abs(np.subtract(own.columns["personalized"], own.columns["local"])).min() > 0
    assert contained(own.columns)
    bits = write(tmp_path / "bits.csv", rng.integers(0, 2, size=(30, 2)))
    assert "not_scored" in own_bernoulli.estimate_file(bits, BernoulliSettings()).result
    more = write(tmp_path / "more.csv", [*rng.normal(size=(29, 2)), rng.normal(size=3)])
    assert own_gaussian.estimate_file(more, GaussianSettings()).result["mse"]["local"]["mean"] > 0


@pytest.mark.slow
def test_settings_and_privacy_are_in_the_result(tmp_path: Path):
    rng = np.random.default_rng(0)
    path = write(tmp_path / "own.csv", rng.normal(size=(20, 4)))
    plain = own_gaussian.estimate_file(path, GaussianSettings(seed=3)).result
    assert plain["settings"] == {"epsilon": None, "seed": 3}
    assert "privacy" not in plain
    given = GaussianSettings(epsilon=2.0, delta=1e-6, radius=2.0, sigma_x=1.0)
    private = own_gaussian.estimate_file(path, given)
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
    bit = own_gaussian.estimate_file(path, GaussianSettings(epsilon=2.0, mechanism="one-bit")).result
    assert bit["privacy"]["delta"] == 0
    bits = own_bernoulli.estimate_file(
        write(tmp_path / "bits.csv", rng.integers(0, 2, size=(9, 4))), BernoulliSettings(epsilon=1.0)
    ).result
    assert bits["privacy"] == {"epsilon": 1.0, "delta": 0.0, "mechanism": "one-bit"}
    assert bits["settings"] == {"epsilon": 1.0, "seed": 0}


@pytest.mark.slow
def test_names_that_would_be_one_in_the_table(tmp_path: Path):
    (tmp_path / "own.csv").write_text("client,x,stderr_x\n" + rows(K * 3, 2))
    layout = CsvLayout(value="x,stderr_x")
    with pytest.raises(JaxpflError, match=r"'x' and 'stderr_x' would both be local_stderr_x in estimates.csv"):
        own_gaussian.estimate_file(tmp_path / "own.csv", GaussianSettings(), layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sizes_of_which_fourth_powers_are_taken(tmp_path: Path):
    path = tmp_path / "own.csv"
    text = "client,value\n" + rows(K * 3, 1)
    for outlier, refused in ((1e120, True), (1e100, True), (1e69, False)):
        path.write_text(text + f"K0,{outlier:g}\n")
        if refused:
            with pytest.raises(JaxpflError, match=r"value must be of a size between 1e-70 and 1e\+70"):
                own_gaussian.estimate_file(path, GaussianSettings())
        else:
            assert np.isfinite(own_gaussian.estimate_file(path, GaussianSettings()).columns["personalized"]).all()


@pytest.mark.slow
def test_clipped_messages_are_counted(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\n" + rows(K * 3, 1))
    own = own_gaussian.estimate_file(path, GaussianSettings(epsilon=1.0)).result
    assert own["privacy"]["clients_clipped"] == 4
    assert own["notes"][0].startswith("warning: 4 of 4 clients' means lie outside ±")
    own = own_gaussian.estimate_file(path, GaussianSettings(epsilon=1.0, radius=20.0)).result
    assert (own["privacy"]["clients_clipped"], own["notes"]) == (0, [])


@pytest.mark.slow
def test_an_empty_interval_is_said_in_words(tmp_path: Path):
    path = tmp_path / "own.csv"
    path.write_text("client,value\n" + "".join(f"K{i},{1e-3 * i + x}\n" for i in range(9) for x in (-5, 5.5, -0.5)))
    own = own_gaussian.estimate_file(path, GaussianSettings()).result
    assert own["estimated"]["sigma_theta_interval"][1] == 0
    said = own_clients.said(own, 0.95)
    assert not any("0 to 0" in line for line in said)
    assert any("check the file" in line for line in said)


def test_names_are_told_without_control_characters(tmp_path: Path):
    escape = "\x1b[31m"
    text = f"client,va{escape}lue\n{escape}a,1\n{escape}a,2\n{escape}b,\nc,3\n"
    (tmp_path / "own.csv").write_text(text)
    read = own_clients.read(tmp_path / "own.csv", CsvLayout(value=f"va{escape}lue")).understood
    lines = own_clients.how_it_was_read({"read": read})
    assert all(line.isprintable() for line in lines)
    assert sum(r"\x1b[31m" in line for line in lines) == 3


@pytest.mark.slow
def test_names_in_titles_are_no_markup_and_no_formulas(tmp_path: Path, capsys):
    """Rich would obey brackets, matplotlib dollars, and a terminal control characters."""
    names = ["[/x]$a^$", "b\x1b[31m"]
    path = tmp_path / "own[bold]$^$.csv"
    values = "".join(f"K{i % 3},{x:.3f},{y:.3f}\n" for i, (x, y) in enumerate(_RNG.normal(size=(12, 2))))
    path.write_text(f"client,{','.join(names)}\n{values}")
    for study in (["gaussian"], ["mixture", "--components", "2"]):
        folder = tmp_path / study[0]
        main(["estimate", *study, "--csv", str(path), "--value", ",".join(names), "--output", str(folder)])
        said = capsys.readouterr().out
        assert "[/x]$a^$" in said
        assert r"b\x1b[31m" in said
        assert "\x1b" not in said
        assert list((folder / "plots").glob("*.png"))
