"""Settings chosen on validation users: nothing is learned of the users, and equal tries for every method."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpfl.studies.histograms import data as histogram_data
from jaxpfl.studies.histograms import tune as histogram_tune
from jaxpfl.studies.histograms.private_methods import METHODS
from jaxpfl.studies.histograms.settings import HistogramSettings

GIVEN = HistogramSettings(
    users=90, tokens=30, components=2, samples=40, kept_tokens=10, candidates=20, block=32, try_clusters=(1, 2),
    try_rounds=(1,), try_radii=(0.3,), try_shares=(0.2,), folds=2,
)  # fmt: skip


def test_every_method_has_as_many_tries():
    assert {len(histogram_tune.grid(method, GIVEN)) for method in METHODS} == {2}
    wide = HistogramSettings()
    assert {len(histogram_tune.grid(method, wide)) for method in METHODS} == {48}
    assert 1 in {choice.clusters for choice in histogram_tune.grid("Standardised", wide)}  # FedAvg is among them


@pytest.mark.slow
def test_private_settings_are_chosen_without_the_users(monkeypatch: pytest.MonkeyPatch):
    """The users' place is taken by as many others: every try's loss stays as it was; of the validation users' it does
    not."""
    monkeypatch.setattr(histogram_tune.histogram_private_methods, "METHODS", ("FedAvg", "Standardised"))
    data = histogram_data.prepare(GIVEN)
    others = histogram_data.prepare(dataclasses.replace(GIVEN, seed=1))
    made = histogram_tune.private(GIVEN, data, {"epsilon 15": 0.5})
    again = histogram_tune.private(GIVEN, data._replace(clients=others.clients), {"epsilon 15": 0.5})
    assert made == again
    changed = histogram_tune.private(GIVEN, data._replace(validation=others.validation), {"epsilon 15": 0.5})
    assert changed["epsilon 15"].tries != made["epsilon 15"].tries
