"""The audit of the engine's own rounds: below the claim on sound code, above it where a fault is planted.

On sound code a bound above the claim has probability 5 % at most (the confidence of each bound), a look inside that
finds a fault 1e-6; the seeds are fixed. The faults are those that private code is known for; each is planted behind the
method, where `Assembled` puts the mechanism around it. Uploads have a matrix, a vector and a scale (psi).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms import METHODS, LocalWork, Method, SgdHyper
from jaxpfl.algorithms.parts.servers import mean_server
from jaxpfl.audit import Audit, Subject, audit, games, white_box
from jaxpfl.core.participation import Availability, Participation, full, poisson, uniform
from jaxpfl.core.protocol import Algorithm, Client, Upload
from jaxpfl.data import stack_clients
from jaxpfl.engine import ExecutionPlan, build
from jaxpfl.engine.build import Assembled
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import make_task
from jaxpfl.priors.distillation import Shared
from jaxpfl.privacy import Mechanism, StepNoise, mechanism, private_sum, privatize
from jaxpfl.privacy.audit import Finding
from jaxpfl.privacy.noise import add_gaussian, clip
from jaxpfl.support.errors import JaxpflError

Z, C, CLIENTS = 1.0, 0.5, 4
CENTRAL = Mechanism(Z, C)
SHARES = Mechanism(Z, C, "distributed", CLIENTS)
STEPS = Mechanism(Z, C, "per_step")
COUNTED = Mechanism(Z, C, quantile=0.5, count_stddev=1.0)
DELTA = 0.1
slow = pytest.mark.slow


def plain(task, work):
    """A method that compiles fast: clients upload sums of their features as a matrix, a vector and a scale (psi)."""

    def update(key, hp, ctx, message, state, splits):
        x = splits.train.x
        change = Shared({"kernel": 10 * jnp.outer(x.sum(axis=0), x.sum(axis=1)), "bias": x[:, 0]}, x.sum())
        return state, Upload(change, jnp.ones(())), {"train_loss": x.mean()}

    client = Client(lambda key, hp, ctx, message: (), update, lambda *args: (), lambda hp, personal, x: x)
    zeros = Shared({"kernel": jnp.zeros((*task.input_shape, 2)), "bias": jnp.zeros(2)}, jnp.zeros(()))
    return Algorithm((client,), mean_server(lambda key: zeros), work.steps)


FOUND = {"plain": Method("plain", plain, SgdHyper()), **METHODS}


def subject(
    tried: Mechanism = CENTRAL,
    participation: Participation | None = None,
    *,
    method: str = "plain",
    rounds: int = 2,
    steps: int = 1,
    features: int = 3,
    examples: int = 2,
    epochs: int | None = None,
    dropout: float = 0.0,
    **options,
) -> Subject:
    participation = participation or full(CLIENTS)
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(examples, features)), np.arange(examples) % 2) for _ in range(participation.num_clients)]
    federation = stack_clients(data, test=data)
    work = LocalWork(np.full(len(data), examples), steps, 2, weighting="uniform", privacy=tried)
    work = work if epochs is None else work.replace_epochs(epochs)
    plan = ExecutionPlan(devices=1, clients="vmap", runs="vmap")
    task, found = make_task("linear", federation, 2), FOUND[method]
    spec = RunSpec(method=found, rounds=rounds, options=options, plan=plan)
    fails = Availability(dropout=dropout)
    return Subject(Assembled(spec, task, federation, None, found.hyper, participation, tried, work, availability=fails))


def play(*args, worlds: int = 2000, **more) -> tuple[bool, games.Game]:
    """True if the game with one canary refutes the claim; and the game."""
    tried = subject(*args, **more)
    game = games.play(tried, worlds=worlds, delta=DELTA)
    return game.bound.epsilon > tried.claim.epsilon(DELTA, tried.claim.default_accountant), game


def look(*args, runs: int = 16, **more) -> list[str]:
    """Check that the white-box check of the noise fails."""
    return [finding.test for finding in white_box.faults(white_box.noise(subject(*args, **more), runs=runs).findings)]


SOUND = [
    pytest.param(CENTRAL, full(CLIENTS), {}, id="central"),
    pytest.param(CENTRAL, poisson(CLIENTS, 0.5, 2), {"rounds": 3}, id="cut"),
    pytest.param(CENTRAL, uniform(CLIENTS, 2), {}, id="uniform"),
    pytest.param(SHARES, full(CLIENTS), {}, id="shares"),
    pytest.param(COUNTED, full(CLIENTS), {}, id="adaptive"),
    pytest.param(CENTRAL, full(CLIENTS), {"method": "adaped"}, id="adaped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tried", "participation", "more"),
    [
        *(one for one in SOUND if one.id in ("cut", "uniform", "adaptive")),
        pytest.param(Mechanism(Z, C, "per_step"), full(CLIENTS), {"method": "adaped", "steps": 3}, id="steps"),
    ],
)
def test_sound_code_is_not_refuted_by_a_game(tried, participation, more):
    # A canary that is often left out has a lower bound of about .4; of 2000 worlds it is 0 in one game of several.
    refuted, game = play(tried, participation, **more, worlds=20_000 if participation.left_out else 2000)
    assert not refuted
    assert 0 < game.bound.epsilon < game.bound.ceiling
    assert game.present.mean() > game.absent.mean()


@slow
@pytest.mark.parametrize(
    ("tried", "participation", "more"),
    [one for one in SOUND if one.id in ("central", "shares", "adaptive", "adaped")],
)
def test_a_look_at_sound_code_finds_nothing(tried, participation, more):
    assert look(tried, participation, **{"rounds": 4} | more) == []


@slow
def test_a_look_at_sound_cohorts_finds_nothing():
    for participation in (full(CLIENTS), poisson(CLIENTS, 0.5, 2), uniform(CLIENTS, 2)):
        claim = subject(participation=participation).claim
        assert white_box.faults(white_box.cohorts(participation, claim.sampling)) == []


def planted(monkeypatch, *, client=None, update=None, server=None, hyper=None):
    """Wrap the result of `privatize` in a defect: of a client's or the server's update, the server, or the numbers."""

    def faulty(algorithm, hp, tried, *rest):
        algorithm, private = privatize(algorithm, hp, tried, *rest)
        if client is not None:
            clients = tuple(each._replace(update=partial(client, each.update)) for each in algorithm.clients)
            algorithm = algorithm._replace(clients=clients)
        if update is not None:
            algorithm = algorithm._replace(
                server=algorithm.server._replace(update=partial(update, algorithm.server.update))
            )
        if server is not None:
            algorithm = algorithm._replace(server=server(algorithm.server))
        return algorithm, private if hyper is None else hyper(private)

    monkeypatch.setattr(build, "privatize", faulty)


@slow
def test_half_the_noise_is_seen_inside(monkeypatch):
    planted(monkeypatch, hyper=lambda private: private.replace(noise_multiplier=private.noise_multiplier / 2))
    found = white_box.noise(subject(rounds=4), runs=16)
    assert "scale" in [finding.test for finding in white_box.faults(found.findings)]
    assert found.scale == pytest.approx(0.5, abs=4 * found.error)


def one_key(server):
    """The server's key of every round is that of the run's start."""

    def init(key, hp, ctx):
        return server.init(key, hp, ctx), jax.random.key_data(key)

    def update(key, hp, ctx, state, reduced):
        inner, first = state
        inner, metrics = server.update(jax.random.wrap_key_data(first), hp, ctx, inner, reduced)
        return (inner, first), metrics

    def broadcast(key, hp, ctx, state):
        return server.broadcast(key, hp, ctx, state[0])

    return server._replace(init=init, update=update, broadcast=broadcast)


def test_noise_that_rounds_of_any_distance_share_cancels_in_a_difference():
    signs = [int(games.sign(t)) for t in range(16)]
    assert all(any(a != b for a, b in zip(signs, signs[apart:], strict=False)) for apart in range(1, 9))


@pytest.mark.slow
def test_a_key_that_rounds_share_is_seen_by_a_game(monkeypatch):
    planted(monkeypatch, server=one_key)
    refuted, game = play(worlds=400)
    assert refuted, game.bound
    assert game.absent.std() < 0.1 * Z  # of what it tells by, no noise is left


@slow
def test_a_key_that_runs_share_is_seen_inside(monkeypatch):
    def same(update, key, hp, ctx, state, reduced):
        return update(jax.random.fold_in(jax.random.key(0), ctx.round), hp, ctx, state, reduced)

    planted(monkeypatch, update=same)
    assert any(test.startswith("runs") for test in look(rounds=4, runs=4, features=20))


@slow
def test_one_key_for_all_leaves_is_seen_inside(monkeypatch):
    """The noise of a leaf begins with that of any smaller one."""

    def each(key, tree, *rest):
        return jax.tree.map(lambda leaf: add_gaussian(key, leaf, *rest), tree)

    monkeypatch.setattr(private_sum, "add_gaussian", each)
    assert [test.partition(":")[0] for test in look(rounds=4, runs=2, features=10)] == ["between leaves"]


@slow
def test_a_count_with_the_key_of_the_sum_is_seen(monkeypatch):
    monkeypatch.setattr(jax.random, "split", lambda key, number=2: jnp.stack([key] * number))
    assert any("count below the clipping norm" in test for test in look(COUNTED, rounds=4, runs=2))
    assert [finding.test for finding in white_box.faults(white_box.draws(subject(COUNTED)))] == ["keys of draws"]


@slow
@pytest.mark.parametrize("faulty", [False, True])
def test_a_sum_of_too_few_uploads_is_seen_inside(monkeypatch, faulty):
    def lenient(update, key, hp, ctx, state, reduced):
        return update(key, hp, ctx, state, reduced._replace(contributors=jnp.int32(CLIENTS)))

    if faulty:
        planted(monkeypatch, update=lenient)
    assert ("what is released" in look(SHARES, rounds=4, runs=4, dropout=0.2)) == faulty


@slow
def test_a_release_that_is_not_finite_is_seen_inside(monkeypatch):
    def broken(update, key, hp, ctx, state, reduced):
        total = jax.tree.map(lambda a: jnp.where(ctx.round == 1, jnp.nan, a), reduced.total)
        return state, update(key, hp, ctx, state, reduced._replace(total=total))[1]

    planted(monkeypatch, update=broken)
    assert look(rounds=2, runs=2)
    assert white_box.faults([Finding("a p-value that is not a number", float("nan"))])


STEPPED = Mechanism(Z, C, "per_step", scale_clipping_norm=C / 2)


@slow
@pytest.mark.parametrize(
    ("tried", "more"),
    [
        (CENTRAL, {"participation": poisson(CLIENTS, 0.5), "rounds": 3}),
        (SHARES, {"dropout": 0.5}),
        (STEPPED, {"method": "adaped", "steps": 5}),
        (CENTRAL, {"method": "adamix", "em_steps": 3}),
    ],
    ids=["central", "shares", "steps", "EM"],
)
def test_draws_of_sound_code_are_those_of_the_claim(tried, more):
    assert [finding.p_value for finding in white_box.draws(subject(tried, **more))] == [1.0, 1.0]


@slow
def test_noise_of_psi_on_the_stream_of_the_parameters_is_seen_in_the_draws(monkeypatch):
    def other_stream(self, key, gradient):
        own = mechanism.stream(key, mechanism.Purpose.RELEASE_NOISE)
        return mechanism._released(own, gradient, self.scale_clipping_norm, self.scale_stddev, "a step of psi")

    monkeypatch.setattr(StepNoise, "release_scale", other_stream)
    found = white_box.faults(white_box.draws(subject(STEPPED, method="adaped", steps=2)))
    assert [finding.test for finding in found] == ["keys of draws"]


@slow
def test_a_step_without_noise_is_seen_in_the_draws(monkeypatch):
    monkeypatch.setattr(mechanism, "add_gaussian", lambda key, tree, stddev, protects: tree)
    found = white_box.faults(white_box.draws(subject(STEPPED, method="adaped", steps=4)))
    assert [finding.test for finding in found] == ["number and deviations of draws"]


def by_leaf(tree, limit):
    leaves = jax.tree.map(lambda leaf: clip(leaf, limit)[0], tree)
    return leaves, clip(tree, limit)[1]


def all_but_psi(tree, limit):
    clipped, size = clip(tree._replace(psi=jnp.zeros(())), limit)
    return clipped._replace(psi=tree.psi), size


@slow
def test_steps_by_a_clients_examples_are_seen_by_a_game():
    """Runs refuse them: without examples a client would take one noisy step in place of twenty."""
    given = {"method": "fedavg", "rounds": 1, "features": 40, "examples": 40, "worlds": 400}
    refuted, game = play(Mechanism(100.0, 1.0, "per_step"), **given, epochs=1)
    assert refuted, game.bound
    assert game.statistic == "length"
    assert not play(Mechanism(100.0, 1.0, "per_step"), **given, steps=20)[0]


@slow
@pytest.mark.parametrize("fault", [by_leaf, all_but_psi])
def test_wrong_clips_are_seen_inside(monkeypatch, fault):
    """Uploads are beyond the norm, as real clients' are here: C is small, and so is the noise."""
    monkeypatch.setattr(private_sum, "clip", fault)
    assert any(test.startswith("sum") for test in look(Mechanism(0.3, 0.01), rounds=4))


