"""Distance of a federation to the map's cells, and the measure of label skew."""

import dataclasses

import numpy as np
import pytest

import jaxpfl
from jaxpfl.benchmarks.winners import atlas
from jaxpfl.benchmarks.winners.nearest import Asked, beyond, nearest
from jaxpfl.benchmarks.winners.skew import Measures, label_skew, measures
from jaxpfl.benchmarks.winners.skew import sizes as sizes_of
from jaxpfl.support.errors import JaxpflError


@pytest.fixture(scope="module")
def places():
    return atlas.read().places


def of(place):
    return Asked(place.measures, place.partition, place.share, place.model, place.steps, place.epsilon)


def test_every_cell_is_nearest_to_itself(places):
    for place in places:
        found = nearest(of(place), places)
        assert found[0].distance == 0
        assert [one.distance for one in found] == sorted(one.distance for one in found)
        assert place in [one.place for one in found if one.distance == 0]
        assert not beyond(of(place), places)


def test_the_units_are_those_of_the_documentation(places):
    one = next(place for place in places if place.epsilon is None and place.partition == "classes")
    size = one.measures
    for change, part in (({"clients": 4 * size.clients}, "clients"), ({"examples": 3 * size.examples}, "examples")):
        asked = dataclasses.replace(of(one), measures=dataclasses.replace(size, **change))
        assert nearest(asked, [one])[0].parts == pytest.approx(
            {**dict.fromkeys(("clients", "examples", "skew", "participation", "steps", "model", "kind"), 0), part: 1}
        )
    users = dataclasses.replace(of(one), partition="natural", model="cnn")
    assert nearest(users, [one])[0].distance == pytest.approx(5**0.5)


def test_what_is_outside_the_map_is_said(places):
    size = Measures(100_000, 45.0, 3.0, 10, 0.25)
    said = beyond(Asked(size, "classes", 1.0, "linear"), places)
    assert len(said) == 1
    assert said[0].startswith("clients 100000, where the map has ")
    open_steps = Asked(dataclasses.replace(size, clients=20), "classes", 1.0, "linear")
    assert not beyond(open_steps, places)


@pytest.mark.parametrize("n", [4, 20, 400])
def test_label_skew_does_not_depend_on_the_number_of_examples(n):
    rng = np.random.default_rng(n)
    iid = rng.multinomial(n, [0.1] * 10, size=4000)
    assert label_skew(iid) == pytest.approx(0, abs=0.01)
    held = np.stack([rng.permutation([1 / 3] * 3 + [0] * 7) for _ in range(4000)])
    apart = np.stack([rng.multinomial(n, shares) for shares in held])
    assert label_skew(apart) == pytest.approx((1 / 3 - 0.1) / 0.9, abs=0.01)


def test_a_split_without_label_skew_is_refused():
    source = jaxpfl.load("digits")
    one = jaxpfl.federate(source, partition="iid", clients=1)
    with pytest.raises(JaxpflError, match=r"no label skew can be measured.*clients 1, labeled examples"):
        measures(one, 10)


def test_unequal_clients_are_outside_the_map(places):
    for sizes, there in (((40, 50), True), ((32, 92), True), ((20, 9000), False), ((0, 4), False)):
        said = beyond(dataclasses.replace(of(places[0]), sizes=sizes), places)
        assert said == [] if there else said[0].startswith(f"unequal clients, of {sizes[0]} to {sizes[1]} labeled")
    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, partition="lognormal", sigma=2)
    low, high = sizes_of(federation)
    assert low < measures(federation, 10).examples < high
