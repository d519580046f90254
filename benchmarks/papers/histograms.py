"""Table 1 of Setlur et al.: users' distributions over a vocabulary, without and with privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..studies.histogram.methods import PRINTED
from .declared import UNPRINTED, Estimate, Estimation, Experiment, Printed

PAPER = "Setlur et al. 2023, Table 1"
STD = 0.01 * math.sqrt(20) / 2.093
"""Standard deviation over 20 runs that corresponds to a 95 % interval of ±.01 (Student's t, 19 degrees of freedom)."""
PRIVACY = (
    "as printed, DimRed and the start of Algorithm 1 are not private, and Algorithm 3 adds its noise to the "
    "mean: here, every release is accounted for, and there are 5 private rounds instead of 50"
)
INTERVAL = "the paper's ± of .01 is a 95 % interval: the table shows the standard deviation over the 20 runs, .0214"
HALVES = (
    "the paper has 500 tokens of each user for training and 2000 for testing: here, users have at least 100 "
    "tokens, half for training and half for testing"
)
_SETTINGS: Mapping[str, Any] = {"tokens": 1000, "clusters": 10, "temperature": 0.5, "epsilon": (15.0,)}
_ALONE = "Local"
"""Estimator that sends nothing, so it has no private form."""
_COLUMNS = {"non-private": "non-private", "eps 15, delta 1e-10": "epsilon 15"}


def _case(setting: str, settings: Mapping[str, Any], *, printed: bool) -> Estimation:
    rows = tuple(
        Estimate(
            name,
            f"{name}, {'non-private' if name == _ALONE else column}",
            Printed(values[place], STD) if printed else UNPRINTED,
            setting=words,
            note="this value depends only on the floor s" if name == _ALONE else "",
        )
        for place, (words, column) in enumerate(_COLUMNS.items())
        for name, values in PRINTED.items()
    )
    return Estimation(setting, "histogram", {**_SETTINGS, **settings}, rows, _QUICK, note=PRIVACY)


_QUICK: Mapping[str, Any] = {
    "data": "synthetic",
    "users": 300,
    "tokens": 100,
    "clusters": 3,
    "components": 3,
    "rounds": 3,
    "private_rounds": 2,
    "repetitions": 2,
}

EXPERIMENTS = (
    Experiment(
        "histograms-table1",
        PAPER,
        "Reddit users' tokens (LEAF): loss of nine estimators, without and with privacy",
        60,
        (_case("Reddit", {"data": "leaf:{data}/reddit", "rounds": 50, "lam": 0.3}, printed=True),),
        note=f"{INTERVAL}; {HALVES}",
    ),
    Experiment(
        "histograms-table1-irc",
        f"{PAPER}, on other data",
        "IRC users' tokens: loss of nine estimators, without and with privacy",
        2,
        (_case("IRC", {"data": "irc", "rounds": 50}, printed=False),),
        note="not the paper's data: IRC users replace Reddit users, and lambda is tuned on validation users",
    ),
    Experiment(
        "histograms-table1-synthetic",
        f"{PAPER}, on drawn users",
        "20000 users of a mixture of Dirichlets: loss of nine estimators, without and with privacy",
        2,
        (_case("drawn", {"users": 20_000, "rounds": 50, "repetitions": 5}, printed=False),),
        note="not the paper's data: simulated users replace Reddit users, and lambda is tuned on validation users",
    ),
)
