"""Hyper-parameters: the paper's values by name, and defaults that are what the search of defaults chose."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxpfl import METHODS, JaxpflError
from jaxpfl.algorithms.parts.hyper import replace
from jaxpfl.benchmarks import defaults
from jaxpfl.engine.spec import Settings

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "defaults_cpu2.json"
AS_PRINTED = ("adaped",)
"""Methods that stay as their paper has them, whatever is better."""


def test_the_papers_value_goes_by_name():
    hp = replace("perfedavg", METHODS["perfedavg"].hyper, {"alpha": "paper", "lr": "paper"})
    assert (hp.alpha, hp.lr) == (1e-3, 0.075)
    assert METHODS["perfedavg"].hyper.alpha != 1e-3


def test_other_texts_are_no_numbers():
    with pytest.raises(JaxpflError, match=r"perfedavg.alpha must be a number.*'papers'"):
        replace("perfedavg", METHODS["perfedavg"].hyper, {"alpha": "papers"})


def test_the_help_of_lr_names_the_rates_that_it_sets_and_the_step_sizes_that_it_leaves():
    """Every hyper-parameter that is a rate or a step is declared as one of the two."""
    sets, leaves = set(), set()
    for method in METHODS.values():
        for field in dataclasses.fields(method.hyper):
            name, meta = field.name, field.metadata
            if meta["is_rate"]:
                sets.add(name)
            elif meta["is_step"]:
                leaves.add(name if "lr" in name else f"{method.name}.{name}")
            elif name not in ("lr_decay", "fine_tune_factor"):  # factors on lr
                assert not re.search(r"^lr|\brate|\bstep towards", f"{name} {meta['doc']}"), f"{method.name}.{name}"
            assert not (meta["is_rate"] and meta["is_step"])
    (lr,) = (field for field in dataclasses.fields(Settings) if field.name == "lr")
    said, left = lr.metadata["plain"].split(". ")
    names = r"(?:[a-z]+\.alpha|\w*lr\w*)"
    assert set(re.findall(rf"\b{names}\b", said)) == sets
    assert set(re.findall(rf"\b{names}\b", left)) == leaves


@pytest.mark.parametrize("name", sorted(set(defaults.TRIES) - set(AS_PRINTED)))
def test_defaults_are_what_the_search_chose(name: str):
    rows = defaults.compared(name, json.loads(RECORD.read_text())["results"])
    assert {tuple(row.set.values()) for row in rows} == {tuple(one.values()) for one in defaults.TRIES[name]}
    chosen, options = defaults.choice(name, rows)
    assert {key: getattr(METHODS[name].hyper, key) for key in chosen} == chosen
    assert not options  # static options stay as they are


def test_a_default_moves_only_where_the_lead_is_beyond_doubt():
    def results(*accuracies: list[float]) -> dict:
        sets = ({"prox": 0.1}, {"prox": 1.0})
        tries = [{"set": s, "accuracy": 0.0, "clients": a} for s, a in zip(sets, accuracies, strict=True)]
        return {"fedprox": {data: {"tries": tries} for data in defaults.ROUNDS}}

    def chosen(*accuracies: list[float]) -> dict:
        return defaults.choice("fedprox", defaults.compared("fedprox", results(*accuracies)))[0]

    assert chosen([0.5, 0.6, 0.7], [0.6, 0.71, 0.8]) == {"prox": 1.0}
    assert chosen([0.5, 0.6, 0.7], [0.9, 0.6, 0.6]) == {"prox": 0.1}  # ahead by .1, with a standard error of .08
