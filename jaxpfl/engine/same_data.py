"""Comparison of the clients' data between the processes of a run, once for data that nobody changes."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from jaxpfl.core import trees
from jaxpfl.core.types import Federation
from jaxpfl.support import processes

_compared: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}
"""Arrays that need no comparison, by their identities."""


def compare(federation: Federation) -> None:
    """Refuse clients' data that differ between the processes, by a checksum of all of them.

    Raises:
      AgreedError: with the two checksums.
    """
    if not processes.several():
        return
    leaves = jax.tree.leaves(federation)
    known = _compared.get(tuple(map(id, leaves)), [])
    if known and all(ref() is leaf for ref, leaf in zip(known, leaves, strict=True)):
        return
    processes.agree("the clients' data", trees.checksum(federation))


def remember(*federations: Federation | None) -> None:
    """Take data as compared from now on: every process must have found them to be the same, and change no array."""
    for key in [key for key, refs in _compared.items() if any(ref() is None for ref in refs)]:
        del _compared[key]
    for federation in federations:
        leaves = jax.tree.leaves(federation)
        if leaves:
            _compared[tuple(map(id, leaves))] = [weakref.ref(leaf) for leaf in leaves]
