"""Definition of a sweep, which ``sweep.json`` stores: methods, common config, grid, and search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import algorithms, models
from jaxpfl.algorithms import LocalWork, Method
from jaxpfl.core import exclusions
from jaxpfl.core.settings import COUNT, Range, check, is_given, read_help, setting
from jaxpfl.engine.build import build
from jaxpfl.engine.spec import Settings, without_effect
from jaxpfl.runs import data_sets, run_folder
from jaxpfl.runs.config import ORDERS, RunConfig, differences, from_mapping, resolve, spec_for, to_json
from jaxpfl.runs.records import Value
from jaxpfl.runs.run_folder import CODE
from jaxpfl.runs.sweep.grid import Axis, Grid, apply_settings, concerns, fill_privacy, named
from jaxpfl.runs.sweep.results import DATA_FIELDS
from jaxpfl.similarity.graphs import from_edges
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, shown, unknown_name

FILE = "sweep.json"
UNFINISHED = "unfinished"
"""Folder with the saved states of groups that were interrupted."""
PARTS = ("journal", "results.parquet", "best", UNFINISHED, CODE)
"""Names of files and folders in a sweep folder, in addition to `FILE` and `run_folder.SHARED`."""
SELECTIONS = ("validation", "none")
BUDGETS = ("rounds", "steps")
SHARE = 0.2
"""Default validation share: the fraction of each client's training examples that is used for the selection."""


@read_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of the search over a grid: selection, seeds and budget."""

    select: str = setting("validation")
    """Choice of each method's setting: validation, by the scores on validation examples (a fifth of the training
    examples unless --validation-share is given); or none, to choose no setting."""
    search_seeds: int | None = setting(None, unless_given="all", range=COUNT, unit="runs")
    """Number of seeds in the search; the chosen setting is then run with all --seeds."""
    budget: str = setting("rounds")
    """Quantity that is equal for all methods: rounds, or steps. With steps, every method computes as many gradients in
    total as a method with one gradient per local step, so methods with more gradients per round run fewer rounds."""
    halving: int = setting(0, range=Range(0, 100))
    """Factor of successive halving: settings are compared after certain rounds (rungs), and at each rung the best
    1/factor of the settings by validation score continue; 0 turns it off."""
    halving_first: int | None = setting(
        None, unless_given="as many as leave one setting at the last rung", range=COUNT, unit="rounds"
    )
    """Number of rounds before the first rung, where settings are first compared."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """Definition of a sweep.

    Attributes:
      methods: names of the methods.
      config: config that all runs share. It is not resolved: presets are filled in for each group of runs.
      grid: axes of the sweep, by their full names.
      search: selection, seeds and budget of the search.
    """

    methods: tuple[str, ...]
    config: RunConfig
    grid: Grid
    search: Search = Search()

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds; the seeds of the search come first."""
        config = resolve(fill_privacy(self.config, self.grid))
        return tuple(range(config.seed, config.seed + (config.seeds or 1)))

    @property
    def searched(self) -> tuple[int, ...]:
        """Seeds of the search."""
        return self.seeds[: self.search.search_seeds]

    def to_json(self) -> dict[str, Any]:
        """Return the definition as a dict of JSON values."""
        return {
            "methods": list(self.methods),
            "config": to_json(self.config),
            "grid": dataclasses.asdict(self.grid),
            "search": dataclasses.asdict(self.search),
            "orders": ORDERS,
            **({"code": run_folder.sources_of(self.methods)} if self.texts() else {}),
        }

    def texts(self) -> dict[str, bytes]:
        """Return the contents of the user's files, as `run_folder.texts_of` returns them."""
        return run_folder.texts_of(self.config, self.methods)


