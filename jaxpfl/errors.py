"""Errors that are the caller's to mend: one line that names what is wrong and what is allowed."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable


class JaxpflError(Exception):
    """A bad argument, file or combination. The message is one line; the command line prints it as it is.

    Not a ValueError: argument parsers catch those and print them in a form of their own.
    """


class JaxpflWarning(UserWarning):
    """Something that works but probably is not what was meant; an error under ``--strict``."""


def warn(message: str, *, strict: bool = False) -> None:
    """Says what is doubtful to who called the caller, as a JaxpflWarning; ``strict`` refuses it.

    Raises:
      JaxpflError: the message, where ``strict`` is true.
    """
    if strict:
        raise JaxpflError(message)
    warnings.warn(message, JaxpflWarning, stacklevel=3)


def shown(value: object, most: int = 60) -> str:
    """A value for a message of one line: its ``repr``, cut where it is longer.

    >>> shown("x" * 100, most=8)
    "'xxxxxxx ..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> JaxpflError:
    """The error for a name that is not registered, with the nearest known one.

    >>> unknown_name("method", "adapd", ["local", "adaped"])
    JaxpflError("unknown method 'adapd': did you mean 'adaped'? (known: adaped, local)")
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return JaxpflError(f"unknown {kind} {shown(name)}{hint} (known: {', '.join(names)})")
