"""Reasons for which a mechanism cannot be accounted, shared by the accountant, the engine and the command line."""

from __future__ import annotations

from enum import Enum

from jaxpfl.errors import JaxpflError


class Refusal(Enum):
    """A reason to refuse a privacy claim. ``raise Refusal.NO_NOISE.error()``."""

    NO_NOISE = "no epsilon can be claimed with a noise multiplier of 0: nothing hides the clipped sum"
    WEIGHTED_MEAN = (
        "a weighted mean cannot be accounted: weights such as example counts are unbounded private data that enter the "
        "sensitivity; let every client weigh the same"
    )
    WITH_REPLACEMENT = (
        "sampling clients with replacement cannot be accounted: one user may be in a cohort several times; sample by "
        "poisson, or uniformly without replacement"
    )
    CLIENT_NOISE_UNDER_POISSON = (
        "noise that the clients add cannot be accounted with poisson participation: who takes part would change the "
        "noise itself; use full or fixed-size cohorts, or central noise"
    )
    COMPRESSED_BEFORE_NOISE = (
        "uploads cannot be compressed under central noise: the server adds it to the sum, and a client would compress "
        "what is not private yet; let the clients add it (noise = distributed)"
    )
    COMPRESSED_STEP_NOISE = (
        "uploads with noise in every step cannot be compressed: the claim is of what local steps make of their noise; "
        "use noise = distributed"
    )
    PRIVATE_FEEDBACK = (
        "private uploads have no error feedback: what a client whose work failed keeps of its memory would tell of its "
        "data; leave feedback out"
    )

    def error(self) -> JaxpflError:
        """The one-line error to raise."""
        return JaxpflError(self.value)
