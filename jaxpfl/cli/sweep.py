"""The command ``jaxpfl sweep``, which runs many settings of one or more methods as few compiled programs."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from tyro.conf import Positional, UseAppendAction, arg

from jaxpfl.cli.training import DEFAULT_METHODS, Flags, WriteFlags, named_file
from jaxpfl.core.settings import Range, check, part_of, read_help, setting
from jaxpfl.runs import compile_cache
from jaxpfl.runs.config import (
    ConfigFile,
    RunConfig,
    check_given,
    default_folder,
    from_mapping,
    pop_methods,
    preset_words,
    read_file,
    resolve,
)
from jaxpfl.runs.sweep.definition import Definition, Search, define, is_stored, stored_definition
from jaxpfl.runs.sweep.grid import Axis, Grid, axis, fill_privacy, parse
from jaxpfl.support import signals
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.output_paths import NEW_FOLDER

T = TypeVar("T")


@read_help
@dataclass(frozen=True)
class Draws:
    """Settings for points drawn from the ranges of a grid."""

    random: int = setting(0, range=Range(0, 1_000_000), unit="points")
    """Number of points to draw from the ranges of --grid."""
    random_seed: int = setting(0, range=Range(0, 2**32 - 1))
    """Seed of the points drawn from ranges."""


@dataclass(frozen=True)
class _Axes(Draws):
    """Flags of the grid."""

    grid: UseAppendAction[tuple[str, ...]] = ()
    """Axis of the grid: NAME=V,V,... or NAME=log:LOW:HIGH:N or NAME=linear:LOW:HIGH:N (without :N, a range for
    --random). NAME is a flag (lr, clients, privacy.epsilon) or METHOD.name; cohort=.1m means a tenth of the clients.
    The flag may be repeated."""


@dataclass(frozen=True)
class _Session(WriteFlags):
    """Flags of a sweep for output, resuming, and Ray."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Sweep folder (default: runs/sweep-DATA-HASH)."""
    resume: bool = False
    """Continue an earlier sweep with its missing and failed runs; methods, values, draws and seeds may be added."""
    config: Path | None = None
    """TOML or YAML file with flags, methods and a table grid (NAME = [V, V] or "log:LOW:HIGH:N"), or a sweep folder's
    sweep.json; flags on the command line take precedence."""
    json: bool = False
    """Print the summary as one JSON object and nothing else on standard output."""
    ray: str | None = None
    """Run the sweep on a Ray cluster: address of a cluster whose machines can all access the sweep folder, or local,
    which starts a cluster on this machine to use several GPUs (needs the extra ray)."""


_SESSION = _Session()


class _File(NamedTuple):
    """Content of a sweep's config file."""

    run: ConfigFile = ConfigFile()
    axes: tuple[Axis, ...] = ()
    search: Search = Search()
    draws: Draws = Draws()


def commands(args: list[str]) -> tuple[Callable[..., None], ...]:
    """Return the command; a config file named in the arguments determines the defaults of its flags."""
    path = named_file(args)
    file = _File() if path is None else _read(path)
    flags = Flags(**vars(file.run.config))
    several, drawn = file.run.methods or DEFAULT_METHODS, _Axes(**vars(file.draws))

    def sweep(
        methods: Annotated[Positional[tuple[str, ...]], arg(metavar="[METHODS ...]", help="The methods.")] = several,
        settings: Annotated[Flags, arg(name="")] = flags,
        axes: Annotated[_Axes, arg(name="")] = drawn,
        search: Annotated[Search, arg(name="")] = file.search,
        session: Annotated[_Session, arg(name="")] = _SESSION,
    ) -> None:
        """Train methods over a grid of settings, choose by validation scores, and report test scores."""
        check(axes)
        given = [parse(text) for text in axes.grid]
        names = [one.name.replace("-", "_") for one in given]
        every = (*(one for one in file.axes if one.name.replace("-", "_") not in names), *given)
        config = part_of(RunConfig, settings)
        check_given(config, file.run.recorded)
        grid = Grid(every, axes.random, axes.random_seed)
        _sweep(define(methods or several, config, grid, search), session)

    return (sweep,)


def _read(path: str) -> _File:
    """Read a config file of a sweep, or the ``sweep.json`` of a sweep folder."""
    given = read_file(path)
    if is_stored(given):
        stored = stored_definition(given, Path(path))
        drawn = Draws(stored.grid.draws, stored.grid.seed)
        run = ConfigFile(stored.config, stored.methods, path=Path(path))
        return _File(run, stored.grid.axes, stored.search, drawn)
    values = {str(name).replace("-", "_"): value for name, value in given.items()}
    methods, table = pop_methods(values, path), values.pop("grid", {})
    if not isinstance(table, dict):
        raise JaxpflError(f"grid in {path} must be a table of axes, got {shown(table)}")
    axes = tuple(axis(str(name), given if isinstance(given, str | list) else [given]) for name, given in table.items())
    search, draws = _part(Search, values), _part(Draws, values)
    return _File(ConfigFile(from_mapping(values, path), tuple(methods), path=Path(path)), axes, search, draws)


def _part(part: type[T], values: dict[str, Any]) -> T:
    """Make a dataclass of settings from the values of its fields, which are removed from ``values``."""
    names = [name for name in inspect.signature(part).parameters if name in values]
    made = part(**{name: values.pop(name) for name in names})
    check(made)
    return made


def _sweep(definition: Definition, session: _Session) -> None:
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs import run_folder
    from jaxpfl.runs.control import Interrupt
    from jaxpfl.runs.sweep import runner
    from jaxpfl.runs.sweep.results import print_sweep
    from jaxpfl.runs.sweep.sweep import Sweep, finish
    from jaxpfl.runs.terminal import SweepTerminal
    from jaxpfl.support.console import Console

    session.check_force(session.output, resume=session.resume)
    folder = session.output or default_folder("sweep", definition.config, definition.methods, session.resume)
    with ExitStack() as stack:
        ray = None if session.ray is None else stack.enter_context(runner.ray_cluster(session.ray))
        use_cpu_cores()
        compile_cache.enable()
        stack.enter_context(run_folder.lock(folder))
        sweep = Sweep.open(folder, definition, resume=session.resume, force=session.force)
        swept = [axis.name for axis in definition.grid.axes]
        if words := preset_words(definition.config, resolve(fill_privacy(definition.config, definition.grid)), swept):
            session.note(words)
        kept = f"; kept in {folder}: the same command with --output {folder} --resume continues"
        interrupt = stack.enter_context(Interrupt())
        interrupt.saves = True
        stack.enter_context(signals.noted(kept))
        done, planned = sweep.progress(sweep.journal.read())
        with SweepTerminal(session.notes(), planned, done) as reporter:
            run = runner.run_missing if ray is None else functools.partial(runner.run_on_ray, ray=ray)
            run(sweep, reporter=reporter, stopped=lambda: interrupt.asked is not None)
        interrupt.end_if_asked(f"stopped{kept}")
        summary = finish(sweep)
    if session.json:
        print(json.dumps(summary))
    else:
        print_sweep(Console(), summary)
        print(f"sweep: {folder} (jaxpfl.load_sweep reads it; plots/; best/METHOD.json is a config of jaxpfl run)")
