"""Statements of `fit` about private runs, and its refusals."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpfl
from jaxpfl.algorithms.parts import private_em
from jaxpfl.core.participation import full, poisson, uniform
from jaxpfl.engine.build import Assembled, assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import make_task
from jaxpfl.privacy import Mechanism, PrivacyConfig, noise, plan_of, private_sum
from jaxpfl.privacy.statement import CUT, GIVEN_START, SAME_USERS, SEED, SPENT_BEFORE, STOPPED
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.export import parameters_origin
from jaxpfl.runs.setup import Origin, caveat, data_checksum, prepare, protection_of
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

SETTING = {"model": "linear", "rounds": 2, "local_steps": 3, "batch_size": 5}
DELTA = 1e-3


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3, test_share=0.5)


def simulation_of(method, federation, privacy, **more):
    """A simulation of which no program is compiled yet."""
    spec = RunSpec(method=jaxpfl.METHODS[method], privacy=privacy, **SETTING, **more)
    return assemble(spec, federation).simulation()


@pytest.mark.slow
def test_each_run_states_its_own(federation):
    norms, z = (0.5, 0.05, 0.2), (0.0, 0.7, 2.0)
    result = jaxpfl.fit("fedavg", federation, **SETTING, seeds=3, privacy=Mechanism(z, norms))
    for run in (1, 2):
        said = result.statement(DELTA, run)
        assert said == plan_of(Mechanism(z[run], norms[run]), full(4), rounds=2).statement(DELTA)
    with pytest.raises(JaxpflError, match="no epsilon can be claimed"):
        result.statement(DELTA)


@pytest.mark.parametrize(
    ("size", "limit", "clients", "words"),
    [
        (0.09, 1.0, 14, ["the uploads is 0.09", "larger than the uploads require", "unit = example"]),
        (9.0, 1.0, 500, ["the uploads is 9", "most of each upload is clipped", "privacy.quantile"]),
        (0.3, 1.0, 14, None),
        (3.0, 1.0, 14, None),
        (np.nan, 1.0, 14, None),
        (0.09, np.array([1.0, 0.9]), 14, None),  # it adapts
        (0.09, np.array([[1.0, 1.0], [0.1, 0.1]]), 14, None),  # one of several that are tried fits
    ],
)
def test_a_clipping_norm_far_from_the_uploads_is_remarked_on(size, limit, clients, words):
    norms = np.array([[size, size], [np.nan, size]])  # one run has a round with an empty cohort
    text = noise.remark(norms, np.broadcast_to(limit, (2, 2)), clients)
    assert (text is None) == (words is None)
    assert all(word in (text or "") for word in words or ())
    if text:
        assert "epsilon covers neither these norms nor a choice based on them" in text
        assert ("for 14 clients" in text) == (clients == 14)


@pytest.mark.slow
def test_a_fit_remarks_on_its_clipping_norm(federation):
    far, near = (jaxpfl.fit("fedavg", federation, **SETTING, privacy=Mechanism(1.0, limit)) for limit in (50.0, 0.5))
    assert "the clipping norm is 50" in str(far.clipping_remark)
    assert near.clipping_remark is None
    assert jaxpfl.fit("fedavg", federation, **SETTING).clipping_remark is None


def plans(method, mechanism, participation, hyper=None, **more):
    entry = jaxpfl.METHODS[method]
    spec = RunSpec(method=entry, rounds=2, hyper=hyper, **more)
    clients, work = jaxpfl.stack_clients([(np.ones((1, 1)), [0])]), jaxpfl.LocalWork(np.full(4, 5), 3, 5)
    task = make_task("linear", clients, 2)
    return Assembled(spec, task, clients, None, spec.hp, participation, mechanism, work).released(1)[0]


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
    assert not plans("fedavg", steps, full(4), client_optimizer="sgd:momentum=0.9").noise.linear
    for joint in (False, True):
        assert not plans("adaped", Mechanism(2.0, noise="per_step", joint=joint), full(4)).noise.linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": Mechanism((1.0, 2.0)), "seeds": 3}, "noise_multiplier must be one value, or .* 3 seeds, got 2"),
        ({"privacy": Mechanism(1.0, (1.0, 2.0)), "seeds": 3}, "clipping_norm must be one value, or .* 3 seeds, got 2"),
    ],
)
def test_what_cannot_be_accounted_is_not_run(federation, options, message):
    with pytest.raises(JaxpflError, match=message):
        jaxpfl.fit("fedavg", federation, **SETTING, **options)


@pytest.mark.slow
def test_nothing_is_said_where_nothing_was_private(federation):
    with pytest.warns(JaxpflWarning, match=r"privacy has no effect: no method of the run \(local\) uploads anything"):
        result = jaxpfl.fit("local", federation, **SETTING, privacy=Mechanism(1.0))
    with pytest.raises(JaxpflError, match="the run was not private"):
        result.statement(DELTA)


@pytest.mark.parametrize(("known", "missing"), [({"steps": 3}, "scales"), ({"scales": 0}, "steps")])
def test_noise_of_steps_is_not_accounted_without_them(known, missing):
    with pytest.raises(JaxpflError, match=f"{missing} must be given"):
        plan_of(Mechanism(1.0, noise="per_step"), full(4), rounds=2, **known)


def test_steps_that_draw_no_noise_get_no_claim(federation):
    silent = jaxpfl.METHODS["ditto"]._replace(name="own", step_noise=True)
    with pytest.raises(JaxpflError, match=r"steps without noise \(the update never calls LocalWork\.released\)"):
        jaxpfl.fit(silent, federation, **SETTING, privacy=Mechanism(1.0, noise="per_step"))


@pytest.mark.slow
def test_rounds_that_are_added_later_are_counted(federation):
    result = jaxpfl.fit("fedavg", federation, **SETTING, privacy=Mechanism(1.0))
    before = result.statement(DELTA)
    state, _ = result.simulation.advance(result.state, 3)
    after = result.statement(DELTA)
    assert (before.rounds, after.rounds) == (2, 5)
    assert after.epsilon == plan_of(Mechanism(1.0), full(4), rounds=5).epsilon(DELTA) > before.epsilon
    result.simulation.evaluate(state)
    assert result.statement(DELTA) == after


@pytest.mark.slow
@pytest.mark.parametrize("secret", [False, True])
def test_another_simulation_adds_no_rounds_to_a_private_run(federation, secret):
    mechanism = Mechanism(1.0, noise_seed="secret" if secret else "run")
    one = jaxpfl.fit("fedavg", federation, **SETTING, privacy=mechanism)
    other = jaxpfl.fit("fedavg", federation, **SETTING, privacy=mechanism, lr=0.02)
    with pytest.raises(JaxpflError, match="the state belongs to another private simulation"):
        other.simulation.advance(one.state, 1)
    assert other.statement(DELTA).rounds == 2
    state, _ = one.simulation.advance(one.state, 1)
    kept = jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray(a), state)
    state, _ = one.simulation.advance(kept, 1)  # a copy is the same run
    state, _ = other.simulation.advance(other.simulation.adopt(one.simulation.trim(state)), 1)
    assert other.statement(DELTA).rounds == 5


@pytest.mark.slow
def test_a_private_run_goes_on_in_private_only(federation):
    private, plain = (jaxpfl.fit("fedavg", federation, **SETTING, privacy=p) for p in (Mechanism(1.0), None))
    with pytest.raises(JaxpflError, match="the state belongs to a private run"):
        plain.simulation.advance(private.state._replace(server=plain.state.server), 1)
    with pytest.raises(JaxpflError, match="not belong to a private run, but this simulation is private"):
        private.simulation.advance(plain.state._replace(server=private.state.server), 1)


@pytest.mark.slow
def test_equal_runs_are_refused_unless_their_noise_differs(federation):
    with pytest.raises(JaxpflError, match="seed 1 is given twice for the same hyper-parameters"):
        jaxpfl.fit("fedavg", federation, **SETTING, seeds=[1, 0, 1])
    with pytest.raises(JaxpflError, match="seed 1 is given twice"):
        jaxpfl.fit("fedavg", federation, **SETTING, seeds=[1, 1, 1], hyper={"lr": [0.1, 0.2, 0.1]})
    swept = jaxpfl.fit("fedavg", federation, **SETTING, seeds=[1, 1], hyper={"lr": [0.1, 0.2]})
    private = jaxpfl.fit("fedavg", federation, **SETTING, seeds=[1, 1], privacy=Mechanism(1.0))
    for result in (swept, private):
        first, second = jax.tree.leaves(result.state.server)[0]
        assert not np.array_equal(first, second)


class Trained(nnx.Module):
    """A module that comes with its parameters."""

    def __init__(self):
        self.dense = nnx.Linear(64, 10, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x.reshape(x.shape[0], -1))


@pytest.mark.slow
def test_a_start_from_given_parameters_is_said(federation):
    parameters = {"head": {"kernel": np.zeros((64, 10)), "bias": np.zeros(10)}}
    for given in ({"warm_start": parameters}, {"model": Trained()}):
        result = jaxpfl.fit("fedavg", federation, **SETTING | given, privacy=Mechanism(1.0))
        assert result.statement(DELTA).caveats == (GIVEN_START,)
        assert GIVEN_START in str(result.statement(DELTA))


@pytest.mark.parametrize(("asked", "private"), [(0.0, False), (1.0, True)])
def test_a_model_whose_run_only_clipped_is_not_private(tmp_path, asked, private):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"privacy": {"noise_multiplier": asked}}, "data": 7}))
    assert parameters_origin(str(tmp_path)) == Origin(7, private)


def test_cohorts_that_are_cut_are_said():
    whole, cut = (plan_of(Mechanism(1.0), poisson(20, 0.2, cap), rounds=5).statement(DELTA) for cap in (20, 8))
    assert CUT in str(cut)
    assert CUT not in str(whole)


def test_private_uploads_have_no_memory(federation):
    """What the code leaves out of an upload may depend on a client's data, and would be sent later."""
    given = {"method": jaxpfl.METHODS["fedavg"], "model": "linear", "compress": "sign"}
    for privacy in (None, Mechanism(1.0, 0.5, "distributed", min_uploads=2)):
        state, _ = assemble(RunSpec(**given, privacy=privacy), federation).simulation().shapes_of_one_run()
        assert bool(jax.tree.leaves(state.clients)) == (privacy is None)


