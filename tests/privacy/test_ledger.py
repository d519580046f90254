"""The ledger of draws: every release of a run has noise of the claimed size, once, under a key of its own.

`jaxpfl.privacy.record` enters what programs draw as they run. Held to it: every kind of release, where clients live,
seeds and settings side by side, and a run that goes on; `test_sensitivity` has every method of the registry. What is
drawn without being entered is found by `test_noise_sites`.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpfl import METHODS, ExecutionPlan, JaxpflError, fit, stack_clients
from jaxpfl.core.types import PersonExamples
from jaxpfl.privacy import Draw, Mechanism, PrivacyConfig, local_dp, record

Z, C, SEEDS, ROUNDS, STEPS, SIZES = 1.5, 0.5, 2, 2, 2, (4, 9, 6)
CENTRAL = Mechanism(Z, C)
COUNTED = Mechanism(Z, C, quantile=0.5, count_stddev=2.0)
SHARES = Mechanism(Z, C, "distributed", min_uploads=3)
IN_STEPS = Mechanism(Z, C, "per_step", scale_clipping_norm=0.2)
EXAMPLES = PrivacyConfig(unit="example", noise_multiplier=Z, clipping_norm=C, delta=1e-3)
REFUSED = {
    "pooled": "pooled data",
    "fedbuff": "asynchronous rounds",
    **dict.fromkeys(("ifca", "fedproto"), "one weight per upload"),
    **dict.fromkeys(("fedamp", "cfl", "fedpac", "network-lasso"), "summed uploads"),
}
"""Methods that take no part in rounds whose sum is noised, and a part of why."""
GUARDED = {"fedavg-ft": 1, "local": 1, "mr-mtl": 1, "ditto": 1, "apfl": 2, "fedprox": 1}
"""Methods whose examples can be protected one by one, and the gradients that they take of a batch."""


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2) for n in SIZES]
    return stack_clients(clients, test=clients, validation=clients)


def draws(federation, method: str, privacy: Any, **more: Any) -> tuple[list[Draw], Any]:
    settings = {"model": "linear", "rounds": ROUNDS, "local_steps": STEPS, "batch_size": 4, "seeds": SEEDS}
    # On several devices padding draws as well, and what it draws is discarded.
    settings |= {"plan": ExecutionPlan(devices=1), "privacy": privacy} | more
    with record() as found:
        result = fit(method, federation, **settings)
    return found, result


def totals(found: list[Draw]) -> Counter[str]:
    """Draws by what they protect, after the check that no two of them share a key."""
    assert len({draw.key for draw in found}) == len(found)
    return Counter(draw.protects for draw in found if not draw.protects.startswith("nothing"))


def some(names: Any, few: tuple[str, ...]) -> list[Any]:
    """Cases of which a few are in the default run, the others in the slow one."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("method", some(("fedavg", "adamix"), ("fedavg",)))
def test_a_round(federation, method):
    """Of every kind of release: what other methods draw is counted by `test_sensitivity`."""
    privacy = COUNTED if METHODS[method].releases is None else CENTRAL
    found, result = draws(federation, method, privacy)
    plan, sums = result.privacy[0], {"sum": 1, "count": 1}
    if METHODS[method].releases is not None:
        sums = {"sums of a step of EM": METHODS[method].options["em_steps"]}
    assert totals(found) == {name: SEEDS * plan.rounds * times for name, times in sums.items()}
    if method == "fedavg":
        z = COUNTED.noise_multiplier_of_sum.item()
        stddevs = sorted(draw.stddev for draw in found if draw.protects == "sum")
        np.testing.assert_allclose(stddevs, sorted(z * result.history["clipping_norm"].ravel()), rtol=1e-6)
        assert {draw.stddev for draw in found if draw.protects == "count"} == {2.0}
        assert {draw.entries for draw in found if draw.protects == "count"} == {1}
        assert {draw.entries for draw in found if draw.protects == "sum"} == {3 * 2 + 2}


@pytest.mark.slow
@pytest.mark.parametrize("method", REFUSED)
def test_other_methods_are_refused(federation, method):
    with pytest.raises(JaxpflError, match=REFUSED[method]):
        draws(federation, method, COUNTED, model="mlp-ln:4")


@pytest.mark.slow
def test_shares_of_the_clients(federation):
    found, _ = draws(federation, "fedavg", SHARES)
    assert totals(found) == {"a client's share": SEEDS * ROUNDS * len(SIZES)}
    np.testing.assert_allclose([draw.stddev for draw in found], Z * C / 3**0.5, rtol=1e-6)


