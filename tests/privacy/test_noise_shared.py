"""No two releases share noise: rounds, steps, steps of EM, seeds, runs, clients, methods, settings, mechanisms.

Every draw of a program is recorded as it runs (`noise_record`); a key that comes twice is noise that two releases
share. Each release of the list `noise_sites.RELEASES` must have drawn. Noisy steps are as many as are accounted.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noise_record import recorded
from noise_sites import RELEASES

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, Simulation, fit, stack_clients
from jaxpfl.benchmarks.studies.histogram import methods as histogram_private_methods
from jaxpfl.benchmarks.studies.histogram.methods import HistogramSettings
from jaxpfl.core.participation import Availability
from jaxpfl.engine import noise_keys
from jaxpfl.engine.build import assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.state import rows_of
from jaxpfl.estimators import base, clustering, gaussian, release
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.privacy import Mechanism, PerStepNoise, PrivacyConfig, discrete_gaussian, mechanism, record

CENTRAL = Mechanism(1.0, 0.5)
DISTRIBUTED = Mechanism(1.0, 0.5, "distributed", min_uploads=3)
PER_STEP = Mechanism(1.0, 0.5, "per_step")
EXAMPLES = PrivacyConfig(unit="example", noise_multiplier=1.0, delta=1e-3)
SEEN: set[str] = set()


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(4, 3)), np.arange(4) % 2) for _ in range(3)]
    return stack_clients(clients, test=clients)


def train(federation, method: str, privacy: Mechanism | PrivacyConfig, **more) -> None:
    settings = {"model": "linear", "rounds": 2, "batch_size": 4, "seeds": [5]}
    settings |= {} if "local_epochs" in more else {"local_steps": 2}
    # On several devices, what nobody's rows draw is a client's, and dropped.
    settings |= {"plan": ExecutionPlan(devices=1)} | more
    fit(method, federation, privacy=privacy, **settings)


@pytest.fixture
def drawn(monkeypatch):
    with recorded(monkeypatch) as drawn:
        yield drawn
    SEEN.update(drawn.sites)


class Stop(Exception):
    """Carries a run's noise keys out of `fit` before anything is compiled."""


