"""The next methods' programs are compiled in a thread while one runs; the numbers do not tell."""

import jax
import numpy as np
import pytest

from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import Ahead
from jaxpfl.runs.setup import prepare
from jaxpfl.support.errors import JaxpflError

SMALL = {"data": "digits", "clients": 6, "cohort": 3, "rounds": 2, "model": "linear", "seeds": 1, "local_steps": 2}


@pytest.fixture(scope="module")
def experiment():
    return prepare(resolve(RunConfig(**SMALL)), ("local", "fedavg"))


@pytest.mark.slow
def test_the_next_method_is_compiled_and_has_the_same_data(experiment):
    with Ahead(experiment, experiment.methods) as ahead:
        first = ahead.simulation("local")
        second = ahead.simulation("fedavg")
        ahead._thread.shutdown(wait=True)
        assert {name for name, _ in second._programs.made} == {"start", "advance", "scores"}
        for a, b in zip(jax.tree.leaves(first.federations), jax.tree.leaves(second.federations), strict=True):
            assert a is b
        scores = [
            made.evaluate(made.advance(made.init([0]), 2)[0])["after"]["loss"]
            for made in (second, experiment.simulation("fedavg"))
        ]
    np.testing.assert_array_equal(*scores)


def test_what_fails_in_the_thread_fails_again_when_its_turn_comes(experiment, monkeypatch):
    real = type(experiment).simulation

    def fails(self, name):
        if name == "fedavg":
            raise JaxpflError("no")
        return real(self, name)

    monkeypatch.setattr(type(experiment), "simulation", fails)
    with Ahead(experiment, experiment.methods) as ahead:
        ahead.simulation("local")
        with pytest.raises(JaxpflError, match=r"^no$"):
            ahead.simulation("fedavg")


def test_without_methods_nothing_is_compiled_ahead(experiment):
    with Ahead(experiment, ()) as ahead:
        ahead.simulation("local")
        assert not ahead._made


def test_the_last_simulation_takes_the_examples_along(experiment):
    with Ahead(experiment, (), last="fedavg") as ahead:
        ahead.simulation("local")
        assert ahead._experiment is experiment
        ahead.simulation("fedavg")
        left = ahead._experiment
    for run in (left.federation, left.runs["local"].federation):
        assert all(not len(leaf) for leaf in jax.tree.leaves(run.train.examples))
        np.testing.assert_array_equal(run.train.size, experiment.federation.train.size)
