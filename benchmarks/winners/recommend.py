"""Recommendation of a method for a federation from the nearest cells, with the commands to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpfl.core.settings import is_default
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.privacy.claim import check_delta
from jaxpfl.runs.config import RunConfig
from jaxpfl.support.errors import JaxpflError, shown

from .atlas import Atlas, Place
from .cells import DELTA
from .command import Commands, commands
from .nearest import FAR, Asked, Near, beyond, nearest
from .verdicts import BASELINES, Verdict, verdict

CAVEATS = (
    "the skew is computed from labels only, so clients that label equal inputs differently may look alike",
    "learning rates are from a coarse grid, and some are at its ends",
    "the best method was chosen by validation; leads are on test examples, with 95 % intervals for one cell at a time",
)


@dataclass(frozen=True)
class Recommendation:
    """The nearest cells to a federation, and the recommendation that follows from them.

    Attributes:
      asked: federation.
      cohort: number of clients in a round.
      near: nearest cells with their verdicts, nearest first.
      sources: pairs of a data set and a model that the map has cells for.
      far: whether even the nearest cell is far.
      beyond: descriptions of the features outside the map's range.
      commands: commands that compare the best method with local training and fine-tuned FedAvg on this federation.
    """

    asked: Asked
    cohort: int
    near: tuple[tuple[Near, Verdict], ...]
    sources: tuple[str, ...]
    far: bool
    beyond: tuple[str, ...]
    commands: Commands

    @property
    def method(self) -> str:
        """Best method of the nearest cell."""
        return self.near[0][1].best

    @property
    def caveats(self) -> tuple[str, ...]:
        """Remarks on the evidence and on the commands."""
        classes = self.asked.measures.num_classes
        more = (f"the data have {classes} classes, but the map's have ten",) if classes != 10 else ()
        private = ("no epsilon covers the choice of rates on validation examples",)
        whence = f"the evidence is from data with ten classes only: {', '.join(self.sources)}"
        return (whence, *CAVEATS, *more, *(private if self.asked.epsilon is not None else ()), *self.commands.remarks)

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation as JSON values."""
        asked = self.asked
        federation = {
            **asked.measures.to_json(),
            "cohort": self.cohort,
            **{name: getattr(asked, name) for name in ("participation", "partition", "model", "steps", "epsilon")},
        }
        return {
            "federation": federation,
            "recommended": self.method,
            "nearest": [_near_json(near, found) for near, found in self.near],
            "far": self.far,
            "beyond": list(self.beyond),
            "caveats": list(self.caveats),
            "command": self.commands.compare,
            "search": self.commands.sweep,
        }


def recommend(atlas: Atlas, asked: Asked, cohort: int, config: RunConfig) -> Recommendation:
    """Recommend a method.

    Args:
      atlas: map.
      asked: federation.
      cohort: number of clients in a round.
      config: data, split and other given settings of the run; the budget is taken from ``asked``.

    Raises:
      JaxpflError: if the map has no cells of this kind, or does not cover the run.
    """
    near = nearest(asked, atlas.places)
    if not near:
        raise JaxpflError(f"the map has no cell {'with' if asked.epsilon is not None else 'without'} privacy")
    found = tuple((one, verdict(one.place)) for one in near)
    outside = beyond(asked, atlas.places)
    place, best = near[0].place, found[0][1].best
    run = replace(config, model=asked.model, cohort=cohort, privacy=_privacy(config.privacy, asked, place, best))
    made = commands(asked, place, tuple(dict.fromkeys((*BASELINES, best))), run)
    far = near[0].distance > FAR
    sources = tuple(dict.fromkeys(f"{one.data} ({one.model})" for one in atlas.places))
    return Recommendation(asked, cohort, found, sources, far, tuple(outside), made)


def _privacy(given: PrivacyConfig, asked: Asked, place: Place, best: str) -> PrivacyConfig:
    """Return the run's privacy settings; missing ones are taken from the cell, with delta at most a tenth of 1 / m.

    Raises:
      JaxpflError: if no run can have the settings, or the map does not cover them.
    """
    if given.noise_multiplier is not None:
        raise JaxpflError(
            f"privacy.noise_multiplier = {shown(given.noise_multiplier)}: the map's private cells have an epsilon: "
            "give privacy.epsilon instead"
        )
    if given.is_example_level:
        raise JaxpflError("privacy.unit = example: the map's epsilon protects users: leave privacy.unit out")
    privacy = replace(given, epsilon=asked.epsilon)
    if asked.epsilon is not None:
        if given.delta is None:
            privacy = replace(privacy, delta=min(DELTA, 1 / (10 * asked.measures.clients)))
        norms = [place.methods[name].settings.get("privacy.clipping_norm") for name in (best, "fedavg-ft", "fedavg")]
        norm = next((one for one in norms if one is not None), None)
        if norm is not None and is_default(given, "clipping_norm"):
            privacy = replace(privacy, clipping_norm=float(norm))
    privacy.check()
    if privacy.delta is not None:
        check_delta(privacy.delta, asked.measures.clients, name="privacy.delta")
    return privacy


def _near_json(near: Near, found: Verdict) -> dict[str, Any]:
    place = near.place
    names = ("name", "data", "model", "heterogeneity", "partition", "share", "steps", "epsilon")
    scores = {
        name: {"settings": dict(own.settings), "validation": _percent(own.validation), "test": _percent(own.test)}
        for name, own in place.methods.items()
    }
    return {
        **{name: getattr(place, name) for name in names},
        "measures": place.measures.to_json(),
        "distance": round(near.distance, 3),
        "parts": {name: round(part, 3) for name, part in near.parts.items()},
        **found.to_json(),
        "methods": scores,
    }


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 2)
