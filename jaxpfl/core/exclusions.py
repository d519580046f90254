"""Table of incompatible settings. The error messages, their documentation and their tests are generated from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpfl.support.errors import JaxpflError

EXCLUSIONS: Mapping[tuple[str, str], str] = {
    ("privacy", "weighting = examples"): (
        "a weighted mean cannot be accounted for: its sensitivity depends on the weights, which may be unbounded "
        "private data such as example counts; give every client the same weight"
    ),
    ("privacy", "participation = replacement"): (
        "sampling clients with replacement cannot be accounted for: one user may be in a cohort several times; sample "
        "by poisson, or uniformly without replacement"
    ),
    ("privacy", "fednova"): "fednova uploads each client's number of steps, which noise would distort: leave one out",
    ("privacy", "aggregate"): (
        "a robust aggregate cannot be private: the noise is calibrated to a sum of clipped uploads, which one client "
        "changes by at most the clipping norm, and no such bound is known for a median or a selection; use "
        "aggregate = mean"
    ),
    ("privacy", "attack"): (
        "attackers and privacy cannot be combined: the privacy claim assumes that every client clips its upload and "
        "adds its share of the noise, which an attacker need not do"
    ),
    ("privacy", "feedback"): (
        "private uploads have no error feedback: the stored error of a client whose training failed would reveal "
        "information about its data; leave feedback out"
    ),
    ("privacy", "running statistics"): (
        "noise in every step does not cover a model's running statistics (BatchNorm), and noise on clipped updates "
        "makes them useless: use GroupNorm, or fedbn, whose clients do not upload them"
    ),
    ("noise_multiplier = 0", "a privacy claim"): (
        "no epsilon can be claimed with a noise multiplier of 0: the clipped sum has no noise"
    ),
    ("client-side noise", "participation = poisson"): (
        "noise that the clients add cannot be accounted for with poisson participation: the amount of noise would "
        "depend on the cohort's size; use full or fixed-size cohorts, or central noise"
    ),
    ("client-side noise", "participation = cyclic"): (
        "noise that the clients add cannot be accounted for with cyclic participation: use full or fixed-size cohorts, "
        "or let the server add the noise (central or banded)"
    ),
    ("noise = banded", "noise_seed = secret"): (
        "banded noise requires noise_seed = run: earlier noise is in the server's state, so it would not stay secret"
    ),
    ("noise = banded", "participation other than cyclic"): (
        "banded noise requires participation = cyclic: its privacy bound holds only if the turns of a client are at "
        "least as many rounds apart as there are bands"
    ),
    ("noise = banded", "quantile, several releases in a round"): (
        "banded noise covers one sum per round with a fixed clipping norm: leave out quantile, and methods that "
        "release several sums"
    ),
    ("client-side noise", "quantile"): "adaptive clipping requires noise = central: use central, or leave out quantile",
    ("client-side noise", "several releases in a round"): ("several releases in a round require central noise"),
    ("noise = per_step", "several noise multipliers or norms"): (
        "noise = per_step takes one noise_multiplier and one clipping_norm for all runs"
    ),
    ("noise = per_step", "local_epochs"): (
        "a client's number of noisy steps would reveal its number of examples: use local_steps"
    ),
    ("noise = per_step", "steps without noise"): "the method's local steps do not support noise",
    ("compress", "noise = central, noise = banded"): (
        "uploads cannot be compressed under central noise: the server adds it to the sum, after the clients' "
        "compression; let the clients add it (noise = distributed)"
    ),
    ("compress", "noise = per_step"): (
        "uploads with noise in every step cannot be compressed: the privacy claim relies on the exact sum of the local "
        "steps; use noise = distributed"
    ),
    ("clip_gradients", "noise = per_step, unit = example"): (
        "noise in every step already clips gradients, to privacy.clipping_norm: leave one out"
    ),
    ("unit = example", "augment"): (
        "augmentation works on batches, but the gradient of each example is computed separately: leave augment out"
    ),
    ("unit = example", "draw"): "every batch is a Poisson draw: leave draw out",
    ("unit = example", "graph of the data"): "the graph is computed from the clients' examples: give a public graph",
    ("unit = example", "noise_seed = secret and training after the last round"): (
        "the method trains on examples again when it is scored or exported, but by then the seed has been deleted: use "
        "noise_seed = run"
    ),
    ("pooled data", "privacy, unit = example, compress, aggregate, attack"): (
        "a method that pools the data has neither uploads nor silos: leave this setting out"
    ),
    ("asynchronous rounds", "privacy, unit = example"): "no accountant covers cohorts that depend on arrival times",
    ("asynchronous rounds", "compress"): "arrival times require known sizes of uploads: leave compress out",
    ("aggregate", "fednova"): "fednova divides a sum of uploads, but a robust aggregate is not a sum: leave one out",
    ("aggregate", "weighting = examples"): (
        "a robust aggregate gives all clients the same weight, because a client could claim any weight: use "
        "weighting = uniform, or aggregate = mean"
    ),
    ("accountant = pld", "participation = uniform"): (
        "pld does not support fixed-size cohorts: use rdp, which accounts for them under replace-one"
    ),
    ("accountant = rdp", "capped cohorts"): ("rdp does not support poisson cohorts with a cap: use pld"),
    ("accountant = paper", "adaptive clipping or cyclic participation, unit = example"): (
        "accountant = paper supports neither adaptive clipping nor cyclic participation nor unit = example: use pld or "
        "rdp"
    ),
    ("a sweep", "plan.clients_in = disk"): "plan.clients_in = disk supports single runs only: use host or device",
    (
        "a sweep",
        "eval_every, checkpoint_every",
    ): "a sweep scores and records each run only at its end: leave this setting out",
    ("a sweep", "patience"): "patience applies to run and compare only: use --halving",
    ("halving", "select = none"): "halving selects by validation scores: leave out --select none",
    ("halving", "an axis of the problem"): "settings are compared on the same clients: no axis may change the clients",
    ("an axis of rounds", "halving, budget = steps"): "this setting determines the rounds itself: leave the axis out",
    ("an audit", "noise = banded, participation = cyclic"): (
        "an audit assumes that noise and cohorts are independent between rounds"
    ),
}
"""Combinations of settings that are refused: (setting, incompatible settings) -> the reason, and what to do instead. A
setting is written as its name if it is on (``compress``), as a name with a value (``noise = central``), or as a
property of the run in words (``asynchronous rounds``). Several incompatible settings are separated by commas."""

NO_NOISE = EXCLUSIONS["noise_multiplier = 0", "a privacy claim"]
"""Reason why no epsilon can be claimed for a mechanism without noise."""


def check(settings: Mapping[str, Any]) -> None:
    """Refuse incompatible settings.

    Args:
      settings: values by name, with the names that `EXCLUSIONS` uses. None and False mean that the setting is off.

    Raises:
      JaxpflError: if two settings are incompatible; the message gives both settings and the reason.
    """
    shown: dict[str, str] = {}
    for name, value in settings.items():
        if value is not None and value is not False:
            text = f"{name} ({value})" if " " in name else f"{name} = {value}"
            shown |= {name: name if value is True else text, text: text}
    for what, other, why in rows():
        if what in shown and other in shown:
            raise JaxpflError(f"{shown[what]} with {shown[other]}: {why}")


def rows() -> list[tuple[str, str, str]]:
    """Pairs of incompatible settings, each with the reason."""
    return [(what, other, why) for (what, others), why in EXCLUSIONS.items() for other in others.split(", ")]


def table() -> str:
    """Format `EXCLUSIONS` as a Markdown table."""
    lines = [f"| {what} | {others} | {why} |" for (what, others), why in EXCLUSIONS.items()]
    return "\n".join(["| setting | not with | why |", "|---|---|---|", *lines])
