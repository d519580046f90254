"""The committed map: what is declared, measured fairly, and what the page says."""

import re
from pathlib import Path

import pytest

from jaxpfl.benchmarks.winners import atlas, page, plot
from jaxpfl.benchmarks.winners.cells import CELLS, FINE_TUNING, LOCAL_STEPS, Cell, contenders
from jaxpfl.benchmarks.winners.measure import config_of, groups_of, tries_of
from jaxpfl.benchmarks.winners.verdicts import lead
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
PERCEPTRON = "digits-mlp32-m20-n{}-{}-share1-steps400"
CONVOLUTIONAL = "mnist-cnn-m10-n{}-{}-share1-steps100"
MNIST = "mnist-linear-m20-n{}-{}-share1-steps200"
WRITERS = "mnist-writers-linear-m{}-nown-writers-share1-steps200"
FEW = "digits-linear-m{}-n45-3classes-share1-steps400"
MANY = "digits-linear-m100-n10-{}-share1-steps100{}"
SUMMARY = {
    "hold three to five": {
        "5.5 points over local": (LINEAR.format(10, "3classes"), "fedavg-ft", "local"),
        "2.4 at 20": (LINEAR.format(20, "3classes"), "fedavg-ft", "local"),
        "1.1 at 45": (LINEAR.format(45, "3classes"), "fedavg-ft", "local"),
        "1.0 at 72": (LINEAR.format(72, "3classes"), "fedavg-ft", "local"),
        "level with it)": (LINEAR.format(72, "3classes"), "ditto", "fedavg-ft"),
        "5.7 at 10": (PERCEPTRON.format(10, "3classes"), "fedavg-ft", "local"),
        ".8 at 45": (PERCEPTRON.format(45, "3classes"), "fedavg-ft", "local"),
        "5.0 at 20": (MNIST.format(20, "3classes"), "fedavg-ft", "local"),
        "1.3 at 100": (MNIST.format(100, "3classes"), "fedavg-ft", "local"),
        "with 20 clients or 50": ("mnist-linear-m50-n100-3classes-share1-steps200", "fedavg-ft", "local"),
        "level at 300": (MNIST.format(300, "3classes"), "fedavg-ft", "local"),
        "4.0 of five": (MNIST.format(100, "5classes"), "fedavg-ft", "local"),
    },
    "a quarter of them": {
        ".6 and": ("digits-linear-m20-n45-3classes-share0.25-steps400", "fedavg-ft", "local"),
        ".9 points": ("digits-linear-m20-n45-3classes-share1-steps1600", "fedavg-ft", "local"),
        "local training is level": ("digits-linear-m20-n45-3classes-share1-steps100", "fedavg-ft", "local"),
    },
    "but five or ten": {
        "local training and Ditto are level": (FEW.format(5), "fedavg-ft", "local"),
        "Ditto are level": (FEW.format(5), "ditto", "local"),
        ".5 points over local": (FEW.format(5), "apfl", "local"),
        ".7 over local": (FEW.format(10), "fedavg-ft", "local"),
    },
    "nearly iid": {
        "8.3 to": (MNIST.format(300, "iid"), "fedavg", "local"),
        "16 points": (PERCEPTRON.format(45, "iid"), "fedavg", "local"),
        "33 to": (MNIST.format(20, "iid"), "fedavg", "local"),
        "36 at 10": (LINEAR.format(10, "iid"), "fedavg", "local"),
        "1.0 to": (LINEAR.format(45, "iid"), "fedavg", "fedavg-ft"),
        "3.4, ": (MNIST.format(300, "iid"), "fedavg", "fedavg-ft"),
        "4.2 with a hundred": (MANY.format("iid", ""), "fedavg", "fedavg-ft"),
        "is level on MNIST": (MNIST.format(100, "Dirichlet1"), "fedavg", "fedavg-ft"),
    },
    "are users": {
        "2.4 to": (WRITERS.format(66), "fedavg-ft", "local"),
        "2.6 points": (WRITERS.format(20), "fedavg-ft", "local"),
        "4.5 to": (WRITERS.format(20), "fedavg-ft", "fedavg"),
        "5.7 over fedavg": (WRITERS.format(66), "fedavg-ft", "fedavg"),
        "Ditto is level": (WRITERS.format(20), "fedavg-ft", "ditto"),
        ".5 behind": (WRITERS.format(66), "fedavg-ft", "ditto"),
    },
    "in clusters": {
        "10.7 points": (LINEAR.format(45, "3clusters"), "ifca", "fedavg-ft"),
        "1.9 with a perceptron": (PERCEPTRON.format(45, "3clusters"), "ifca", "fedavg-ft"),
        "are level on MNIST": (MNIST.format(100, "3clusters"), "ifca", "fedavg-ft"),
    },
    "| hold two classes": {
        ".3 points over local": (LINEAR.format(45, "2classes"), "fedavg-ft", "local"),
        "level with a perceptron": (PERCEPTRON.format(45, "2classes"), "fedavg-ft", "local"),
        "level at 72": (LINEAR.format(72, "2classes"), "fedavg-ft", "local"),
        ".7 at 10": (LINEAR.format(10, "2classes"), "fedavg-ft", "local"),
        "is level with local": (LINEAR.format(10, "2classes"), "adaped", "local"),
        ".5 behind": (LINEAR.format(10, "2classes"), "fedavg-ft", "adaped"),
        "1.4 points": (MNIST.format(20, "2classes"), "ditto", "local"),
        "1.1 over": (MNIST.format(20, "2classes"), "ditto", "fedavg-ft"),
        "all level at 100": (MNIST.format(100, "2classes"), "ditto", "local"),
        "level at 100": (MNIST.format(100, "2classes"), "fedavg-ft", "local"),
        "level at 100 and 300": (MNIST.format(300, "2classes"), "local", "ditto"),
    },
    "train a convolutional": {
        "12.8 points": (CONVOLUTIONAL.format(100, "3classes"), "local", "fedavg-ft"),
        "level with it at 20": (CONVOLUTIONAL.format(20, "3classes"), "local", "fedavg-ft"),
        "16 points over local": (CONVOLUTIONAL.format(100, "iid"), "fedavg", "local"),
    },
    "need epsilon 8": {
        "4.85 and": (MANY.format("3classes", "-eps8"), "fedavg-ft", "local"),
        "4.15 points": (MANY.format("3classes", "-eps2"), "fedavg-ft", "local"),
        "5.1 without": (MANY.format("3classes", ""), "fedavg-ft", "local"),
        "33 and": (MANY.format("iid", "-eps8"), "fedavg", "local"),
        "30 over": (MANY.format("iid", "-eps2"), "fedavg", "local"),
    },
}
"""Rows of the page's first table: what each says, and the cell and the two methods of which it is said."""


