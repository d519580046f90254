"""What the command line does with its arguments; JAX and what else is heavy is imported inside a command."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff

from jaxpfl import signals
from jaxpfl.cli import training
from jaxpfl.cli.flags import REGISTRY
from jaxpfl.errors import JaxpflError, JaxpflWarning, unknown_name
from jaxpfl.experiment import compile_cache

DESCRIPTION = "Personalized federated learning, every round one compiled JAX program."
BENCH = "Measure speed against peers and against the machine: jaxpfl bench NAME; without a name, lists them."
GROUPS: dict[str, str] = {
    "estimate": "Estimate clients' parameters together: jaxpfl estimate NAME; simulated, or on data of your own.",
    "privacy": "Privacy calculators: epsilon, noise, paper, curve; audit tries to refute a claim.",
}
"""Commands with commands of their own, and what they are for: ``jaxpfl.cli.NAME`` has ``commands()``."""


def run(args: list[str]) -> None:
    """Runs one command. Errors that are the user's are one line and exit status 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", JaxpflWarning)
            warnings.filterwarnings("always", compile_cache.TROUBLE)
            warnings.showwarning = _show_warning
            _dispatch(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    except Exception as error:
        said = _users_own(error)
        if said is None:
            raise
        print(f"error: {' '.join(said.split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _users_own(error: Exception) -> str | None:
    """What is said of an error that is the user's, or the machine's; None of a defect."""
    if isinstance(error, JaxpflError | OSError):  # also a full disk, a folder taken away
        return str(error)
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    # jax has its own kind of RuntimeError.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower()):
        return f"out of memory: {error}"
    return None


def _dispatch(args: list[str]) -> None:
    if args == ["--version"]:
        from jaxpfl import __version__

        print(__version__)
        return
    if args[:1] == ["bench"]:  # a folder beside the package, installed with it; the benchmarks read their own options
        _stop_by_exception()
        importlib.import_module("jaxpfl.benchmarks.__main__").main(args[1:])
        return

    if args[:1] and args[0] in GROUPS:
        group = importlib.import_module(f"jaxpfl.cli.{args[0]}")
        _app(group.commands(), f"jaxpfl {args[0]}", GROUPS[args[0]], args[1:])
        return
    named = (_named(name, text) for name, text in {**GROUPS, "bench": BENCH}.items())
    _app((*training.commands(args), *named), "jaxpfl", DESCRIPTION, args)


def _stop_by_exception() -> None:
    """Has signals raise, so that what started processes can stop them."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + number)

    signals.unwatch()
    for number in signals.NUMBERS:
        signal.signal(number, end)


def _app(commands: Iterable[Callable[..., None]], prog: str, description: str, args: list[str]) -> None:
    commands = tuple(commands)
    names = [command.__name__.replace("_", "-") for command in commands]
    if args and not args[0].startswith("-") and args[0].replace("_", "-") not in names:
        raise unknown_name(f"command of {prog}", args[0], names)
    app = tyro.extras.SubcommandApp()
    for command in commands:
        app.command(command)
    app.cli(prog=prog, description=description, args=args, config=(FlagCreatePairsOff, DisallowNone), registry=REGISTRY)


def _named(name: str, text: str) -> Callable[[], None]:
    """A command for the list that ``--help`` prints; what it does was dispatched before."""

    def command() -> None: ...

    command.__name__, command.__doc__ = name, text
    return command


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    del file, line
    if issubclass(category, JaxpflWarning):
        print(f"warning: {message}", file=sys.stderr)
    elif not compile_cache.repair(str(message)):
        print(f"{filename}:{lineno}: {category.__name__}: {message}", file=sys.stderr)
