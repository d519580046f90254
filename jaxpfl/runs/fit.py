"""`fit`: train and score a method from Python in one call, with or without a run folder."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxpfl.algorithms import METHODS, Method, Optimizer
from jaxpfl.core.settings import F, Kind, check_kind, documented, instance_of, named
from jaxpfl.core.types import Federation, PyTree
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.fit import Evaluated, Fit, result, train
from jaxpfl.engine.spec import OWN, RunSpec, Settings, refuse, without_effect
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION
from jaxpfl.privacy import Mechanism, PrivacyConfig
from jaxpfl.runs import compile_cache
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.uploads.compression import Compressor

if TYPE_CHECKING:
    from jaxpfl.engine import RunState, Simulation
    from jaxpfl.runs.config import RunConfig

_FEDERATION = instance_of("a Federation (jaxpfl.federate and jaxpfl.stack_clients make one)", Federation)
_CALLBACKS = Kind("a sequence of functions", lambda value: isinstance(value, Sequence) and all(map(callable, value)))


def _names_given(function: F) -> F:
    """Decorate `fit` so that `is_given` knows its keywords."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        with named(keywords.keys()):
            return function(*args, **keywords)

    return cast(F, call)


@_names_given
def fit(
    method: str | Method,
    federation: Federation,
    *,
    unseen: Federation | None = None,
    callbacks: Sequence[Callable[[Evaluated], None]] = (),
    output: str | Path | None = None,
    model: Any = "mlp",
    task: str | Task | None = None,
    loss: str | Callable[..., Any] | None = None,
    label_smoothing: float = 0.0,
    metrics: Any = None,
    rounds: int = 100,
    eval_every: int | None = None,
    patience: int | None = None,
    cohort: int | None = None,
    participation: str | None = None,
    cohort_cap: int | None = None,
    cycle: int | None = None,
    local_steps: int = 10,
    local_epochs: int | None = None,
    batch_size: int = 20,
    draw: str = "epoch",
    augment: str | None = None,
    client_optimizer: Optimizer = "sgd",
    keep_optimizer: bool = False,
    lr: float | Sequence[float] | None = None,
    clip_gradients: float | None = None,
    lr_schedule: str | Callable[..., Any] = "decay",
    weighting: str | None = None,
    server_optimizer: Optimizer = "sgd",
    server_lr: float | Sequence[float] | None = None,
    aggregate: str = "mean",
    attack: str | None = None,
    attackers: float = 0.0,
    attack_seed: int = 0,
    dropout: Any = 0.0,
    stragglers: Any = 0.0,
    same_stragglers: bool = False,
    time_model: str | None = None,
    compress: str | Compressor | None = None,
    adapt_rounds: int = 10,
    graph: str | Graph | None = None,
    neighbours: int | None = None,
    seeds: int | Sequence[int] = 1,
    hyper: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    warm_start: PyTree | None = None,
    privacy: Mechanism | PrivacyConfig | None = None,
    plan: ExecutionPlan | None = None,
) -> Fit:
    """Train a method and score every client on its test examples.

    Example::

        federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3)
        result = jaxpfl.fit("adaped", federation, rounds=50, cohort=10, seeds=3)
        result.personalized_accuracy.mean()

    Args:
      method: registered name, or a `Method` of your own.
      federation: stacked data of the clients.
      unseen: clients that do not take part in training. ``Fit.unseen_accuracy`` has their scores after adaptation;
        `jaxpfl.set_apart` separates such clients from a federation.
      callbacks: functions that are called in order after every evaluation, with an `Evaluated`. They cannot change the
        run.
      output: run folder to create, like ``jaxpfl run --output``, with a copy of the federation. Commands such as report
        and export read it, and ``jaxpfl run --config OUTPUT/config.json --output OUTPUT --resume`` continues a stopped
        run. Settings must then be strings or numbers; name your own code as ``FILE.py:NAME``. None to write nothing.

    Raises:
      JaxpflError: if a name is unknown, if a value has the wrong type or is out of range, if a setting is incompatible
        with the data, or if the folder contains files or cannot be written.
    """
    given = dict(locals())
    settings = {name: given[name] for name in inspect.signature(RunSpec).parameters}
    spec = RunSpec(**settings)
    refuse(spec, without_effect(spec))
    check_kind("federation", federation, _FEDERATION)
    check_kind("callbacks", callbacks, _CALLBACKS)
    if unseen is not None:
        check_kind("unseen", unseen, _FEDERATION)
    compile_cache.keep_programs()
    if output is None:
        return train(spec, federation, unseen, callbacks)
    if unseen is not None or processes.several():
        raise JaxpflError(
            f"output = {output} supports neither unseen clients nor several processes: leave it out, or use jaxpfl run"
        )
    return _fit_in_folder(settings, spec, federation, callbacks, Path(output))


