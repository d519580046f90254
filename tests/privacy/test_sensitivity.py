"""An extreme client, or an extreme example, changes what is released by at most what the accountant assumes.

Every release passes through `jaxpfl.privacy.noise`. Here the noise is off: what a program would release under a draw is
noted by the key of that draw, and the program gets the same numbers in all worlds, as if noise had hidden the
differences. So the releases of two worlds may differ by the clipping norm, over all leaves together, and all that
follows them must be equal: the server's state, and the states of all other clients. A weight, a divisor or a message
that depends on the client, and any use of its data that passes the noise by, is a difference. No two releases have the
same key.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from test_ledger import EXAMPLES, GUARDED, REFUSED, some

from jaxpfl import METHODS, ExecutionPlan, stack_clients
from jaxpfl.algorithms.parts import private_em
from jaxpfl.core.participation import Availability
from jaxpfl.core.types import ClientData, Federation
from jaxpfl.engine import Simulation
from jaxpfl.engine.build import assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism, SiloMechanism, noise

C, C2, TOLD, CLIENTS, EACH = 5e-4, 1e-3, 1e-4, 3, 6
CENTRAL = Mechanism(1.0, C)
COUNTED = Mechanism(1.0, C, quantile=0.5, count_stddev=1.0)
SHARES = Mechanism(1.0, C, "distributed", min_uploads=3)
IN_STEPS = Mechanism(1.0, C, "per_step", scale_clipping_norm=C2)
JOINT = Mechanism(1.0, C, "per_step", joint=True)
BANDED = Mechanism(1.0, C, "banded", bands=2)
SILOS = replace(EXAMPLES, clipping_norm=C)
LIMITS = {
    **dict.fromkeys(("sum", "a client's share", "a step", "a batch"), C),
    "a step of psi": C2,
    "count": 0.5,
    "sums of a step of EM": private_em.SENSITIVITY * C,
}
ROUNDING = 1e-5
LEAST = {"sums of a step of EM": 0.5}  # its bound cannot be reached


@pytest.fixture(autouse=True)
def absent(monkeypatch):
    """Programs without noise, which note what they would release; and the list that says whether the client is away."""
    found, away = {}, [False]

    def gaussian(key, like, stddev, protects):
        def note(key, stddev, *leaves):
            values = np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)
            release = (values, float(stddev))
            assert found.setdefault((protects, tuple(np.ravel(key).tolist())), release) is release, (
                "a key is used twice"
            )

        jax.debug.callback(note, jax.random.key_data(key), stddev, *jax.tree.leaves(like))
        return jax.tree.map(jnp.zeros_like, like)

    def drops_out(self, run_key, round, client_id):
        gone = jax.pure_callback(lambda: np.array(away[0]), jax.ShapeDtypeStruct((), bool), vmap_method="sequential")
        return gone & (client_id == CLIENTS - 1)

    monkeypatch.setattr(noise, "gaussian", gaussian)
    monkeypatch.setattr(noise, "_on_lattice", lambda x, scale: jnp.full_like(x, TOLD))
    monkeypatch.setattr(Availability, "drops_out", drops_out)
    with set_xla_metadata(without_noise=1):  # part of JAX's cache key: no other test gets these programs
        yield found, away


def changed(federation: Federation, where: slice, factor: float) -> Federation:
    """The examples at these places of the last client, multiplied and with other labels."""

    def extreme(data: ClientData) -> ClientData:
        x, y = (np.array(part) for part in (data.examples.x, data.examples.y))
        own = slice(len(y) - EACH + (where.start or 0), len(y) - EACH + where.stop)
        x[own], y[own] = factor * x[own], 1 - y[own]
        return replace(data, examples=data.examples._replace(x=x, y=y))

    return federation._replace(train=extreme(federation.train), validation=extreme(federation.validation))


def released(simulation: Simulation, data: Federation, rounds: int, absent: Any, away: bool) -> tuple[dict, list]:
    """What the rounds release, and all that follows from it."""
    found, gone = absent
    found.clear()
    gone[:] = [away]
    given = jax.tree.map(lambda a, b: jax.device_put(np.array(b), a.sharding), simulation.federations[0], data)
    simulation._inputs = simulation._inputs._replace(federations=(given,))
    state, _ = simulation.advance(simulation.init([0]), rounds)
    silos = simulation.algorithm.guarded
    others = [np.array(leaf)[:, : CLIENTS if silos else -1] for leaf in jax.tree.leaves(state.clients)]
    after = [np.array(leaf) for leaf in jax.tree.leaves(state.server)]
    if silos:
        after += [np.array(leaf) for leaf in jax.tree.leaves(simulation.personal_models(state))]
    jax.effects_barrier()
    return dict(found), [*after, *others]


def check(absent: Any, method: str, privacy: Any = CENTRAL, **settings: Any) -> None:
    """Each release is changed by at most what is allowed, and by as much, so that more would have been seen.

    Sums that the server noises, and batches of silos, are as many as the accountant counts.
    """
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(EACH, 3)).astype(np.float32), np.arange(EACH) % 2) for _ in range(CLIENTS)]
    federation = stack_clients(clients, test=clients, validation=clients)
    small = {"model": "mlp:4", "rounds": 2, "local_steps": 2, "batch_size": 4, "seeds": (0,)}
    spec = RunSpec(method=METHODS[method], privacy=privacy, plan=ExecutionPlan(devices=1), **small | settings)
    run = assemble(spec, federation)
    simulation, silos = run.simulation(), isinstance(run.mechanism, SiloMechanism)
    where = slice(EACH - 1, EACH) if silos else slice(EACH)
    worlds = [(np.nan, False), (1e3, False), (-1.0, False)]
    if run.mechanism in (CENTRAL, COUNTED) or (not silos and run.mechanism.noise == "banded"):
        worlds.insert(0, (1.0, True))  # whether the client takes part is hidden too
    told = [
        released(simulation, changed(federation, where, factor), spec.rounds, absent, away) for factor, away in worlds
    ]
    (without, after), changes = told[0], {}
    assert without
    if run.mechanism == CENTRAL:
        steps = spec.method.releases
        sums = {"sum": 1} if steps is None else {"sums of a step of EM": steps(spec.method.options)}
        rounds = run.released(1)[0].rounds
        assert Counter(protects for protects, _ in without) == {name: rounds * n for name, n in sums.items()}
        if steps is None:
            np.testing.assert_allclose([stddev for _, stddev in without.values()], C, rtol=1e-6)
    if silos:
        batches = sum(silo.clients * run.mechanism.plan(silo).rounds for silo in run.mechanism.silos)
        assert [protects for protects, _ in without] == ["a batch"] * batches * GUARDED[method]
    for present, then in told[1:]:
        assert present.keys() == without.keys()
        for release, (values, _) in present.items():
            change = np.linalg.norm(values - without[release][0]) / LIMITS[release[0]]
            changes.setdefault(release[0], []).append(change)
        for a, b in zip(then, after, strict=True):
            np.testing.assert_array_equal(a, b)
    for protects, change in ((name, np.max(found)) for name, found in changes.items()):  # NaN if one is
        assert LEAST.get(protects, 1 - ROUNDING) <= change <= 1 + ROUNDING, (protects, change)


ACCEPTED = [name for name, method in METHODS.items() if method.uploads and name not in REFUSED]


@pytest.mark.parametrize("method", some(ACCEPTED, ("adaped",)))
def test_a_client_of_every_method(absent, method):
    own = {"map-laplace": {"hyper": {"scale_init": 100.0}}, "fedbn": {"model": "mlp-ln:4"}}
    check(absent, method, **own.get(method, {}))  # without a weak prior all models stay at the median


@pytest.mark.parametrize("method", some(("fedavg", "fedem", "adaped"), ()))
def test_a_step(absent, method):
    check(absent, method, IN_STEPS)


@pytest.mark.parametrize("method", some(GUARDED, ()))
def test_an_example(absent, method):
    check(absent, method, SILOS)


POISSON = {"participation": "poisson", "cohort": 2, "rounds": 12}  # the last client never comes: below 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "privacy", "settings"),
    [
        ("adaped", COUNTED, {"rounds": 1}),
        ("fedavg", SHARES, {"compress": "qsgd:levels=4"}),
        ("fedavg", BANDED, {"participation": "cyclic", "cohort": 1, "rounds": 5}),
        ("adaped", JOINT, {}),
        ("fedavg", CENTRAL, {"local_epochs": 2, "client_optimizer": "sgd:momentum=0.9", "hyper": {"lr_decay": 1.0}}),
        ("fedavg", CENTRAL, POISSON | {"server_optimizer": "adam", "server_lr": 0.1, "lr": 10.0}),
        ("fedbn", CENTRAL, {"model": "mlp-bn:4"}),
        ("adaped", CENTRAL, POISSON | {"options": {"gate": True, "idle_rounds": 1}}),
        ("adaped-plus", CENTRAL, {"options": {"keep": True, "own_psi": True, "normalize": True, "gate": True}}),
        ("apfl", CENTRAL, {"options": {"keep_w": True}}),
        ("quped", CENTRAL, {"options": {"bits": 2}}),
        ("scaffold", CENTRAL, POISSON),
    ],
)
def test_over_settings(absent, method, privacy, settings):
    check(absent, method, privacy, **settings)
