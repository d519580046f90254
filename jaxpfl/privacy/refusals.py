"""Reasons for which a mechanism cannot be accounted, shared by the accountant, the engine and the command line."""

from __future__ import annotations

from enum import Enum

from jaxpfl.support.errors import JaxpflError


class Refusal(Enum):
    """A reason to refuse a privacy claim. ``raise Refusal.NO_NOISE.error()``."""

    NO_NOISE = "no epsilon can be claimed with a noise multiplier of 0: the clipped sum has no noise"
    WEIGHTED_MEAN = (
        "a weighted mean cannot be accounted: weights such as example counts are unbounded private data that enter the "
        "sensitivity; give every client the same weight"
    )
    WITH_REPLACEMENT = (
        "sampling clients with replacement cannot be accounted: one user may be in a cohort several times; sample by "
        "poisson, or uniformly without replacement"
    )
    CLIENT_NOISE_UNDER_POISSON = (
        "noise that the clients add cannot be accounted with poisson participation: the cohort would determine the "
        "amount of noise; use full or fixed-size cohorts, or central noise"
    )
    CLIENT_NOISE_IN_TURNS = (
        "noise that the clients add is not accounted with cyclic participation: use full or fixed-size cohorts, or "
        "noise of the server (central or banded)"
    )
    SECRET_BANDS = (
        "noise = banded has noise_seed = run only: the state that each round leaves holds the noise of the last ones"
    )
    COMPRESSED_BEFORE_NOISE = (
        "uploads cannot be compressed under central noise: the server adds it to the sum, after the clients' "
        "compression; let the clients add it (noise = distributed)"
    )
    COMPRESSED_STEP_NOISE = (
        "uploads with noise in every step cannot be compressed: the claim relies on the exact sum of the local steps; "
        "use noise = distributed"
    )
    PRIVATE_FEEDBACK = (
        "private uploads have no error feedback: the memory kept by a client whose work failed would depend on its "
        "data; leave feedback out"
    )
    ROBUST_AGGREGATE = (
        "a robust aggregate cannot be private: the noise is calibrated to a sum of clipped uploads, which one client "
        "changes by at most the clipping norm, and no such bound is known here of a median or of a selection; use "
        "aggregate = mean"
    )
    ATTACKERS = (
        "attackers and privacy cannot be combined: the claim assumes that every client clips its upload and adds its "
        "share of the noise, which an attacker need not do"
    )

    def error(self) -> JaxpflError:
        """The one-line error to raise."""
        return JaxpflError(self.value)
