"""Flags that none of a run's methods has a use for."""

from __future__ import annotations

from operator import attrgetter

from jaxpfl import algorithms
from jaxpfl.experiment import graph_file
from jaxpfl.experiment.config import RunConfig


def unused(config: RunConfig, methods: tuple[str, ...]) -> list[str]:
    """What is given and changes nothing, each with the reason; only what is not at its default counts as given."""
    chosen, none = [algorithms.get(name) for name in methods], f"no method of the run ({', '.join(methods)})"
    reasons: dict[str, str] = {}
    if not any(method.graph for method in chosen):
        reasons |= dict.fromkeys(("graph", "neighbours"), f"{none} has a graph of the clients")
    elif graph_file.is_named(config.graph):
        reasons["neighbours"] = f"{config.graph} says who is whose neighbour"
    if not any(hasattr(method.hyper, "server_lr") for method in chosen):
        reasons |= dict.fromkeys(("server_optimizer", "server_lr"), f"{none} has a server optimizer")
    if not any(method.uploads for method in chosen):
        idle = "compress", "privacy.epsilon", "privacy.noise_multiplier"
        reasons |= dict.fromkeys(idle, f"{none} uploads anything")
    if not config.unseen_clients:
        reasons["adapt_rounds"] = "there are no unseen_clients"
    default = RunConfig()
    given = [name for name in reasons if attrgetter(name)(config) != attrgetter(name)(default)]
    return [f"{name} = {attrgetter(name)(config)} changes nothing: {reasons[name]}" for name in given]
