"""Difference between float32 and float64 over the rounds, for every registered method.

    python -m benchmarks drift --json FILE

Digits is split among 12 clients with three classes each. Half of the clients take part in a round; for the method cfl,
all of them do. The model is an MLP with 16 hidden units, trained for 500 rounds of five steps. Both precisions start
from the same models, and draw the same cohorts and batches, which do not depend on the type. (The benchmark itself
checks only that each client takes part equally often.) ``distance`` is the L2 distance between the personal models
of the two runs (over all clients), divided by the norm of the float64 models. ``accuracy`` is the difference between
mean accuracies of the personal models, in percentage points. The record is written after each method, so that an
interrupted run can continue.

``shaken`` shows how much of the distance is due to rounding. It is the distance between two float64 runs, one of which
is perturbed: at the start and after every tenth round, every number of the server's and clients' states is multiplied
by 1 + 2^-24 z, where z is standard normal. If a method's float32 run is not further away than the perturbed run, the
method amplifies any perturbation (argmax, thresholds, chaotic training), in any precision.

With ``--smooth``, networks use softplus instead of relu. If a relu unit's input is zero up to rounding for some
example, the unit may be active in one run and inactive in the other, so the runs diverge by far more than rounding
errors. This does not happen with softplus.

    python -m benchmarks drift --precision bfloat16 --json FILE

compares bfloat16 with float32 models in the same way. Digits is split among 20 clients, which all take part in each of
100 rounds of ten steps of batch 20, with three seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .problems import use_devices
from .record import command, parser, positive, stored, table, write

MODELS = {"fedbn": "mlp-ln:16"}
"""Models for methods that need a part that ``mlp:16`` lacks."""
EVERYONE = ("cfl",)
"""Methods that require full participation."""
OF_PRECISION = (("mlp", "fedavg"), ("mlp", "adaped"), ("mlp", "fedper"), ("linear", "fedavg"), ("linear", "adaped"))
"""Models and methods for `--precision`."""
SEEDS = 3
SHAKE, SHAKE_EVERY = 2.0**-24, 10
UNUSED = 1e30
"""Bound above which a value is not a parameter: losses that were never computed are the largest float of their type."""


@command
def main(argv: list[str] | None = None) -> None:
    import jaxpfl

    options = parser("drift", __doc__)
    options.add_argument(
        "--methods", nargs="+", choices=sorted(jaxpfl.METHODS), metavar="NAME", help="methods to run; all by default"
    )
    options.add_argument("--rounds", type=positive, help="number of rounds; by default 500, or 100 with --precision")
    options.add_argument("--clients", type=positive, help="number of clients; by default 12, or 20 with --precision")
    options.add_argument("--smooth", action="store_true", help="use softplus instead of relu")
    options.add_argument("--precision", choices=("bfloat16",), help="precision of the models, compared with float32")
    args = options.parse_args(argv)
    if args.precision:
        _of_precision(args)
    else:
        _of_float32(args)


def _of_float32(args: argparse.Namespace) -> None:
    """Compare float32 with float64."""
    import jaxpfl

    names = args.methods or (["fedavg"] if args.quick else list(jaxpfl.METHODS))
    settings = {"rounds": 20 if args.quick else args.rounds or 500, "clients": args.clients or 12}
    settings |= {"smooth": True} if args.smooth else {}  # older records lack this setting
    results = stored(args.json, settings)
    for name in names:
        if name not in results:
            results[name] = once(Job("drift", settings | {"method": name}))
            write(args.json, "drift", settings, results)
    rows = [
        (name, *row["distance"], row["shaken"][-1], row["accuracy"][0], 100 * (row["accuracy"][1] - row["accuracy"][0]))
        for name, row in results.items()
    ]
    rounds = next(iter(results.values()))["rounds"]
    columns = ("", *(f"after {r}" for r in rounds), "shaken", "accuracy", "difference")
    table("distance of personal models in float32 from those in float64", columns, rows)


def _of_precision(args: argparse.Namespace) -> None:
    """Compare models of another precision with float32."""
    settings = {"precision": args.precision, "rounds": 3 if args.quick else args.rounds or 100}
    settings |= {"clients": args.clients or 20, "seeds": SEEDS}
    results = stored(args.json, settings)
    for model, method in OF_PRECISION[:1] if args.quick else OF_PRECISION:
        name = f"{model}, {method}"
        if name not in results and method in (args.methods or [method]):
            results[name] = once(Job("drift", settings | {"model": model, "method": method}))
            write(args.json, "drift", settings, results)
    rows = [
        (name, *row["distance"], *(100 * value for pair in row["accuracy"] for value in pair))
        for name, row in results.items()
    ]
    columns = ("", "after 1", f"after {settings['rounds']}", "float32, %", "+-", f"{args.precision}, %", "+-")
    table(f"distance of personal models in {args.precision} from those in float32, and accuracy", columns, rows)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compute the distances and accuracies of a method."""
    use_devices(1)
    if "precision" in settings:
        return _with_precision(settings)
    return _of_method(settings["method"], settings)