@slow
def test_noise_that_skips_small_leaves_is_seen(monkeypatch):
    add = private_sum.add_gaussian

    def skipping(key, tree, *rest, **more):
        noisy = add(key, tree, *rest, **more)
        return noisy._replace(mu=noisy.mu | {"bias": tree.mu["bias"]}, psi=tree.psi)

    monkeypatch.setattr(private_sum, "add_gaussian", skipping)
    assert any(test.startswith("leaves") for test in look())
    refuted, game = play(worlds=400)
    assert refuted, game.bound


@slow
def test_a_divisor_that_counts_who_is_there_is_seen_by_a_game(monkeypatch):
    def counting(update, key, hp, ctx, state, reduced):
        there = ctx._replace(expected_cohort=reduced.contributors.astype(float))
        return update(key, hp, there, state, reduced)

    planted(monkeypatch, update=counting)
    refuted, game = play(worlds=400)
    assert refuted, game.bound
    assert game.statistic == "divisor"


@slow
def test_weights_by_examples_are_seen(monkeypatch):
    """Each clipped change is multiplied by its number of examples after all."""

    def weighted(update, key, hp, ctx, message, state, splits):
        state, upload, metrics = update(key, hp, ctx, message, state, splits)
        return state, upload._replace(total=jax.tree.map(lambda a: a * splits.train.size, upload.total)), metrics

    planted(monkeypatch, client=weighted)
    refuted, game = play(worlds=6000)
    assert refuted, game.bound


