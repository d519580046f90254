"""The thread that brings and takes clients' rows, in the caller's precision."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


class Courier(ThreadPoolExecutor):
    """One thread, whose tasks are done in turn.

    ``jax.enable_x64`` as a context holds in the thread that entered it alone: without the caller's, float64 rows would
    come to the devices as float32.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="clients")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule ``fn(*args, **kwargs)``."""
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

        def task() -> Any:
            with jax.enable_x64(wide):
                return fn(*args, **kwargs)

        return super().submit(task)
