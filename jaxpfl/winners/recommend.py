"""Recommendation of a method for a federation, from the nearest cells, with the commands to run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpfl import algorithms
from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.errors import JaxpflError
from jaxpfl.experiment.config import DataConfig
from jaxpfl.records import Value
from jaxpfl.winners.atlas import Atlas, Place
from jaxpfl.winners.cells import BATCH, DELTA, LOCAL_STEPS, RATES
from jaxpfl.winners.nearest import FAR, Asked, Near, beyond, nearest
from jaxpfl.winners.verdicts import BASELINES, Verdict, verdict

CAVEATS = (
    "the skew is of labels alone: clients that label the same input differently look alike, unless the split says so",
    "rates are of a coarse grid, at whose ends some lie",
    "the best method was chosen on validation, leads are on test over five splits at 95 %, one cell at a time",
)


@dataclass(frozen=True)
class Recommendation:
    """The nearest cells to a federation, and what follows from them.

    Attributes:
      asked: the federation.
      cohort: clients in a round.
      near: the nearest cells with their verdicts, the nearest first.
      sources: data sets with their models, of all cells of the map.
      far: whether the nearest is far.
      beyond: features outside the map's range, in words.
      command: that compares the best method with local training and fine-tuned FedAvg on this federation.
      search: that chooses their rates on it first.
    """

    asked: Asked
    cohort: int
    near: tuple[tuple[Near, Verdict], ...]
    sources: tuple[str, ...]
    far: bool
    beyond: tuple[str, ...]
    command: str
    search: str

    @property
    def method(self) -> str:
        """The best method of the nearest cell."""
        return self.near[0][1].best

    @property
    def caveats(self) -> tuple[str, ...]:
        """Remarks on the evidence."""
        classes = self.asked.measures.num_classes
        more = (f"the data have {classes} classes, the map's ten",) if classes != 10 else ()
        private = ("a choice of rates on validation examples costs privacy that no epsilon here covers",)
        whence = f"evidence from ten classes of {', '.join(self.sources)} alone"
        return (whence, *CAVEATS, *more, *(private if self.asked.epsilon is not None else ()))

    def to_json(self) -> dict[str, Any]:
        """The recommendation as JSON-able values."""
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
            "command": self.command,
            "search": self.search,
        }


def recommend(
    atlas: Atlas, asked: Asked, cohort: int, config: DataConfig, delta: float | None = None
) -> Recommendation:
    """Recommend a method.

    Args:
      atlas: the map.
      asked: the federation.
      cohort: clients in a round.
      config: the data and their split, as given.
      delta: of a private budget; at most a tenth of 1 / m unless given.

    Raises:
      JaxpflError: if the map has no cell of the kind.
    """
    near = nearest(asked, atlas.places)
    if not near:
        raise JaxpflError(f"the map has no cell {'with' if asked.epsilon is not None else 'without'} privacy")
    found = tuple((one, verdict(one.place)) for one in near)
    outside = beyond(asked, atlas.places)
    place, best = near[0].place, found[0][1].best
    if delta is None:
        delta = min(DELTA, 1 / (10 * asked.measures.clients))
    methods = tuple(dict.fromkeys((*BASELINES, best)))
    flags = [*_flags(config), *_work(asked, place, cohort), *_privacy(asked, place, best, delta)]
    settings = [text for name in methods if name in place.methods for text in _settings(place, name, asked)]
    command = ["jaxpfl", "compare", *methods, *flags, *settings]
    lists = ",".join(f"{rate:g}" for rate in RATES)
    search = ["jaxpfl", "sweep", *methods, *flags, "--grid", f"lr={lists}", "--budget", "steps"]
    far = near[0].distance > FAR
    sources = tuple(dict.fromkeys(f"{one.data} ({one.model})" for one in atlas.places))
    return Recommendation(asked, cohort, found, sources, far, tuple(outside), shlex.join(command), shlex.join(search))


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


def _flags(config: DataConfig) -> list[str]:
    """Flags of the data and the split that are not the defaults."""
    found: list[str] = []
    default = DataConfig()
    for field in dataclasses.fields(DataConfig):
        value = getattr(config, field.name)
        name = f"--{field.name.replace('_', '-')}"
        if field.name != "data" and value == getattr(default, field.name):
            continue
        found += [name] if value is True else [name, str(value)]
    return found


def _work(asked: Asked, place: Place, cohort: int) -> list[str]:
    rounds = max(1, round((asked.steps or place.steps) / (LOCAL_STEPS * asked.participation)))
    return [
        *("--model", asked.model, "--cohort", str(cohort), "--rounds", str(rounds)),
        *("--local-steps", str(LOCAL_STEPS), "--batch-size", str(BATCH)),
    ]


def _privacy(asked: Asked, place: Place, best: str, delta: float) -> list[str]:
    if asked.epsilon is None:
        return []
    norms = [place.methods[name].settings.get("privacy.clipping_norm") for name in (best, "fedavg-ft", "fedavg")]
    norm = next((one for one in norms if one is not None), None)
    clip = [] if norm is None else ["--privacy.clipping-norm", f"{norm:g}"]
    return ["--privacy.epsilon", f"{asked.epsilon:g}", "--privacy.delta", f"{delta:g}", *clip]


def _settings(place: Place, method: str, asked: Asked) -> list[str]:
    """The settings that a method chose in a cell, as flags; the number of clusters is that of the federation."""
    scores = place.methods[method]
    own: dict[str, Value] = {}
    for entry in scores.set:
        name, _, value = entry.partition("=")
        counts = name.endswith((".clusters", ".components")) and asked.clusters is not None
        own[name] = str(asked.clusters) if counts else value
    for name, value in scores.settings.items():
        if name == "lr":
            own |= {f"{method}.{rate}": value for rate in rates(algorithms.get(method).hyper)}
        elif name.startswith(f"{method}."):
            own[name] = value
    entries = (f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items())
    return [part for entry in entries for part in ("--set", entry)]
