"""``jaxpfl sweep estimate``: a study of estimation over a grid of its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction

from jaxpfl.cli.estimate import commands_of, titled, with_flags
from jaxpfl.cli.session import Written
from jaxpfl.cli.sweep import Draws, check_session, end_if_asked, show
from jaxpfl.core.settings import COUNT, check, setting
from jaxpfl.runs import compile_cache
from jaxpfl.runs.sweep.grid import Grid, parse
from jaxpfl.studies import registry
from jaxpfl.support import signals
from jaxpfl.support.places import NEW_FOLDER


@dataclass(frozen=True)
class _Axes(Draws):
    """The grid and the seeds."""

    grid: UseAppendAction[tuple[str, ...]] = ()
    """An axis, NAME=V,V,... or NAME=log:LOW:HIGH:N or NAME=linear:LOW:HIGH:N (without N a range, for --random); NAME is
    a setting of the study; may be repeated."""
    seeds: int = setting(1, "Number of runs of each setting, with seeds from --seed on.", range=COUNT, unit="runs")


@dataclass(frozen=True)
class _Session(Written):
    """Destination of a sweep, and use of an earlier one."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Sweep folder; runs/sweep-STUDY unless given."""
    resume: bool = False
    """Continue an earlier sweep: only what is missing runs; values, draws and seeds may be added."""
    retry: bool = False
    """With --resume, run settings that failed once more."""
    json: bool = False
    """Print the summary as one JSON object, the only thing on standard output."""
    table: Literal["md", "latex"] | None = None
    """Print the errors as a Markdown or LaTeX table, the only thing on standard output."""


def commands(args: Sequence[str] | None = None) -> tuple[Callable[..., None], ...]:
    """A command for every study, as `estimate.commands`."""
    return commands_of(args, _command)


def _command(name: str) -> Callable[..., None]:
    def command(settings: Any, axes: _Axes, session: _Session, options: Any = None) -> None:
        from jaxpfl.runs.sweep.estimate import define_study

        check(axes)
        grid = Grid(tuple(map(parse, axes.grid)), axes.random, axes.random_draw, axes.random_seed)
        _sweep(define_study(name, settings, grid, axes.seeds, options), session)

    return titled(with_flags(command, registry.get(name), axes=_Axes(), session=_Session()), name)


def _sweep(definition: Any, session: _Session) -> None:
    from jaxpfl.runs import lock
    from jaxpfl.runs.interrupt import Interrupt
    from jaxpfl.runs.sweep.estimate import StudySweep
    from jaxpfl.runs.sweep.progress import Terminal

    check_session(session)
    compile_cache.enable()
    folder = session.output or Path("runs") / f"sweep-{definition.name}"
    session.check_force(folder, resume=session.resume)
    with ExitStack() as stack:
        stack.enter_context(lock.held(folder))
        sweep = StudySweep.open(folder, definition, resume=session.resume, force=session.force)
        kept = f"; kept in {folder}: the same command with --output {folder} --resume continues"
        interrupt = stack.enter_context(Interrupt())
        interrupt.saves = True
        stack.enter_context(signals.noted(kept))
        done, planned = sweep.progress(sweep.journal().read(), failed=session.retry)
        with Terminal(session.notes(), planned, done) as reporter:
            sweep.run_missing(reporter, stopped=lambda: interrupt.asked is not None, failed=session.retry)
        end_if_asked(interrupt, f"stopped{kept}")
        summary = sweep.finish()
    show(summary, session, folder, "jaxpfl.load_sweep reads it; plots in plots/")
