"""What `fit` says of a private run, and what it refuses to run."""

import pytest

import jaxpfl
from jaxpfl.engine import accounted
from jaxpfl.errors import JaxpflError
from jaxpfl.participation import full, poisson, uniform
from jaxpfl.privacy import Mechanism, plan_of

SETTING = {"model": "linear", "rounds": 2, "local_steps": 3, "batch_size": 5}
DELTA = 1e-3


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3, test_share=0.5)


def test_each_run_states_its_own(federation):
    norms, z = (0.5, 0.05, 0.2), (0.0, 0.7, 2.0)
    result = jaxpfl.fit("fedavg", federation, **SETTING, seeds=3, privacy=Mechanism(z, norms))
    for run in (1, 2):
        said = result.statement(DELTA, run)
        assert said == plan_of(Mechanism(z[run], norms[run]), full(4), rounds=2).statement(DELTA)
    with pytest.raises(JaxpflError, match="no epsilon can be claimed"):
        result.statement(DELTA)


def plans(method, mechanism, participation, hyper=None, **work):
    entry = jaxpfl.METHODS[method]
    done = jaxpfl.LocalWork([5] * 4, 3, 5, **work)
    hp = entry.hyper.replace(**hyper or {})
    return accounted.plans(entry, hp, {}, mechanism, participation, done, rounds=2, runs=1, compressed=False)[0]


def test_what_a_method_releases_is_read_off_it():
    central = Mechanism(2.0)
    fedavg, adamix = plans("fedavg", central, full(4)), plans("adamix", central, full(4))
    em_steps = jaxpfl.METHODS["adamix"].options["em_steps"]
    assert em_steps > 1
    assert adamix.noise_multiplier == pytest.approx(fedavg.noise_multiplier / em_steps**0.5)
    steps = Mechanism(2.0, noise="per_step")
    assert plans("adaped", steps, full(4)).noise.clips == (1.0, 1.0)
    assert plans("fedavg", steps, full(4)).noise.steps == 3
    assert plans("fedavg", central, uniform(4, 2)).default_accountant == "rdp"
    assert plans("fedavg", central, poisson(4, 0.5)).default_accountant == "pld"


def test_noise_of_steps_is_hidden_by_others_only_where_steps_do_not_stretch_it():
    """``|1 - lr (prox + decay)| <= 1``: beyond, an early step counts for more than the noise of the last."""
    steps = Mechanism(2.0, noise="per_step")
    near, far = (plans("fedprox", steps, full(4), {"lr": 1.0, "prox": prox}).noise for prox in (1.9, 2.1))
    assert near.linear
    assert not far.linear
    assert near.multiplier > far.multiplier
    assert not plans("fedavg", steps, full(4), optimizer="sgd:momentum=0.9").noise.linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort": 2, "privacy": Mechanism(1.0, 1.0, "distributed", 2)}, "cannot be accounted with poisson"),
        ({"cohort": 2, "privacy": Mechanism(1.0, noise="per_step")}, "cannot be accounted with poisson"),
        ({"privacy": Mechanism(1.0), "participation": "with-replacement"}, "with replacement cannot be accounted"),
        ({"privacy": Mechanism((1.0, 2.0)), "seeds": 3}, "noise_multiplier has 2 values for 3 runs"),
        ({"privacy": Mechanism(1.0, (1.0, 2.0)), "seeds": 3}, "clipping_norm has 2 values for 3 runs"),
    ],
)
def test_what_cannot_be_accounted_is_not_run(federation, options, message):
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", federation, **SETTING, **options)


def test_nothing_is_said_where_nothing_was_private(federation):
    with pytest.raises(JaxpflError, match="nothing was private"):
        jaxpfl.fit("local", federation, **SETTING, privacy=Mechanism(1.0)).statement(DELTA)


@pytest.mark.parametrize(("known", "missing"), [({"steps": 3}, "scales"), ({"scales": 0}, "steps")])
def test_noise_of_steps_is_not_accounted_without_them(known, missing):
    with pytest.raises(JaxpflError, match=f"give {missing}"):
        plan_of(Mechanism(1.0, noise="per_step"), full(4), rounds=2, **known)
