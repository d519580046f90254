"""Small runs of methods and estimators, described by their continuous results: what `golden.json` holds.

``python tests/golden/golden_runs.py DEVICES NAME...`` prints the numbers of some runs, `rewrite.py` makes the file.
Training has four rounds, so that rounding is not amplified beyond a few units in the last place.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpfl
from jaxpfl import Federation
from jaxpfl.benchmarks.studies import regression_model as regression
from jaxpfl.core import participation
from jaxpfl.core.types import Array
from jaxpfl.estimators import base, bernoulli, gaussian, mixture
from jaxpfl.estimators.empirical_bayes import ebnm
from jaxpfl.privacy import Mechanism, noise
from jaxpfl.privacy.claim import plan_of

FILE = Path(__file__).with_name("golden.json")
ROUNDS, CLIENTS, CLASSES, FEATURES, DELTA = 4, 6, 3, 4, 1e-3
UNUSED = 1e30
"""No result's size: a number that was never computed is the largest float."""
RESIDUALS = ("admm_primal", "admm_dual")
"""Metrics that are differences of almost equal numbers, and so rounding alone."""

Numbers = dict[str, list[float]]
"""Quantity -> its values: of all rounds, of all clients, or one."""


@functools.cache
def federation() -> Federation:
    """Six clients of 5 to 9 examples, classes apart, each client's a little in another place."""
    rng = np.random.RandomState(24)  # its stream is frozen, a Generator's is not
    centers = rng.normal(size=(CLASSES, FEATURES))
    turns = rng.normal(size=(CLIENTS, CLASSES, FEATURES)) / 2

    def client(size: int, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(size) % CLASSES
        return ((centers + turn)[y] + rng.normal(size=(size, FEATURES)) / 2).astype(np.float32), y

    sizes = (5, 9, 6, 8, 7, 6)
    return jaxpfl.stack_clients(
        [client(n, turn) for n, turn in zip(sizes, turns, strict=True)], test=[client(3, turn) for turn in turns]
    )


class Training(NamedTuple):
    """Four rounds of a method by `fit`; ``given`` are its arguments, ``hyper`` among them."""

    method: str
    given: Mapping[str, Any] = {}

    def __call__(self, change: float = 1.0) -> Numbers:
        """Loss and scales of each round, final test losses and states; with the rate of the local steps
        multiplied by ``change``."""
        defaults = {"model": "linear", "rounds": ROUNDS, "cohort": 4, "local_steps": 2, "batch_size": 4}
        given = defaults | dict(self.given)
        hyper = dict(given.pop("hyper", {}))
        rate = {"lr": change * jaxpfl.METHODS[self.method].hyper.lr}
        fit = jaxpfl.fit(self.method, federation(), hyper=rate | hyper, **given)
        found = {
            name: values[0].tolist()
            for name, values in sorted(fit.history.items())
            if values.dtype.kind == "f" and name not in RESIDUALS
        }
        for which, scores in sorted(fit.scores.items()):
            found[f"test loss, {which}"] = [float(np.asarray(scores["loss"], np.float64).mean())]
        found |= {"server": _summary(fit.state.server), "clients": _summary(fit.state.clients)}
        return {name: values for name, values in found.items() if values}

    def resumed(self, folder: Path) -> Numbers:
        """Loss and scales of each round, and final states, of a run that goes on from a checkpoint in its middle."""
        from jaxpfl.runs.checkpoint import Checkpoints

        defaults = {"model": "linear", "rounds": ROUNDS // 2, "cohort": 4, "local_steps": 2, "batch_size": 4}
        fit = jaxpfl.fit(self.method, federation(), **(defaults | dict(self.given)))
        simulation = fit.simulation
        Checkpoints(folder).save(ROUNDS // 2, simulation.checkpointed(fit.state), 0.0)
        like = simulation.checkpointed(simulation.init([0]))
        state, _ = Checkpoints(folder).restore(like, ROUNDS, print)
        state, more = simulation.advance(simulation.adopt(state), ROUNDS // 2)
        whole = {name: [*fit.history[name][0].tolist(), *more[name][0].tolist()] for name in fit.history}
        return whole | {"server": _summary(state.server), "clients": _summary(state.clients)}


class Estimation(NamedTuple):
    """An estimator of some clients' parameters, as a function of a factor on a variance that it takes for known; in
    float64 where float32 finds the maximum to four digits only."""

    of: Callable[[Array], Mapping[str, Array]]
    double: bool = False

    def __call__(self, change: float = 1.0) -> Numbers:
        with jax.enable_x64(self.double):
            found = _jitted(self.of)(jnp.asarray(change, jnp.result_type(float)))
        return {name: np.ravel(np.asarray(values, np.float64)).tolist() for name, values in found.items()}


_jitted = functools.cache(jax.jit)


def _summary(tree: Any) -> list[float]:
    """Norm of all floats of a tree, and their sum with the weights cos 1, cos 2, ..., which sees directions too."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    flat = np.concatenate([np.zeros(0), *(np.asarray(leaf, np.float64).ravel() for leaf in leaves)])
    flat = flat[abs(flat) < UNUSED]
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(1, len(flat) + 1)))] if len(flat) else []


def _normal(*shape: int) -> np.ndarray:
    return np.random.RandomState(7).normal(size=shape).astype(np.float32)


def _gaussian(change: Array) -> Mapping[str, Array]:
    x = base.every(jnp.asarray(_normal(8, 5, 2) + _normal(8, 1, 2)))
    found = base.estimate(gaussian.personalized(sx2=change), jax.random.key(0), x)
    return {"estimates": found.estimates, "mean": found.shared.mean, "st2": found.shared.st2}


def _bernoulli(change: Array) -> Mapping[str, Array]:
    x = base.every(jnp.asarray((_normal(8, 6, 1) + _normal(8, 1, 1) > 0).astype(np.float32)))
    found = base.estimate(bernoulli.personalized(variance=0.05 * change), jax.random.key(0), x)
    return {"estimates": found.estimates}


def _mixture(change: Array) -> Mapping[str, Array]:
    centers = np.where(np.arange(8) % 2, 1.0, -1.0).astype(np.float32)[:, None, None]
    x = base.every(jnp.asarray(centers + _normal(8, 3, 2)))
    estimator = mixture.em(2, sx2=change, steps=3, starts=2)
    found = base.estimate(estimator, jax.random.key(0), x)
    return {"estimates": found.estimates}


def _regression(change: Array) -> Mapping[str, Array]:
    x, theta = jnp.asarray(_normal(8, 5, 2)), jnp.asarray(_normal(8, 2) / 2 + 1)
    y = jnp.einsum("ijd,id->ij", x, theta) + jnp.asarray(_normal(8, 5)) / 2
    rotated = jax.vmap(regression.rotate)(x, y)
    begin = regression.Population(jnp.zeros(2), 0.5 * change, 0.5 * change)
    population = regression.em(begin, rotated, 1e-6, 3)
    of = jax.vmap(lambda data: regression.posterior(population, data))(rotated)
    return {"estimates": of.mean, **population._asdict()}


def _normal_means(change: Array) -> Mapping[str, Array]:
    s = np.linspace(0.5, 1.5, 12, dtype=np.float32)
    found = ebnm(jnp.asarray(2 * _normal(12)), change * s, "normal")
    return {"estimates": found.mean, "sd": found.sd, "log likelihood": found.log_marginal}


def _private_sum(change: Array) -> Mapping[str, Array]:
    """Clipped uploads and their noisy sum. The noise of a run of `fit` is of a key that is made of its code too, and so
    another one after any change."""
    uploads = {"w": jnp.asarray(_normal(6, 4, 3)), "b": jnp.asarray(_normal(6, 3))}
    clipped, norms = jax.vmap(lambda upload: noise.clip(upload, 3 * change))(uploads)
    total = jax.tree.map(lambda leaf: leaf.sum(axis=0), clipped)
    return {"norms": norms, **noise.add_gaussian(jax.random.key(1), total, 0.5, "a test")}


def _epsilons(change: float = 1.0) -> Numbers:
    """Epsilon of ten rounds, of which the noise is ``change`` of what is said."""
    central, distributed = Mechanism(change, 0.1), Mechanism(change, 0.1, "distributed", 3)
    cohorts = {"everyone": participation.full(20), "fixed size": participation.uniform(20, 5)}
    plans = {name: plan_of(distributed, drawn, rounds=10) for name, drawn in cohorts.items()}
    plans["poisson"] = plan_of(central, participation.poisson(20, 0.25), rounds=10)
    accountants: dict[str, Any] = {"everyone": "pld", "fixed size": "rdp", "poisson": "pld"}
    return {name: [plan.epsilon(DELTA, accountants[name])] for name, plan in plans.items()}


_FITS: dict[str, Callable[..., Numbers]] = {
    name: Training(name)
    for name in (
        "fedavg", "adaped", "map-gaussian", "map-laplace", "map-kd", "adamix", "fedem", "ifca", "ditto", "pfedme",
        "scaffold", "apfl",
    )
}  # fmt: skip
RUNS: dict[str, Callable[..., Numbers]] = _FITS | {
    "fedavg, server Adam": Training("fedavg", {"server_optimizer": "adam", "hyper": {"server_lr": 0.05}}),
    "gaussian": Estimation(_gaussian),
    "bernoulli": Estimation(_bernoulli),
    "mixture": Estimation(_mixture),
    "regression": Estimation(_regression),
    "normal means": Estimation(_normal_means, double=True),
    "private sum": Estimation(_private_sum),
    "epsilon": _epsilons,
}
"""Name -> the run, a function of the change that is planted."""


def apart(found: Numbers, want: Numbers) -> float:
    """Largest difference of a number from that of the file, relative to the largest of its quantity; infinite if the
    quantities differ, or a number is not finite."""
    if {name: len(values) for name, values in found.items()} != {name: len(values) for name, values in want.items()}:
        return float("inf")

    def of(a: list[float], b: list[float]) -> float:
        difference = np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), np.finfo(float).tiny)
        return float(difference) if np.isfinite(difference) else float("inf")

    return max(of(values, want[name]) for name, values in found.items())


if __name__ == "__main__":
    from jaxpfl import use_cpu_cores

    use_cpu_cores(int(sys.argv[1]))
    print(json.dumps({name: RUNS[name]() for name in sys.argv[2:]}))
