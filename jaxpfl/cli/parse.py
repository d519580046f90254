"""Parsing of one command's arguments: help, one-line errors, and the call. The only file that calls tyro."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro
from tyro.conf import DisallowNone

from jaxpfl.cli.arguments import checked
from jaxpfl.cli.flags import REGISTRY
from jaxpfl.cli.signature import flags_of
from jaxpfl.errors import JaxpflError

HELP = ("-h", "--help")


def with_more(command: Callable[..., None], more: Callable[[Sequence[str]], str]) -> Callable[..., None]:
    """A command whose help has additional lines: ``more`` builds them from the arguments."""
    vars(command)["more"] = more
    return command


def run(command: Callable[..., None], name: str, args: Sequence[str]) -> None:
    """Call a command with its parsed arguments, or print its help on request.

    Args:
      command: a function whose parameters are its flags (see `flags_of`).
      name: of the command, ``jaxpfl run``.
      args: the arguments after it.

    Raises:
      JaxpflError: if the arguments are not the command's; and any that the command raises.
    """
    flags = flags_of(command)
    if set(HELP) & set(args):
        from jaxpfl.cli import help

        more = vars(command).get("more")
        print(help.of_command(name, command, flags, more(args) if more else ""))
        return
    bound(command, name, checked(flags, args, name))()


def bound(command: Callable[..., None], name: str, args: Sequence[str]) -> Callable[[], None]:
    """The call of a command with checked arguments.

    Raises:
      JaxpflError: if they do not parse.
    """

    @functools.wraps(command)
    def later(*values: Any, **named: Any) -> Callable[[], None]:
        return functools.partial(command, *values, **named)

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            call = tyro.cli(later, prog=name, args=args, config=(DisallowNone,), registry=REGISTRY)
    except SystemExit:  # an unforeseen error, which tyro prints in a box
        text = "".join(" " if char in "│╭╮╰╯─|+" else char for char in said.getvalue())
        raise JaxpflError(f"{name}: {' '.join(text.split())}") from None
    print(said.getvalue(), end="", file=sys.stderr)
    return call
