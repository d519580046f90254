"""Cases that a group of processes runs: named functions whose results must not depend on the number of processes."""

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import toys
from problem import numbers, ragged_federation, simulate

from jaxpfl import ExecutionPlan, JaxpflError, fit, open_federation
from jaxpfl.core.types import PersonExamples
from jaxpfl.engine.cohort import Group
from jaxpfl.engine.placement import agree_on
from jaxpfl.engine.state import RunState
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.support import processes

COHORTS: dict[str, int | float | None] = {
    "local": None,
    "fedavg": 0.6,
    "ifca": 4,
    "pooled": 4,
    "cfl": None,
    "fedbuff": 4,
    "network-lasso": 4,
    "adaped": 4,
    "adaped, idle": None,
    "adaped, private": 4,
    "toy medians": 4,
    "toy clusters": None,
}
"""Cohorts of some methods, which between them have every kind of state and upload: all clients, four, or Poisson."""


def method(name: str, cohort: int | float | None) -> dict[str, Any]:
    """State, history and scores of three rounds of a method, in float64."""
    return numbers(toys.CASES[name], plan=None, cohort=cohort)


def trained(method: str, privacy: Mechanism | PrivacyConfig) -> dict[str, Any]:
    """A private fit from Python, in which each person has one or two examples."""
    with jax.enable_x64(True):
        clients = ragged_federation()
        persons = np.concatenate([100 * i + np.arange(size) // 2 for i, size in enumerate(clients.train.size)])
        known = PersonExamples(*clients.train.examples, persons.astype(np.int32))
        clients = clients._replace(train=replace(clients.train, examples=known))
        more = {"participation": "poisson", "model": "linear", "privacy": privacy, "seeds": 2}
        result = fit(method, clients, rounds=3, cohort=4, **more)
        models = result.simulation.personal_models(result.state)
        gradients = result.gradients
    return jax.tree.map(np.asarray, {"history": result.history, "scores": result.scores, "models": models}) | {
        "gradients": gradients._asdict() if gradients else {}
    }


def stored() -> dict[str, Any]:
    """Two rounds, the state gathered by the first process and dealt out again, and two more."""
    with jax.enable_x64(True):
        simulation = simulate(toys.CASES["adaped"], ragged_federation(), dtype=np.float64)
        state, _ = simulation.advance(simulation.init((1, 2)), 2)
        kept = simulation.gather(state)
        again = simulation.scatter(kept, 2)
        state, history = simulation.advance(again, 2)
        return {
            "history": history,
            "counts": np.asarray(simulation.counts(state).table),
            "kept": simulation.gather(state),
        }


def shares() -> dict[str, list[int]]:
    """Rows of data and states on the devices of the first process, over all their rows."""
    simulation = simulate(toys.CASES["adaped"], ragged_federation())
    state: RunState = simulation.init((1,))
    own = jax.tree.leaves(state.clients)[0].addressable_shards
    return {"states": [shard.data.shape[1] for shard in own]}


def refused() -> dict[str, str]:
    """Messages of errors that one process alone has, or that come of a difference."""

    def fails_on(number: int) -> None:
        if processes.index() == number:
            raise JaxpflError(f"{number} failed")

    def said(do: Callable[[], Any]) -> str:
        try:
            do()
        except JaxpflError as error:
            return str(error)
        return "nothing"

    clients, own = ragged_federation(), processes.index()
    other = clients._replace(client_ids=clients.client_ids + own)
    simulation = simulate(toys.CASES["adaped"], clients)
    found = {
        "data": said(lambda: simulate(toys.CASES["adaped"], other)),
        "seeds": said(lambda: simulation.init((1, 2 + own))),
        "rounds": said(lambda: fit("local", clients, rounds=2 + own)),
        "place": said(lambda: fit("local", clients, rounds=2, plan=ExecutionPlan(clients_in="host"))),
        "alone": said(lambda: processes.together(lambda: fails_on(processes.count() - 1))),
        "first": said(lambda: processes.on_first(lambda: fails_on(0))),
        "all": said(lambda: processes.together(lambda: fails_on(processes.index()))),
        "value": said(lambda: processes.agree("the rounds", {"a": 1, "b": processes.index()})),
        "long": str(processes.exchange("x" * 10_000 * (1 + processes.index()))[-1].count("x")),
    }
    return found | {"others": str(processes.exchange(found["alone"])[-1])}


def opened() -> dict[str, Any]:
    """A round on a federation in files, of which, once they were compared, only this process's clients can be read."""
    federation = open_federation(os.environ["JAXPFL_CASE_FOLDER"])
    agree_on(federation, for_good=True)
    x, start, size = federation.train.examples.x, federation.train.start, federation.train.size
    sizes = np.stack([size, federation.validation.size, federation.test.size], axis=1)
    each = len(size) // processes.count()
    group = Group(np.arange(len(size)), len(size), len(size), True).dealt(sizes, processes.count())
    others = group.order // each != processes.index()
    forbid(x, start[others], size[others])
    result = fit("fedavg", federation, rounds=1, model="linear", local_steps=1, batch_size=4, cohort=6)
    (held,) = result.simulation.federations
    told = {
        "read": int(size[~others].sum()) * x[0].nbytes,
        "held": sum(shard.data.nbytes for shard in held.train.examples.x.addressable_shards),
    }
    return {"each": processes.exchange(told), "scores": jax.tree.map(np.asarray, result.scores)}


def forbid(x: np.ndarray, start: np.ndarray, size: np.ndarray) -> None:
    """Make runs of rows of a mapped file, but for the pages at their ends, fatal to read."""
    address, row, page = x.ctypes.data, x[0].nbytes, mmap.PAGESIZE
    for first, count in zip(start.tolist(), size.tolist(), strict=True):
        low = -(-(address + first * row) // page) * page
        high = (address + (first + count) * row) // page * page
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(low), ctypes.c_size_t(high - low), 0) == 0


METHODS = {name: partial(method, name, cohort) for name, cohort in COHORTS.items()}
CASES: dict[str, Callable[[], Any]] = {
    **METHODS,
    "trained": partial(trained, "adaped", Mechanism(0.5, 0.3)),
    "persons": partial(trained, "ditto", PrivacyConfig(unit="example", noise_multiplier=0.3, delta=1e-3)),
    "stored": stored,
    "shares": shares,
    "refused": refused,
    "opened": opened,
}
