"""Settings of clipping and noise, shared by a `Mechanism` and by a run's `PrivacyConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpfl.core.settings import setting

NOISE_SEEDS = ("run", "secret")


@dataclass(frozen=True)
class NoiseSettings:
    """Clipping of uploads, and the noise that is added to them."""

    noise_multiplier: float | tuple[float, ...] | None = setting(
        None,
        "Standard deviation of the noise over the clipping norm, z; 0 clips only and claims nothing.",
        python="One number, or one for each run.",
        text=float | None,
    )
    clipping_norm: float | tuple[float, ...] = setting(
        1.0,
        "Clipping norm C (L2) of each upload as a whole (parameters, psi, ...); the initial one if it adapts.",
        python="One number, or one for each run.",
        text=float,
    )
    noise: Literal["central", "distributed", "per_step", "banded"] = setting(
        "central",
        "Where noise is added: central (by the server, to the sum), distributed (by each client its share, of variance "
        "z^2 C^2 / min_uploads, as under secure aggregation), per_step (by each client in every local step, as "
        "DP-AdaPeD is printed; norms and noise are then those of a step) or banded (by the server, correlated with "
        "that of the rounds before, so that much of it cancels; clients take turns).",
        text=str,
    )
    min_uploads: int | None = setting(
        None,
        "Least number of uploads for a round to release anything, public, where the clients add the noise; for "
        "per_step the expected cohort unless given.",
    )
    quantile: float | None = setting(
        None,
        "Adapt the clipping norm to this quantile of the uploads' norms (Andrew et al. 2021): each client also reports "
        "whether its norm was below it; the cost of that count is part of the noise multiplier.",
    )
    quantile_lr: float = setting(0.2, "Rate of the clipping norm's geometric steps.")
    count_stddev: float | None = setting(
        None,
        "Standard deviation of the noise on the number of uploads below the clipping norm; a PrivacyConfig takes "
        "cohort / 20 unless given, or the noise multiplier if that is more.",
    )
    scale_clipping_norm: float | None = setting(
        None, "For per_step: the clipping norm of psi's gradient; clipping_norm unless given."
    )
    joint: bool = setting(False, "For per_step: clip and noise the gradients of parameters and psi as one vector.")
    noise_seed: Literal["run", "secret"] = setting(
        "run",
        "Source of cohorts and noise: run (its seed and all its settings, so that it can be repeated), or secret "
        "(the operating system; only the run's state and checkpoints hold it, until the run ends), for a model "
        "to be published.",
        text=str,
    )
    bands: int | None = setting(
        None,
        "For banded: bands b of the matrix whose inverse correlates the noise, at most the rounds from one turn of a "
        "client to the next. The server's state holds b - 1 models of noise.",
        unless_given="the cycle of the cohorts unless given",
        since="0.2",
    )