@pytest.mark.parametrize("method", some(("fedavg", "adaped"), ("fedavg",)))
def test_local_steps(federation, method):
    found, result = draws(federation, method, IN_STEPS)
    plan = result.privacy[0]
    steps = SEEDS * plan.rounds * len(SIZES) * plan.noise.steps
    assert totals(found) == dict(zip(("a step", "a step of psi"), [steps] * len(plan.noise.clips), strict=False))
    by_kind = {draw.protects: draw.stddev for draw in found}
    np.testing.assert_allclose([by_kind[name] for name in sorted(by_kind)], plan.noise.stddevs, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("persons", [False, True])
def test_batches_of_silos(federation, persons):
    """As many as each silo's claim counts: those of the rounds, and those of the model that it is scored with."""
    if persons:
        known = PersonExamples(*federation.train.examples, np.repeat(np.arange(7), (3, 1, 2, 7, 1, 2, 3)))
        federation = federation._replace(train=replace(federation.train, examples=known))
    found, result = draws(federation, "fedavg-ft", EXAMPLES)
    silos = result.statement().silos
    assert [silo.get("persons") for silo in silos] == ([2, 3, 2] if persons else [None] * 3)
    once = list(set(found))  # every scoring makes the same personalized model again, with the same noise
    assert totals(once) == {"a batch": SEEDS * sum(silo["batches"] * silo["clients"] for silo in silos)}
    np.testing.assert_allclose([draw.stddev for draw in found], Z * C, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"plan": ExecutionPlan(clients_in="host", clients="map", runs="map")}, id="streamed"),
        pytest.param({"participation": "poisson", "cohort": 1}, id="empty cohorts"),
        pytest.param({"dropout": 0.9}, id="dropout"),
        pytest.param({"privacy": replace(CENTRAL, noise_multiplier=(1.0, 2.0)), "seeds": [5, 5]}, id="settings"),
        pytest.param({"server_optimizer": "sgd:momentum=0.9"}, id="server optimizer"),
        pytest.param(
            {"privacy": Mechanism(Z, C, "banded", bands=1), "participation": "cyclic", "cohort": 1}, id="banded"
        ),
    ],
)
def test_every_round_is_noised_once(federation, more):
    privacy = more.get("privacy", CENTRAL)
    found, result = draws(federation, "fedavg", **{"privacy": privacy} | more)
    assert totals(found) == {"sum": SEEDS * result.privacy[0].rounds}
    each = np.repeat(np.broadcast_to(privacy.noise_multiplier, SEEDS), ROUNDS) * C
    np.testing.assert_allclose(sorted(draw.stddev for draw in found), each, rtol=1e-6)


@pytest.mark.slow
def test_rounds_that_are_added_and_other_runs(federation):
    """A run that goes on, and runs of other settings, methods and seeds, draw noise of their own."""
    both, result = draws(federation, "fedavg", CENTRAL)
    with record() as added:
        result.simulation.advance(result.state, 1)
    others = [
        draws(federation, *run, **more)[0]
        for run, more in (
            (("fedavg", CENTRAL), {"seeds": [7, 8]}),
            (("fedavg", replace(CENTRAL, noise_multiplier=2.0)), {}),
            (("fedprox", CENTRAL), {}),
        )
    ]
    every = both + added + [draw for run in others for draw in run]
    assert totals(every) == {"sum": SEEDS * (ROUNDS + 1 + 3 * ROUNDS)}
    assert result.statement(1e-3).rounds == ROUNDS + 1


@pytest.mark.slow
def test_too_few_uploads_release_nothing(federation):
    """The server keeps its model, whatever the clients that came have sent."""
    _, result = draws(federation, "fedavg", SHARES, dropout=0.999999, rounds=1)
    start = result.simulation.init([0, 1])
    for now, before in zip(jax.tree.leaves(result.state.server), jax.tree.leaves(start.server), strict=True):
        np.testing.assert_array_equal(now, before)


def test_records_are_of_their_block():
    """Also for a function that was compiled before the block."""
    message = jax.jit(lambda key: local_dp.gaussian(key, np.ones(3, np.float32), 1.0, 2.0))
    found = []
    for seed in (0, 1):
        jax.block_until_ready(message(jax.random.key(7)))
        with record() as draws:
            with pytest.raises(RuntimeError, match="already active"), record():
                pass
            jax.block_until_ready(message(jax.random.key(seed)))
        found.append([draw[0::2] for draw in draws])
    assert found == [[("a client's message", 3)]] * 2
