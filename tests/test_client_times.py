"""Simulated time of clients and rounds against NumPy, and the time to a score."""

import json
from typing import Any

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.cli import main
from jaxpfl.core.participation import Availability, TimeModel, resolve_time_model
from jaxpfl.engine.evaluate import first_time
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.config import resolve as resolve_config

IDS: Any = np.array([4, 0, 9, 2])


def test_a_client_s_seconds_are_those_of_its_work_and_its_bytes():
    work: Any = np.array([3, 0, 5, 1])
    up = np.array([100.0, 0.0, 50.0, 10.0])
    equal = resolve_time_model("equal:step=0.5,up=10,down=4").seconds(IDS, work, up, 8)
    np.testing.assert_allclose(equal, 0.5 * work + up / 10 + 2, rtol=1e-6)
    model = resolve_time_model("lognormal:step=0.5,up=10,down=4,sigma=0.7,seed=3")
    compute, received, sent = np.asarray(jax.vmap(model.factors)(IDS)).T
    unequal = model.seconds(IDS, work, up, 8)
    np.testing.assert_allclose(unequal, 0.5 * work * compute + 2 / received + up / 10 / sent, rtol=1e-5)


def test_factors_are_a_client_s_own_and_of_median_one():
    model = resolve_time_model("lognormal:step=1,sigma=0.5")
    factors = np.log(np.asarray(jax.vmap(model.factors)(jax.numpy.arange(4000))))
    np.testing.assert_allclose(np.median(factors, axis=0), 0, atol=0.05)
    np.testing.assert_allclose(factors.std(axis=0), 0.5, atol=0.03)
    assert abs(np.corrcoef(factors.T)[np.triu_indices(3, 1)]).max() < 0.06
    np.testing.assert_array_equal(jax.vmap(model.factors)(IDS[::-1]), jax.vmap(model.factors)(IDS)[::-1])
    other = resolve_time_model("lognormal:step=1,sigma=0.5,seed=1")
    assert not np.allclose(other.factors(jax.numpy.int32(4)), model.factors(jax.numpy.int32(4)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "unknown time model 'fast'"),
        ("equal:step=-1", "equal:step must be >= 0 and finite, got -1"),
        ("equal", "time_model = equal simulates rounds of zero seconds: set step, up or down"),
    ],
)
def test_what_means_nothing_is_refused(text, message):
    with pytest.raises(JaxpflError, match=message):
        Availability(time_model=text).checked()


def test_the_first_time_of_a_score():
    scores, seconds = np.array([[0.5, 0.9, 0.1], [0.8, 0.7, 0.2]]), np.array([[10.0, 20.0, 1.0], [30.0, 40.0, 2.0]])
    np.testing.assert_array_equal(first_time(scores, seconds, 0.8), [30, 20, np.nan])
    np.testing.assert_array_equal(first_time(scores, seconds, 0.5, lower=True), [10, np.nan, 1])


CLOCK = TimeModel(0.5, 1e4, 2e4, 0.5, 0)
GIVEN: dict[str, Any] = {
    "model": "linear",
    "rounds": 3,
    "cohort": 4,
    "local_steps": 3,
    "batch_size": 5,
    "seeds": 2,
    "stragglers": 0.5,
    "dropout": 0.3,
    "eval_every": 1,
}


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    return jaxpfl.federate(jaxpfl.load("digits"), clients=8, classes_per_client=3)


def rounds_of(found: jaxpfl.Fit, federation: jaxpfl.Federation) -> np.ndarray:
    """Seconds of each round of a fit again, by its states' counts after each round, [S, rounds]."""
    simulation = found.simulation
    up, down = simulation.bytes_per_client()
    state, seconds = simulation.init([0, 1]), []
    before = simulation.counts(state)
    for _ in range(3):
        state, _ = simulation.advance(state, 1)
        after = simulation.counts(state)
        work = np.asarray(after.gradients - before.gradients)
        sent = (after.upload_bits - before.upload_bits) / 8 if simulation.algorithm.counts_bits else up
        each = np.stack(
            [CLOCK.seconds(federation.client_ids, w, s, down) for w, s in zip(work, sent + 0 * work, strict=True)]
        )
        seconds.append(np.where(after.participations > before.participations, each, 0).max(axis=1))
        before = after
    return np.stack(seconds, axis=1)


TIMED: dict[str, Any] = GIVEN | {"time_model": "lognormal:step=0.5,up=1e4,down=2e4,sigma=0.5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ditto", {}),
        ("fedavg", {"compress": "top-k:share=0.1"}),
        ("fedavg", {"plan": ExecutionPlan(clients_in="host")}),
    ],
)
def test_a_round_lasts_as_long_as_its_slowest_client(federation, method, more):
    timed = jaxpfl.fit(method, federation, **TIMED, **more)
    np.testing.assert_allclose(timed.history["round_seconds"], rounds_of(timed, federation), rtol=1e-5)
    assert timed.seconds is not None
    np.testing.assert_allclose(timed.seconds[:, -1], timed.history["round_seconds"].sum(axis=1), rtol=1e-6)
    means = timed.scores["after"]["accuracy"].mean(axis=2)
    best = means[1].max()
    np.testing.assert_allclose(timed.time_to(best), first_time(means, timed.seconds.T, best))
    assert np.isnan(timed.time_to(1.01)).all()


@pytest.mark.slow
def test_nothing_else_depends_on_it(federation):
    timed, plain = jaxpfl.fit("ditto", federation, **TIMED), jaxpfl.fit("ditto", federation, **GIVEN)
    assert set(timed.history) - set(plain.history) == {"round_seconds"}
    np.testing.assert_allclose(timed.personalized_accuracy, plain.personalized_accuracy, rtol=1e-6)
    with pytest.raises(JaxpflError, match="the run has no simulated time: pass time_model to fit"):
        plain.time_to(0.5)


@pytest.mark.slow
def test_the_command_line_tells_time_to_a_score(federation, tmp_path, capsys):
    flags = "--model linear --clients 8 --cohort 4 --rounds 3 --local-steps 3 --batch-size 5 --seeds 2 --eval-every 1"
    more = "--stragglers .5 --dropout .3 --time-model lognormal:step=0.5,up=1e4,down=2e4,sigma=0.5 --time-to .8"
    main(["run", "ditto", *flags.split(), *more.split(), "--output", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().out.split())
    assert "simulated seconds; accuracy 80.00 % " in said
    row = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]["ditto"]
    want = jaxpfl.fit("ditto", federation, **TIMED)
    assert want.seconds is not None
    np.testing.assert_allclose(row["simulated_seconds"], want.seconds[:, -1], rtol=1e-6)
    np.testing.assert_allclose(np.array(row["seconds_to"], float), want.time_to(0.8), rtol=1e-6)


def test_a_time_to_a_score_needs_a_time_model():
    with pytest.raises(JaxpflError, match=r"time_to = 0.8 requires time_model, which simulates the seconds of a round"):
        resolve_config(RunConfig(time_to=0.8))
