"""Checkpoints of one method's state, by orbax: written atomically, the last two kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.engine import RunState
from jaxpfl.errors import JaxpflError


class Checkpoints:
    """The checkpoints of one method in a run folder; use it as a context manager.

    A save is atomic: a process that is killed inside it leaves the checkpoint before.
    """

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp

        # orbax reports every step of every save; a run has its own progress display.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The round of the last whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, round: int, state: RunState, seconds: float) -> None:
        """Saves the state after ``round`` rounds, and the seconds spent so far, unless it is there already."""
        if round != self.latest():
            tree = {"state": _without_key_type(state), "seconds": np.float64(seconds)}
            self._manager.save(round, args=self._ocp.args.StandardSave(tree))

    def restore(self, like: RunState, say: Callable[[str], None]) -> tuple[RunState, float]:
        """The last checkpoint that can be read, or ``like`` itself where there is none.

        A damaged one (a full disk, a copied folder) is said, deleted and passed over: the run goes on from the one
        before, to the same numbers.

        Args:
          like: a state of the same shapes, such as the initial one.
          say: hears of damaged checkpoints.

        Returns:
          The state, and the seconds spent until it was saved.
        """
        for round in sorted(self._manager.all_steps(), reverse=True):
            try:
                return self.read(round, like)
            except JaxpflError as error:
                say(f"{error}, and is deleted")
                self._manager.delete(round)
        return like, 0.0

    def read(self, round: int, like: RunState) -> tuple[RunState, float]:
        """The checkpoint of one round: its state, and the seconds spent until it was saved.

        Raises:
          JaxpflError: when it cannot be read.
        """
        # With the places of today: those that it was saved from may be devices that are not here.
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _without_key_type(like)
        )
        wanted = self._ocp.args.StandardRestore({"state": abstract, "seconds": np.float64(0)})
        try:
            tree = self._manager.restore(round, args=wanted)
        except Exception as error:  # orbax raises whatever its parts do
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise JaxpflError(f"the checkpoint of round {round} cannot be read ({reason})") from None
        state = tree["state"]._replace(key=jax.random.wrap_key_data(jnp.asarray(tree["state"].key)))
        return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), state, like), float(tree["seconds"])


def _without_key_type(state: RunState) -> RunState:
    """Key data in place of the typed key, which is not an array that every reader of a checkpoint knows."""
    return state._replace(key=jax.random.key_data(state.key))
