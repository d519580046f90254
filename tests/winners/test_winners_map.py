"""The committed map: what is declared, measured fairly, and what the page says."""

from pathlib import Path

import pytest

from jaxpfl.benchmarks.winners import atlas, page, plot
from jaxpfl.benchmarks.winners.cells import CELLS, FINE_TUNING, LOCAL_STEPS, contenders
from jaxpfl.benchmarks.winners.measure import config_of, groups_of, tries_of
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

GRADIENTS = {"ditto": 2, "adaped": 2, "apfl": 2, "fedem": 3}
"""Gradients in a local step; fedem's by components, each of its own."""
PAGE = Path(__file__).parents[2] / "docs" / "records" / "who-wins.md"


@pytest.fixture(scope="module")
def found():
    return atlas.read()


def test_the_map_holds_declared_cells_alone(found):
    assert not found.quick
    assert found.splits >= 5
    names = [place.name for place in found.places]
    assert len(set(names)) == len(names)
    assert set(names) <= {cell.name for cell in CELLS}
    cells = {cell.name: cell for cell in CELLS}
    for place in found.places:
        cell = cells[place.name]
        assert (place.steps, place.epsilon) == (cell.steps, cell.epsilon)
        assert place.measures.clients == cell.clients
        assert {"local", "fedavg-ft"} <= place.methods.keys()
        assert all(len(own.test) == found.splits for own in place.methods.values())


def test_the_page_is_that_of_the_map(found):
    text = PAGE.read_text()
    own = text.partition(f"{page.BEGIN}\n")[2].partition(page.END)[0]
    assert own.strip() == page.tables(found).strip(), "jaxpfl winners show --markdown prints the page's tables"


LINEAR = "digits-linear-m20-n{}-{}-share1-steps400"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_all_methods_try_equally_often_with_equal_steps(cell):
    """The tries differ in their settings, and rounds x gradients are those of the cell to within a round."""
    share = cell.cohort / cell.clients
    for contender in contenders(cell):
        tries = tries_of(cell, contender)
        assert len({tuple(one.items()) for one in tries}) == len(tries) == 6
        config = config_of(cell, contender, 3)
        assert (config.split_seed, config.seed, config.seeds) == (3, 3, 1)
        each = GRADIENTS.get(contender.method, 1)
        tuned = round(FINE_TUNING * cell.steps) if contender.method == "fedavg-ft" else 0
        steps = config.rounds * LOCAL_STEPS * share * each + tuned
        assert abs(steps - cell.steps) <= LOCAL_STEPS * share * each + 1
        private = cell.epsilon is not None and contender.method != "local"
        assert config.privacy.on == private


def test_a_group_is_a_method_on_one_split():
    groups = groups_of(CELLS[:1], splits=2, methods=("local", "ditto"))
    assert [(one.method, one.static["split_seed"], len(one.runs)) for one in groups] == [
        ("local", 0, 6),
        ("ditto", 0, 6),
        ("local", 1, 6),
        ("ditto", 1, 6),
    ]
    assert len({run.id for group in groups for run in group.runs}) == 24


def test_a_file_of_something_else_is_refused(tmp_path):
    path, known = tmp_path / "map.json", atlas.read().to_json()
    first = known["places"][0]
    short = first["methods"] | {"local": first["methods"]["local"] | {"test": [0.5], "validation": [0.5]}}
    beyond = first["methods"] | {"local": first["methods"]["local"] | {"test": [1.5] * 5}}
    for stored in (
        {},
        {"places": [{}]},
        {"places": 3},
        known | {"places": []},
        known | {"places": [first | {"methods": {}}]},
        known | {"places": [first | {"methods": short}]},
        known | {"places": [first | {"methods": beyond}]},
    ):
        files.write_checksummed(path, stored)
        with pytest.raises(JaxpflError, match="holds no map"):
            atlas.read(path)
    path.write_text("[]")
    with pytest.raises(JaxpflError, match="is damaged or was changed"):
        atlas.read(path)
    files.write_checksummed(path, known)
    assert atlas.read(path) == atlas.read()
    path.write_text(path.read_text().replace("0.9", "0.8", 1))
    with pytest.raises(JaxpflError, match="is damaged or was changed"):
        atlas.read(path)


def test_the_picture_by_examples_has_cells_of_the_same_other_settings(found):
    """A hundred clients of ten examples are another cell than twenty, and not shown in its place."""
    for data, model in (("digits", "linear"), ("mnist", "linear"), ("digits", "mlp:32")):
        shown = plot._grid(found, data, model).values()
        assert len(shown) > 3
        assert len({(place.measures.clients, place.share, place.steps, place.epsilon) for place in shown}) == 1
    assert plot._grid(found, "digits", "linear")[10, 3].name == LINEAR.format(10, "3classes")
