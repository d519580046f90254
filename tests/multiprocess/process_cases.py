"""Cases that a group of processes runs: named functions whose results must not depend on the number of processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import toys
from problem import outcome, ragged_federation, simulate

from jaxpfl import ExecutionPlan, JaxpflError, fit, processes
from jaxpfl.engine.state import RunState
from jaxpfl.privacy import Mechanism

EVERYONE = ("local", "fedper", "scaffold", "toy clusters", "adaped, idle")
"""Methods that are run with all clients in every round; the others with a cohort, of a fixed size or Poisson."""


def method(name: str, cohort: int | None) -> dict[str, Any]:
    """State, history and scores of three rounds of a method, in float64."""
    with jax.enable_x64(True):
        simulation = simulate(toys.CASES[name], ragged_federation(), cohort=cohort, dtype=np.float64)
        return outcome(simulation, 3, (1, 2))


def trained() -> dict[str, Any]:
    """A private fit with unseen clients, from Python."""
    with jax.enable_x64(True):
        clients = ragged_federation()
        result = fit(
            "adaped",
            clients,
            rounds=3,
            cohort=4,
            participation="poisson",
            model="linear",
            privacy=Mechanism(0.5, 0.3),
            seeds=2,
        )
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


COHORTS = {name: None if name in EVERYONE else 4 for name in toys.CASES}
METHODS = {name: partial(method, name, cohort) for name, cohort in COHORTS.items()}
CASES: dict[str, Callable[[], Any]] = {
    **METHODS,
    "fedavg, everyone": partial(method, "fedavg", None),
    "trained": trained,
    "stored": stored,
    "shares": shares,
    "refused": refused,
}
