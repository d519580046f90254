"""An extreme client changes what a round releases by at most the clipping norm, in many methods.

With the noise off, the sum that a method's server would receive is compared between two runs that differ in one client:
in one its examples are far away and its labels wrong, in the other it has none that it can work with, so that it adds
zero. The server is told the same sum in both, as if noise had hidden the difference. So all that follows from what was
released is equal, and whatever differs (a message, another client's state or upload) went past the noise. Who came is
the same in both: divisors that count it are in `test_engine_audit`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ledger import some

from jaxpfl import METHODS, ExecutionPlan, stack_clients
from jaxpfl.audit.subject import Subject, only, recorded, rounds
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import ClientData, Federation
from jaxpfl.engine import Simulation
from jaxpfl.engine.build import Assembled, assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism
from jaxpfl.privacy.private_sum import Guarded

C, CLIENTS, SEEDS = 0.01, 3, 2
CENTRAL = Mechanism(0.0, C)
COUNTED = Mechanism(0.0, C, quantile=0.5, count_stddev=1.0, quantile_lr=1.0)
ROUNDING = 1e-5


@pytest.fixture(autouse=True)
def quick():
    """The programs run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def assembled(method: str, privacy: Mechanism = CENTRAL, **settings: Any) -> Assembled:
    rng = np.random.default_rng(0)
    clients, scores, valid = (
        [(rng.normal(size=(6, 3)).astype(np.float32), np.arange(6) % 2) for _ in range(CLIENTS)] for _ in range(3)
    )
    federation = stack_clients(clients, test=scores, validation=valid)
    small = {"model": "mlp-ln:4", "rounds": 2, "local_steps": 2, "batch_size": 4, "seeds": tuple(range(SEEDS))}
    spec = RunSpec(method=METHODS[method], privacy=privacy, plan=ExecutionPlan(devices=1), **small | settings)
    return assemble(spec, federation)


def given(federation: Federation, factor: float) -> Federation:
    """The last client's examples, multiplied, and with other labels."""

    def changed(data: ClientData) -> ClientData:
        x, y = (np.array(part) for part in (data.examples.x, data.examples.y))
        own = slice(data.start[-1], None)
        x[own], y[own] = factor * x[own], 1 - y[own]
        return replace(data, examples=data.examples._replace(x=x, y=y))

    return federation._replace(train=changed(federation.train), validation=changed(federation.validation))


def deaf(algorithm: Algorithm) -> Algorithm:
    """The same with a server that is told one sum, whatever it is sent."""
    usual = algorithm.server.update

    def update(key, hp, ctx, state, reduced):
        told = jax.tree.map(lambda a: jnp.full_like(a, C / 10), reduced.total)
        return usual(key, hp, ctx, state, reduced._replace(total=told))

    return algorithm._replace(server=algorithm.server._replace(update=update))


def transcript(run: Assembled, simulation: Simulation) -> list[tuple[np.ndarray, list[np.ndarray], np.ndarray]]:
    """Of each round: the sum, [S, entries]; what must not depend on the client; and the clipping norm of the next."""
    found = []
    for seen in rounds(simulation, simulation.init(range(SEEDS)), run.spec.rounds):
        state = simulation.trim(seen.state)
        server = only(Guarded, state.server)
        others = [np.asarray(leaf)[:, :-1] for leaf in jax.tree.leaves(state.clients)]
        told = jax.tree.map(np.asarray, jax.tree.leaves(server.state.state))
        total = np.concatenate(list(seen.leaves.values()), axis=1)
        found.append((total, [*told, *others, seen.weight], np.asarray(server.clipping_norm)))
    return found


def check(run: Assembled) -> np.ndarray:
    """Largest change of a round's sum, over C, [S]."""
    subject = Subject(run)
    upload = subject.upload()
    simulation = subject.simulation(lambda algorithm, work: recorded(deaf(algorithm), upload))
    (data,) = simulation.federations
    told = []
    for factor in (np.nan, 1e3, -1.0):  # in one program
        simulation.federations = (jax.tree.map(lambda a, b: jax.device_put(b, a.sharding), data, given(data, factor)),)
        told.append(transcript(run, simulation))
    absent, *present = told
    changes = []
    for one in present:
        for (with_it, same, norm), (without, equal, other_norm) in zip(one, absent, strict=True):
            changes.append(np.linalg.norm(with_it - without, axis=1) / C)
            for a, b in zip(same, equal, strict=True):
                np.testing.assert_array_equal(a, b)
            if isinstance(run.mechanism, Mechanism) and run.mechanism.quantile is not None:
                # C exp(-(1/2 + count / D - quantile)): a client adds 1/2 to the count, or takes it away.
                counts = np.log(norm / other_norm) * run.cohorts.expected_cohort
                assert (np.abs(counts) <= 0.5 + ROUNDING).all()
                assert counts.any()
    assert np.max(changes) <= 1 + ROUNDING
    return np.max(changes, axis=0)


CLIPPED = (
    *("fedavg", "fedavg-ft", "fedprox", "fedbn", "adaped", "adaped-plus", "fedper", "fedrep", "fedem", "persfl"),
    *("persfl-gd", "map-gaussian", "map-kd", "ditto", "pfedme"),
)
"""Methods in which this client's upload is beyond the clipping norm in every run."""


@pytest.mark.parametrize("method", some(CLIPPED, ()))
def test_of_every_method(method):
    assert (check(assembled(method)) > 1 - ROUNDING).all()  # it is clipped, so that a greater change would be seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"privacy": COUNTED, "rounds": 1}),
        ("adaped", {"privacy": COUNTED, "rounds": 1}),
        ("fedavg", {"privacy": Mechanism(0.0, C, "distributed", min_uploads=3)}),
        ("fedavg", {"participation": "poisson", "cohort": 1, "rounds": 5}),
        ("fedavg", {"participation": "uniform", "cohort": 1, "rounds": 5}),
        ("fedavg", {"local_epochs": 2, "model": "linear"}),
        ("adaped", {"options": {"gate": True, "idle_rounds": 1}, "participation": "poisson", "cohort": 1, "rounds": 5}),
        ("adaped-plus", {"options": {"keep": True, "own_psi": True, "normalize": True, "idle_rounds": 1}}),
        ("perfedavg", {"options": {"hessian": True}}),
        ("apfl", {"options": {"keep_w": True}, "server_optimizer": "sgd:momentum=0.9"}),
        ("quped", {"options": {"bits": 2}}),
        ("scaffold", {"participation": "poisson", "cohort": 1, "rounds": 5}),
        ("feddyn", {"participation": "poisson", "cohort": 1, "rounds": 5}),
    ],
)
def test_over_settings(method, settings):
    assert (check(assembled(method, **settings)) > 1 - ROUNDING).any()
