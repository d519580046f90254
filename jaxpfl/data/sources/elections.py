"""Winners of US presidential elections by county, 2000 to 2020: real Bernoulli clients of six samples each.

``elections/county_winners_2000_2020.csv`` in the data directory, with a header and the columns ``fips`` (a county's
five digits) and ``win_YYYY`` (R or D) for two elections or more. Both parties' votes, ``dem_YYYY`` and ``rep_YYYY``,
are read if all of these elections have them; other columns are ignored. From the MIT Election Lab's county returns
(doi:10.7910/DVN/VOQCHQ).
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.data.sources.base import data_directory, where_to_put_it
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits, opened

FILE = "county_winners_2000_2020.csv"
_PARTIES = {"R": 1.0, "D": 0.0}


class Elections(NamedTuple):
    """Winners of elections by county.

    Attributes:
      counties: [m] FIPS codes, in the order of the file.
      years: [e], ascending.
      republican: [m, e], 1 where the Republican won.
      votes: [m, e, 2], numbers of Democratic and Republican votes; None unless the file has those of all elections.
    """

    counties: np.ndarray
    years: np.ndarray
    republican: np.ndarray
    votes: np.ndarray | None = None


def load_elections(data_dir: str | None = None) -> Elections:
    """Read the winners.

    Args:
      data_dir: see `data_directory`.

    Raises:
      JaxpflError: if the file is missing (with advice), or not of the format (with the line and the reason).
    """
    path = data_directory(data_dir) / "elections" / FILE
    if not path.is_file():
        raise JaxpflError(f"data set 'elections': no file {path}: {where_to_put_it()}")
    try:
        check_fits(path, 20 * path.stat().st_size)
        with opened(path) as file:
            rows = list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""), restval=None))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JaxpflError(f"{path}: no CSV text: {' '.join(str(error).split())}") from None
    columns = {int(c[4:]): c for c in (rows[0] if rows else {}) if c and re.fullmatch(r"win_\d{4}", c)}
    if len(columns) < 2 or "fips" not in rows[0]:
        raise JaxpflError(f"{path}: needs a header with fips and at least two columns win_YYYY, and counties below it")
    years = sorted(columns)
    parties = [[f"{party}_{year}" for party in ("dem", "rep")] for year in years]
    counted = all(name in rows[0] for names in parties for name in names)
    counties, winners, votes, seen = [], [], [], set()
    for line, row in enumerate(rows, start=2):
        fips = row["fips"]
        if not re.fullmatch(r"\d{5}", fips or "") or fips in seen:
            raise JaxpflError(f"{path} line {line}: fips must be five digits and distinct, got {shown(fips)}")
        for year in years:
            if row[columns[year]] not in _PARTIES:
                raise JaxpflError(
                    f"{path} line {line}: {columns[year]} must be R or D, got {shown(row[columns[year]])}"
                )
        seen.add(fips)
        counties.append(fips)
        winners.append([_PARTIES[row[columns[year]]] for year in years])
        if counted:
            votes.append([[_votes(path, line, name, row[name]) for name in names] for names in parties])
    return Elections(np.array(counties), np.array(years), np.array(winners), np.array(votes) if counted else None)


def _votes(path: Path, line: int, name: str, text: str | None) -> int:
    """A number of votes.

    Raises:
      JaxpflError: for what is none.
    """
    if not re.fullmatch(r"\d{1,9}", text or "", re.ASCII):
        raise JaxpflError(f"{path} line {line}: {name} must be a whole number of votes, got {shown(text)}")
    return int(text or "")
