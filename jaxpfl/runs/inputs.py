"""Inputs of a run in addition to its settings, and the privacy claim that depends on these inputs.

The data are identified by their checksum. A graph of clients is a CSV file with one edge (two client ids) on each line;
a header and repeated edges are allowed. Given parameters have an origin.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.core.trees import checksum
from jaxpfl.core.types import Federation
from jaxpfl.data.sources import csv_text
from jaxpfl.engine.build import Assembled
from jaxpfl.privacy import Mechanism, PrivacyConfig, SiloMechanism, Statement
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, shown


def data_checksum(*federations: Federation | None) -> int:
    """CRC-32 of the clients with their examples; it does not depend on capacities."""
    given = [one for one in federations if one is not None]
    return checksum([(one.client_ids, [(split.flat(), split.size) for split in one.all_splits]) for one in given])


def has_checksum(stored: int, *federations: Federation | None) -> bool:
    """True if a stored checksum matches these data."""
    return stored == data_checksum(*federations)


GRAPH_HEADER = ("client", "neighbour")


def read_graph(path: Path, client_ids: np.ndarray) -> Graph:
    """Read a graph of clients; clients that the file does not name have no neighbours.

    Args:
      client_ids: ids of the clients in the order of the stack, [m].

    Raises:
      JaxpflError: if the file cannot be read, or a line does not hold the ids of two different clients.
    """
    cells, _ = csv_text.rows(path)
    if cells.shape[1] > 1 and not any(cell.lstrip("-").isdecimal() for cell in cells.iloc[0]):
        cells = cells.iloc[1:]
    place = {str(client): row for row, client in enumerate(client_ids.tolist())}
    pairs = []
    for line, row in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        if len(row) != 2 or row[0] == row[1] or not place.keys() >= set(row):
            raise JaxpflError(
                f"{path} line {line}: needs the ids of two different clients of the data, got {shown(','.join(row))}"
            )
        pairs.append([place[cell] for cell in row])
    return graphs.from_edges(pairs, len(client_ids))


def write_graph(path: Path, graph: Graph, client_ids: np.ndarray) -> None:
    """Write a graph in the format that `read_graph` reads."""
    with files.whole(path) as file:
        writer = csv.writer(file)
        writer.writerow(GRAPH_HEADER)
        writer.writerows(zip(client_ids[graph.first].tolist(), client_ids[graph.second].tolist(), strict=True))


class Origin(NamedTuple):
    """Origin of given parameters: the checksum of their training data, and whether they are private."""

    data: int
    private: bool


def caveat(origin: Origin | None, *federations: Federation | None) -> str:
    """Caveat of a run's claim due to its initial parameters, for these data."""
    if origin is None or not has_checksum(origin.data, *federations):
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A mechanism and its guarantee; the guarantee is None if nothing can be claimed, for example without noise."""

    mechanism: Mechanism | SiloMechanism
    statement: Statement | None


def protection_of(run: Assembled, caveats: tuple[str, ...] = ()) -> Protection | None:
    """Mechanism and claim that protect a method's uploads, or the examples of its silos; None without privacy.

    Args:
      run: run with one noise multiplier.
      caveats: weaknesses of the claim.

    Raises:
      JaxpflError: if no accountant covers the run.
    """
    if run.mechanism is None:
        return None
    released, asked = run.released(1), run.spec.privacy  # one for all seeds
    assert released is not None
    plan = released[0]
    if plan is None:
        return Protection(run.mechanism, None)
    assert isinstance(asked, PrivacyConfig)
    assert asked.delta is not None
    statement = plan.statement(asked.delta, asked.accountant)
    return Protection(run.mechanism, statement._replace(noise_seed=asked.noise_seed, caveats=caveats))
