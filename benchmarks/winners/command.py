"""Commands that a recommendation prints: a comparison on the given federation, and a search of the learning rates."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpfl import algorithms
from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.core.settings import LARGEST, is_default
from jaxpfl.runs.config import DataConfig, RunConfig
from jaxpfl.runs.records import Value
from jaxpfl.runs.sweep.definition import gradients_of, rounds_of
from jaxpfl.support.errors import JaxpflError, shown

from .atlas import Place
from .cells import BATCH, FINE_TUNING, LOCAL_STEPS, RATES
from .nearest import Asked

_TUNED = "fedavg-ft.fine_tune_steps"
_DECIDED = {
    "rounds": "--steps says how long the run is",
    "lr": "the rates are taken from the nearest cell",
    "set": "the settings are taken from the nearest cell",
}
"""Settings of a config that the commands replace, with the reason."""


@dataclass(frozen=True)
class Commands:
    """Commands for a federation.

    Attributes:
      compare: command that compares the methods with the settings that they chose in the nearest cell.
      sweep: command that first chooses their learning rates on the federation; other settings are the same.
      remarks: remarks on both commands.
    """

    compare: str
    sweep: str
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """A budget of gradient steps of a client, a part of which fedavg-ft spends on fine-tuning.

    Attributes:
      steps: total number of steps.
      local_steps: number of steps in a round.
      share: fraction of the rounds in which a client takes part.
    """

    steps: int
    local_steps: int
    share: float

    @property
    def tuned(self) -> int:
        """Number of steps of fine-tuning."""
        return round(FINE_TUNING * self.steps)

    def rounds(self, steps: int) -> int:
        """Return the number of rounds, at least one, in which a client takes this many steps.

        Raises:
          JaxpflError: if a run cannot have so many rounds.
        """
        found = max(1, round(steps / (self.local_steps * self.share)))
        if found > LARGEST:
            raise JaxpflError(
                f"steps = {self.steps} are {found} rounds of {self.local_steps} local steps for a client that takes "
                f"part in {self.share:.3g} of them: at most {LARGEST} rounds are allowed"
            )
        return found


def commands(asked: Asked, place: Place, methods: Sequence[str], config: RunConfig) -> Commands:
    """Return the commands that compare methods on a federation.

    Args:
      asked: federation.
      place: nearest cell.
      methods: names of the methods to compare.
      config: config of the run, whose rounds, learning rate and method settings are replaced.

    Raises:
      JaxpflError: if a run cannot have so many rounds, or if local work is not given in steps.
    """
    if config.local_epochs is not None:
        raise JaxpflError(f"local_epochs = {config.local_epochs}: the map compares steps: give local_steps instead")
    steps = config.local_steps or LOCAL_STEPS
    work = Work(asked.steps or place.steps, steps, asked.participation)
    # fedavg-ft replaces its last rounds by fine-tuning, so that methods with one gradient per step have equal work.
    rounds = work.rounds(work.steps - work.tuned)
    batch = config.batch_size or BATCH
    own = replace(config, rounds=rounds, local_steps=steps, batch_size=batch, lr=None)
    fixed = {name: _settings(place, name, asked, work) for name in methods if name in place.methods}
    entries = _entries(fixed)
    compared = replace(own, set=(*entries, *_entries({name: _rates(place, name) for name in fixed})))
    searched = replace(own, set=entries)
    grid = ["--grid", f"lr={','.join(f'{rate:g}' for rate in RATES)}", "--budget", "steps"]
    return Commands(
        shlex.join(["jaxpfl", "compare", *methods, *_flags(compared)]),
        shlex.join(["jaxpfl", "sweep", *methods, *_flags(searched), *grid]),
        (*_remarks(compared, methods, work), *_left_out(config)),
    )


def _settings(place: Place, method: str, asked: Asked, work: Work) -> dict[str, Value]:
    """Return a method's settings in a cell without learning rates, with clusters and fine-tuning for the federation."""
    scores = place.methods[method]
    own: dict[str, Value] = {}
    for entry in scores.set:
        name, _, value = entry.partition("=")
        counts = name.endswith((".clusters", ".components")) and asked.clusters is not None
        own[name] = str(asked.clusters) if counts else value
    if _TUNED in own:
        own[_TUNED] = work.tuned
    return own | {name: value for name, value in scores.settings.items() if name.startswith(f"{method}.")}


def _rates(place: Place, method: str) -> dict[str, Value]:
    rate = place.methods[method].settings.get("lr")
    return {} if rate is None else {f"{method}.{name}": rate for name in rates(algorithms.get(method).hyper)}


def _entries(settings: Mapping[str, Mapping[str, Value]]) -> tuple[str, ...]:
    return tuple(f"{name}={_text(value)}" for own in settings.values() for name, value in own.items())


def _text(value: Any) -> str:
    """Return a value as a flag accepts it: a float has as few digits as represent it exactly."""
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return str(value)


def _flags(config: RunConfig) -> list[str]:
    """Return flags for all settings that differ from their defaults, the data's settings first."""
    of_data = {field.name for field in dataclasses.fields(DataConfig)}
    named = sorted(_given(config), key=lambda pair: pair[0] not in of_data)
    return ["--data", config.data, *(word for name, value in named if name != "data" for word in _flag(name, value))]


def _given(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return names and values of the settings that differ from their defaults; a table's name precedes its settings."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _given(value, f"{field.name}.")
        elif not is_default(settings, field.name):
            yield prefix + field.name, value


def _flag(name: str, value: Any) -> list[str]:
    table, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{table}{dot}{last if value else f'no-{last}'}"]
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (f"--{table}{dot}{last}", _text(one))]


def _remarks(config: RunConfig, methods: Sequence[str], work: Work) -> Iterator[str]:
    """Return remarks on the methods' gradients in equal rounds, and on the rounds with equal gradients."""
    assert config.rounds is not None
    among = tuple(methods)
    taken, equal = [], []
    for name in methods:
        tuned = work.tuned if name == "fedavg-ft" else 0
        each = gradients_of(config, name, among, work.share) * work.share
        taken.append(f"{name} {round(config.rounds * each) + tuned}")
        whole = replace(config, rounds=work.rounds(work.steps - tuned))
        rounds = rounds_of(whole, name, among, work.share)
        equal += [f"{name} {rounds}"] if rounds != config.rounds else []
    yield f"compare gives every method {config.rounds} rounds; a client then computes gradients: {', '.join(taken)}"
    if equal:
        yield (
            f"for {work.steps} gradients each, as in the map, run each method alone: jaxpfl run METHOD with the flags "
            f"of compare, --set of this method only, and these --rounds: {', '.join(equal)}"
        )
    if (work.local_steps, config.batch_size) != (LOCAL_STEPS, BATCH):
        yield (
            f"a round has {work.local_steps} steps in batches of {config.batch_size}, but in the map it has "
            f"{LOCAL_STEPS} in batches of {BATCH}"
        )


def _left_out(config: RunConfig) -> Iterator[str]:
    for name, reason in _DECIDED.items():
        if not is_default(config, name):
            value = getattr(config, name)
            said = ", ".join(value) if isinstance(value, tuple) else shown(value)
            yield f"{name} = {said} in the config file is ignored: {reason}"
