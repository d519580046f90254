"""Adapters of a small transformer of tokens: every registered method trains them, shared or personal, or refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError
from jaxpfl.engine.assembly import simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.spec_parts import Cohorts, Neighbourhood, Training, Work
from jaxpfl.models import build_model, lora

V, T, RANK = 7, 5, 2
ADAPTED = "block*/query/kernel,block*/value/kernel"
OPTIONS = {name: {"distill_steps": 2} for name in ("persfl", "persfl-gd")}

NO_CLASSES = {
    "fedrod": "fedrod balances classes by their counts",
    "fedproto": "fedproto needs prototypes of classes",
    "knn-per": "knn-per lets examples vote for classes",
    "fedpac": "fedpac aligns features by classes",
    "moon": "moon compares features of examples",
    "feddbe": "feddbe compares features of examples",
}
"""Methods that refuse next-token itself, with or without adapters."""
SHARED = {
    "fedbn": "fedbn .* normalis",
    **dict.fromkeys(("fedper", "fedrep", "fedbabu", "fedala", "lg-fedavg"), "needs a model that names its head"),
}
"""Methods that refuse a model without a personal part, which adapters have only where it is named."""
PERSONAL = {"fedbn": "fedbn .* normalis"}
"""Those that refuse adapters that are personal: they have no normalisation of their own."""


@functools.cache
def base():
    model = build_model("transformer:8,1", V, (T,), every=True)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))


def adapted(personal):
    """Adapters of queries and values beside a head that is trained whole; the adapters are personal or shared."""
    return lora(*base(), rank=RANK, at=ADAPTED, trained="head/*", personal="adapters/*" if personal else "")


@functools.cache
def data():
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(rng.integers(0, V, (2, n, T)))  # noqa: E731
    return jaxpfl.stack_clients(*([draw(n) for n in (5, 6, 7)] for _ in range(3)))


def simulation(method, personal):
    method = METHODS[method]
    return simulation_of(
        RunSpec(
            method=method,
            options=OPTIONS.get(method.name, {}),
            training=Training(model=adapted(personal), task="next-token", rounds=1),
            cohorts=Cohorts(cohort=1 if method.asynchronous else None),
            work=Work(local_steps=2, batch_size=4),
            neighbourhood=Neighbourhood(graph="models", neighbours=1) if method.graph else Neighbourhood(),
        ),
        data(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_them_or_refuses(method, personal):
    """One round, traced: none is left out, shapes fit, and the frozen parameters are no part of what is exchanged."""
    reason = NO_CLASSES.get(method) or (PERSONAL if personal else SHARED).get(method)
    if reason is not None:
        with pytest.raises(JaxpflError, match=reason) as refused:
            simulation(method, personal)
        assert "\n" not in str(refused.value)
        return
    made = simulation(method, personal)
    assert made.program("cpu").eqns
    up, _ = made.bytes_per_client()
    frozen = 4 * sum(leaf.size for leaf in jax.tree.leaves(base()[1]))
    assert up < frozen


ADAPTERS, HEAD = 4 * 2 * RANK * (8 + 8), 4 * (8 * V + V)
"""Bytes of both adapters, and of the head."""


@pytest.mark.parametrize(
    ("method", "personal", "up"),
    [
        ("fedavg", False, ADAPTERS + HEAD),
        ("fedper", True, HEAD),
        ("local", False, 0),
        ("lg-fedavg", True, ADAPTERS),
    ],
)
def test_the_shared_part_alone_is_exchanged(method, personal, up):
    assert simulation(method, personal).bytes_per_client()[0] == up


@pytest.mark.slow
def test_personal_adapters_differ_and_the_frozen_parameters_stay():
    model = adapted(personal=True)
    given = {"task": "next-token", "rounds": 1, "local_steps": 2, "batch_size": 4, "lr": 0.5, "num_classes": V}
    result = jaxpfl.fit("fedper", data(), model=model, **given)
    own = result.state.clients[0]
    (b,) = (leaf for path, leaf in jax.tree.leaves_with_path(own) if "query" in str(path) and "'b'" in str(path))
    assert b.shape[-2:] == (RANK, 8)
    of_clients = np.asarray(b)[0, :3].reshape(3, -1)
    assert len(np.unique(np.round(of_clients, 6), axis=0)) == 3
    assert not [path for path, _ in jax.tree.leaves_with_path(result.state.server) if "adapters" in str(path)]