def keys(federation, method: str, privacy: Mechanism, **more) -> list[tuple[int, ...]]:
    """The noise's key of each run."""

    def stop(self: Simulation, seeds):
        made = noise_keys.keys(self.algorithm.noise, self._noise_names, seeds, rows_of(self.hp, len(seeds)))
        raise Stop([tuple(row) for row in np.asarray(jax.random.key_data(made)).tolist()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "init", stop)
        with pytest.raises(Stop) as stopped:
            train(federation, method, privacy, **more)
    return stopped.value.args[0]


@pytest.mark.slow
def test_runs_of_one_seed_have_streams_of_their_own(federation):
    """Every method, hyper-parameter, setting, mechanism and model has its own; also repeated seeds of one program. The
    data, secret seeds and functions of the user are those of the next test."""
    parameters = {"head": {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}}
    of_runs = [
        keys(federation, "fedavg", CENTRAL, seeds=[5, 5, 6]),
        keys(
            federation, "fedavg", replace(CENTRAL, noise_multiplier=(1.0, 2.0)), hyper={"lr": [0.2, 0.2]}, seeds=[5, 5]
        ),
        keys(federation, "fedavg", CENTRAL, hyper={"lr": 0.011}),
        keys(federation, "fedavg", replace(CENTRAL, noise_multiplier=1.01)),
        keys(federation, "fedavg", replace(CENTRAL, clipping_norm=0.51)),
        keys(federation, "fedavg", replace(CENTRAL, quantile=0.5, count_stddev=1.0)),
        keys(federation, "fedavg", DISTRIBUTED),
        keys(federation, "fedavg", replace(DISTRIBUTED, min_uploads=2)),
        keys(federation, "fedavg", DISTRIBUTED, compress="qsgd:levels=4"),
        keys(federation, "fedavg", DISTRIBUTED, compress="qsgd:levels=5"),
        keys(federation, "fedavg", PER_STEP),
        keys(federation, "fedavg", replace(PER_STEP, noise_multiplier=2.0)),
        keys(federation, "fedavg", CENTRAL, batch_size=2),
        keys(federation, "fedavg", CENTRAL, cohort=2),
        keys(federation, "fedavg", CENTRAL, cohort=2, cohort_cap=2),
        keys(federation, "fedavg", CENTRAL, dropout=0.5),
        keys(federation, "fedavg", CENTRAL, model="mlp:2"),
        keys(federation, "fedavg", CENTRAL, warm_start=parameters),
        keys(federation, "fedavg", CENTRAL, client_optimizer="sgd:momentum=0.5"),
        keys(federation, "fedavg", CENTRAL, server_optimizer="sgd:momentum=0.5"),
        keys(federation, "adaped", CENTRAL),
        keys(federation, "adaped", CENTRAL, options={"gate": True}),
        keys(federation, "local", EXAMPLES),
        keys(federation, "fedavg", EXAMPLES),
        keys(federation, "fedavg", replace(EXAMPLES, noise_multiplier=2.0)),
        keys(federation, "fedavg", replace(EXAMPLES, clipping_norm=0.5)),
        keys(federation, "fedavg", EXAMPLES, batch_size=2),
        keys(federation, "adamix", CENTRAL, options={"em_steps": 2}),
    ]
    every = [key for runs in of_runs for key in runs]
    assert len(every) == len(of_runs) + 3
    assert len(set(every)) == len(every)


def test_other_runs_have_streams_of_their_own(federation):
    """Of each kind one: repeated seeds, settings, functions of the users, secret seeds, and the data of one user."""
    x = np.array(federation.train.examples.x)
    x[0, 0] += 1.0
    other = federation._replace(train=federation.train.with_examples(x=x))
    own = [{"client_optimizer": lambda rate, m=m: optax.sgd(rate, m)} for m in (0.6, 0.7)]
    secret = replace(CENTRAL, noise_seed="secret")
    every = keys(federation, "fedavg", CENTRAL, seeds=[5, 5]) + keys(other, "fedavg", CENTRAL)
    slow = [{"stragglers": 0.5, "same_stragglers": same} for same in (False, True)]
    plain = [(CENTRAL, more) for more in ({"local_steps": 3}, *own, *slow)]
    for privacy, more in (*plain, (secret, {}), (secret, {})):
        every += keys(federation, "fedavg", privacy, **more)
    for z, limit in ((1.0, 0.5), (2.0, 0.5), (1.0, 0.6)):  # neither is a hyper-parameter of AdaMix
        every += keys(federation, "adamix", replace(CENTRAL, noise_multiplier=z, clipping_norm=limit))
    assert len(set(every)) == len(every) == 13


def test_what_is_no_other_run_has_the_same_noise(federation):
    """The same run alone, in another plan, under another order of the clients, with padding."""
    first, second = keys(federation, "fedavg", CENTRAL, seeds=[5, 6])
    assert keys(federation, "fedavg", CENTRAL, seeds=[6]) == [second]
    assert keys(federation, "fedavg", CENTRAL, plan=ExecutionPlan(clients="map")) == [first]
    assert keys(federation, "fedavg", CENTRAL, rounds=9, eval_every=3) == [first]
    turned = federation.rows(np.arange(federation.num_clients)[::-1])
    assert keys(turned, "fedavg", CENTRAL) == [first]
    padded = federation.train.bounded(federation.train.capacity + 2)
    assert keys(federation._replace(train=padded), "fedavg", CENTRAL) == [first]
    assert keys(federation, "fedavg", replace(CENTRAL, noise_multiplier=(1.0, 2.0)), seeds=[5, 5])[0] == first
    rates = keys(federation, "fedavg", CENTRAL, dropout=[0.0, 0.5, 0.5], seeds=[5, 5, 6])
    alone = [keys(federation, "fedavg", CENTRAL, dropout=p, seeds=[s])[0] for p, s in ((0.0, 5), (0.5, 5), (0.5, 6))]
    assert rates == alone
    assert rates[0] == first


@pytest.mark.slow
def test_programs_of_rounds_draw(federation, drawn):
    """Traced for `test_every_release_has_drawn`; `test_ledger` and `test_sensitivity` look at the keys."""
    turns = {"participation": "cyclic", "cohort": 1}
    for method, privacy, more in (
        ("fedavg", replace(CENTRAL, quantile=0.5, count_stddev=1.0), {}),
        ("fedavg", replace(CENTRAL, noise="banded", bands=2), turns),
        ("adaped", DISTRIBUTED, {}),
        ("adaped", PER_STEP, {}),
        ("ditto", EXAMPLES, {}),
        ("adamix", CENTRAL, {}),
    ):
        given = {"model": "linear", "rounds": 2, "local_steps": 2, "batch_size": 4} | more
        spec = RunSpec(method=METHODS[method], privacy=privacy, **given)
        assemble(spec, federation).simulation().program("cpu")
    assert {"privacy.private_sum._server.update", "privacy.noise.add_banded"} <= drawn.sites


LATE: dict[str, Any] = {"stragglers": 0.5, "dropout": 0.3}
IDLE = {"options": {"idle_rounds": 2}, "cohort": 2, "participation": "uniform"}
STREAMED = {"plan": ExecutionPlan(clients_in="host", clients="map", runs="map")}
TUNED = {"options": {"fine_tune_epochs": 1}, "client_optimizer": "adam"}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param("fedavg", LATE, id="fedavg", marks=pytest.mark.slow),
        pytest.param("adaped", IDLE, id="idle", marks=pytest.mark.slow),
        pytest.param("fedavg-ft", TUNED, id="fine-tuned", marks=pytest.mark.slow),
        pytest.param("fedavg", STREAMED, id="streamed", marks=pytest.mark.slow),
    ],
)
def test_noisy_steps_are_those_of_the_plan(monkeypatch, method, more):
    """Of clients of 1, 7 and 60 examples: those of every client, whatever its data; fewer by a straggler's coin."""
    draw, count = mechanism._released, []
    monkeypatch.setattr(mechanism, "_released", lambda *of: jax.debug.callback(lambda: count.append(1)) or draw(*of))
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 3)), np.arange(n) % 2) for n in (1, 7, 60)]
    plan = ExecutionPlan(devices=1, clients="map", runs="map")  # others mask what is not a client's
    settings = {"model": "linear", "rounds": 2, "local_steps": 5, "batch_size": 4, "seeds": [3], "plan": plan} | more
    found = fit(method, stack_clients(clients, test=clients), privacy=replace(PER_STEP, min_uploads=1), **settings)
    jax.effects_barrier()
    noise = found.privacy[0].noise
    assert isinstance(noise, PerStepNoise)
    assert noise.steps == 5
    late, key = Availability(**LATE if more is LATE else {}), found.state.key[0]
    steps = [min(5, int(late.step_limit(key, t, client, 5))) for t in range(2) for client in range(3)]
    expected = sum(steps) if "cohort" not in more else 2 * 2 * 5
    assert len(count) == expected * len(noise.clips)
    assert (sum(steps) < 30) == (more is LATE)


