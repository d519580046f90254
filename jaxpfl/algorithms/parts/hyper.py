"""Hyper-parameters: frozen dataclasses that are pytrees of scalars.

JAX traces the scalars. Their ranges are checked before that, outside of compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpfl.core.types import Array, Scalar
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

H = TypeVar("H")
PAPER = "paper"
"""String by which users select the paper's value of a hyper-parameter."""


def hyper(
    default: float,
    doc: str,
    *,
    low: float = 0.0,
    high: float = math.inf,
    positive: bool = False,
    is_rate: bool = False,
    is_step: bool = False,
    decays: bool | None = None,
    paper: float | None = None,
) -> Any:
    """Declare a dataclass field as a hyper-parameter.

    Args:
      default: default value.
      doc: meaning in one phrase, for the help of the command line.
      low, high: smallest and largest allowed value.
      positive: whether ``low`` itself is excluded.
      is_rate: whether this is a learning rate that ``--lr`` and ``fit(lr=)`` set.
      is_step: whether this is another step size, for example for a prior, a scale, a mixture, adaptation or the server.
        ``--lr`` and ``fit(lr=)`` do not set it.
      decays: whether the value decays over the rounds as ``lr`` does, and follows ``lr_schedule``; by default, true if
        ``is_rate`` is true.
      paper: value in the method's paper or in a comparison with the method, if different from the default. Users select
        it with the string ``"paper"``; see `replace`.
    """
    metadata = {
        "doc": doc,
        "low": low,
        "high": high,
        "open": positive,
        "is_rate": is_rate,
        "is_step": is_step,
        "paper": paper,
        "decays": is_rate if decays is None else decays,
    }
    return struct.field(default=default, metadata=metadata)


@struct.dataclass
class SgdHyper:
    """Hyper-parameters of SGD methods; after r rounds of tau local steps, the rate is ``lr * lr_decay ** floor(r tau /
    decay_every)``.
    """

    lr: Scalar = hyper(0.1, "learning rate of the local steps", positive=True, is_rate=True)
    lr_decay: Scalar = hyper(0.99, "factor on the learning rate after each decay_every local steps", high=1.0)
    decay_every: Scalar = hyper(60.0, "local steps in one epoch of the decay", low=1.0)
    weight_decay: Scalar = hyper(1e-4, "added to each gradient as weight_decay * parameters")

    def decay(self, round: Array, local_steps: int) -> Array:
        """Factor by which every decaying rate is multiplied in round ``round`` (counted from 0)."""
        # 1e-4 is added because an integer quotient may be rounded to just below the integer.
        return self.lr_decay ** jnp.floor(round * local_steps / self.decay_every + 1e-4)


@struct.dataclass
class AveragingHyper(SgdHyper):
    """Hyper-parameters of SGD methods with an averaging server; the server's learning rate does not decay."""

    server_lr: Scalar = hyper(
        1.0, "learning rate of the server optimizer; with sgd, 1 is plain averaging", positive=True, is_step=True
    )


def check(method: str, hp: Any) -> None:
    """Refuse values outside their range.

    Raises:
      JaxpflError: if a value is refused; the error gives the method, the hyper-parameter, its value and its range.
    """
    for field in dataclasses.fields(hp):
        meta, value = field.metadata, np.asarray(getattr(hp, field.name), dtype=float)
        low_ok = (value > meta["low"]) if meta["open"] else (value >= meta["low"])
        if not (np.isfinite(value) & low_ok & (value <= meta["high"])).all():
            low = f"{'>' if meta['open'] else '>='} {meta['low']:g}"
            high = "" if math.isinf(meta["high"]) else f" and <= {meta['high']:g}"
            raise JaxpflError(f"{method}.{field.name} must be {low}{high}, got {value}")
        # On the device, numbers outside this range would become infinite or zero.
        held = jnp.finfo(jnp.result_type(float))
        if not ((value == 0) | (abs(value) >= float(held.tiny)) & (abs(value) <= float(held.max))).all():
            raise JaxpflError(
                f"{method}.{field.name} must be 0 or have a magnitude from {held.tiny:.2g} to {held.max:.2g} (the "
                f"range of {held.dtype}), got {value}"
            )


def replace(method: str, hp: H, values: Mapping[str, float | str | Sequence[float]]) -> H:
    """Replace some hyper-parameters and check the result.

    Args:
      method: the method's name, for errors.
      hp: the hyper-parameters.
      values: name -> value. A sequence has one value for each run of a sweep. The string ``"paper"`` selects the value
        in the paper, or the default if no such value is declared.

    Raises:
      JaxpflError: if a name is unknown, or a value is not a number or is outside its range.
    """
    fields = {field.name: field for field in dataclasses.fields(hp)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise unknown_name(f"hyper-parameter of {method}", name, list(fields))
    leaves = {name: _leaf(f"{method}.{name}", value, fields[name]) for name, value in values.items()}
    new = dataclasses.replace(hp, **leaves)  # type: ignore[type-var]
    check(method, new)
    return new


def _leaf(name: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """Convert a value to a number or, for a sweep, to an array. (JAX would treat a list as a tree of numbers.)"""
    if isinstance(value, str) and value == PAPER:
        paper = field.metadata["paper"]
        return field.default if paper is None else paper
    try:
        leaf = np.asarray(value)
    except ValueError:  # lists of unequal length
        leaf = np.asarray(None)
    if leaf.dtype.kind not in "iuf" or leaf.ndim > 1:
        raise JaxpflError(f"{name} must be a number, or one for each run, got {shown(value)}")
    return leaf.astype(float)[()]


def rates(hp: Any) -> list[str]:
    """Names of the fields that ``--lr`` and ``fit(lr=)`` set."""
    return [field.name for field in dataclasses.fields(hp) if field.metadata["is_rate"]]
