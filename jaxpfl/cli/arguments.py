"""Arguments checked against a command's flags: what is wrong is one line that names the flag, its value and what is
allowed."""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxpfl.cli.signature import REQUIRED, Flag
from jaxpfl.errors import JaxpflError, shown
from jaxpfl.settings import LARGEST

_MOST_LISTED = 12
_LARGEST_SEED = 2**32 - 1
_NUMBERS: dict[type, tuple[str, Callable[[str], float]]] = {
    int: ("a whole number, in digits", int),
    float: ("a number", float),
}


def checked(flags: Sequence[Flag], args: Sequence[str], command: str) -> list[str]:
    """The same arguments in one order: flags, then ``--`` and what is given by position.

    Args:
      flags: of the command.
      args: as they were typed.
      command: its name, ``jaxpfl run``.

    Raises:
      JaxpflError: an unknown flag (the nearest is suggested) or argument, a missing one, or a value that the flag does
        not take.
    """
    named = {flag.name: flag for flag in flags if not flag.positional} | {
        flag.off: flag for flag in flags if flag.kind is bool
    }
    places = [flag for flag in flags if flag.positional]
    queue, given, canonical = deque(args), set[Flag](), list[str]()
    loose: list[str] = []
    switch = None  # the last argument, where it was a switch
    while queue:
        token = queue.popleft()
        if token == "--":
            loose += queue
            break
        if not _is_flag(token):
            if switch is not None and _left(places, loose) < 1:
                raise JaxpflError(f"{switch} takes no value, got {shown(token)}")
            loose.append(token)
            switch = None
            continue
        name, equals, value = token.partition("=")
        name = name.replace("_", "-")
        if name not in named:
            raise _unknown(name, named, command)
        flag = named[name]
        given.add(flag)
        switch = name if flag.kind is bool else None
        if flag.kind is bool:
            if equals:
                raise JaxpflError(f"{name} takes no value, got {shown(value)}")
            canonical.append(name)
            continue
        values = [value] if equals else []
        reserved = sum(place.default is REQUIRED for place in places[len(loose) :]) if flag.many else 0
        while len(queue) > reserved and (flag.many or not values) and not _is_flag(queue[0]) and queue[0] != "--":
            values.append(queue.popleft())
        if not values and not flag.many:
            raise JaxpflError(f"{name} needs a value: {_wanted(flag)}")
        for text in values:
            _check(flag, text)
        canonical += [f"{name}={values[0]}", *values[1:]] if values else [name]
    _check_loose(places, loose, command)
    _check_given(flags, given, loose, command)
    return [*canonical, "--", *loose] if loose else canonical


def _left(places: Sequence[Flag], loose: Sequence[str]) -> float:
    """Number of further arguments that can be given by position."""
    return float("inf") if any(place.many for place in places) else len(places) - len(loose)


def _is_flag(token: str) -> bool:
    """True if it is written as a flag is; -0.1 and -inf are numbers."""
    return token.startswith("-") and token.lstrip("-")[:1].isalpha() and not _is_negative(token)


def _is_negative(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _check(flag: Flag, text: str) -> None:
    wanted = _wanted(flag)
    if not text.strip():
        raise JaxpflError(f"{flag.name} must be {wanted}, got {shown(text)}")
    if flag.choices and text not in flag.choices:
        raise JaxpflError(f"{flag.name} must be {wanted}, got {shown(text)}{_suggested(text, flag.choices)}")
    if flag.kind in _NUMBERS:
        try:
            value = _NUMBERS[flag.kind][1](text)
        except ValueError:
            raise JaxpflError(f"{flag.name} must be {wanted}, got {_short(text)}") from None
        if math.isnan(value):
            raise JaxpflError(f"{flag.name} must be {wanted}, got {shown(text)}")
        most = _LARGEST_SEED if flag.name.endswith("seed") else LARGEST
        if flag.kind is int and not -most <= value <= most:
            raise JaxpflError(f"{flag.name} must be at most {most}, got {_short(text)}")
    if flag.kind is Path and "\0" in text:
        raise JaxpflError(f"{flag.name} must be {wanted}, got {shown(text)}")
    try:
        trouble = flag.place.trouble(Path(text)) if flag.place is not None else None
    except OSError as error:
        raise JaxpflError(f"{flag.name} is no path: {error.strerror}: got {_short(text)}") from None
    if trouble is not None:
        raise JaxpflError(f"{flag.name} must be {trouble}: got {shown(text)}")


def _wanted(flag: Flag) -> str:
    if flag.choices:
        return _either(flag.choices)
    if flag.kind in _NUMBERS:
        return _NUMBERS[flag.kind][0]
    return "a path" if flag.kind is Path else "some text"


def _check_loose(places: Sequence[Flag], loose: Sequence[str], command: str) -> None:
    if _left(places, loose) < 0:
        takes = " ".join(place.name for place in places) or "flags"
        raise JaxpflError(f"{command} takes {takes} alone, got also {shown(loose[len(places)])}")
    for i, text in enumerate(loose):
        _check(places[min(i, len(places) - 1)], text)


def _check_given(flags: Iterable[Flag], given: set[Flag], loose: Sequence[str], command: str) -> None:
    places = [flag for flag in flags if flag.positional]
    lacking = [flag for flag in flags if flag.default is REQUIRED and flag not in given and flag not in places]
    lacking = [*(place for place in places[len(loose) :] if place.default is REQUIRED), *lacking]
    if lacking:
        names = [f"{flag.name} ({_either(flag.choices)})" if flag.choices else flag.name for flag in lacking]
        raise JaxpflError(f"{command} needs {_listed(names, 'and')}: {command} --help explains it")


def _unknown(name: str, named: Iterable[str], command: str) -> JaxpflError:
    names = sorted(named)
    said = _suggested(name, names)
    if not said:
        few = len(names) <= _MOST_LISTED
        said = f" (known: {', '.join(names)})" if few else f": {command} --help lists what it takes"
    return JaxpflError(f"unknown flag {name} of {command}{said}")


def _suggested(text: str, names: Iterable[str]) -> str:
    """The end of an error: the name that was probably meant, where there is one."""
    names = list(names)
    inner = [name for name in names if name.endswith(f".{text.lstrip('-')}")]  # --epsilon for --privacy.epsilon
    near = inner[:1] or difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)")


def _either(names: Sequence[str]) -> str:
    return _listed(names, "or")


def _listed(names: Sequence[str], last: str) -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else names[0]
