"""Timed work: federations, models and simulations, described by one small record of JSON values.

jax and jaxpfl are imported inside the functions, because the parent process of a benchmark only describes problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .worker import Contender

if TYPE_CHECKING:
    from jaxpfl import Algorithm, ExecutionPlan, Federation, Simulation, Task

BASE_CLIENTS = {"mnist": 50, "digits": 10, "cifar": 10}
FEATURES, EXAMPLES = 50, 10  # per linear client


@dataclass(frozen=True)
class Problem:
    """A federation, a model and a method.

    Attributes:
      model: ``cnn`` (the papers', on 28 x 28 images), ``mlp`` (one hidden layer, on 8 x 8 digits) or ``linear`` (on
        Gaussian data with 50 features and 10 examples per client).
      clients, cohort, steps, batch: number m of clients, number K in a round (None for all), local steps tau, batch
        size b.
      method: registered name of the method.
      cap: number of examples that each client keeps. Clients after the first 50 (10 with digits) then repeat the data,
        so that a large m fits in memory; a step takes the same work. None to split the data among the m clients.
      outputs: number of outputs of a linear model; 1 is regression with the squared error, more are classes.
      source: source of the images: ``mnist``, ``digits`` (included, enlarged, split among 10 clients and repeated) or
        ``cifar`` (the digits, as large as CIFAR's images).
      data_dir: folder that contains mnist.
    """

    model: str = "cnn"
    clients: int = 50
    cohort: int | None = None
    steps: int = 60
    batch: int = 20
    method: str = "fedavg"
    cap: int | None = None
    outputs: int = 1
    source: str = "mnist"
    data_dir: str | None = None

    @property
    def client_steps(self) -> int:
        """Number of steps of all clients together in one round."""
        return (self.cohort or self.clients) * self.steps


def use_devices(count: int | None = None) -> None:
    """Make CPU devices, by default one per core; must be called before JAX starts. GPUs are not affected."""
    from jaxpfl import use_cpu_cores

    if not use_cpu_cores(count):
        raise SystemExit("jax is running already: the CPU's devices cannot be chosen")


def make_federation(problem: Problem) -> Federation:
    """Return the stacked data."""
    import jaxpfl

    if problem.model == "linear":
        return _gaussian(problem.clients, problem.outputs)
    if problem.model == "mlp":
        return jaxpfl.federate(jaxpfl.load("digits"), clients=problem.clients, classes_per_client=3)
    embedded = problem.source != "mnist"
    images = jaxpfl.load("digits" if embedded else "mnist", problem.data_dir)
    if problem.source == "cifar":
        images = images._replace(x_train=images.x_train.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3))
    elif embedded:  # 8 x 8 pixels, each repeated three times in both directions, and a border: 28 x 28
        x = np.pad(images.x_train.repeat(3, axis=1).repeat(3, axis=2), [(0, 0), (2, 2), (2, 2), (0, 0)])
        images = images._replace(x_train=x)
    repeats = problem.cap is not None or embedded
    base = BASE_CLIENTS[problem.source] if repeats else problem.clients
    federation = jaxpfl.federate(images, clients=base, classes_per_client=3)
    return _repeat(federation, problem.clients, problem.cap) if repeats else federation


def make_task(problem: Problem, federation: Federation) -> Task:
    """Return the model with its loss."""
    from jaxpfl.engine.tasks import make_task

    if problem.model == "linear" and problem.outputs == 1:
        return _regression()
    return make_task(problem.model, federation, problem.outputs if problem.model == "linear" else 10)


def make_algorithm(problem: Problem, task: Task, federation: Federation) -> Algorithm:
    import jaxpfl

    work = jaxpfl.LocalWork(np.asarray(federation.train.size), problem.steps, problem.batch)
    return jaxpfl.METHODS[problem.method].build(task, work)


def simulate(
    problem: Problem,
    *,
    plan: ExecutionPlan | None = None,
    model: Any = None,
    method: Callable[..., Algorithm] | None = None,
    hyper: dict[str, Any] | None = None,
    draw: str = "epoch",
) -> Simulation:
    """Return the simulation, whose rounds are compiled.

    Args:
      problem: federation, model and method.
      plan: execution plan; chosen automatically by default.
      model: jaxpfl or flax model on the same inputs and classes, instead of the problem's model.
      method: function that builds a method, instead of the problem's method; the hyper-parameters are that method's.
      hyper: hyper-parameters by name; arrays make a sweep.
      draw: kind of draw of the mini-batches.
    """
    import jaxpfl
    from jaxpfl.core import participation
    from jaxpfl.engine.tasks import make_task as task_of
    from jaxpfl.models import in_bfloat16

    federation = make_federation(problem)
    task = make_task(problem, federation) if model is None else task_of(model, federation, 10)
    if plan is not None and plan.precision == "bfloat16":
        task = in_bfloat16(task)
    registered = jaxpfl.METHODS[problem.method]
    work = jaxpfl.LocalWork(np.asarray(federation.train.size), problem.steps, problem.batch, draw)
    return jaxpfl.Simulation(
        (method or registered.build)(task, work),
        task,
        federation,
        participation.of(problem.clients, problem.cohort),
        registered.hyper.replace(**(hyper or {})),
        plan=plan,
    )


def rounds_of(simulation: Simulation, *, seeds: Sequence[int] = (0,), score: bool = False) -> Contender:
    """Return the rounds of a simulation as a contender.

    The facts are ``train_loss`` of the last round, ``peak_bytes`` of the process, `device_facts`, and, with ``score``,
    the mean test ``accuracy`` of the global model.
    """
    state = simulation.init(list(seeds))
    history: dict[str, np.ndarray] = {}

    def run(rounds: int) -> None:
        nonlocal state, history
        state, history = simulation.advance(state, rounds)  # returns when the history is on the host

    def facts() -> dict[str, Any]:
        known = {"train_loss": float(np.nanmean(history["train_loss"][:, -1]))} | memory_facts() | device_facts()
        if score:
            known["accuracy"] = float(np.nanmean(simulation.evaluate(state)["global"]["accuracy"]))
        return known

    return Contender(run, facts)


def device_facts() -> dict[str, Any]:
    """Return the devices that JAX computes on, and the relevant settings of JAX."""
    import jax

    device = jax.devices()[0]
    names = ("jax_enable_x64", "jax_default_matmul_precision")
    return {
        "device": {"platform": device.platform, "kind": device.device_kind, "count": len(jax.devices())},
        "config": {name: getattr(jax.config, name) for name in names},
    }


def memory_facts() -> dict[str, int]:
    """Return ``peak_bytes`` of this process so far, and ``temporary_bytes`` of the largest loaded program."""
    import jax

    programs = jax.devices()[0].client.live_executables()
    temporary = max(program.get_compiled_memory_stats().temp_size_in_bytes for program in programs)
    return {"peak_bytes": peak_bytes(), "temporary_bytes": temporary}


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _repeat(federation: Federation, clients: int, cap: int | None) -> Federation:
    """Repeat the first clients, each with at most ``cap`` training examples, and a third as many test examples."""
    import jax

    from jaxpfl import ClientData

    rng = np.random.default_rng(0)
    rows = np.arange(clients) % federation.num_clients

    def cut(data: ClientData, most: int | None) -> ClientData:
        # A client's examples may be sorted by class, so the ``most`` examples are drawn at random.
        kept = [
            start + (np.arange(size) if most is None else rng.permutation(size)[:most])
            for start, size in zip(data.start, data.size, strict=True)
        ]
        places = np.concatenate([kept[row] for row in rows])
        examples = jax.tree.map(lambda leaf: np.asarray(leaf)[places], data.examples)
        return ClientData.stacked(examples, [len(kept[row]) for row in rows])

    splits = {"train": cap, "test": cap and max(cap // 3, 1), "validation": None}
    return federation._replace(
        client_ids=np.arange(clients, dtype=np.int32),
        **{name: cut(getattr(federation, name), most) for name, most in splits.items()},
    )


def _gaussian(clients: int, outputs: int) -> Federation:
    """Return linear data: y = <x, w> + noise (or its sign), with the same w for all clients."""
    from jaxpfl import ClientData, Federation
    from jaxpfl.core.types import Examples

    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, EXAMPLES, FEATURES), np.float32)
    y = x @ rng.standard_normal(FEATURES, np.float32) / np.float32(FEATURES**0.5)
    y += np.float32(0.1) * rng.standard_normal(y.shape, np.float32)
    if outputs > 1:
        y = np.digitize(y, np.quantile(y, np.arange(1, outputs) / outputs)).astype(np.int32)
    train = ClientData.stacked(Examples(x.reshape(-1, FEATURES), y.reshape(-1)), [EXAMPLES] * clients)
    return Federation(np.arange(clients, dtype=np.int32), train, train.emptied(), train.emptied())


def _regression() -> Task:
    """Return the model <x, w> + b with the squared error: one output, d + 1 parameters."""
    from jaxpfl.models import build_model, classification
    from jaxpfl.models.base import regression_task

    return regression_task(classification(build_model("linear", 1, (FEATURES,)), (FEATURES,), 1))
