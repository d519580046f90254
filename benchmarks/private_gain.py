"""Gain from collaboration under user-level privacy, relative to controls that share nothing.

    python -m benchmarks private_gain --data-dir DIR --json FILE

Even if strong noise hides what clients could learn from each other, a private method may be better than local training
because of a penalty toward a fixed model, softer targets, or a start from public examples. Local training with the same
regularization or start therefore serves as a control, and the result is the lead over the best such control.
All contenders have six tries, and the best try by validation is scored on test examples. Leads are paired over splits.
The record contains every try. It is written after each program, so that an interrupted study can continue. The privacy
claims do not cover the choice of a try.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .private_gain_page import tables
from .problems import use_devices
from .record import command, parser, stored, write

EPSILONS = (1.0, 2.0, 4.0, 8.0)
SPLITS = (0, 1, 2, 3, 4)
STEPS, BATCH, CLASSES, VALIDATION = 5, 5, 3, 0.2
RATES = (0.03, 0.1, 0.3, 1.0, 2.0, 4.0)


class Problem(NamedTuple):
    """A federation of many small clients, and the public examples that the study uses.

    Attributes:
      clients: number of clients.
      examples: number of training examples per client, including validation examples.
      test: number of test examples per client.
      public: number of examples that belong to no client, from the same data set.
      delta: delta of all privacy claims.
      rates: factor for the learning rates of all tries, because MNIST's images are larger than the digits.
    """

    clients: int
    examples: int
    test: int
    public: int
    delta: float
    rates: float = 1.0


PROBLEMS = {"digits": Problem(100, 10, 6, 100, 1e-3), "mnist": Problem(300, 10, 20, 100, 1e-4, rates=0.3)}


class Contender(NamedTuple):
    """A method with its tries.

    Attributes:
      method: registered name.
      tries: learning rate for digits (``lr``) and clipping norm (``clip``) of each try.
      private: whether the uploads are private.
      public: whether the models start from a model that was trained on the public examples.
      rounds: number of rounds; all clients take part in each round, unless ``fit`` sets a cohort.
      fit: further arguments of `jaxpfl.fit`.
      privacy: further settings of the `PrivacyConfig`.
    """

    method: str
    tries: tuple[Mapping[str, float], ...]
    private: bool = True
    public: bool = False
    rounds: int = 30
    fit: Mapping[str, Any] = {}
    privacy: Mapping[str, Any] = {}


def _crossed(**values: Iterable[float]) -> tuple[Mapping[str, float], ...]:
    return tuple(dict(zip(values, row, strict=True)) for row in itertools.product(*values.values()))


ALONE = _crossed(lr=RATES)
SHARED = _crossed(lr=(0.1, 0.3, 1.0), clip=(0.3, 1.0))
CONTENDERS: Mapping[str, Contender] = {
    "local": Contender("local", ALONE, private=False),
    "local, labels smoothed by .2": Contender("local", ALONE, private=False, fit={"label_smoothing": 0.2}),
    "local, public start": Contender("local", ALONE, private=False, public=True),
    "AdaPeD that learns nothing": Contender("adaped", _crossed(lr=RATES, clip=(1e-6,))),
    "FedAvg+": Contender("fedavg-ft", SHARED),
    "FedAvg+, 10 rounds": Contender("fedavg-ft", SHARED, rounds=10, fit={"local_steps": 3 * STEPS}),
    "FedAvg+, public start": Contender("fedavg-ft", SHARED, public=True),
    "FedAvg+, banded noise": Contender(
        "fedavg-ft", SHARED, fit={"cohort": 0.2, "participation": "cyclic"}, privacy={"noise": "banded"}
    ),
    "AdaPeD": Contender("adaped", SHARED),
    "Ditto": Contender("ditto", SHARED),
}


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("private_gain", __doc__)
    options.add_argument("--data", nargs="+", choices=sorted(PROBLEMS), default=list(PROBLEMS), metavar="NAME")
    args = options.parse_args(argv)
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    problems = {"digits": Problem(8, 10, 6, 20, 1e-2)} if args.quick else PROBLEMS
    settings = {"problems": {name: one._asdict() for name, one in problems.items()}, "quick": args.quick}
    results: dict[str, Any] = stored(args.json, settings) or {}
    names = ("local", "FedAvg+") if args.quick else tuple(CONTENDERS)
    for data in ("digits",) if args.quick else args.data:
        for split in SPLITS[:1] if args.quick else SPLITS:
            missing = [name for name in names if f"{data} {split} {name}" not in results]
            if missing:
                _study(data, problems[data], split, missing, results, args, settings)
    if not args.quick:
        print(tables({"settings": settings, "results": results}))


def _study(
    data: str, problem: Problem, split: int, names: Iterable[str], results: dict[str, Any], args: Any, settings: Any
) -> None:
    """Run contenders on a split, and write their results into the record."""
    federation, public = _drawn(data, problem, split, args.data_dir)
    start = _start(public)
    for name in names:
        one = CONTENDERS[name]
        epsilons = (EPSILONS[:1] if args.quick else EPSILONS) if one.private else (None,)
        rows = [
            {**_run(one, problem, federation, start, split, epsilon, quick=args.quick), "epsilon": epsilon}
            for epsilon in epsilons
        ]
        results[f"{data} {split} {name}"] = rows
        path: Path | None = args.json
        write(path, "private_gain", settings, results)
        print(f"{data}, split {split}, {name}:", *(f"{row['test']:.2f}" for row in rows), flush=True)


def _drawn(data: str, problem: Problem, split: int, data_dir: str | None) -> tuple[Any, Any]:
    """Return the federation of a split, and the public examples, which belong to no client."""
    import numpy as np

    import jaxpfl
    from jaxpfl.data.sources.base import pooled

    source = jaxpfl.load(data, data_dir)
    source = source if source.x_test is None else pooled(source)
    each = problem.examples + problem.test
    order = np.random.default_rng([split, 20]).permutation(len(source.y_train))
    public, rest = order[: problem.public], order[problem.public :][: problem.clients * each]
    own = source._replace(x_train=source.x_train[rest], y_train=source.y_train[rest])
    federation = jaxpfl.federate(
        own,
        clients=problem.clients,
        classes_per_client=CLASSES,
        test_share=problem.test / each,
        validation_share=VALIDATION,
        split_seed=split,
    )
    return federation, (source.x_train[public], source.y_train[public])


def _start(public: tuple[Any, Any]) -> Any:
    """Train a linear model on public examples to convergence, with a small penalty, and return its parameters."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxpfl.models import build_model

    x, y = jnp.asarray(public[0]), jnp.asarray(public[1])
    model = build_model("linear", 10, x.shape[1:])
    solver = optax.lbfgs()
    params = model.init(jax.random.key(0), x[:1])

    def loss(params: Any) -> jax.Array:
        penalty = 1e-2 * optax.tree.norm(params, squared=True)
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean() + penalty

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradient = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = solver.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(params, updates), state

    state = solver.init(params)
    for _ in range(100):
        params, state = step(params, state)
    return params


