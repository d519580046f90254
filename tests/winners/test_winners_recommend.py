"""The recommendation from a map: private budgets use private cells, and the commands hold the chosen settings."""

import dataclasses
import shlex

import pytest

from jaxpfl.benchmarks.winners import atlas
from jaxpfl.benchmarks.winners.nearest import Asked
from jaxpfl.benchmarks.winners.recommend import recommend
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig
from jaxpfl.support.errors import JaxpflError

CONFIG = RunConfig(data="digits", clients=20, classes_per_client=3, pool_test=True)


@pytest.fixture(scope="module")
def open_map():
    found = atlas.read()
    return dataclasses.replace(found, places=tuple(one for one in found.places if one.epsilon is None))


def private(place, epsilon):
    methods = {
        name: dataclasses.replace(own, settings={"lr": 0.12, "privacy.clipping_norm": 0.3})
        for name, own in place.methods.items()
    }
    return dataclasses.replace(place, name=f"eps{epsilon:g}", epsilon=epsilon, methods=methods)


def of(place, **more):
    asked = Asked(place.measures, place.partition, place.share, place.model, place.steps, place.epsilon)
    return dataclasses.replace(asked, **more)


def flag(words, name):
    return words[words.index(name) + 1]


def test_a_private_budget_uses_private_cells(open_map):
    first = open_map.places[0]
    with pytest.raises(JaxpflError, match="no cell with privacy"):
        recommend(open_map, of(first, epsilon=6.0), 20, CONFIG)
    both = dataclasses.replace(open_map, places=(*open_map.places, private(first, 2.0), private(first, 8.0)))
    found = recommend(both, of(first, epsilon=6.0), 20, CONFIG)
    assert [near.place.name for near, _ in found.near] == ["eps8", "eps2"]
    assert any("no epsilon covers" in text for text in found.caveats)
    words = shlex.split(found.commands.compare)
    assert flag(words, "--privacy.epsilon") == "6"
    assert flag(words, "--privacy.delta") == "0.001"
    assert flag(words, "--privacy.clipping-norm") == "0.3"
    many = of(first, epsilon=6.0, measures=dataclasses.replace(first.measures, clients=1000))
    assert flag(shlex.split(recommend(both, many, 20, CONFIG).commands.compare), "--privacy.delta") == "0.0001"
    given = dataclasses.replace(CONFIG, privacy=PrivacyConfig(delta=1e-6))
    assert flag(shlex.split(recommend(both, many, 20, given).commands.compare), "--privacy.delta") == "1e-06"
    assert all(near.place.epsilon is None for near, _ in recommend(both, of(first), 20, CONFIG).near)


def test_the_command_holds_the_split_and_the_chosen_settings(open_map):
    place = next(one for one in open_map.places if one.heterogeneity == "3 classes")
    found = recommend(open_map, of(place), 10, CONFIG)
    words = shlex.split(found.commands.compare)
    assert flag(words, "--classes-per-client") == "3"
    assert "--pool-test" in words
    assert "--split-seed" not in words
    assert (flag(words, "--cohort"), flag(words, "--rounds")) == ("10", str(round(0.85 * place.steps / 10)))
    chosen = place.methods[found.method].settings["lr"]
    assert f"{found.method}.lr={chosen:g}" in words
    tuned = next(word for word in words if word.startswith("fedavg-ft.fine_tune_steps="))
    assert tuned.endswith(f"={round(0.15 * place.steps)}")
    half = recommend(open_map, of(place, participation=0.5, steps=600), 10, CONFIG)
    assert flag(shlex.split(half.commands.compare), "--rounds") == "102"
    assert "fedavg-ft.fine_tune_steps=90" in half.commands.compare


def test_more_rounds_than_a_run_can_have_are_refused(open_map):
    asked = of(open_map.places[0], participation=0.05, steps=2_000_000_000)
    with pytest.raises(JaxpflError, match=r"steps = 2000000000 are 3400000000 rounds .* at most 2147483647"):
        recommend(open_map, asked, 1, CONFIG)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"local_epochs": 2}, r"local_epochs = 2: .* local_steps"),
        ({"privacy": PrivacyConfig(noise_multiplier=1.0)}, r"privacy.noise_multiplier = 1.0: .* privacy.epsilon"),
        ({"privacy": PrivacyConfig(unit="example")}, "privacy.unit = example"),
    ],
)
def test_settings_of_which_the_map_does_not_speak_are_refused(open_map, more, match):
    with pytest.raises(JaxpflError, match=match):
        recommend(open_map, of(open_map.places[0]), 20, dataclasses.replace(CONFIG, **more))
