"""MNIST with the writer of each digit, for naturally heterogeneous clients.

The pixels are MNIST's; the writers were recovered by QMNIST (Yadav and Bottou 2019, "Cold Case: The Lost MNIST
Digits"). The test set has other writers than the training set: `unseen` makes new clients of them, and the clients of
the partition "natural" are split by ``test_share``.
"""

from __future__ import annotations

from pathlib import Path

from jaxpfl.data.sources.base import Entry, Source, entry, where_to_put_it
from jaxpfl.data.sources.npz import load_npz
from jaxpfl.support.errors import JaxpflError

WRITERS = "mnist-writers"
_FILE = "mnist_by_writer.npz"
_DESCRIPTION = "MNIST by its writers, each a natural client"


def load_writers(root: Path, *, in_files: bool = False) -> Source:
    """Load ``mnist-writers``, with inputs in memory-mapped files if asked to.

    Raises:
      JaxpflError: if the file is missing (with where to put it) or damaged.
    """
    return load_npz(WRITERS, _locate(root), _DESCRIPTION, in_files=in_files)


def writers_entry(root: Path) -> Entry:
    """The line of ``jaxpfl data list`` for this set."""
    return entry(WRITERS, lambda: f"{_DESCRIPTION}: {_locate(root)}")


def _locate(root: Path) -> Path:
    places = [root / "writers" / _FILE, root / WRITERS / _FILE, root / _FILE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise JaxpflError(f"data set {WRITERS!r}: no file {places[0]}: {where_to_put_it()}")
    return found
