"""Dispatch of the command line to its commands, which import JAX and other heavy packages when they are called."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from jaxpfl.cli import parsing, training
from jaxpfl.cli.training import QUIET
from jaxpfl.core.settings import named
from jaxpfl.runs import compile_cache
from jaxpfl.support import own_code, signals
from jaxpfl.support.console import settle
from jaxpfl.support.errors import JaxpflError, JaxpflWarning, is_exhausted, printable, unknown_name

DESCRIPTION = "Personalized federated learning: every round is one compiled JAX program."
BENCH = "Compare speed and accuracy with other libraries: jaxpfl bench NAME; without a name, list the benchmarks."
ALONE: dict[str, str] = {
    "sweep": "Train methods over a grid of settings, choose by validation scores, and report test scores.",
    "recommend": "Find the measured federations most similar to yours, and print their best method and its command.",
}
"""Commands that have a module of their own (see `commands_of`) -> their purpose."""
FOLDERS: dict[str, str] = {
    "report": "Write one HTML page about runs, sweeps and studies: tables, pictures, settings, privacy claims.",
    "runs": "List the run, sweep and study folders below a folder, with their status.",
    "compare-runs": "Show how two finished runs differ, in their settings and in their scores.",
    "check": "Check that result folders are complete, files match their checksums, and summaries match the files.",
    "predict": "Predict the rows of a new table: by the exported model of a row's client, or by the global model.",
    "new": "Write a small project: a method, a data loader, a config, and a test that runs in seconds.",
    "completion": "Print the script that completes commands and flags in a shell: jaxpfl completion bash | zsh.",
}
"""Commands in ``jaxpfl.cli.folders`` -> their purpose. Most of these commands read existing results."""
GROUPS: dict[str, str] = {
    "estimate": "Estimate clients' parameters together, on simulated data or your own: jaxpfl estimate NAME.",
    "papers": "Reproduce tables and figures of papers, beside the published values: list, run NAME, show.",
    "privacy": "Privacy calculators: epsilon, noise, paper; audit tries to refute a privacy claim.",
    "winners": "The map of the best methods by federation, for jaxpfl recommend: run measures it, show prints it.",
}
"""Command groups -> their purpose."""
_MODULES = {
    "papers": "jaxpfl.benchmarks.papers.commands",
    "winners": "jaxpfl.benchmarks.winners.commands",
    "recommend": "jaxpfl.benchmarks.winners.recommend_command",
}
"""Commands and groups whose modules are not in ``jaxpfl.cli`` -> their modules, which belong to the benchmarks."""


def commands_of(name: str, args: list[str] | None = None) -> Iterable[Callable[..., None]]:
    """Return the commands of a group or module.

    Args:
      name: name of the group or module.
      args: arguments of the command line, on which the commands and their defaults may depend; None to return all
        commands.
    """
    commands = importlib.import_module(_MODULES.get(name, f"jaxpfl.cli.{name}")).commands
    return commands() if args is None else commands(args)


def command_table() -> dict[str, Callable[..., None]]:
    """Return all commands by their full names, such as ``jaxpfl papers run``, in the order of ``jaxpfl --help``.

    All modules of commands are imported.
    """
    alone = [command for name in ALONE for command in commands_of(name, [name])]
    groups: dict[str, Iterable[Callable[..., None]]] = {"": [*training.commands([]), *commands_of("folders"), *alone]}
    groups |= {name: commands_of(name) for name in GROUPS}
    return {
        " ".join(f"jaxpfl {group} {command.__name__.replace('_', '-')}".split()): command
        for group, commands in groups.items()
        for command in commands
    }


def run(args: list[str]) -> None:
    """Run one command. An error caused by the user is printed on one line, and the exit status is then 2."""
    settle()
    own_code.refresh()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if QUIET in args else "always", JaxpflWarning)
            warnings.filterwarnings("always", compile_cache.TROUBLE)
            warnings.showwarning = _show_warning
            _dispatch(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except Exception as error:
        group = _group()
        said = _users_own(group.loss_of(error) or error if group else error)
        if said is None:
            if group:
                traceback.print_exc()
                group.leave(1)
            raise
        print(f"error: {' '.join(said.split())}", file=sys.stderr)
        if group:
            group.leave(2)
        raise SystemExit(2) from None


def _group() -> Any:
    """Return the module `jaxpfl.support.distributed` if this process is one of several, else None."""
    group = sys.modules.get("jaxpfl.support.distributed")
    return group if group and group.has_started() else None


def _users_own(error: Exception) -> str | None:
    """Return the message for an error caused by the user or the machine; None for a defect of the program."""
    if isinstance(error, OSError) and error.strerror:  # for example, a full disk or a deleted folder
        return error.strerror if error.filename is None else f"{error.strerror}: {printable(str(error.filename), 200)}"
    if isinstance(error, JaxpflError | OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "jaxpfl.benchmarks":  # a source tree, not an install
        return "jaxpfl.benchmarks is not installed here: run jaxpfl outside its source tree, or pip install -e . in it"
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    if is_exhausted(error):
        return f"out of memory: {error}"
    return None


def _dispatch(args: list[str]) -> None:
    if args[:1] == ["--version"] and args[1:] in ([], ["--json"]):
        from jaxpfl import __version__

        print(json.dumps({"version": __version__}) if args[1:] else __version__)
        return
    if args[:1] == ["bench"]:  # the benchmarks are a separate folder and parse their options themselves
        with _stopped_by_exception():
            importlib.import_module("jaxpfl.benchmarks.__main__").main(args[1:])
        return

    if args[:1] and args[0] in GROUPS:
        _choose(commands_of(args[0], args[1:]), f"jaxpfl {args[0]}", GROUPS[args[0]], args[1:])
        return
    if args[:1] and (args[0] in ALONE or args[0] in FOLDERS):
        _choose(commands_of(args[0] if args[0] in ALONE else "folders", args), "jaxpfl", DESCRIPTION, args)
        return
    _choose(training.commands(args), "jaxpfl", DESCRIPTION, args, others={**ALONE, **FOLDERS, **GROUPS, "bench": BENCH})


@contextmanager
def _stopped_by_exception() -> Iterator[None]:
    """Context manager in which signals raise SystemExit, so that code that started processes can stop them."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + number)

    signals.unwatch()
    before = {number: signal.signal(number, end) for number in signals.NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _choose(
    commands: Iterable[Callable[..., None]],
    prog: str,
    description: str,
    args: list[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run the command named by the first argument, or print help if the arguments ask for it.

    Args:
      commands: one function for each command; its parameters are the command's flags (see `parsing.flags_of`).
      prog: words before the arguments, such as ``jaxpfl privacy``.
      description: description of the commands as a group.
      args: arguments after ``prog``.
      others: names and descriptions of further commands, which are dispatched elsewhere but listed in the help.

    Raises:
      JaxpflError: if there is no such command, if it does not accept the arguments, or if the command raises the error.
    """
    known = {command.__name__.replace("_", "-"): command for command in commands}
    names = [*known, *others]
    if not args:
        raise JaxpflError(f"{prog} requires a command: {', '.join(names)} ({prog} --help explains them)")
    if args[0] in (*parsing.HELP, parsing.HELP_ALL):
        from jaxpfl.cli import help

        print(help.group_help(prog, description, {n: help.summary(c) for n, c in known.items()} | dict(others)))
        return
    name = args[0].replace("_", "-")
    if args[0].startswith("-"):
        raise JaxpflError(f"{prog} requires a command before {args[0]}: {', '.join(names)}")
    if name not in known:
        raise unknown_name(f"command of {prog}", args[0], names)
    command, name, args = known[name], f"{prog} {name}", args[1:]
    flags = parsing.flags_of(command)
    if {*parsing.HELP, parsing.HELP_ALL} & {*args}:
        from jaxpfl.cli import help

        more = help.describe(args) if any(flag.name in ("METHOD", "METHODS") for flag in flags) else ""
        print(help.command_help(name, command, flags, more, whole=parsing.HELP_ALL in args))
        return
    args = parsing.check_arguments(flags, args, name)
    with named({flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in args if flag.startswith("--")}):
        parsing.bind_arguments(command, name, args)()


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    group = sys.modules.get("jaxpfl.support.processes")
    if group and not group.is_first():  # only the first process prints warnings
        return
    if issubclass(category, JaxpflWarning):
        print(f"warning: {message}", file=sys.stderr)
    elif not compile_cache.repair(str(message)):
        print(f"{filename}:{lineno}: {category.__name__}: {message}", file=sys.stderr)