def test_a_claim_names_what_it_leaves_open():
    """Patience, the seed, and a start from a model of the same users."""
    given = {"model": "linear", "partition": "iid", "clients": 6, "validation_share": 0.2, "batch_size": 8, "rounds": 4}
    private = PrivacyConfig(noise_multiplier=1.0, delta=DELTA)
    config = resolve(RunConfig(**given, patience=1, privacy=private, warm_start="given.npz"))
    start = {"head/kernel": np.zeros((64, 10)), "head/bias": np.zeros(10)}
    experiment = prepare(config, ("fedavg",), initial=start)
    claim = protection_of(experiment.runs["fedavg"], experiment.caveats).statement
    assert claim.caveats == (GIVEN_START, STOPPED)
    assert (claim.noise_seed, STOPPED in str(claim), SEED["run"] in str(claim)) == ("run", True, True)
    checksum = data_checksum(experiment.federation)
    for origin, caveat_of in ((Origin(checksum, True), SPENT_BEFORE), (Origin(checksum, False), SAME_USERS)):
        assert caveat(origin, experiment.federation) == caveat_of
    assert caveat(None, experiment.federation) == caveat(Origin(0, True), experiment.federation) == GIVEN_START


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "batch_size", "remembers"), [("fedavg", 1000, False), ("fedavg", 5, True), ("adaped", 1000, True)]
)
def test_cut_cohorts_are_said_where_uploads_depend_on_what_clients_keep(federation, method, batch_size, remembers):
    """A state, or the place in the order of the examples; whole data sets have none."""
    given = {"model": "linear", "rounds": 1, "local_steps": 2, "batch_size": batch_size, "privacy": Mechanism(1.0)}
    cut = jaxpfl.fit(method, federation, **given, cohort=2, cohort_cap=3)
    assert cut.simulation.remembers() is remembers
    assert (CUT in str(cut.statement(DELTA))) is remembers
    assert CUT not in str(jaxpfl.fit(method, federation, **given, cohort=2, cohort_cap=4).statement(DELTA))


