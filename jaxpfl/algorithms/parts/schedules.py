r"""Schedules of learning rates over a whole run, by name.

In round :math:`r = 0, 1, \dots` every decaying rate of a method (`hyper.hyper`) is multiplied by a factor in [0, 1].
This factor replaces the method's own ``lr_decay``. Let R be the number of rounds, w the number of warm-up rounds and
:math:`s = r - w`. The factor is

.. math::
   (r + 1) / (w + 1) &\quad\text{while } r < w, \text{ and from then on} \\
   1 &\quad\text{(constant)} \\
   e + (1 - e) (1 + \cos(\pi s / (R - w))) / 2 &\quad\text{(cosine)} \\
   1 - (1 - e) s / (R - w) &\quad\text{(linear)} \\
   f^{\lfloor s / k \rfloor} &\quad\text{(step)} \\
   f^s &\quad\text{(exponential)}

where e is ``end``, f is ``factor`` and k is ``every``. The factor depends on the round of the run, not on how often a
client has taken part, and is constant within a round. Rates that a method does not decay (AdaPeD's ``lr_psi``,
Per-FedAvg's ``alpha``) and the server's rate are not scheduled. A schedule applies only to training. Personalization
after training (for example, fine-tuning) and the adaptation of new clients use the unscheduled rates, because the rate
at the end of a cosine schedule is zero.

A schedule may also be a function of the round, such as an optax schedule. The function is tabulated over the rounds of
the run when the run begins. Its values are factors in [0, 1], like the factors above. A function whose largest value is
not 1 is refused, because its values may be learning rates instead of factors.

Reference for the cosine: Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts",
https://arxiv.org/abs/1608.03983 (without restarts).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core import settings
from jaxpfl.core.protocol import (
    Algorithm,
    Client,
    ClientContext,
    Message,
    Server,
    ServerContext,
    Upload,
    wrapped_client,
    wrapped_server,
)
from jaxpfl.core.settings import Range
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

OWN = "decay"
"""Name of the schedule that leaves each method its own decay, given by ``lr_decay`` and ``decay_every``."""

Factors = Callable[[Any], Any]
"""Function from a round, counted from 0, to the factor for every rate in this round; must be traceable by JAX."""

_TABLE = "table"
_WARMUP = {"warmup": 0.0}
SCHEDULES: Mapping[str, Mapping[str, float | None]] = {
    OWN: {},
    "constant": _WARMUP,
    "cosine": {"end": 0.0} | _WARMUP,
    "linear": {"end": 0.0} | _WARMUP,
    "step": {"every": None, "factor": 0.1} | _WARMUP,
    "exponential": {"factor": 0.99} | _WARMUP,
}
"""For each schedule, its arguments and their defaults; None for an argument that must be given."""

_ROUNDING = 1e-5  # tolerance for the rounding error of a schedule that is computed in float32
_RANGES = {"end": Range(0, 1), "factor": Range(0, 1, open_low=True), "every": Range(1), "warmup": Range(0)}


@struct.dataclass
class Schedule:
    """A schedule with its arguments. Arguments are traced, so that runs with different arguments or numbers of rounds
    share a compiled program.

    Attributes:
      name: a name in `SCHEDULES`; `_TABLE` if the schedule is a function.
      rounds: number R of rounds of the run.
      table: the factors of the run's rounds if the schedule is a function; later rounds have the last factor.
      warmup, end, factor, every: arguments of the schedules; each schedule ignores the arguments of other schedules.
    """

    name: str = struct.field(pytree_node=False)
    rounds: Scalar
    warmup: Scalar = 0.0
    end: Scalar = 0.0
    factor: Scalar = 1.0
    every: Scalar = 1.0
    table: tuple[float, ...] = struct.field(pytree_node=False, default=())

    def value(self, round: Scalar) -> Array:
        """Factor by which every rate is multiplied in a round, [].

        Examples:
          >>> [round(float(parse("cosine:warmup=1", 3).value(r)), 3) for r in range(4)]
          [0.5, 1.0, 0.5, 0.0]
        """
        if self.name == _TABLE:
            return jnp.asarray(self.table)[jnp.clip(jnp.asarray(round, jnp.int32), 0, len(self.table) - 1)]
        warming = (round + 1) / (self.warmup + 1)
        since = jnp.maximum(round - self.warmup, 0)
        share = jnp.minimum(since / jnp.maximum(self.rounds - self.warmup, 1), 1)
        if self.name == "cosine":
            factor = self.end + (1 - self.end) * (1 + jnp.cos(math.pi * share)) / 2
        elif self.name == "linear":
            factor = 1 - (1 - self.end) * share
        elif self.name == "step":
            # 1e-4 is added because an integer quotient may be rounded to just below the integer.
            factor = self.factor ** jnp.floor(since / self.every + 1e-4)
        elif self.name == "exponential":
            factor = self.factor**since
        else:
            factor = jnp.ones(())
        return jnp.where(round < self.warmup, warming, factor)


def resolve(given: str | Factors, rounds: int) -> Schedule | None:
    """Build a schedule for a run of ``rounds`` rounds from a string or a function.

    Returns None for the name `OWN`, with which each method keeps its own decay.

    Raises:
      JaxpflError: if the string or the function is refused, as in `parse` and `tabulated`.
    """
    return parse(given, rounds) if isinstance(given, str) else tabulated(given, rounds)


def tabulated(function: Factors, rounds: int) -> Schedule:
    """Build a schedule for a run of ``rounds`` rounds from a function of the round.

    Examples:
      >>> import optax
      >>> tabulated(optax.linear_schedule(1.0, 0.0, 4), 4).table
      (1.0, 0.75, 0.5, 0.25)

    Raises:
      JaxpflError: if JAX cannot trace the function, if it does not return one real number for each round, if a factor
        is outside [0, 1], or if the largest factor is not 1.
    """
    try:
        factors = np.asarray(jax.vmap(function)(jnp.arange(rounds)))
    except Exception as error:  # the user's function may raise any exception
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise JaxpflError(f"lr_schedule must be a function that JAX can trace, got the error: {said}") from error
    if np.iscomplexobj(factors):
        raise JaxpflError(f"lr_schedule must return real factors, got {factors.dtype}")
    factors = factors.astype(np.float64)
    if factors.shape != (rounds,):
        raise JaxpflError(f"lr_schedule must return one number for each round, got shape {list(factors.shape[1:])}")
    wrong = ~((factors >= 0) & (factors <= 1 + _ROUNDING))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise JaxpflError(f"lr_schedule must return factors >= 0 and <= 1, got {factors[first]:g} in round {first}")
    if (largest := factors.max()) < 1 - _ROUNDING:
        raise JaxpflError(
            f"lr_schedule must have a maximum of 1 within {rounds} rounds, got {largest:g}: its values multiply the "
            "method's learning rates, so scale it to a maximum of 1, and set lr"
        )
    return Schedule(_TABLE, float(rounds), table=tuple(factors.tolist()))


def parse(text: str, rounds: int) -> Schedule | None:
    """Build a schedule for a run of ``rounds`` rounds from a string such as ``cosine:warmup=5``.

    Returns None for the name `OWN`, with which each method keeps its own decay.

    Examples:
      >>> parse("step:every=30,factor=0.5", 100).every
      30.0

    Raises:
      JaxpflError: if a name or argument is unknown, an argument is missing, a value is outside its range, or the
        warm-up does not end within the run.
    """
    name, given = settings.split_choice("lr_schedule", text, SCHEDULES)
    values = dict(SCHEDULES[name])
    for key, value in given.items():
        if key not in values:
            raise unknown_name(f"argument of lr_schedule {name}", key, values)
        number = settings.literal(value)
        if type(number) not in (int, float) or number not in _RANGES[key]:
            raise JaxpflError(f"lr_schedule {name}:{key} must be a number {_RANGES[key].words}, got {shown(value)}")
        values[key] = float(number)
    for key, value in values.items():
        if value is None:
            raise JaxpflError(f"lr_schedule {name} requires {key}: write {name}:{key}=30, for example")
    if name == OWN:
        return None
    if (warmup := values["warmup"] or 0.0) >= rounds:
        raise JaxpflError(f"lr_schedule {name}:warmup must be below the number of rounds ({rounds}), got {warmup:g}")
    numbers: dict[str, Any] = {key: float(value or 0.0) for key, value in values.items()}
    return Schedule(name, float(rounds), **numbers)


def depends_on_rounds(text: str) -> bool:
    """True if the schedule that a string describes depends on the run's number of rounds."""
    return text.partition(":")[0] in ("cosine", "linear")


