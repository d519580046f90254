"""Errors that the caller can fix. Each message is one line with the wrong name, its value and the allowed values."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LISTED = 150  # characters of a list of names in a message; a longer list is cut to the nearest names
_FEW = 5


class JaxpflError(Exception):
    """An invalid argument, an unusable file, or incompatible settings.

    The message is one line, which the command line prints unchanged.

    This is not a ValueError, because argument parsers catch ValueErrors and print them in their own format.
    """


class UnwritableError(JaxpflError):
    """A file that cannot be written, for example on a full disk. The message has the name and the system's reason."""


class OutOfMemoryError(JaxpflError):
    """A program that does not fit into memory. The message says how to use less memory."""


_EXHAUSTED = ("out of memory", "resource_exhausted", "can't start new thread")


def is_exhausted(error: BaseException) -> bool:
    """Return True if an error means that memory ran out: in Python, in XLA, or for the stack of a new thread."""
    if isinstance(error, OutOfMemoryError | MemoryError):
        return True
    # jax raises its own subclass of RuntimeError, and threading raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _EXHAUSTED)


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Convert each OSError of the block to an `UnwritableError` that names the file or folder.

    Raises:
      UnwritableError: if the block raises an OSError; the message has the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"cannot write to {path}: {error.strerror or error}") from None


@contextmanager
def expecting(path: object, what: str) -> Iterator[None]:
    """Raise an error that names the file, if the block fails because the file has an unexpected structure.

    Raises:
      JaxpflError: if the block raises one of Python's errors for a missing entry, a wrong type or an invalid value.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise JaxpflError(f"{path} is damaged or is not {what} ({printable(why)})") from error


class JaxpflWarning(UserWarning):
    """Something that works but is probably not intended; an error under ``--strict``."""


def warn(message: str, *, strict: bool = False) -> None:
    """Issue a `JaxpflWarning` that points at the user's line, or raise it as an error if ``strict``.

    Raises:
      JaxpflError: if ``strict``, with the same message.
    """
    if strict:
        raise JaxpflError(message)
    # Skip callers in the package, and in JAX, which calls the package's functions while it traces them.
    frame, level = sys._getframe(1), 2
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("jaxpfl", "jax", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, JaxpflWarning, stacklevel=level)


def shown(value: object, most: int = 60) -> str:
    """Return the ``repr`` of a value for a one-line message, truncated after ``most`` characters.

    Examples:
      >>> shown("x" * 100, most=8)
      "'xxxxxxx ..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def printable(text: str, most: int = 100) -> str:
    """Return text for a one-line message: unchanged or, if unprintable or too long, passed through `shown`.

    Examples:
      >>> printable("weight"), printable("a\\nb")
      ('weight', "'a\\\\nb'")
    """
    return text if text.isprintable() and len(text) <= most else shown(text, most)


def label(name: str) -> str:
    """Return a name from data for a table or plot: shortened, and quoted if it is empty or unprintable.

    Examples:
      >>> label("Bern"), label(""), label("a\\tb")
      ('Bern', "''", "'a\\\\tb'")
    """
    return printable(name, 30) if name else repr(name)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> JaxpflError:
    """Return the error for an unregistered name, with the nearest registered name.

    Examples:
      >>> unknown_name("method", "adapd", ["local", "adaped"])
      JaxpflError("unknown method 'adapd': did you mean 'adaped'? (known: adaped, local)")
      >>> unknown_name("method", "ADAPED", ["local", "adaped"])
      JaxpflError("unknown method 'ADAPED': did you mean 'adaped'? (known: adaped, local)")
    """
    names = sorted(known)
    near = _near(name, names)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return JaxpflError(f"unknown {kind} {shown(name)}{hint} (known: {listed(names, name)})")


def missing_extra(what: str, package: str, extra: str) -> JaxpflError:
    """Return the error for a missing package that an extra of this distribution installs."""
    return JaxpflError(
        f"{what} requires the package {package}: pip install '.[{extra}]' in a clone, or pip install 'jaxpfl[{extra}]'"
    )


def listed(names: Iterable[str], name: str) -> str:
    """List known names for a one-line message: all if the list is short, otherwise the most similar to ``name``.

    Examples:
      >>> listed((f"setting-{i}" for i in range(100)), "setting-42")
      'setting-42, setting-4, setting-2, setting-94, setting-92, ... of 100'
    """
    names = list(names)
    text = ", ".join(map(printable, names))
    if len(text) <= _LISTED:
        return text or "none"
    return f"{', '.join(map(printable, _near(name, names) or names[:_FEW]))}, ... of {len(names)}"


def _near(name: str, names: Iterable[str]) -> list[str]:
    lower = {one.lower(): one for one in names}
    return [lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=_FEW, cutoff=0.5)]