def test_secret_noise_is_said_and_differs_between_runs(federation):
    result = jaxpfl.fit("fedavg", federation, **SETTING, privacy=Mechanism(1.0, noise_seed="secret"))
    said = result.statement(DELTA)
    assert said.noise_seed == "secret"
    assert "noise from the operating system" in str(said)
    assert "observers who know the seed" not in str(said)
    first, second = (jax.random.key_data(result.simulation.init([1]).released) for _ in range(2))
    assert not np.array_equal(first, second)
    with pytest.raises(JaxpflError, match="noise_seed"):
        Mechanism(1.0, noise_seed="os")


def test_cohorts_are_drawn_from_a_secret_key(federation):
    """Whoever knows the run's seed does not know who takes part."""
    mechanism = Mechanism(1.0, noise_seed="secret")
    simulation = simulation_of("fedavg", federation, mechanism, participation="poisson", cohort=2)
    # Each of four clients is in a round with probability 1/2: three counts of 24 rounds agree with one below 1e-6.
    counts = [np.asarray(simulation.counts(simulation.advance(simulation.init([1]), 24)[0]).table) for _ in range(3)]
    assert len({count.tobytes() for count in counts}) > 1


def test_personalisation_of_silos_is_noised_by_the_noise_key(federation):
    privacy = PrivacyConfig(unit="example", noise_multiplier=1.0, delta=DELTA)
    simulation = simulation_of("fedavg-ft", federation, privacy)
    state = simulation.init([1])
    keys = state.noise, state.key
    assert not np.array_equal(*map(jax.random.key_data, keys))
    one, other = (jax.tree.leaves(simulation.personal_models(state._replace(noise=key)))[0] for key in keys)
    assert not np.array_equal(one, other)


