"""Runs with noise from the operating system, whose seed is in every checkpoint but the last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.engine import RunState


def without(state: RunState) -> RunState:
    """The state with its noise key zeroed: it can be evaluated and exported, but not continued."""
    assert state.noise is not None
    return state._replace(noise=jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(state.noise))))


def is_gone(state: RunState) -> bool:
    """True if the state's noise key was removed."""
    assert state.noise is not None
    return not np.any(jax.random.key_data(state.noise))


def refusal(round: int) -> str:
    """Error message for continuing a run that ended at that round."""
    return f"privacy.noise_seed = secret: it is gone since round {round}, and no round can follow"
