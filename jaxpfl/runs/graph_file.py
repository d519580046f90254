"""Graph of clients as a CSV file, an edge of two client ids on each line; a header and repeated edges are allowed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypeGuard

import numpy as np

from jaxpfl.support import files
from jaxpfl.data.sources import csv_text
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph

HEADER = ("client", "neighbour")


def is_named(graph: str | Graph | None) -> TypeGuard[str]:
    """Test for a ``--graph`` that is a file, not a space."""
    return isinstance(graph, str) and graph.lower().endswith(".csv")


def read(path: Path, client_ids: np.ndarray) -> Graph:
    """Read a graph; clients that the file does not name have no neighbours.

    Args:
      client_ids: of the clients in the order of the stack, [m].

    Raises:
      JaxpflError: for a file that cannot be read, a line that is not two ids of clients, and a client beside itself.
    """
    cells, _ = csv_text.rows(path)
    if cells.shape[1] > 1 and not any(cell.lstrip("-").isdecimal() for cell in cells.iloc[0]):
        cells = cells.iloc[1:]
    place = {str(client): row for row, client in enumerate(client_ids.tolist())}
    pairs = []
    for line, row in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        if len(row) != 2 or row[0] == row[1] or not place.keys() >= set(row):
            raise JaxpflError(
                f"{path} line {line}: needs the ids of two clients of the run, got {shown(','.join(row))}"
            )
        pairs.append([place[cell] for cell in row])
    return graphs.from_edges(pairs, len(client_ids))


def write(path: Path, graph: Graph, client_ids: np.ndarray) -> None:
    """Write a graph, as `read` takes it."""
    with files.whole(path) as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(zip(client_ids[graph.first].tolist(), client_ids[graph.second].tolist(), strict=True))
