"""PersFL on data, tasks and options that it cannot serve: refused before anything is compiled, with the reason."""

import jax
import numpy as np
import pytest
from oracle_setup import (
    IDS,
    SIZES,
    STEPS,
    classification_problem,
    clients,
    least_squares,
    perceptron,
    run,
    simulation,
    stack,
)

from jaxpfl import METHODS, JaxpflError, LocalWork

BATCH = 6


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def without_validation():
    """The fourth client has no validation examples."""
    problem = classification_problem()
    validation = clients(problem.validation)
    validation[3] = validation[3][0][:0], validation[3][1][:0]
    return stack(clients(problem.train), clients(problem.test), IDS, validation)


@pytest.mark.parametrize("method", ["persfl", "persfl-gd"])
def test_clients_without_validation_examples_are_refused(method):
    with pytest.raises(JaxpflError, match=f"^{method} chooses on validation examples: 1 of 5 clients have none"):
        simulation(method, without_validation(), {})
    unseen = without_validation()._replace(client_ids=np.arange(100, 105, dtype=np.int32))
    with pytest.raises(JaxpflError, match="1 of 5 clients have none"):
        simulation(method, classification_problem(), {}, engine={"unseen": unseen})


def test_without_a_choice_they_are_served():
    options = {"teacher": "last", "temperatures": (3.0,), "imitations": (0.5,)}
    problem = classification_problem()
    empty = stack(clients(problem.train), clients(problem.test), IDS)
    got = run(simulation("persfl", empty, {}, distill_steps=4, **options), 1)
    assert np.isfinite(got.simulation.evaluate(got.state)["after"]["loss"]).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperatures": (1.0, 0.0)}, "persfl.temperatures must be numbers > 0"),
        ({"temperatures": ()}, "persfl.temperatures must be numbers > 0, at least one"),
        ({"imitations": (1.5,)}, "persfl.imitations must be numbers >= 0 and <= 1"),
        ({"imitations": ("a",)}, "persfl.imitations must be numbers"),
        ({"teacher": "first"}, "persfl.teacher must be best or last"),
        ({"stored": -2}, "persfl.stored must be 0 or >= 2, got -2"),
        ({"stored": 1}, "persfl.stored must be 0 or >= 2, got 1"),
        ({"stored": 4, "teacher": "last"}, "persfl.stored needs the teacher best"),
        ({"distill_steps": 0}, "persfl.distill_steps must be >= 1"),
    ],
)
def test_options_outside_their_range_are_refused(options, reason):
    with pytest.raises(JaxpflError, match=f"^{reason}"):
        METHODS["persfl"].build(perceptron(), LocalWork(np.array(SIZES), STEPS, BATCH), **options)


def test_a_task_without_classes_is_refused():
    with pytest.raises(JaxpflError, match="persfl distils class probabilities"):
        METHODS["persfl"].build(least_squares(4), LocalWork(np.array(SIZES), STEPS, BATCH))
