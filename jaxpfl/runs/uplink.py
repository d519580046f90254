"""Size of a run's compressed uploads so far, for records, results and plots."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.state import Counts


class Uplink:
    """Running count of a run's uploaded bits.

    Attributes:
      bits: of all clients' uploads since round 0, [S] int64; None without compression.
    """

    def __init__(self, simulation: Simulation, state: RunState):
        self.bits: np.ndarray | None = None
        if simulation.algorithm.counts_bits:
            self.bits = simulation.counts(state).upload_bits.sum(axis=1)

    def along(self, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next rounds' history with ``bits_up`` of each, all bits since round 0."""
        if self.bits is None:
            return history
        bits = self.bits[:, None] + np.cumsum(history["upload_bits"], axis=1)
        self.bits = bits[:, -1]
        return history | {"bits_up": bits}

    def now(self) -> dict[str, Any]:
        """The present ``bits_up``, for an evaluation's record."""
        return {} if self.bits is None else {"bits_up": self.bits}


def of_method(simulation: Simulation, counts: Counts, compress: str | None) -> dict[str, Any]:
    """Upload size stored for a finished method: ``bytes_up``, a mean over the runs.

    With compression also the compressor's name and the uncompressed size.

    Args:
      counts: at the end, on the host.
      compress: as in the config.
    """
    runs = counts.uploads.shape[0]
    plain = simulation.bytes_per_client()[0] * int(counts.uploads.sum()) // runs
    if not simulation.algorithm.counts_bits:
        return {"bytes_up": plain}
    coded = int(counts.upload_bits.sum()) // (8 * runs)
    return {"bytes_up": coded, "bytes_up_uncoded": plain, "compress": compress}