def define(methods: Sequence[str], config: RunConfig, grid: Grid, search: Search | None = None) -> Definition:
    """Define a sweep, and check everything that can be checked without loading the data.

    Raises:
      JaxpflError: if a name is unknown, a value has the wrong type or is out of range, or settings exclude each other.
    """
    if not methods:
        raise JaxpflError("a sweep requires at least one method")
    methods = algorithms.names_of(methods)
    for name in methods:
        algorithms.get(name)
        if list(methods).count(name) > 1:
            raise JaxpflError(f"list each method once, got {', '.join(methods)}")
    search = search or Search()
    check(search)
    if search.select not in SELECTIONS:
        raise unknown_name("select", search.select, SELECTIONS)
    if search.budget not in BUDGETS:
        raise unknown_name("budget", search.budget, BUDGETS)
    grid = named(grid, methods)
    names = [axis.name for axis in grid.axes]
    _check_exclusions(config, search, names)
    if search.budget == "steps":
        for name in methods:
            # Called for its error: the method's number of gradients may be unknown.
            rounds_of(fill_privacy(config, grid), name, tuple(methods), share=1.0)
    if search.select == "validation" and not config.validation_share and "validation_share" not in names:
        if not data_sets.is_stored(config.data):
            config = dataclasses.replace(config, validation_share=SHARE)
        elif not data_sets.has_validation(config):
            raise JaxpflError(
                f"{config.data} has no validation examples to select by: convert the data set with --validation-share, "
                "or give select = none"
            )
    found = Definition(tuple(methods), config, grid, search)
    if (search.search_seeds or 1) > len(found.seeds):
        raise JaxpflError(f"search_seeds must be at most seeds = {len(found.seeds)}, got {search.search_seeds}")
    for name in methods:
        _check_values(found, algorithms.get(name))
    return found


def _check_exclusions(config: RunConfig, search: Search, axes: Sequence[str]) -> None:
    """Refuse settings that exclude each other in a sweep."""
    halving = search.halving or None
    if halving == 1:
        raise JaxpflError("halving must be 0 or at least 2, got 1")
    if search.halving_first is not None and halving is None:
        raise JaxpflError("halving_first requires --halving")
    exclusions.check(
        {
            "a sweep": True,
            "plan.clients_in": config.plan.clients_in,
            "eval_every": config.eval_every if is_given(config, "eval_every") else None,
            "checkpoint_every": config.checkpoint_every if is_given(config, "checkpoint_every") else None,
            "patience": "an axis" if "patience" in axes else config.patience,
            "halving": halving,
            "select": search.select,
            "an axis of the problem": next((name for name in axes if name in DATA_FIELDS), None),
            "an axis of rounds": "rounds" in axes,
            "budget": search.budget,
        }
    )


def _check_values(definition: Definition, method: Method) -> None:
    """Refuse a sweep if some run of the method would have a setting outside its range, or without effect."""
    without = without_effect(definition.config)
    for axis in definition.grid.axes:
        if axis.name in without:
            raise JaxpflError(f"the axis {axis.name} has no effect, because {without[axis.name]}: leave it out")
        if concerns(axis.name, method, definition.config):
            for value in _ends(axis):
                config = apply_settings(fill_privacy(definition.config, definition.grid), {axis.name: value})
                if axis.name.startswith("privacy."):
                    check(config.privacy)
                    continue  # the whole config is not checked, as other privacy settings may be axes too
                config = resolve(config)
                model = Settings.model if config.model is None else config.model
                _ = spec_for(dataclasses.replace(config, model=model), method.name, definition.methods).hp


def _ends(axis: Axis) -> tuple[Value, ...]:
    """Return the values of an axis that must be checked.

    For an axis of numbers, these are the smallest and the largest number, because the allowed values of a setting form
    an interval. Otherwise, these are all values.
    """
    if not axis.values:
        return axis.low, axis.high
    numbers = [value for value in axis.values if isinstance(value, int | float) and not isinstance(value, bool)]
    return (min(numbers), max(numbers)) if len(numbers) == len(axis.values) else axis.values


