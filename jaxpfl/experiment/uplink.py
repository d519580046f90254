"""What a run's uploads have taken so far, where they are sent in a code: for records, results and plots."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpfl.engine import RunState, Simulation
from jaxpfl.engine.state import Counts


class Uplink:
    """Counts along with a run.

    Attributes:
      bits: of all clients' uploads since round 0, [S] int64; None where they are not sent in a code.
    """

    def __init__(self, simulation: Simulation, state: RunState):
        self.bits: np.ndarray | None = None
        if simulation.algorithm.counts_bits:
            self.bits = simulation.trim(state).counts.upload_bits.sum(axis=1)

    def along(self, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next rounds' history with ``bits_up`` of each, all bits since round 0."""
        if self.bits is None:
            return history
        bits = self.bits[:, None] + np.cumsum(history["upload_bits"], axis=1)
        self.bits = bits[:, -1]
        return history | {"bits_up": bits}

    def now(self) -> dict[str, Any]:
        """``bits_up`` of today, for an evaluation's record."""
        return {} if self.bits is None else {"bits_up": self.bits}


def of_method(simulation: Simulation, counts: Counts, compress: str | None) -> dict[str, Any]:
    """What is stored of a finished method's uploads: ``bytes_up``, a mean over the runs; where they were sent in a
    code, also its name and what they would have taken without.

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
