"""Warnings about a run: settings without effect, unusual learning rates, doubtful data, and doubtful privacy claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.algorithms.parts.optimizers import resolve
from jaxpfl.algorithms.parts.schedules import OWN
from jaxpfl.algorithms.parts.servers import check_rate
from jaxpfl.core.settings import is_default, is_given
from jaxpfl.core.types import Federation
from jaxpfl.data.stack import labels, listed
from jaxpfl.engine.client_graph import SPACES
from jaxpfl.engine.spec import RunSpec, Settings
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.privacy.claim import check_delta
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import own_code
from jaxpfl.support.errors import JaxpflError, shown, warn
from jaxpfl.uploads.robust import attack_of


def without_effect(settings: Settings) -> dict[str, str]:
    """Find the settings that other settings override; return setting -> reason why it has no effect."""
    task, found = settings.task, {}
    if isinstance(task, Task) or own_code.is_reference(task):
        named = "the given Task" if isinstance(task, Task) else f"task = {task}"
        found |= dict.fromkeys(("model", "num_classes"), f"{named} has its own model")
    elif task not in (None, CLASSIFICATION, NEXT_TOKEN):
        found["num_classes"] = f"task = {task} has no classes"
    if settings.local_epochs is not None:
        found["local_steps"] = f"local_epochs = {settings.local_epochs} takes its place"
    return found


def refuse(settings: Settings, without: Mapping[str, str], recorded: Settings | None = None) -> None:
    """Refuse the given settings without effect, except settings that have their recorded value.

    Args:
      settings: settings as the user gave them.
      without: settings without effect, as `without_effect` returns them.
      recorded: settings of an earlier run that ``settings`` takes as defaults; None if there is none.

    Raises:
      JaxpflError: if a setting without effect was given.
    """
    for name, why in without.items():
        value = getattr(settings, name, None)
        if value is None or not is_given(settings, name) or (recorded and value == getattr(recorded, name)):
            continue
        what = f"{name} = {value}" if isinstance(value, str | int | float) else name
        raise JaxpflError(f"{what} has no effect, because {why}: leave it out")


def check_settings(specs: list[RunSpec], *, newcomers: bool, strict: bool = False) -> None:
    """Warn about settings without effect, unusual learning rates, and asynchronous rounds with all clients.

    The function also warns about sweeps in which the value and the seed change together.

    Args:
      specs: one run for each method, all with the same settings.
      newcomers: whether there are unseen clients.
      strict: whether to raise errors instead of warnings.

    Raises:
      JaxpflError: if a hyper-parameter is out of range, or if a name is unknown; with ``strict``, also instead of a
        warning.
    """
    server_rates = [np.max(getattr(spec.hp, "server_lr", 0.0)) for spec in specs]
    if specs[0].server_optimizer != "sgd":
        check_rate(specs[0].server_optimizer, max(server_rates), strict=strict)
    for spec in specs:
        if spec.method.asynchronous and spec.cohort is None:
            warn(
                f"{spec.method.name} with all clients in the cohort waits for the slowest client, as a synchronous "
                "method does: set a smaller cohort",
                strict=strict,
            )
        others = [name for name in rates(spec.method.hyper) if name not in spec.hyper]
        if spec.lr is None and np.ndim(spec.hyper.get("lr", 0)) and others:
            at = ", ".join(f"{name} = {np.asarray(getattr(spec.method.hyper, name)):g}" for name in others)
            warn(
                f"hyper sets lr, but other learning rates of {spec.method.name} keep their defaults ({at}): "
                "fit(lr=...) sets all of them",
                strict=strict,
            )
        if len(spec.seeds) > 1:
            _check_seeds(spec, strict=strict)
    if idle := unused(specs, newcomers=newcomers):
        warn("; ".join(idle), strict=strict)


def _check_seeds(spec: RunSpec, *, strict: bool) -> None:
    """Warn if the values of a sweep do not all have the same seeds; raise an error if ``strict``.

    The effects of the value and of the seed could then not be separated.
    """
    found = vars(spec.hp) | vars(spec.availability) | (vars(spec.privacy) if spec.privacy else {})
    lists = {name: np.asarray(value).tolist() for name, value in found.items() if np.ndim(value) == 1}
    swept = {name: values for name, values in lists.items() if len(values) == len(spec.seeds) and len(set(values)) > 1}
    seeds: dict[tuple[float, ...], list[int]] = {}
    for run, seed in zip(zip(*swept.values(), strict=True), spec.seeds, strict=False):
        seeds.setdefault(run, []).append(seed)
    if len({tuple(sorted(own)) for own in seeds.values()}) > 1:
        name, values = next(iter(swept.items()))
        warn(
            f"{name} = {shown(values)} differs between runs whose seeds {shown(list(spec.seeds))} differ too, so "
            f"the effects are mixed: give every value the same seeds, such as seeds={[spec.seeds[0]] * len(values)}",
            strict=strict,
        )


def check_federation(
    federation: Federation, unseen: Federation | None, task: str | Task | None, *, strict: bool = False
) -> None:
    """Warn about clients that cannot be scored because they have no test examples; raise an error if ``strict``.

    Raises:
      JaxpflError: if the inputs of unseen clients and of trained clients differ in shape.
    """
    if unseen is not None and federation.input_shape != unseen.input_shape:
        here, there = federation.input_shape, unseen.input_shape
        raise JaxpflError(f"unseen clients' inputs must have the federation's shape {here}, got {there}")
    untested = np.asarray(federation.test.size) == 0
    if unseen is not None and untested.all() and np.asarray(unseen.test.size).any():
        warn("no trained client has test examples: only unseen clients are scored", strict=strict)
    elif untested.all():
        warn("no client has test examples: every score will be NaN", strict=strict)
    elif untested.any():
        ids = listed(labels(np.asarray(federation.client_ids), federation.client_names)[untested])
        warn(
            f"{untested.sum()} of {len(untested)} clients have no test examples (namely {ids}): scores cover only "
            "the other clients",
            strict=strict,
        )


def check_claim(spec: RunSpec, federation: Federation, *, strict: bool = False) -> None:
    """Warn if delta is so large that the privacy claim means nothing; raise an error if ``strict``.

    A method that publishes all data of one random client satisfies a privacy claim about users with delta =
    1 / clients. A method that publishes one random example of each client satisfies a claim about examples with delta =
    1 / examples, where ``examples`` is the number of examples of the largest client.
    Likewise, a claim about persons is satisfied with delta = 1 / persons.
    """
    delta = spec.privacy.delta if isinstance(spec.privacy, PrivacyConfig) else None
    if spec.guards_examples:
        train = federation.train
        unit, counts = ("example", train.size) if train.persons is None else ("person", train.count_persons()[0])
        largest = int(np.max(np.asarray(counts), initial=1))
        if delta is not None and 1 / largest <= delta < 1:
            warn(
                f"privacy.delta should be below {1 / largest:g} (the largest client has {largest} {unit}s), got "
                f"{delta:g}: even publishing one random {unit} of each client would satisfy such a claim",
                strict=strict,
            )
        return
    if delta is not None:
        check_delta(delta, federation.num_clients, name="privacy.delta", strict=strict)


def unused(specs: Sequence[RunSpec], *, newcomers: bool) -> list[str]:
    """Return a sentence for each setting that differs from its default but has no effect, with the reason.

    Args:
      specs: one run for each method, all with the same settings. A setting has an effect if at least one method uses
        it.
      newcomers: whether there are unseen clients.
    """
    first, methods = specs[0], [spec.method for spec in specs]
    none = f"no method of the run ({', '.join(method.name for method in methods)})"
    reasons: dict[str, str] = {}
    if not any(method.graph for method in methods):
        reasons |= dict.fromkeys(("graph", "neighbours"), f"{none} uses a graph of the clients")
    elif (graph := first.graph) is not None and graph not in SPACES:
        named = graph if isinstance(graph, str) else "the graph"
        reasons["neighbours"] = f"{named} already defines the neighbors"
    if not any(rates(method.hyper) for method in methods):
        reasons |= dict.fromkeys(("lr", "lr_schedule"), f"{none} has a learning rate")
    if not any(hasattr(method.hyper, "server_lr") for method in methods):
        of_server = "server_optimizer", "server_lr"
        reasons |= dict.fromkeys(of_server, f"{none} has a server optimizer")
    if not any(method.weighs for method in methods):
        reasons["weighting"] = f"{none} weights its clients"
    optimizer = first.client_optimizer
    if first.keep_optimizer and not jax.tree.leaves(resolve(optimizer)(0.1).init(np.zeros(1))):
        reasons["keep_optimizer"] = f"{optimizer if isinstance(optimizer, str) else 'the optimizer'} has no state"
    if not any(method.uploads for method in methods):
        reasons |= dict.fromkeys(("compress", "aggregate"), f"{none} uploads anything")
        if first.attack is not None and attack_of(first.attack).change is not None:
            reasons["attack"] = f"{none} uploads anything"
    if first.attack is None:
        reasons["attack_seed"] = "no client attacks"
    if not newcomers:
        reasons["adapt_rounds"] = "there are no unseen_clients"
    found = {}
    for name, reason in reasons.items():
        value = getattr(first, name)
        if not is_default(first, name):
            found[name if isinstance(value, Graph) else f"{name} = {value}"] = reason
    if (schedule := first.lr_schedule) != OWN:
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
    return [f"{what} has no effect: {reason}" for what, reason in found.items()]