def read(folder: Path, *, runs_code: bool = False) -> Definition:
    """Read the definition in a sweep folder; with ``runs_code``, also run the folder's copies of the user's files.

    Raises:
      JaxpflError: if the folder has no definition, or the definition is invalid, for example because it was edited
        by hand.
    """
    path = folder / FILE
    if not path.exists():
        raise JaxpflError(f"{folder} is not a sweep folder: it has no {FILE}")
    return stored_definition(files.read_json(path), path, runs_code=runs_code)


def is_stored(values: Any) -> bool:
    """Return whether the content of a file is the definition of a sweep, as in `FILE`."""
    return isinstance(values, dict) and {"methods", "config", "grid", "search"} <= values.keys()


def stored_definition(stored: Any, path: Path, *, runs_code: bool = True) -> Definition:
    """Make a definition from the content of its file.

    Args:
      stored: parsed content of the file.
      path: path of the file.
      runs_code: whether to run the Python files of the user that are copied into the sweep's folder. If False, a
        definition with such files is not checked.

    Raises:
      JaxpflError: if the definition is invalid, for example because it was edited by hand.
    """
    with expecting(path, "the definition of a sweep"):
        grid = Grid.from_json(stored["grid"])
        methods, search = stored["methods"], Search(**stored["search"])
        if stored.get("orders") != ORDERS:
            raise JaxpflError(f"{path} is from a version that drew examples in a different order: start a new sweep")
        config = from_mapping(dict(stored["config"]), str(path))
        if (code := stored.get("code")) is not None:
            config = run_folder.located(config, path.parent / CODE)
            if not runs_code:
                return Definition(tuple(methods), config, grid, search)
            methods = run_folder.methods_in(path.parent / CODE, methods, code)
        return define(methods, config, grid, search)