def _run(
    one: Contender, problem: Problem, federation: Any, start: Any, split: int, epsilon: float | None, *, quick: bool
) -> dict[str, Any]:
    """Run all tries as one program; return the test accuracy in % of the try with the best validation accuracy."""
    import numpy as np

    import jaxpfl
    from jaxpfl.privacy import PrivacyConfig

    tries = [{**row, "lr": float(f"{problem.rates * row['lr']:.3g}")} for row in one.tries]
    more = {"cohort": problem.clients, "local_steps": STEPS, **one.fit}
    if isinstance(more["cohort"], float):
        more["cohort"] = max(1, round(more["cohort"] * problem.clients))
    if epsilon is not None:
        norms = tuple(row["clip"] for row in tries)
        more["privacy"] = PrivacyConfig(epsilon=epsilon, delta=problem.delta, clipping_norm=norms, **one.privacy)
    found = jaxpfl.fit(
        one.method,
        federation,
        model="linear",
        rounds=2 if quick else one.rounds,
        batch_size=BATCH,
        seeds=[split] * len(tries),
        lr=[row["lr"] for row in tries],  # clips the gradient of every step, including that of AdaPeD's global model
        warm_start=start if one.public else None,
        **more,
    )
    assert found.validation is not None
    validation = 100 * np.nanmean(found.validation["after"]["accuracy"][-1], axis=1)  # [tries]
    test = 100 * np.nanmean(found.scores["after"]["accuracy"][-1], axis=1)
    best = int(validation.argmax())
    claimed = None if epsilon is None else round(float(found.statement(run=best).epsilon), 3)
    return {
        "chosen": tries[best],
        "validation": [round(float(value), 3) for value in validation],
        "test": round(float(test[best]), 3),
        "claimed": claimed,
    }


if __name__ == "__main__":
    main()
