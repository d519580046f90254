"""Settings of the histogram study: those of the methods, and those tried on validation users."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpfl.core import checks
from jaxpfl.estimators.histograms.start import Direction
from jaxpfl.studies.histograms.data import HistogramData
from jaxpfl.studies.settings import NOT_PRIVATE, at_least, check_privacy, refuse_given
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError


@dataclass(frozen=True)
class HistogramTuning(HistogramData):
    """Settings that every method tries on validation users."""

    tune: bool = False
    """Choose k, T, C and the mean's share for every method and eps on the validation users."""
    try_clusters: tuple[int, ...] = (1, 2, 3, 5)
    """k; one is FedAvg."""
    try_rounds: tuple[int, ...] = (1, 2, 4)
    """T under privacy."""
    try_radii: tuple[float, ...] = (0.1, 0.25)
    """C of clusterings; FedAvg, which has no other setting, tries as many radii as they try settings."""
    try_shares: tuple[float, ...] = (0.2, 0.5)
    """The mean's share of a clustering's budget."""
    folds: int = 4
    """Folds of the validation users, two users or more in each: scored by the others' model, with scaled noise."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        for name in ("try_clusters", "try_rounds", "try_radii", "try_shares"):
            if not getattr(self, name):
                raise JaxpflError(f"{name} must have at least one value")
        for name in ("try_clusters", "try_rounds"):
            for value in getattr(self, name):
                checks.count(name, value)
        for value in self.try_radii:
            checks.positive("try_radii", value)
        for value in self.try_shares:
            checks.probability("try_shares", value)
        at_least("folds", self.folds, 2)


@dataclass(frozen=True)
class HistogramSettings(HistogramTuning):
    """Users' histograms, estimated alone, together, in clusters, and under privacy."""

    clusters: int = 10
    """k; one per four users if they are few."""
    rounds: int = 20
    """T of Algorithm 2 and of IFCA without privacy."""
    ifca_rate: float = 0.1
    """Rate of IFCA's steps."""
    temperature: float = 0.5
    """t of Algorithm 1."""
    direction: Direction = "printed"
    """Direction of Algorithm 1's divergence: as printed, or as in the objective."""
    kept_tokens: int = 100
    """Tokens that DimRed keeps; a tenth of all if they are fewer."""
    candidates: int = 200
    """Candidate tokens of private DimRed, the most frequent by the private mean; all if they are fewer."""
    lam: float | None = None
    """lambda of fine-tuning; tuned on the validation users unless given."""
    epsilon: tuple[float, ...] = (1.0, 3.0, 8.0, 15.0)
    """Epsilon of a user, one column of the table each; every release of a row is accounted for."""
    delta: float = 1e-10
    """delta of each epsilon."""
    private_clusters: int | None = None
    """k under privacy; --clusters unless given."""
    private_rounds: int = 5
    """T under privacy."""
    mean_share: float = 0.5
    """Share of a clustering's privacy budget for its release of the mean; its rounds have the rest."""
    radius: float = 0.25
    """C: public clipping norm (L2) of the histograms."""
    clip: float = 1.0
    """c of Algorithm 3 as printed."""
    floor: float = 1e-6
    """s: floor of every token's estimate before normalisation, which determines the score of local."""
    em_steps: int = 10
    """Steps of the Dirichlet mixture's EM, and of the Dirichlet fit of each cluster."""
    repetitions: int = 20
    """Runs, each with its own start and noise, side by side on the same users."""

    def check(self) -> None:
        """Check the settings, independently of the data (see `histograms.fitting.follow`).

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        for name in ("clusters", "rounds", "private_rounds", "em_steps", "repetitions"):
            checks.count(name, getattr(self, name))
        if self.private_clusters is not None:
            checks.count("private_clusters", self.private_clusters)
        host_memory.check(
            4 * self.repetitions * self.clusters * self.tokens,
            f"the centers of {self.repetitions} repetitions of {self.clusters} clusters over {self.tokens} tokens need",
            "fewer repetitions, clusters or tokens",
        )
        for name in ("kept_tokens", "candidates"):
            checks.count(name, getattr(self, name))
        for name in ("radius", "clip"):
            checks.positive(name, getattr(self, name))
        checks.rate("ifca_rate", self.ifca_rate)
        checks.probability("mean_share", self.mean_share)
        at_least("temperature", self.temperature, 0)
        checks.positive("floor", self.floor)
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise JaxpflError(f"lam must be >= 0 and <= 1, got {self.lam}")
        for epsilon in self.epsilon:
            check_privacy(epsilon, self.delta)
        if not self.epsilon:
            refuse_given(self, ("delta", "private_clusters", "private_rounds", "mean_share"), NOT_PRIVATE)
