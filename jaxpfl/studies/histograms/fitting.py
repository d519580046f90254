"""Defaults of the histogram study that are too large for small data, reduced with a message; given values are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpfl.data.sources.token_counts import TokenCounts, shares_of
from jaxpfl.studies.histograms.settings import HistogramSettings
from jaxpfl.support.errors import JaxpflError

_FEW = 20
"""Number of users below which the minimum number of tokens per user is lowered."""
_LEAST = (50, 20, 10, 5, 2)
_USERS_OF_A_CLUSTER = 4


def follow(given: HistogramSettings, counts: TokenCounts | None) -> tuple[HistogramSettings, dict[str, Any]]:
    """Adapt settings at their defaults to the data.

    Args:
      given: already checked on its own.
      counts: of real users; None of synthetic ones.

    Returns:
      The settings, and those that were changed.

    Raises:
      JaxpflError: all that the data cannot hold, of what was given, in one line.
    """
    taken: dict[str, Any] = {}
    wrong: list[str] = []

    def at_most(name: str, most: int, instead: int, why: str = "") -> None:
        value = getattr(given, name)
        if value is None or value <= most:
            return
        if value == getattr(HistogramSettings, name):
            taken[name] = instead
        else:
            wrong.append(f"{name} must be at most {most}{why}, got {value}")

    tokens, users = given.tokens, given.users
    if counts is not None:
        vocabulary = len(counts.vocabulary)
        at_most("tokens", vocabulary, vocabulary, f" (those of {given.data})")
        tokens = min(given.tokens, vocabulary)
        users = _users(given, counts, tokens, taken, wrong)
    at_most("kept_tokens", tokens, max(1, tokens // 10))
    at_most("candidates", tokens, tokens)
    if not given.floor < 1 / tokens:
        wrong.append(f"floor must be > 0 and below 1/{tokens}, got {given.floor:g}")
    validation, unseen = shares_of(users, given.validation, given.unseen)
    together = users - validation - unseen
    if users > 2 and together > 0:
        few = max(1, together // _USERS_OF_A_CLUSTER)
        if given.clusters == HistogramSettings.clusters:
            at_most("clusters", few, few)
        at_most("clusters", together, few, f" (the users that estimate, of {users})")
        at_most("private_clusters", together, few, f" (the users that estimate, of {users})")
    if given.tune and validation < 2 * given.folds:
        if given.folds == HistogramSettings.folds and validation >= 4:
            taken["folds"] = validation // 2
        else:
            most = validation // 2
            wrong.append(
                f"folds must be at most {most}, two of the {validation} validation users each, got {given.folds}"
            )
    if wrong:
        raise JaxpflError("; ".join(wrong))
    return replace(given, **taken), taken


def _users(given: HistogramSettings, counts: TokenCounts, tokens: int, taken: dict[str, Any], wrong: list[str]) -> int:
    """Number of users with enough tokens."""
    sizes = counts.most_frequent(tokens).sizes
    least = given.least_tokens
    if least == HistogramSettings.least_tokens and (sizes >= least).sum() < _FEW:
        least = next((n for n in _LEAST if (sizes >= n).sum() >= _FEW), _LEAST[-1])
        taken["least_tokens"] = least
    users = int((sizes >= max(least, 2)).sum())
    if users < 3:
        wrong.append(f"{given.data}: three users with least_tokens {max(least, 2)} tokens are needed, got {users}")
    return users


def said(taken: dict[str, Any], given: dict[str, Any]) -> str:
    """A line on the changed settings."""
    line = ", ".join(f"{name} {value}" for name, value in taken.items())
    private = ", which no eps covers" if given["epsilon"] else ""
    return f"smaller than by default, after the data{private}: {line}"
