"""Fine-tuning: local steps that a client takes from the received model before it predicts."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.local_work import LocalWork, sgd
from jaxpfl.core.protocol import ClientContext, LocalEpochs
from jaxpfl.core.types import ClientData, Key, PyTree, Scalar
from jaxpfl.models import Task
from jaxpfl.support.errors import JaxpflError


def planned(method: str, work: LocalWork, steps: int, epochs: int) -> LocalWork | None:
    """Return the local work of fine-tuning, or None if fine-tuning has no steps.

    Args:
      method: the method's name, for errors.
      work: local work in a round.
      steps: the option ``fine_tune_steps``.
      epochs: the option ``fine_tune_epochs``. If 0, ``steps`` is used; otherwise ``steps`` is ignored.

    Raises:
      JaxpflError: if ``steps`` or ``epochs`` is negative.
    """
    for name, value in (("fine_tune_steps", steps), ("fine_tune_epochs", epochs)):
        if value < 0:
            raise JaxpflError(f"{method}.{name} must be >= 0, got {value}")
    if epochs:
        return work.replace_epochs(epochs)
    return replace(work, steps=steps, epochs=None) if steps else None


def step_count(tuning: LocalWork | None) -> int | LocalEpochs:
    """Number of fine-tuning steps; a `LocalEpochs` if the number depends on the client's number of examples."""
    return 0 if tuning is None else tuning.own_steps or tuning.steps


def fine_tuned(
    tuning: LocalWork | None,
    task: Task,
    key: Key,
    hp: SgdHyper,
    ctx: ClientContext,
    data: ClientData,
    params: PyTree,
    round_steps: int,
    factor: Scalar = 1.0,
) -> PyTree:
    """Return the parameters after fine-tuning from ``params``, or ``params`` if fine-tuning has no steps.

    The learning rate is ``factor`` times the learning rate of the last round, which had ``round_steps`` local steps.
    """
    if tuning is None:
        return params
    rate = factor * hp.lr * hp.decay(jnp.maximum(ctx.round - 1, 0), round_steps)
    return sgd(tuning, task, key, ctx, data, params, rate=rate, weight_decay=hp.weight_decay)[0]