def test_noise_is_secret_with_a_function_of_the_users(federation):
    """Which has no text to make a key of: two of one name may differ."""
    settings = {**SETTING, "privacy": Mechanism(1.0), "client_optimizer": lambda rate: optax.sgd(rate)}
    result = jaxpfl.fit("fedavg", federation, **settings)
    assert result.statement(DELTA).noise_seed == "secret"
    first, second = (jax.random.key_data(result.simulation.init([1]).noise) for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "dtype"), [("fedavg", jnp.float16), ("adamix", jnp.bfloat16)])
def test_models_of_few_digits_are_clipped_and_noised_in_float32(federation, method, dtype):
    """In bfloat16 a norm, a sum and noise are right to 1 % at best, and noise ends at 2.8 deviations."""
    model = nn.Dense(10, param_dtype=dtype, dtype=dtype)
    narrow = jaxpfl.Model(
        lambda key, x: model.init(key, x.reshape(len(x), -1)),
        lambda params, x, key=None, train=False: model.apply(params, x.reshape(len(x), -1)).astype(jnp.float32),
    )
    released = []
    real = noise.add_gaussian

    def watched(key, tree, stddev, protects):
        result = real(key, tree, stddev, protects)
        released.extend(leaf.dtype for leaf in jax.tree.leaves(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_sum, "add_gaussian", watched)
        patch.setattr(private_em, "add_gaussian", watched)
        result = jaxpfl.fit(method, federation, **SETTING | {"model": narrow}, privacy=Mechanism(1.0, 0.1))
    assert set(released) == {jnp.dtype(jnp.float32)}
    server = result.state.server if method == "adamix" else result.state.server.state
    kept = server.mu if method == "adamix" else server
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(dtype)}


def test_noise_in_the_steps_of_a_narrow_model_is_refused(federation):
    model = nn.Dense(10, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    narrow = jaxpfl.Model(
        lambda key, x: model.init(key, x.reshape(len(x), -1)),
        lambda params, x, key=None, train=False: model.apply(params, x.reshape(len(x), -1)).astype(jnp.float32),
    )
    with pytest.raises(JaxpflError, match="per_step requires a model in float32, got bfloat16"):
        jaxpfl.fit("fedavg", federation, **SETTING | {"model": narrow}, privacy=Mechanism(1.0, noise="per_step"))


@pytest.mark.slow
def test_the_delta_of_a_config_is_that_of_its_statement(federation):
    config = PrivacyConfig(epsilon=8.0, delta=DELTA)
    result = jaxpfl.fit("fedavg", federation, **SETTING, privacy=config)
    assert result.statement() == result.statement(DELTA)
    assert result.statement().epsilon == pytest.approx(8.0, rel=0.01)
    assert result.statement().epsilon <= 8.0
    assert result.statement(1e-2).epsilon < result.statement().epsilon
    with pytest.raises(JaxpflError, match="a privacy claim requires delta"):
        jaxpfl.fit("fedavg", federation, **SETTING, privacy=Mechanism(2.0)).statement()


@pytest.mark.slow
def test_each_run_has_its_own(federation):
    seeds, noise_of, norms = (3, 4, 5), (0.0, 0.7, 2.0), (0.5, 0.05, 0.2)

    def server(mechanism, seeds):
        return jaxpfl.fit("fedavg", federation, **SETTING, seeds=seeds, privacy=mechanism).state.server.state

    together = server(Mechanism(noise_of, norms), seeds)
    for i, (seed, z, limit) in enumerate(zip(seeds, noise_of, norms, strict=True)):
        alone = server(Mechanism(z, limit), (seed,))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b[0], rtol=2e-5, atol=1e-6), together, alone)
    first, last = server(Mechanism(noise_of, norms[::-1]), seeds), together
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)) > 1e-2


def test_adamix_takes_one(federation):
    with pytest.raises(JaxpflError, match="adamix does not support sweeps over noise_multiplier or clipping_norm"):
        jaxpfl.fit("adamix", federation, **SETTING, seeds=[0, 0], privacy=Mechanism((1.0, 2.0)))
