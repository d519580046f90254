r"""Simulated time of clients: what a client of the cohort takes for its round, and how much clients differ.

A client with :math:`g` gradients in a round, which receives :math:`B_d` bytes and uploads :math:`B_u`, takes

.. math:: t_i = g\, s\, c_i + \frac{B_d}{d\, l_i} + \frac{B_u}{u\, k_i}

seconds, with s seconds a gradient and d, u bytes a second; the factors :math:`c_i, l_i, k_i` are a client's own in all
rounds: 1, or log-normal with median 1 and deviation sigma of their logarithms. A synchronous round lasts as long as its
slowest client takes, those whose upload is lost included; clients outside the cohort are not waited for. One of
asynchronous rounds (FedBuff) lasts until the next of the clients at work have arrived.

By name with arguments, for ``--time-model`` and ``jaxpfl.fit(time_model=)``: ``equal:step=0.1,up=1e6,down=1e7``, or
``lognormal`` with ``sigma=0.5,seed=0`` as well. Nothing else of a run depends on it, but for asynchronous rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpfl.core import choices
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, Scalar
from jaxpfl.support.errors import JaxpflError


class TimeModel(NamedTuple):
    """Speeds of clients.

    Attributes:
      step: s, median seconds of a gradient.
      up, down: u and d, median bytes a second of the uplink and of the downlink; infinite for none of that time.
      sigma: standard deviation of the logarithms of the clients' factors.
      seed: of the factors.
    """

    step: float
    up: float
    down: float
    sigma: float = 0.0
    seed: int = 0

    def factors(self, client_id: Array) -> Array:
        """A client's factors (c, l, k), [3] float32."""
        if self.sigma == 0:
            return jnp.ones(3, jnp.float32)
        key = stream(jax.random.key(self.seed), Purpose.SPEEDS, client_id)
        return jnp.exp(self.sigma * jax.random.normal(key, (3,), jnp.float32))

    def seconds(self, client_ids: Array, gradients: Array, up: Scalar, down: Scalar) -> Array:
        """Seconds of each client's round, [m].

        Args:
          client_ids: [m].
          gradients: evaluated in the round, [m].
          up, down: bytes of its upload and of its message, [] or [m].
        """
        compute, received, sent = jax.vmap(self.factors)(client_ids).T
        return gradients * self.step * compute + down / (self.down * received) + up / (self.up * sent)


def resolve(time_model: str) -> TimeModel:
    """The time model of that name with those arguments.

    Examples:
      >>> resolve("equal:step=0.1,up=1e6")
      TimeModel(step=0.1, up=1000000.0, down=inf, sigma=0.0, seed=0)

    Raises:
      JaxpflError: if the name or an argument is unknown, or a value is out of range.
    """
    name, values = choices.arguments("time model", time_model, TIME_MODELS)
    model = TIME_MODELS[name](**values)
    for what, value, fits, allowed in (
        ("step", model.step, 0 <= model.step < math.inf, ">= 0 and finite"),
        ("up", model.up, model.up > 0, "> 0"),
        ("down", model.down, model.down > 0, "> 0"),
        ("sigma", model.sigma, 0 <= model.sigma < math.inf, ">= 0 and finite"),
        ("seed", model.seed, 0 <= model.seed < 2**32, ">= 0 and < 2**32"),
    ):
        if not fits:
            raise JaxpflError(f"{name}:{what} must be {allowed}, got {value:g}")
    if model.step == 0 and math.isinf(model.up) and math.isinf(model.down):
        raise JaxpflError(f"time_model = {time_model} takes no time: give step, up or down")
    return model


def _equal(step: float = 0.0, up: float = math.inf, down: float = math.inf) -> TimeModel:
    return TimeModel(step, up, down)


def _lognormal(
    step: float = 0.0, up: float = math.inf, down: float = math.inf, sigma: float = 0.5, seed: int = 0
) -> TimeModel:
    return TimeModel(step, up, down, sigma, seed)


TIME_MODELS: Mapping[str, Callable[..., TimeModel]] = {"equal": _equal, "lognormal": _lognormal}
"""Name -> ``**arguments -> TimeModel``."""