@struct.dataclass
class ScheduledHyper:
    """Hyper-parameters of a method, and the schedule of the method's rates."""

    method: Any
    schedule: Schedule

    def values(self, round: Scalar) -> Any:
        """The method's hyper-parameters in a round, with scheduled rates."""
        return _scaled(self.method, self.schedule.value(round))

    @property
    def undecayed(self) -> Any:
        """The method's hyper-parameters after training, with the rates as given."""
        return _scaled(self.method, 1.0)


def unscheduled(hp: PyTree) -> PyTree:
    """Replace the schedule by the constant schedule, also where it is nested in a wrapper's hyper-parameters."""

    def constant(node: Any) -> Any:
        return ScheduledHyper(node.method, Schedule("constant", 1.0)) if isinstance(node, ScheduledHyper) else node

    return jax.tree.map(constant, hp, is_leaf=lambda node: isinstance(node, ScheduledHyper))


def _scaled(hp: Any, factor: Scalar) -> Any:
    """Return hyper-parameters with every decaying rate multiplied by a factor, and without the method's own decay."""
    fields = dataclasses.fields(hp)
    values = {field.name: getattr(hp, field.name) * factor for field in fields if field.metadata["decays"]}
    if any(field.name == "lr_decay" for field in fields):
        values["lr_decay"] = jnp.ones_like(hp.lr_decay)
    return dataclasses.replace(hp, **values)


