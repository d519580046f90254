"""A run whose noise is from the operating system: its seed is in the checkpoints until the last, which has none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.engine import RunState


def without(state: RunState) -> RunState:
    """The state with zeros for the noise's key: it can be scored and exported, but no round can follow."""
    assert state.noise is not None
    return state._replace(noise=jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(state.noise))))


def is_gone(state: RunState) -> bool:
    """Whether it is such a state."""
    assert state.noise is not None
    return not np.any(jax.random.key_data(state.noise))


def refusal(round: int) -> str:
    """Why a run that ended at that round cannot have more of them."""
    return f"privacy.noise_seed = secret: it is gone since round {round}, and no round can follow"