fit.__doc__ = documented(fit.__doc__ or "", RunSpec)


def _fit_in_folder(
    settings: dict[str, Any],
    spec: RunSpec,
    federation: Federation,
    callbacks: Sequence[Callable[[Evaluated], None]],
    folder: Path,
) -> Fit:
    """Save the federation in a run folder, and run the method in this folder as ``jaxpfl run`` does."""
    from jaxpfl import algorithms
    from jaxpfl.data import Source, save_federation
    from jaxpfl.runs import run_folder
    from jaxpfl.runs.config import resolve
    from jaxpfl.runs.control import Interrupted, Reporter
    from jaxpfl.runs.run import open_folder, run_methods
    from jaxpfl.runs.setup import prepare

    config = _config(settings, spec, federation, folder)
    algorithms.names_of([spec.method.source])  # registers a method from a file under its name
    evaluated: list[Evaluated] = []
    last: list[tuple[Simulation, RunState]] = []

    def observe(simulation: Simulation, state: RunState, found: Evaluated) -> None:
        last[:] = [(simulation, state)]
        evaluated.append(found)
        for callback in callbacks:
            callback(found)

    with run_folder.lock(folder):
        run_folder.check_place(folder, "config.json", "run", run_folder.RUN_PARTS, resume=False, force=False)
        try:
            shutil.rmtree(folder / run_folder.FEDERATION, ignore_errors=True)  # left by a process that was killed
            source = None
            if spec.num_classes is not None:
                y = federation.train.examples.y
                source = Source("federation", None, y, None, None, spec.num_classes, "a fit", task=str(config.task))
            save_federation(federation, folder / run_folder.FEDERATION, source=source)
            experiment = prepare(resolve(config), (spec.method.name,))
            assembled = experiment.runs[spec.method.name]
            released = assembled.released(len(spec.seeds))
            open_folder(folder, experiment, resume=False)
            run_methods(experiment, folder, Reporter(), observe=observe)
        except Interrupted as stop:
            resumed = f"jaxpfl run --config {folder / 'config.json'} --output {folder} --resume continues"
            error = KeyboardInterrupt(f"{stop}; {resumed}") if stop.status == 130 else SystemExit(stop.status)
            raise error from None
        except Exception:
            run_folder.discard_unstarted(folder)
            raise
    return result(assembled, released, *last[0], evaluated)


def _config(settings: dict[str, Any], spec: RunSpec, federation: Federation, folder: Path) -> RunConfig:
    """Return the config with which ``jaxpfl run`` repeats the run.

    Raises:
      JaxpflError: if a setting is neither a string nor a number, or the seeds are not consecutive.
    """
    from jaxpfl.runs.config import RunConfig
    from jaxpfl.runs.run_folder import FEDERATION

    def plain(name: str, value: Any, *allowed: type, instead: str = "") -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or isinstance(value, (str, int, float, *allowed)):
            return value
        words = f"{name} must be a string or a number in a stored run, got a {type(value).__name__}"
        raise JaxpflError(f"{words}: {instead or 'call fit without output'}")

    own = "put it into a file and write FILE.py:NAME"
    if METHODS.get(spec.method.name) != spec.method and not spec.method.source:
        plain("method", spec.method, instead=own)
    flat = {f.name: settings[f.name] for f in fields(Settings)}
    flat = {name: plain(name, value, instead=own if name in OWN else "") for name, value in flat.items()}
    entries = dict(spec.hyper) | dict(spec.options)
    texts = {name: str(plain(f"{spec.method.name}.{name}", value)) for name, value in entries.items()}
    first, runs = next(iter(spec.seeds), 0), len(spec.seeds)
    if any(seed != first + run for run, seed in enumerate(spec.seeds)):
        raise JaxpflError(f"seeds must be consecutive numbers in a stored run, got {shown(settings['seeds'])}")
    plain("warm_start", spec.warm_start)
    plain("privacy", spec.privacy, PrivacyConfig, instead="write a PrivacyConfig")
    return RunConfig(
        **flat
        | {
            "data": f"federation:{FEDERATION}",
            "data_dir": str(folder.absolute()),
            "task": settings["task"] or CLASSIFICATION,
            "cohort": spec.cohort or federation.num_clients,
            "eval_every": spec.eval_every or spec.rounds,
            "set": tuple(f"{spec.method.name}.{name}={text}" for name, text in texts.items()),
            "seed": int(first),
            "seeds": runs,
            "privacy": spec.privacy or PrivacyConfig(),
            "plan": spec.plan,
        }
    )