def test_a_fixed_size_draw_that_is_accounted_as_poisson_is_seen_inside():
    claimed = poisson(20, 0.25)
    drawn = uniform(20, 5)._replace(rate=claimed.rate, name="poisson", capacity=20)
    sampling = subject(participation=claimed).claim.sampling
    assert [finding.test for finding in white_box.faults(white_box.cohorts(drawn, sampling))] == ["cohort sizes"]
    assert white_box.faults(white_box.cohorts(claimed, sampling)) == []


def test_clients_who_are_drawn_more_often_are_seen_inside():
    claimed = poisson(20, 0.25)

    def twice_the_first(key, ids):
        return jnp.where(jnp.arange(20) == 19, 0, claimed.sample(key, ids)).sort()

    found = white_box.cohorts(claimed._replace(sample=twice_the_first), subject(participation=claimed).claim.sampling)
    assert "who is drawn" in [finding.test for finding in white_box.faults(found)]


@slow
def test_one_run_stays_below_the_claim_and_sees_a_skipped_clip(monkeypatch):
    tried = subject(participation=full(20), features=30)
    claimed = tried.claim.epsilon(1e-5)
    sound = games.one_run(tried, delta=1e-5, runs=10)
    assert 0.5 < sound.epsilon < claimed
    assert sound.canaries == 200
    small = subject(Mechanism(20.0, C), full(20), features=30)
    assert games.one_run(small, delta=1e-5, runs=10).epsilon < small.claim.epsilon(1e-5) < 1
    monkeypatch.setattr(private_sum, "clip", lambda tree, limit: (tree, clip(tree, limit)[1]))
    assert games.one_run(small, delta=1e-5, runs=10).epsilon > small.claim.epsilon(1e-5)


