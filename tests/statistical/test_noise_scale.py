"""The noise that a round adds has the scale that is accounted: a Kolmogorov-Smirnov test takes it, and refuses others.

Each test of it refuses right code with probability 1e-4 (its level); with 4000 entries, scales 2/3 and 3/2 of the right
one are refused with a probability that differs from one by less than 1e-30. The sampling of the engine is the sampling
that is accounted: each client independently, at the stated rate. Its seeds are fixed; right code passes each bound with
probability above 1 - 1e-5.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, LocalWork, Model, Simulation, Task, stack_clients
from jaxpfl.core.participation import Participation, full, of, poisson
from jaxpfl.core.types import PyTree
from jaxpfl.models import classification
from jaxpfl.privacy import Mechanism, privatize

ENTRIES, CLIENTS, C, Z, RATE = 4000, 6, 0.5, 0.8, 0.05
LEVEL = 1e-4
NEXT_TO_NONE = 1e-29
"""A noise multiplier: without any noise the cohort would be drawn from another key."""
ADAPTIVE = Mechanism(Z, C, quantile=0.5, count_stddev=1.5)
Z_SUM = float(ADAPTIVE.noise_multiplier_of_sum)


def noise_of_a_round(mechanism: Mechanism, participation: Participation, devices: int = 1) -> np.ndarray:
    """Noise added to the server's parameters by one round, over z C / D, [ENTRIES]."""
    rng = np.random.default_rng(0)
    federation = stack_clients([(rng.normal(size=(3, ENTRIES)), np.zeros(3, int)) for _ in range(CLIENTS)])
    model = Model(lambda key, x: jnp.zeros(ENTRIES), lambda w, x, key=None, train=False: (x @ w)[:, None])
    task = Task(model, (ENTRIES,), 1, lambda p, y: (p[:, 0] - y - 1) ** 2, {"loss": lambda p, y: p[:, 0]})
    ends, key = [], None
    for noisy in (mechanism, replace(mechanism, noise_multiplier=NEXT_TO_NONE)):
        work = LocalWork(np.full(CLIENTS, 3), 1, 3, privacy=noisy)
        method = METHODS["fedavg"]
        algorithm, hp = privatize(method.build(task, work), method.hyper.replace(lr=RATE), noisy)
        plan = ExecutionPlan(devices=devices, rounds_per_call=1)
        made = Simulation(algorithm, task, federation, participation, hp, plan=plan)
        state = made.init([0])
        key = np.array(jax.random.key_data(state.noise)) if key is None else key  # a copy: states are donated
        state = made.adopt(state._replace(noise=jax.random.wrap_key_data(jnp.asarray(key))))  # the same cohort
        state, _ = made.advance(state, 1)
        ends.append(np.asarray(state.server.state[0], np.float64))
    return (ends[0] - ends[1]) * participation.expected_cohort / (Z * C)


def p_value(noise: np.ndarray, scale: float = 1.0) -> float:
    return float(stats.kstest(noise / scale, "norm").pvalue)


@pytest.mark.parametrize(
    ("mechanism", "participation", "devices", "scale"),
    [
        pytest.param(Mechanism(Z, C), full(CLIENTS), 1, 1.0, id="central"),
        pytest.param(Mechanism(Z, C), poisson(CLIENTS, 0.5), 2, 1.0, id="central, Poisson", marks=pytest.mark.slow),
        pytest.param(Mechanism(Z, C, "distributed", CLIENTS), full(CLIENTS), 2, 1.0, id="distributed"),
        # More uploads than are needed: more noise than is accounted.
        pytest.param(
            Mechanism(Z, C, "distributed", 3),
            full(CLIENTS),
            1,
            2**0.5,
            id="distributed, more than K_min",
            marks=pytest.mark.slow,
        ),
        pytest.param(ADAPTIVE, full(CLIENTS), 1, Z_SUM / Z, id="adaptive, the sum", marks=pytest.mark.slow),
        # One step of each of K clients, at the learning rate.
        pytest.param(
            Mechanism(Z, C, "per_step"), full(CLIENTS), 2, RATE * CLIENTS**0.5, id="per step", marks=pytest.mark.slow
        ),
    ],
)
def test_the_noise_of_a_round(mechanism, participation, devices, scale):
    assert_standard(noise_of_a_round(mechanism, participation, devices) / scale)


def assert_standard(noise: np.ndarray) -> None:
    """Normal of variance one, and of none else."""
    assert p_value(noise) > LEVEL
    assert p_value(noise, 2 / 3) < LEVEL
    assert p_value(noise, 3 / 2) < LEVEL


def after_a_round(method: str, mechanism: Mechanism, **hyper: float) -> tuple[PyTree, PyTree]:
    """The server's state after a round of as many runs as `ENTRIES`, with noise and without, leaves [ENTRIES, ...]."""
    rng = np.random.default_rng(0)
    federation = stack_clients([(rng.normal(size=(3, 2)), np.arange(3) % 2) for _ in range(CLIENTS)])
    model = Model(lambda key, x: jnp.eye(2), lambda w, x, key=None, train=False: x @ w)
    task = classification(model, (2,), 2)
    entry, ends, key = METHODS[method], [], None
    for noisy in (mechanism, replace(mechanism, noise_multiplier=NEXT_TO_NONE)):
        algorithm = entry.build(task, LocalWork(np.full(CLIENTS, 3), 1, 3, privacy=noisy))
        algorithm, hp = privatize(algorithm, entry.hyper.replace(**hyper), noisy)
        made = Simulation(
            algorithm, task, federation, full(CLIENTS), hp, plan=ExecutionPlan(runs="vmap", rounds_per_call=1)
        )
        state = made.init(range(ENTRIES))
        key = np.array(jax.random.key_data(state.noise)) if key is None else key  # a copy: states are donated
        state, _ = made.advance(made.adopt(state._replace(noise=jax.random.wrap_key_data(jnp.asarray(key)))), 1)
        ends.append(jax.tree.map(lambda a: np.asarray(a, np.float64), state.server))
    return ends[0], ends[1]