def check_growth(old: Definition, new: Definition, folder: Path) -> None:
    """Check that a resumed sweep is the stored sweep, possibly with more methods, values, draws or seeds.

    The changes that `differences` allows to a run's config, such as more rounds, are allowed too.

    Raises:
      JaxpflError: if the resumed sweep differs in another way; the message lists the differences.
    """
    was, now = to_json(old.config), to_json(new.config)
    semantic = [text for text in differences(was, now)[0] if not text.startswith("seeds: ")]
    if len(new.seeds) < len(old.seeds):
        semantic.append(f"seeds: {len(old.seeds)} -> {len(new.seeds)}")
    if dropped := [name for name in old.methods if name not in new.methods]:
        semantic.append(f"methods dropped: {', '.join(dropped)}")
    if old.search != new.search:
        ours, theirs = dataclasses.asdict(old.search), dataclasses.asdict(new.search)
        semantic += [f"{name}: {ours[name]} -> {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    semantic += grid_changes(old.grid, new.grid) + run_folder.code_changes(folder, new.texts())
    if semantic:
        raise JaxpflError(f"--resume would change the sweep in {folder}: {'; '.join(semantic)}")


def grid_changes(old: Grid, new: Grid) -> list[str]:
    """Return the differences between an earlier and a new grid.

    The differences are values and axes that the new grid lacks, axes that only the new grid has, and changed ranges.
    Additional values on an axis and a larger number of random points are not differences.
    """
    changes: list[str] = []
    axes = {axis.name: axis for axis in new.axes}
    for axis in old.axes:
        other = axes.pop(axis.name, None)
        if other is None:
            changes.append(f"axis dropped: {axis.name}")
        elif lost := [value for value in axis.values if value not in other.values]:
            changes.append(f"values of {axis.name} dropped: {', '.join(map(str, lost))}")
        elif not axis.values and axis != other:
            changes.append(f"range {axis.name}: {shown(axis)} -> {shown(other)}")
    changes += [f"new axis {name} (no run so far has a value of it)" for name in axes]
    if old.seed != new.seed or new.draws < old.draws:
        changes.append(f"draws: {old.draws} from seed {old.seed} -> {new.draws} from seed {new.seed}")
    return changes


def rounds_of(config: RunConfig, method: str, among: tuple[str, ...], share: float | None = None) -> int:
    """Return the number of rounds after which a client has used up its gradient budget.

    The budget is the number of gradients that the client computes in all rounds with a method that takes one gradient
    per local step. The number of rounds is rounded down, but is at least one. For methods that also train outside the
    cohort (``idle``), the expected gradients between two participations count toward the cost of a round.

    Args:
      config: the run's config, before `resolve`.
      method: name of the method.
      among: names of all methods that run with the config.
      share: fraction of the clients that are in a cohort; cohort / clients by default.

    Raises:
      JaxpflError: if the method does not count its gradients or draws their number at random, if it trains outside the
        cohort and the number of clients or the cohort is unknown, or if ``local_epochs`` is set and the method's number
        of gradients is not proportional to the number of local steps.
    """
    full = resolve(config)
    assert full.rounds is not None
    return max(1, int(full.rounds * full.local_steps / gradients_of(config, method, among, share) + 1e-9))


def gradients_of(config: RunConfig, method: str, among: tuple[str, ...], share: float | None = None) -> float:
    """Return the expected number of gradients that a client computes per participation.

    This includes the gradients that the client computes outside the cohort before its next participation.

    Args:
      config, method, among, share: same as in `rounds_of`.

    Raises:
      JaxpflError: as in `rounds_of`.
    """
    full = resolve(config)
    steps = full.local_steps
    options = spec_for(full, method, among).options
    in_cohort, outside, cap = _gradients(method, steps, tuple(sorted(options.items())))
    if full.local_epochs is not None and _gradients(method, 10 * steps, tuple(sorted(options.items())))[0] != (
        10 * in_cohort
    ):
        raise JaxpflError(
            f"budget = steps with local_epochs does not support {method}: its gradients are not proportional to its "
            "steps"
        )
    if not outside:
        return in_cohort
    if share is None:
        if full.clients is None or full.cohort is None:
            raise JaxpflError(f"budget = steps requires clients and cohort, as {method} also trains outside the cohort")
        share = min(1.0, full.cohort / full.clients)
    rests = 1 - share
    return in_cohort + outside * sum(rests**j for j in range(1, cap + 1))


@functools.lru_cache(maxsize=256)
def _gradients(method: str, steps: int, options: tuple[tuple[str, object], ...]) -> tuple[int, int, int]:
    """Count the gradients that a client takes in a round.

    The counts do not depend on the data, so a small task is built to find them. The task has many clients, because some
    options must not exceed the number of clients.

    Returns:
      The number of gradients in a round in the cohort, the number in a round outside the cohort, and the maximum number
      of consecutive rounds outside the cohort in which a client trains.
    """
    shape, clients = (4,), 1000
    task = models.classification(models.build_model("mlp-ln", 2, shape), shape, 2, None)
    ring = from_edges([(i, (i + 1) % clients) for i in range(clients)], clients)
    work = LocalWork(np.full(clients, 8), steps, 4, graph=ring)
    algorithm = build(algorithms.get(method), task, work, dict(options))
    if not algorithm.counts_gradients:
        raise JaxpflError(f"budget = steps does not support {method}, which does not count its gradients")
    try:
        said = [client.gradients for client in algorithm.clients if client.gradients is not None]
        # A method that draws the number at random reads it from the server's message, which is None here.
        nothing: Any = None
        counts = [(int(one.update(steps, nothing)), int(one.idle(steps)) if one.idle else 0) for one in said]
    except AttributeError:
        raise JaxpflError(f"budget = steps does not support {method}, whose number of gradients is random") from None
    in_cohort, outside = (max(column) for column in zip(*counts, strict=True))
    return in_cohort, outside if algorithm.idle_cap else 0, algorithm.idle_cap
