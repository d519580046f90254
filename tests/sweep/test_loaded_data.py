"""Data sets that sweeps share: each is read once, and another one in its place is seen, as is another sweep."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import sweep_of

from jaxpfl.runs import data_sets
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.sweep import definition
from jaxpfl.runs.sweep.execute import Data
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflError

CONFIG = resolve(RunConfig(data="digits"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the data sets that have been read."""
    names: list[str] = []
    load = data_sets.source_of

    def counted(given: RunConfig) -> object:
        names.append(given.data)
        return load(given)

    monkeypatch.setattr(data_sets, "source_of", counted)
    return names


def test_sweeps_of_the_same_data_read_them_once(read: list[str], tmp_path: Path):
    loaded = Data()
    for name in ("a", "b"):
        Sweep.open(tmp_path / name, sweep_of("lr=.05,.5"), resume=False, data=loaded)
    Sweep.open(tmp_path / "a", sweep_of("lr=.05,.5"), resume=True, data=loaded)
    assert read == ["digits"]


def test_other_data_take_the_place_of_the_first(read: list[str]):
    loaded = Data()
    other = replace(CONFIG, data="planted:clients=3,clusters=3")
    sums = [loaded.checksum(given) for given in (CONFIG, CONFIG, other, CONFIG)]
    assert read == ["digits", other.data, "digits"]
    assert sums[0] == sums[1] == sums[3] != sums[2]


def test_a_sweep_of_its_own_sees_that_a_file_has_changed(tmp_path: Path):
    table, folder = tmp_path / "a.csv", tmp_path / "sweep"
    rows = [f"{client},{x},{x % 2}" for client in "abcd" for x in range(12)]
    table.write_text("\n".join(["client,x,y", *rows]))
    definition = sweep_of(
        "lr=.05,.5", data=f"csv:{table}", target="y", client="client", task="classification", clients=4
    )
    Sweep.open(folder, definition, resume=False)
    table.write_text("\n".join(["client,x,y", *rows[:-1], "d,11.5,1"]))
    with pytest.raises(JaxpflError, match="has changed since the sweep"):
        Sweep.open(folder, definition, resume=True)


def test_nothing_of_the_earlier_sweep_counts_in_the_new_one(tmp_path: Path):
    place = tmp_path / "s"
    earlier = Sweep.open(place, sweep_of("lr=.1,.2"), resume=False)
    Journal(place).append([Record("local", {"lr": 0.1}, 0)])
    (place / "best").mkdir()
    with pytest.raises(JaxpflError, match="--force replaces it"):
        Sweep.open(place, sweep_of("lr=.3"), resume=False)
    (place / "notes.txt").touch()
    with pytest.raises(JaxpflError, match=r"^--force would delete .*notes\.txt"):
        Sweep.open(place, sweep_of("lr=.3"), resume=False, force=True)
    assert definition.read(place) == earlier.definition
    (place / "notes.txt").unlink()
    replaced = Sweep.open(place, sweep_of("lr=.3"), resume=False, force=True)
    assert definition.read(place) == replaced.definition != earlier.definition
    assert Journal(place).read() == []
    assert [path.name for path in place.iterdir()] == ["sweep.json"]
