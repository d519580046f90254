"""A sweep that takes the place of another in its folder."""

from pathlib import Path

import pytest
from small import sweep_of

from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.sweep import definition
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflError


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
