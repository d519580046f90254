"""Noise drawn by a program: its keys, at run time, and the functions of the package that requested it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from jaxpfl.privacy import noise


@dataclass
class Drawn:
    """The keys of all draws, each of a release if ``keys`` holds it once; and the sites that drew."""

    keys: list[tuple[int, ...]] = field(default_factory=list)
    sites: set[str] = field(default_factory=set)

    def repeated(self) -> int:
        """Number of draws whose key was used by another draw."""
        jax.effects_barrier()
        return len(self.keys) - len(set(self.keys))


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[Drawn]:
    """Records all draws of programs that are compiled and run within."""
    drawn = Drawn()

    def watched(draw):
        def record(data: np.ndarray) -> None:
            drawn.keys.append(tuple(np.asarray(data).tolist()))

        def wrapper(key, *shape):
            drawn.sites |= set(_callers())
            jax.debug.callback(record, jax.random.key_data(key))
            return draw(key, *shape)

        return wrapper

    with patch.context() as inside:
        inside.setattr(noise, "bits", watched(noise.bits))
        inside.setattr(noise, "uniform", watched(noise.uniform))
        yield drawn
        jax.effects_barrier()


def _callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jaxpfl."):
            yield f"{module.removeprefix('jaxpfl.')}.{frame.f_code.co_qualname.replace('.<locals>', '')}"
        frame = frame.f_back