@slow
def test_the_whole_audit():
    found: Audit = audit(subject(participation=poisson(8, 0.5)), delta=1e-3, worlds=100, canary_runs=3)
    assert not found.against
    assert found.claimed_one_run > found.claimed > found.game.bound.epsilon
    said = found.to_json()
    assert said["refuted"] is False
    assert said["one_run"]["canaries"] == 24
    assert said["noise"]["over_claimed"] == pytest.approx(1, abs=0.5)


@slow
def test_adamix_is_audited_by_its_mixture():
    refuted, _ = play(Mechanism(0.5, C), method="adamix", em_steps=3)
    assert not refuted
    assert white_box.why_no_noise_check(subject(method="adamix", em_steps=3)) is not None


def test_refusals():
    with pytest.raises(JaxpflError, match="worlds must be at least 40, got 4"):
        games.check_worlds(4)
    with pytest.raises(JaxpflError, match=r"canaries must be between 2 and 4 \(the number of clients\), got 5"):
        games.one_run(subject(), canaries=5, delta=1e-5)
    with pytest.raises(JaxpflError, match="local uploads nothing and so has no privacy claim to audit"):
        _ = subject(method="local").claim
    with pytest.raises(JaxpflError, match="noise multiplier of 0"):
        _ = subject(Mechanism(0.0, C)).claim