@pytest.mark.parametrize(
    ("method", "privacy", "more", "said"),
    [
        ("fedavg", CENTRAL, {}, "fedavg.lr_decay .* lr_decay = 1, or use lr_schedule or local_steps"),
        ("adaped-plus", CENTRAL, {"lr_schedule": "constant", "hyper": {"anneal": 0.5}}, "adaped-plus.anneal depends"),
    ],
)
def test_work_in_epochs_may_not_tell_of_one_client(federation, method, privacy, more, said):
    with pytest.raises(JaxpflError, match=said):
        keys(federation, method, privacy, local_epochs=1, **more)
    keys(federation, "fedavg", CENTRAL, local_epochs=1, lr_schedule="constant")
    keys(federation, "fedavg", CENTRAL, local_epochs=1, hyper={"lr_decay": 1.0})


WHOLE = discrete_gaussian.table(3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(release.gaussian(1.0, 0.5), id="gaussian"),
        pytest.param(release.gaussian_vector(1.0, 0.5), id="vector"),
        pytest.param(release.one_bit(1.0, 0.5), id="one bit"),
        pytest.param(release.discrete_gaussian(1.0, 4, WHOLE), id="discrete"),
    ],
)
def test_messages_of_clients(drawn, sent):
    samples = base.every(jnp.ones((3, 2, 1)))
    estimator = gaussian.personalized(st2=0.2, sx2=0.5, release=sent)
    for key in jax.random.split(jax.random.key(1)):
        jax.block_until_ready(base.estimate(estimator, key, samples))
    assert len(drawn.keys) >= 3 * 2
    assert drawn.repeated() == 0