def _of_method(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    import jax

    began = time.perf_counter()
    rounds = [r for r in (1, 10, 100) if r < settings["rounds"]] + [settings["rounds"]]
    with _softplus() if settings.get("smooth") else nullcontext():
        single = _run(name, settings, rounds)
        with jax.enable_x64(True):
            double = _run(name, settings, rounds)
            shaken = _run(name, settings, rounds, shake=SHAKE)
    for other in (single, shaken):
        for a, b in zip(other.counts, double.counts, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{name}: other cohorts or batches")
    return {
        "rounds": rounds,
        "distance": [_distance(a, b) for a, b in zip(single.models, double.models, strict=True)],
        "shaken": [_distance(a, b) for a, b in zip(shaken.models, double.models, strict=True)],
        "server": _distance(single.server, double.server),
        "accuracy": [double.accuracy, single.accuracy],
        "diverged": [double.diverged, single.diverged],
        "seconds": time.perf_counter() - began,
    }


def _with_precision(settings: dict[str, Any]) -> dict[str, Any]:
    import jaxpfl

    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=settings["clients"], classes_per_client=3)
    given = {"model": settings["model"], "local_steps": 10, "batch_size": 20, "seeds": settings["seeds"], "rounds": 1}
    models, accuracy = [], []
    for precision in ("float32", settings["precision"]):
        plan = jaxpfl.ExecutionPlan(precision=precision)
        fitted = jaxpfl.fit(settings["method"], federation, **given, plan=plan)
        simulation, state = fitted.simulation, fitted.state
        of_first = _floats(simulation.personal_models(state))
        state, _ = simulation.advance(state, settings["rounds"] - 1)
        models.append([of_first, _floats(simulation.personal_models(state))])
        found = np.asarray(simulation.evaluate(state)["after"]["accuracy"]).mean(axis=1)
        accuracy.append([float(found.mean()), float(found.std(ddof=1))])
    exact, other = models
    return {"distance": [_distance(a, b) for a, b in zip(other, exact, strict=True)], "accuracy": accuracy}


@contextmanager
def _softplus() -> Iterator[None]:
    """Replace ``jax.nn.relu`` by softplus; each measurement has its own process."""
    import jax

    relu = jax.nn.relu
    jax.nn.relu = jax.nn.softplus
    try:
        yield
    finally:
        jax.nn.relu = relu


class _Found:
    """Results of a run."""

    def __init__(self) -> None:
        self.models: list[list[np.ndarray]] = []
        self.server: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.accuracy = self.diverged = 0.0


def _run(name: str, settings: dict[str, Any], rounds: list[int], shake: float = 0.0) -> _Found:
    import jax

    simulation, found = _simulation(name, settings["clients"]), _Found()
    state = simulation.init([0])
    stops = sorted({*rounds, *(range(SHAKE_EVERY, rounds[-1], SHAKE_EVERY) if shake else ())})
    for start, stop in zip([0, *stops], stops, strict=False):
        if shake and start % SHAKE_EVERY == 0:
            state = _shaken(start, state, shake)
        state, history = simulation.advance(state, stop - start)
        found.diverged += float(np.asarray(history["diverged"]).sum())
        if stop in rounds:
            found.models.append(_floats(simulation.personal_models(state)))
    found.server, found.counts = _floats(state.server), [np.asarray(leaf) for leaf in jax.tree.leaves(state.counts)]
    found.accuracy = float(simulation.evaluate(state)["after"]["accuracy"].mean())
    return found


def _simulation(name: str, clients: int) -> Any:
    import dataclasses

    import jax

    import jaxpfl
    from jaxpfl.core import participation
    from jaxpfl.engine.build import Assembled
    from jaxpfl.engine.client_graph import graph_by_inputs
    from jaxpfl.engine.spec import RunSpec
    from jaxpfl.engine.tasks import make_task

    data = jaxpfl.load("digits")
    federation = jaxpfl.federate(data, clients=clients, classes_per_client=3, validation_share=0.2)
    kind = jax.dtypes.canonicalize_dtype(float)
    federation = jax.tree.map(lambda a: a.astype(kind) if np.issubdtype(a.dtype, np.floating) else a, federation)
    method = jaxpfl.METHODS[name]
    task = make_task(MODELS.get(name, "mlp:16"), federation, 10)
    work = jaxpfl.LocalWork(np.asarray(federation.train.size), 5, 10)
    if method.graph:
        with jax.enable_x64(False):
            work = dataclasses.replace(work, graph=graph_by_inputs("data", federation, neighbours=3))
    cohorts = participation.of(clients, clients if name in EVERYONE else -(-clients // 2))
    plan = jaxpfl.ExecutionPlan(clients="vmap", devices=1, rounds_per_call=1000)
    spec = RunSpec(method=method, plan=plan)
    return Assembled(spec, task, federation, None, method.hyper, cohorts, None, work).simulation()


def _shaken(seed: int, state: Any, by: float) -> Any:
    """Return the state after perturbing every number of the server's and clients' states independently."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)

    def of(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        values = np.asarray(leaf)
        factors = np.where(_used(values), 1 + by * rng.standard_normal(leaf.shape), 1)
        return jax.device_put((values * factors).astype(leaf.dtype), leaf.sharding)

    server, clients = jax.tree.map(of, (state.server, state.clients))
    return state._replace(server=server, clients=clients)


def _used(values: np.ndarray) -> np.ndarray:
    """Return a mask that is false for unused slots, which contain the largest float of their type, or NaN."""
    return abs(values) < UNUSED


def _floats(tree: Any) -> list[np.ndarray]:
    import jax
    import jax.numpy as jnp

    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _distance(found: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return the norm of the difference relative to the norm of ``exact``, over all entries that are used in both."""
    pairs = list(zip(found, exact, strict=True))
    used = [_used(a) | _used(b) for a, b in pairs]
    apart = sum(((a[there] - b[there]) ** 2).sum() for (a, b), there in zip(pairs, used, strict=True))
    size = sum((b[there] ** 2).sum() for (_, b), there in zip(pairs, used, strict=True))
    return float(np.sqrt(apart / size)) if size > 0 else 0.0


if __name__ == "__main__":
    main()
