"""The noise that a round adds has the scale that is accounted: a Kolmogorov-Smirnov test takes it, and refuses others.

Each test refuses right code with probability 1e-4 (its level); with 4000 entries, scales 2/3 and 3/2 of the right one
are refused with a probability that differs from one by less than 1e-30.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpfl import METHODS, ExecutionPlan, LocalWork, Model, Simulation, Task, stack_clients
from jaxpfl.participation import Participation, full, poisson
from jaxpfl.privacy import Mechanism, privatize

ENTRIES, CLIENTS, C, Z, RATE = 4000, 6, 0.5, 0.8, 0.05
LEVEL = 1e-4


def noise_of_a_round(mechanism: Mechanism, participation: Participation, devices: int = 1) -> np.ndarray:
    """What one round adds to the server's parameters, beyond what it adds without noise; over z C / D, [ENTRIES]."""
    rng = np.random.default_rng(0)
    federation = stack_clients([(rng.normal(size=(3, ENTRIES)), np.zeros(3, int)) for _ in range(CLIENTS)])
    model = Model(lambda key, x: jnp.zeros(ENTRIES), lambda w, x, key=None, train=False: (x @ w)[:, None])
    task = Task(model, (ENTRIES,), 1, lambda p, y: (p[:, 0] - y - 1) ** 2, {"loss": lambda p, y: p[:, 0]})
    ends = []
    for noisy in (mechanism, replace(mechanism, noise_multiplier=0.0)):
        work = LocalWork(np.full(CLIENTS, 3), 1, 3, step_noise=noisy.step_noise)
        method = METHODS["fedavg"]
        algorithm, hp = privatize(method.build(task, work), method.hyper.replace(lr=RATE), noisy)
        plan = ExecutionPlan(devices=devices, rounds_per_call=1)
        made = Simulation(algorithm, task, federation, participation, hp, plan=plan)
        state, _ = made.advance(made.init([0]), 1)
        ends.append(np.asarray(state.server.state[0], np.float64))
    return (ends[0] - ends[1]) * participation.expected_cohort / (Z * C)


def p_value(noise: np.ndarray, scale: float = 1.0) -> float:
    return float(stats.kstest(noise / scale, "norm").pvalue)


@pytest.mark.parametrize(
    ("mechanism", "participation", "devices", "scale"),
    [
        pytest.param(Mechanism(Z, C), full(CLIENTS), 1, 1.0, id="central"),
        pytest.param(Mechanism(Z, C), full(CLIENTS), 2, 1.0, id="central, two devices"),
        pytest.param(Mechanism(Z, C), poisson(CLIENTS, 0.5), 2, 1.0, id="central, Poisson"),
        pytest.param(Mechanism(Z, C, "distributed", CLIENTS), full(CLIENTS), 2, 1.0, id="distributed"),
        # More uploads than are needed: more noise than is accounted.
        pytest.param(Mechanism(Z, C, "distributed", 3), full(CLIENTS), 1, 2**0.5, id="distributed, more than K_min"),
        # One step of each of K clients, at the learning rate.
        pytest.param(Mechanism(Z, C, "per_step"), full(CLIENTS), 2, RATE * CLIENTS**0.5, id="per step"),
    ],
)
def test_the_noise_of_a_round(mechanism, participation, devices, scale):
    noise = noise_of_a_round(mechanism, participation, devices) / scale
    assert p_value(noise) > LEVEL
    assert p_value(noise, 2 / 3) < LEVEL
    assert p_value(noise, 3 / 2) < LEVEL


def test_the_noise_of_a_sum_whose_count_is_released_too():
    """Sum and count together are one Gaussian of noise multiplier z: 1/z^2 = 1/z_sum^2 + 1/(2 s_count)^2."""
    mechanism = Mechanism(Z, C, quantile=0.5, count_stddev=1.0)
    z_sum = float(mechanism.noise_multiplier_of_sum)
    assert pytest.approx(1 / z_sum**2 + 1 / 2.0**2) == 1 / Z**2
