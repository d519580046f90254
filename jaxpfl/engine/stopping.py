"""Rounds of evaluation, the best of them, and early stopping by validation scores: test scores have no part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Chosen(NamedTuple):
    """Choice of each of S runs among its evaluations.

    Attributes:
      best: [S] index of the best evaluation, the first of equal ones; 0 where no score is a number.
      over: [S] bool, true if a run's patience has ended.
    """

    best: np.ndarray
    over: np.ndarray


def chosen(validation: np.ndarray, patience: int | None = None, *, lower: bool = False) -> Chosen:
    """Best evaluation of each run, and whether its patience has ended.

    A run's patience ends at the ``patience``-th evaluation in a row that is not better than the best before; later
    ones, which the other runs of its program need, do not count. A score that is not a number is never better.

    Examples:
      >>> chosen(np.array([[0.5], [0.7], [0.6], [0.7], [0.9]]), patience=2)
      Chosen(best=array([1]), over=array([ True]))

    Args:
      validation: mean validation scores, [E, S].
      patience: number of evaluations; None for no end.
      lower: less is better.
    """
    runs = validation.shape[1]
    best, over = np.zeros(runs, int), np.zeros(runs, bool)
    record, waited = np.full(runs, -np.inf), np.zeros(runs, int)
    for nth, scores in enumerate(-validation if lower else validation):
        better = ~over & (scores > record)
        best, record = np.where(better, nth, best), np.where(better, scores, record)
        waited = np.where(better, 0, waited + 1)
        if patience is not None:
            over = over | (waited >= patience)
    return Chosen(best, over)


def first_time(scores: np.ndarray, seconds: np.ndarray, score: float, *, lower: bool = False) -> np.ndarray:
    """Time of each run's first evaluation that reaches a score, [S]; NaN for a run that never does.

    Examples:
      >>> first_time(np.array([[0.5, 0.9], [0.8, 0.7]]), np.array([[10.0, 20.0], [30.0, 40.0]]), 0.8)
      array([30., 20.])

    Args:
      scores, seconds: score and time at each evaluation, [E, S].
      score: the least score that counts, or the largest if ``lower``, where less is better.
    """
    there = scores <= score if lower else scores >= score
    first = np.argmax(there, axis=0)[None]
    return np.where(there.any(axis=0), np.take_along_axis(seconds, first, axis=0)[0], np.nan)


def milestones(start: int, rounds: int, *every: int) -> Iterator[int]:
    """The rounds in (start, rounds] that are a multiple of some ``every`` (0: none), and ``rounds`` itself, in order.

    Multiples are absolute, so a resumed run stops where the uninterrupted one does.

    Examples:
      >>> list(milestones(3, 10, 4))
      [4, 8, 10]
    """
    while start < rounds:
        start = min([rounds, *((start // n + 1) * n for n in every if n)])
        yield start