@pytest.mark.parametrize("row", SUMMARY)
def test_the_summary_says_what_the_map_holds(found, row):
    (text,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and row in line]
    places = {place.name: place for place in found.places}
    for said, (name, method, over) in SUMMARY[row].items():
        assert said in text
        measured = lead(places[name], method, over)
        number = re.match(r"\d*\.?\d+", said)
        assert measured.level == ("level" in said), said
        if number:
            digits = len(number[0].partition(".")[2])
            assert round(measured.points, digits) == float(number[0]), said


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


def test_names_of_cells_are_unique():
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert Cell("digits", "linear", 20, 45, epsilon=8.0).name.endswith("eps8")


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
    with pytest.raises(JaxpflError, match="is damaged, or was changed"):
        atlas.read(path)
    files.write_checksummed(path, known)
    assert atlas.read(path) == atlas.read()
    path.write_text(path.read_text().replace("0.9", "0.8", 1))
    with pytest.raises(JaxpflError, match="is damaged, or was changed"):
        atlas.read(path)


def test_the_picture_by_examples_has_cells_of_the_same_other_settings(found):
    """A hundred clients of ten examples are another cell than twenty, and not shown in its place."""
    for data, model in (("digits", "linear"), ("mnist", "linear"), ("digits", "mlp:32")):
        shown = plot._grid(found, data, model).values()
        assert len(shown) > 3
        assert len({(place.measures.clients, place.share, place.steps, place.epsilon) for place in shown}) == 1
    assert plot._grid(found, "digits", "linear")[10, 3].name == LINEAR.format(10, "3classes")
