"""A run's records as one table, ``.csv`` or ``.parquet``: a row for each round or evaluation of each seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpfl.support import files, parquet
from jaxpfl.support.errors import JaxpflError
from jaxpfl.runs.stored_run import open_run

if TYPE_CHECKING:
    import pandas

KINDS = (".csv", ".parquet")


def write(run: Path, path: Path) -> int:
    """Write the records of a run, finished or not, as a table.

    Args:
      run: the run folder.
      path: the file, whose name says its kind.

    Returns:
      The number of rows.

    Raises:
      JaxpflError: for a folder without a run or without a round, damaged records, a file of another kind, and one that
        exists or cannot be written.
    """
    if path.suffix not in KINDS:
        raise JaxpflError(f"--rounds must be a file that ends in {' or '.join(KINDS)}, got {str(path)!r}")
    if path.exists():
        raise JaxpflError(f"{path} exists: choose another --rounds")
    found = table(run)
    if path.suffix == ".csv":
        with files.whole(path) as file:
            found.to_csv(file, index=False)
    else:
        parquet.write_table(path, found)
    return len(found)


def table(run: Path) -> pandas.DataFrame:
    """The records of a run: ``kind`` (round or evaluation), ``method``, ``round``, ``seed``, then every metric, missing
    where a record has none or it is not finite.

    Raises:
      JaxpflError: for a folder without a run or without a round, and damaged records.
    """
    import pandas

    seeds, path = open_run(run).seeds, run / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for record in files.Records(path).read():
        names = {name: record[name] for name in ("kind", "method", "round")}
        values = {name: value for name, value in record.items() if name not in names}
        if any(isinstance(value, list) and len(value) != len(seeds) for value in values.values()):
            raise JaxpflError(f"{path} is damaged: it has not a value for each of {len(seeds)} seeds")
        for place, seed in enumerate(seeds):
            own = {name: value[place] if isinstance(value, list) else value for name, value in values.items()}
            rows.append(names | {"seed": seed} | own)
    if not rows:
        raise JaxpflError(f"{run} has no round yet")
    found = pandas.DataFrame(rows)
    return found.astype(dict.fromkeys(found.columns[4:], float))