@pytest.mark.slow
def test_the_noise_of_adaptive_clippings_count():
    """``log C <- log C - rate (count / D - quantile)``, and a count of K clients that do not differ between runs."""
    noisy, _ = after_a_round("fedavg", ADAPTIVE, lr=RATE)
    moved = np.log(noisy.clipping_norm / C) * CLIENTS / (ADAPTIVE.quantile_lr * ADAPTIVE.count_stddev)
    assert_standard(moved - moved.mean())


@pytest.mark.slow
@pytest.mark.parametrize("scale_norm", [None, 2.0])
def test_the_noise_of_adapeds_steps(scale_norm):
    """Noise of mu with C_1, and of psi with C_2, both with the same z."""
    mechanism = Mechanism(Z, C, "per_step", scale_clipping_norm=scale_norm)
    noisy, exact = (end.state for end in after_a_round("adaped", mechanism, lr_global=RATE, lr_psi=0.05))
    one = Z / CLIENTS**0.5
    assert_standard((noisy.psi - exact.psi) / (0.05 * one * (scale_norm or C)))
    for entry in range(4):
        assert_standard(np.reshape(noisy.mu - exact.mu, (ENTRIES, 4))[:, entry] / (RATE * one * C))


def test_the_noise_of_a_sum_whose_count_is_released_too():
    """Sum and count together are one Gaussian of noise multiplier z: 1/z^2 = 1/z_sum^2 + 1/(2 s_count)^2."""
    mechanism = Mechanism(Z, C, quantile=0.5, count_stddev=1.0)
    z_sum = float(mechanism.noise_multiplier_of_sum)
    assert pytest.approx(1 / z_sum**2 + 1 / 2.0**2) == 1 / Z**2


M, DRAWN, ROUNDS = 20, 0.3, 4000
IDS = jnp.arange(100, 100 + M)


def taking_part(cap: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Participation, [ROUNDS, M] bool, and the number left out, [ROUNDS]."""
    participation = poisson(M, DRAWN, cap)
    keys = jax.random.split(jax.random.key(1), ROUNDS)
    rows, left_out = jax.jit(
        lambda keys: jax.lax.map(lambda k: (participation.sample(k, IDS), participation.left_out(k, IDS)), keys)
    )(keys)
    rows = np.asarray(rows)
    assert (np.diff(rows, axis=1) >= 0).all(), "rows are sorted, empty slots last"
    assert ((np.diff(rows, axis=1) > 0) | (rows[:, 1:] == M)).all(), "and distinct"
    return (rows[:, :, None] == np.arange(M)).any(axis=1), np.asarray(left_out)


def test_each_client_at_the_rate_independently():
    here, left_out = taking_part()
    assert not left_out.any()
    # Each client's count is binomial: M two-sided tests at 1e-5 / M.
    for count in here.sum(axis=0):
        assert stats.binomtest(int(count), ROUNDS, DRAWN).pvalue > 1e-5 / M
    # The size of a cohort is binomial(M, q): a chi-squared test on the sizes that are expected five times or more.
    expected = ROUNDS * stats.binom.pmf(np.arange(M + 1), M, DRAWN)
    common = expected >= 5
    observed = np.bincount(here.sum(axis=1), minlength=M + 1)
    table = np.append(observed[common], observed[~common].sum()), np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(*table).pvalue > 1e-5
    # Pairs are uncorrelated: 190 correlations of standard error ROUNDS^-1/2; 6 of them leave 4e-7.
    correlations = np.corrcoef(here.T.astype(float))[np.triu_indices(M, 1)]
    assert np.abs(correlations).max() < 6 / ROUNDS**0.5


def test_a_cap_takes_a_uniform_part_of_those_drawn():
    cap = 5
    drawn, _ = taking_part()
    here, left_out = taking_part(cap)
    assert (here <= drawn).all(), "the same draw"
    np.testing.assert_array_equal(here.sum(axis=1), np.minimum(drawn.sum(axis=1), cap))
    np.testing.assert_array_equal(left_out, drawn.sum(axis=1) - here.sum(axis=1))
    full = drawn.sum(axis=1) == cap + 2
    chances = here[full].sum(axis=0) / np.maximum(drawn[full].sum(axis=0), 1)
    error = np.sqrt(cap / (cap + 2) * 2 / (cap + 2) / drawn[full].sum(axis=0))
    assert (np.abs(chances - cap / (cap + 2)) < 5 * error).all()  # 20 clients at 5 standard errors: 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11), "between 1 and the number of clients"),
        ((10, 5, "binomial"), "unknown participation"),
        ((10, 5, "full"), "cohort of all 10"),
        ((10, 5, "uniform", 7), "cap = 7 requires participation = poisson"),
        ((10, 5, "poisson", 11), "between 1 and 10"),
        ((10, 5, "poisson", 0), "between 1 and 10"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(JaxpflError, match=message):
        of(*arguments)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(JaxpflError, match="must be > 0 and <= 1"):
        poisson(10, rate)
