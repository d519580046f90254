"""Small published data sets with known answers, of a few hundred bytes each."""

from __future__ import annotations

import numpy as np

BATTERS = (
    ("Clemente", 18, 0.346), ("F. Robinson", 17, 0.298), ("F. Howard", 16, 0.276), ("Johnstone", 15, 0.222),
    ("Berry", 14, 0.273), ("Spencer", 14, 0.270), ("Kessinger", 13, 0.263), ("L. Alvarado", 12, 0.210),
    ("Santo", 11, 0.269), ("Swoboda", 11, 0.230), ("Unser", 10, 0.264), ("Williams", 10, 0.256),
    ("Scott", 10, 0.303), ("Petrocelli", 10, 0.264), ("E. Rodriguez", 10, 0.226), ("Campaneris", 9, 0.285),
    ("Munson", 8, 0.316), ("Alvis", 7, 0.200),
)  # fmt: skip
"""Batters of 1970, hits of their first 45 at bats, and averages in the remainder of the season (Efron and Morris 1975,
"Data analysis using Stein's estimator and its generalizations", Table 1)."""

AT_BATS = 45

SCHOOLS = (
    ("A", 28.0, 15.0), ("B", 8.0, 10.0), ("C", -3.0, 16.0), ("D", 7.0, 11.0),
    ("E", -1.0, 9.0), ("F", 1.0, 11.0), ("G", 18.0, 10.0), ("H", 12.0, 18.0),
)  # fmt: skip
"""Schools, estimated effects of coaching on test scores and their standard errors (Rubin 1981, "Estimation in parallel
randomized experiments", Table 1)."""


def arcsine(average: np.ndarray) -> np.ndarray:
    """Averages of 45 at bats on the scale on which their variance is about one, whatever the batter's ability."""
    return np.sqrt(AT_BATS) * np.arcsin(2 * average - 1)


def average(value: np.ndarray) -> np.ndarray:
    """The inverse of `arcsine`."""
    return (np.sin(value / np.sqrt(AT_BATS)) + 1) / 2


def batters() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, early averages to three digits as they are printed, and later ones, [18] each."""
    names, hits, later = zip(*BATTERS, strict=True)
    return list(names), np.round(np.array(hits) / AT_BATS, 3), np.array(later)


def schools() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, effects and standard errors, [8] each."""
    names, effects, errors = zip(*SCHOOLS, strict=True)
    return list(names), np.array(effects), np.array(errors)