def scheduled(algorithm: Algorithm, hp: Any, schedule: Schedule) -> tuple[Algorithm, ScheduledHyper]:
    """Wrap an algorithm so that its rates follow a schedule; return the wrapper and its hyper-parameters."""
    clients, server = tuple(map(_client, algorithm.clients)), _server(algorithm.server)
    return algorithm._replace(clients=clients, server=server), ScheduledHyper(hp, schedule)


def _method_hyper(hp: ScheduledHyper) -> Any:
    return hp.undecayed


def _client(inner: Client) -> Client:
    def update(
        key: Key, hp: ScheduledHyper, ctx: ClientContext, message: Message, state: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        return inner.update(key, hp.values(ctx.round), ctx, message, state, splits)

    alone = inner.idle

    def idle(key: Key, hp: ScheduledHyper, ctx: ClientContext, state: PyTree, splits: Splits) -> tuple[PyTree, Metrics]:
        assert alone is not None
        return alone(key, hp.values(ctx.round), ctx, state, splits)

    return wrapped_client(inner, update=update, hyper=_method_hyper)._replace(idle=alone and idle)


def _server(inner: Server) -> Server:
    def update(key: Key, hp: ScheduledHyper, ctx: ServerContext, state: PyTree, reduced: Any) -> tuple[PyTree, Metrics]:
        return inner.update(key, hp.values(ctx.round), ctx, state, reduced)

    def init(key: Key, hp: ScheduledHyper, ctx: ServerContext) -> PyTree:
        return inner.init(key, hp.undecayed, ctx)

    return wrapped_server(inner, init=init, update=update, state=lambda state: state, hyper=_method_hyper)