@pytest.mark.slow
def test_steps_of_lloyds_algorithm(drawn):
    begin, points, valid = jnp.eye(2), jnp.ones((4, 2)), jnp.ones(4, bool)
    jax.block_until_ready(
        clustering.noisy_lloyd(jax.random.key(1), begin, points, valid, radius=1.0, noise=1.0, steps=3)
    )
    assert len(drawn.keys) >= 3 * 2
    assert drawn.repeated() == 0


@pytest.mark.slow
def test_rounds_of_histograms(drawn):
    """The mean, DimRed's moment, and every round, of all methods of the study under one key."""
    counts = np.random.default_rng(0).integers(1, 9, (12, 20))
    users = histogram.from_sparse(np.arange(0, 241, 20), np.tile(np.arange(20), 12), counts.ravel(), 20)
    given = HistogramSettings(tokens=20, candidates=10, kept_tokens=5, private_rounds=3)
    choices = {
        name: histogram_private_methods.Choice(2, 3, 0.3, 0.5) for name in histogram_private_methods.PRIVATE_METHODS
    }
    noise = histogram_private_methods.Noise(1.0, 0.5, 1.0)
    run = jax.jit(lambda key: histogram_private_methods.all_private_centers(key, users, noise, choices, given))
    jax.block_until_ready(run(jax.random.key(1)))
    assert drawn.repeated() == 0


@pytest.mark.parametrize(
    "kind", [histogram_private.cluster, pytest.param(histogram_private.cluster_standardised, marks=pytest.mark.slow)]
)
def test_rounds_of_clusters_draw_anew(kind):
    counts = np.random.default_rng(0).integers(1, 9, (12, 20))
    users = histogram.from_sparse(np.arange(0, 241, 20), np.tile(np.arange(20), 12), counts.ravel(), 20)
    first = histogram_private.Release(jnp.ones((1, 20)), jnp.ones(1))
    with record() as draws:
        kind(jax.random.key(1), users, first, 2, 3, radius=0.3, noise=1.0, first_noise=1.0, floor=1e-4)
    assert len({draw.key for draw in draws}) == len(draws) >= 3


@pytest.mark.slow
def test_every_release_has_drawn():
    """The tests of this file, run together, have seen every release of the list."""
    if "estimators.histograms.clusters.noisy_moment" not in SEEN:
        pytest.skip("asks what the other slow tests of this file have recorded")
    # Of a loop that is traced apart from its callers; replaced by the recorder; a lambda of another name.
    other = {"exponential.deeper", "bits", "uniform"}
    assert set(RELEASES) - {f"privacy.noise.{name}" for name in other} - {"estimators.release.gaussian"} <= SEEN


def test_a_simulation_takes_the_keys_of_its_own_runs_alone():
    ours, keys = noise_keys.Ours(private=True), jax.random.split(jax.random.key(0), 3)
    ours.add(keys[:2])
    ours.check(keys[1:2])
    for others in (keys[2:], keys[1:]):
        with pytest.raises(JaxpflError, match="the state belongs to another private simulation"):
            ours.check(others)
    with pytest.raises(JaxpflError, match="not belong to a private run, but this simulation is private"):
        ours.check(None)
    with pytest.raises(JaxpflError, match="the state belongs to a private run"):
        noise_keys.Ours(private=False).check(keys)
