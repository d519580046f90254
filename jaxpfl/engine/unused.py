"""Settings for which no method of a run has a use."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import jax
import numpy as np

from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.algorithms.parts.optimizers import resolve
from jaxpfl.algorithms.parts.schedules import OWN
from jaxpfl.core.settings import is_default
from jaxpfl.engine.client_graph import SPACES
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.similarity.graphs import Graph
from jaxpfl.uploads.robust import attack_of


def unused(specs: Sequence[RunSpec], *, newcomers: bool) -> list[str]:
    """The settings that are given and change nothing, each with the reason.

    Args:
      specs: of the methods that run with the same settings. What one of them uses is used, and a setting at its default
        counts as not given.
      newcomers: whether there are unseen clients.
    """
    first, methods = specs[0], [spec.method for spec in specs]
    none = f"no method of the run ({', '.join(method.name for method in methods)})"
    reasons: dict[str, str] = {}
    if not any(method.graph for method in methods):
        reasons |= dict.fromkeys(
            ("neighbourhood.graph", "neighbourhood.neighbours"), f"{none} has a graph of the clients"
        )
    elif (graph := first.neighbourhood.graph) is not None and graph not in SPACES:
        named = graph if isinstance(graph, str) else "the graph"
        reasons["neighbourhood.neighbours"] = f"{named} says who is whose neighbour"
    if not any(rates(method.hyper) for method in methods):
        reasons |= dict.fromkeys(("work.lr", "work.lr_schedule"), f"{none} has a learning rate")
    if not any(hasattr(method.hyper, "server_lr") for method in methods):
        of_server = "aggregation.server_optimizer", "aggregation.server_lr"
        reasons |= dict.fromkeys(of_server, f"{none} has a server optimizer")
    if not any(method.weighs for method in methods):
        reasons["aggregation.weighting"] = f"{none} weighs its clients"
    optimizer = first.work.client_optimizer
    if first.work.keep_optimizer and not jax.tree.leaves(resolve(optimizer)(0.1).init(np.zeros(1))):
        reasons["work.keep_optimizer"] = f"{optimizer if isinstance(optimizer, str) else 'the optimizer'} has no state"
    if not any(method.uploads for method in methods):
        reasons |= dict.fromkeys(("coding.compress", "aggregation.aggregate"), f"{none} uploads anything")
        if first.adversary.attack is not None and attack_of(first.adversary.attack).change is not None:
            reasons["adversary.attack"] = f"{none} uploads anything"
    if not newcomers:
        reasons["newcomers.adapt_rounds"] = "there are no unseen_clients"
    found = {}
    for path, reason in reasons.items():
        part, _, name = path.partition(".")
        value = attrgetter(path)(first)
        if not is_default(getattr(first, part), name):
            found[name if isinstance(value, Graph) else f"{name} = {value}"] = reason
    if (schedule := first.work.lr_schedule) != OWN:
        for spec in specs:
            if "lr_decay" in spec.hyper:
                found[f"{spec.method.name}.lr_decay = {spec.hyper['lr_decay']}"] = (
                    f"lr_schedule{f' = {schedule}' if isinstance(schedule, str) else ''} takes its place"
                )
    if first.is_private and not any(method.uploads for method in methods):
        privacy, what = first.privacy, "privacy"
        if isinstance(privacy, PrivacyConfig):
            name = "noise_multiplier" if privacy.epsilon is None else "epsilon"
            what = f"privacy.{name} = {getattr(privacy, name)}"
        found[what] = f"{none} uploads anything"
    return [f"{what} changes nothing: {reason}" for what, reason in found.items()]
