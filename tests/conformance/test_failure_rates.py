"""Rates of failures are one for each run: rows of a sweep over them are the runs alone."""

import jax
import numpy as np
import pytest
from problem import assert_close, outcome, simulate

import jaxpfl
from jaxpfl import METHODS, ExecutionPlan
from jaxpfl.core.participation import Availability
from jaxpfl.support.errors import JaxpflError

NOTHING, LOSSY, SLOW, BOTH = (0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.6, 0.9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "runs", "rates"), [("fedavg", "map", [NOTHING, BOTH]), ("adaped", "vmap", [NOTHING, LOSSY, SLOW, BOTH])]
)
def test_rows_equal_runs_alone(federation, name, runs, rates):
    """States, counters, history and scores; at a rate of 0, of a run in which nothing fails."""
    seeds = [3, 4, 5, 6][: len(rates)]

    def run(dropout, stragglers, seeds):
        given = {"plan": ExecutionPlan(runs=runs, rounds_per_call=8), "dtype": np.float64, "model": "linear"}
        fails = Availability(dropout=dropout, stragglers=stragglers)
        return outcome(simulate(METHODS[name], federation, failures=fails, **given), 4, seeds)

    dropouts, slow = zip(*rates, strict=True)
    together = run(dropouts, slow, seeds)
    for i, ((dropout, stragglers), seed) in enumerate(zip(rates, seeds, strict=True)):
        alone, row = run(dropout, stragglers, (seed,)), jax.tree.map(lambda a, i=i: a[i : i + 1], together)
        counts = row["state"].counts
        assert (counts.dropped.sum() > 0) == (dropout > 0)
        assert (counts.steps < 3 * counts.participations).any() == (stragglers > 0)
        if not dropout:  # a run without dropout does not report it
            assert not row["history"].pop("dropped").any()
        assert_close(row, alone, 1e-9)


@pytest.mark.slow
def test_fit_takes_lists_and_tells_runs_apart(federation):
    given = {"model": "linear", "rounds": 2, "local_steps": 2}
    result = jaxpfl.fit("fedavg", federation, seeds=[1, 1], dropout=[0.0, 0.9], stragglers=0.5, **given)
    assert result.history["dropped"].sum(axis=1).tolist() == [0, result.state.counts.dropped[1].sum()]
    assert result.history["dropped"][1].sum() > 0
    with pytest.raises(JaxpflError, match="seed 1 is given twice for the same hyper-parameters"):
        jaxpfl.fit("fedavg", federation, seeds=[1, 1], dropout=[0.9, 0.9], **given)
    with pytest.raises(JaxpflError, match="dropout has 3 values but stragglers has 2"):
        jaxpfl.fit("fedavg", federation, seeds=3, dropout=[0.1, 0.2, 0.3], stragglers=[0.1, 0.2], **given)
