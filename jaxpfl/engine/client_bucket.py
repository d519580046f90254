"""Buckets of client counts: a stack with rows that are nobody's, so that runs of other client counts share programs.

With b rows for m clients, a program is one of b clients of which the last b - m never take part. Their number, the
cohort's and its expected value are arguments. Nobody's rows have no examples, work in no round, and are cut off from
scores and stored states. The numbers are those without a bucket, up to the order of additions.

Not served: servers that see single uploads or hold a row for each client (the shapes of their states and of the uploads
say how many there are), and clients in groups or on a graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms import LocalWork
from jaxpfl.core.participation import CohortNumbers, Participation
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Array, ClientData, Federation, Key, PyTree
from jaxpfl.engine import compiled, refusals
from jaxpfl.engine.execution_plan import ExecutionPlan, bucket_of, stack_rows
from jaxpfl.engine.state import number, server_context


class Bucket(NamedTuple):
    """The stack of a simulation's clients, as its programs see it.

    Attributes:
      rows: b; m without a bucket.
      participation: the sampling of cohorts; in a bucket without its numbers.
      numbers: arguments of the programs; None without a bucket.
      why: the reason for the number of rows; empty if the plan asks for no bucket.
    """

    rows: int
    participation: Participation
    numbers: CohortNumbers | None = None
    why: str = ""

    @classmethod
    def none(cls, participation: Participation, why: str = "") -> Bucket:
        """As many rows as clients."""
        return cls(participation.num_clients, participation, why=why and f"no bucket: {why}")

    @property
    def pads(self) -> bool:
        """True for a bucket, whether or not it has more rows than there are clients."""
        return self.numbers is not None

    def padded(self, federation: Federation) -> Federation:
        """The data with nobody's rows, of id 0 and without examples, and with `stores_padded`."""
        if not self.pads:
            return federation
        more = self.rows - federation.num_clients

        def with_nobody(split: ClientData) -> ClientData:
            return dataclasses.replace(split, start=_lengthened(split.start, more), size=_lengthened(split.size, more))

        ids, *splits = stores_padded(federation, self.rows)
        return Federation(_lengthened(ids, more), *map(with_nobody, splits))


def stores_padded(federation: Federation, rows: int) -> Federation:
    """The data on the host with capacities, chunks and stores (as long as of so many clients) of `bucket_of` length."""

    def padded(split: ClientData) -> ClientData:
        total = len(split.examples.y)
        length = bucket_of(-(-total * rows // federation.num_clients))
        examples = jax.tree.map(lambda a: _lengthened(a, length - total), split.examples)
        return dataclasses.replace(
            split, examples=examples, capacity=bucket_of(split.capacity), chunk=bucket_of(split.chunk)
        )

    ids, *splits = federation
    return Federation(ids, *map(padded, splits))


def _lengthened(a: Array, more: int) -> np.ndarray:
    return np.pad(a, [(0, more)] + [(0, 0)] * (np.ndim(a) - 1))


def bucket_for(plan: ExecutionPlan, algorithm: Algorithm, participation: Participation, hp: PyTree) -> Bucket:
    """The bucket that a plan asks for, or none with the reason why an algorithm or a participation cannot have one.

    Args:
      plan: the plan.
      algorithm: the method.
      participation: of the m clients.
      hp: hyper-parameters; leaves [] or [S].

    Raises:
      JaxpflError: for a bucket of fewer rows than clients.
    """
    clients, rows = participation.num_clients, stack_rows(plan, participation.num_clients)
    if plan.client_bucket == "none":
        return Bucket.none(participation)
    # A cohort is thought of as a share of the clients: .1 m of them has the same slots whatever m is.
    slots = rows if participation.everyone else min(bucket_of(-(-participation.capacity * rows // clients)), rows)
    bare = participation.without_numbers(rows, slots)
    if bare is None:
        return Bucket.none(participation, f"cohorts are drawn by a rule of their own ({participation.name})")
    numbers = participation.numbers
    numbers = numbers._replace(expected=number(numbers.expected))
    why = _refusal(algorithm, bare, numbers, hp)
    if why:
        return Bucket.none(participation, why)
    return Bucket(rows, bare, numbers, f"one program for up to {rows} clients, {clients} here")


def work_within(work: LocalWork) -> LocalWork:
    """The same local work for clients of about these sizes, whatever their number."""
    sizes = np.asarray(work.sizes)
    least, largest = int(sizes[sizes > 0].min(initial=2**31 - 1)), int(sizes.max(initial=0))
    most = bucket_of(largest)
    if work.batch_size >= largest:  # every batch is all of a client's examples, and stays so
        most = max(min(most, work.batch_size), largest)
    between = np.arange(_bucket_below(min(least, largest)), most + 1)
    return dataclasses.replace(work, sizes=between if sizes.all() else np.append(between, 0), bounds=True, unseen=0)


def _bucket_below(value: int) -> int:
    """The largest number up to a value that is `bucket_of` itself."""
    step = max(1, 2 ** (value.bit_length() - 3))
    return value // step * step


def _refusal(algorithm: Algorithm, participation: Participation, numbers: CohortNumbers, hp: PyTree) -> str:
    """The reason why a program of this algorithm depends on the number of clients; empty if it does not."""
    if algorithm.pooled:
        return "one client trains"
    if why := refusals.of_stack(algorithm):
        return why

    def first(numbers: CohortNumbers, hp: Any, key: Key) -> PyTree:
        ctx = server_context(participation.at(numbers), jnp.int32(0))
        return algorithm.server.broadcast(key, hp, ctx, algorithm.server.init(key, hp, ctx)).per_client

    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((), number(a).dtype), hp)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    try:
        per_client = compiled.shapes(first, numbers, one, key)
    except (TypeError, jax.errors.JAXIndexError):  # a value or a shape was asked for that is traced here
        return "its server depends on the number of clients"
    return refusals.of_messages(per_client)
