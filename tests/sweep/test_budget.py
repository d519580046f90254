"""Equal budgets of gradient steps."""

from pathlib import Path
from typing import Any

import pytest
from small import CONFIG, sweep_of

from jaxpfl import algorithms
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import load_sweep
from jaxpfl.runs.sweep.definition import rounds_of
from jaxpfl.runs.sweep.plan import groups_of, runs_of
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support.errors import JaxpflError

STEPS = {"budget": "steps"}


def config(**changes: Any) -> RunConfig:
    given: dict[str, Any] = CONFIG | {"rounds": 60, "local_steps": 4} | changes
    return RunConfig(**given)


@pytest.mark.parametrize("method", [name for name in algorithms.METHODS if name != "l2gd"][::8])
def test_every_method_that_counts_has_its_rounds(method: str):
    assert 1 <= rounds_of(config(), method, (method,)) <= 60


def test_rounds_by_the_gradients_of_a_round():
    rounds = {name: rounds_of(config(), name, (name,)) for name in ("local", "fedavg", "ditto", "pfedme", "pooled")}
    assert rounds == {"local": 60, "fedavg": 60, "ditto": 30, "pfedme": 20, "pooled": 60}
    assert rounds_of(config(set=("fedem.components=4",)), "fedem", ("fedem",)) == 15
    assert rounds_of(config(set=("ifca.clusters=5",)), "ifca", ("ifca",)) == 60
    assert rounds_of(config(rounds=1), "ditto", ("ditto",)) == 1


def test_rounds_outside_the_cohort_count():
    """Half of the clients rest in a round: (1/2 + 1/4) rounds of 4 gradients between two of 8."""
    given = config(set=("adaped.idle_rounds=2",))
    assert rounds_of(given, "adaped", ("adaped",)) == int(60 * 4 / (8 + 4 * 0.75))
    assert rounds_of(given, "adaped", ("adaped",), share=1.0) == 30


def test_a_method_that_draws_its_gradients_is_refused():
    with pytest.raises(JaxpflError, match="does not support l2gd, whose number of gradients is random"):
        sweep_of("lr=.1", methods=("fedavg", "l2gd"), search=STEPS)


def test_settings_that_change_the_gradients_have_rounds_of_their_own():
    definition = sweep_of("fedem.components=2,3", methods=("fedem",), search=STEPS, rounds=12)
    assert [group.rounds for group in groups_of(definition, runs_of(definition))] == [6, 4]


@pytest.mark.slow
def test_clients_evaluate_equally_many_gradients(tmp_path: Path):
    methods, rounds = ("local", "fedavg", "adaped", "ditto"), 40
    more: dict[str, Any] = {"set": ("adaped.idle_rounds=1",), "cohort": 3}
    definition = sweep_of("lr=.1", methods=methods, search=STEPS, rounds=rounds, seeds=1, **more)
    sweep = Sweep.open(tmp_path / "s", definition, resume=False)
    run_missing(sweep, Reporter())
    table = load_sweep(tmp_path / "s").set_index("method")
    reference = table.gradients["fedavg"]
    assert reference == rounds * 2 * definition.config.cohort / 6  # type: ignore[operator]
    assert table.rounds["fedavg"] == rounds
    assert table.rounds["ditto"] == rounds // 2
    for method in methods:
        in_a_round = table.gradients[method] / table.rounds[method]
        assert abs(table.gradients[method] - reference) <= in_a_round, method
    again = Sweep.open(tmp_path / "s", definition, resume=True)
    assert again.missing(again.journal.read()) == ()
