r"""A robust server for any method whose uplink is a mean: a wrapper around its `Algorithm`.

Let :math:`\Delta_i` be the increment that client i would upload with weight :math:`w_i` (total over weight). The server
of the method receives a robust estimate of the centre of the cohort's :math:`\Delta_i` in place of
:math:`\sum_i w_i \Delta_i / \sum_i w_i`, as the upload of one client of weight 1.

Weights. A weight is the client's own word, and an attacker's would be as large as it likes. Clients therefore count the
same; a weight says only that a client contributes (above zero). Under an ``Upload.weight`` with several entries each
part is estimated by itself, and under an entry [k] (IFCA's models) each of the k among those who contribute to it.

A round's estimate needs all of its uploads at once: the reduction is `Reduction.STACK`, in the memory of one upload for
each slot of the cohort on every device, gathered by the engine from blocks of clients and from devices. A client that
is not in the cohort, dropped out, diverged or sent a number that is not finite does not count.

Servers that keep a sum over all clients up to date by the mean (SCAFFOLD's and FedDyn's variates, L2GD) receive the
estimate times the number of contributors for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, Reduced, Reduction, Server, ServerContext, Stacked, wrapped_server
from jaxpfl.core.types import Array, Key, Metrics, PyTree
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.robust.aggregators import Aggregator
from jaxpfl.uploads.robust.rules import Rule


def robust(algorithm: Algorithm, aggregator: Aggregator, method: str = "the method") -> Algorithm:
    """An algorithm whose server is given a robust estimate in place of the mean of the uploads.

    ``below_quorum`` among its metrics is 1 in a round with too few uploads for the rule's guarantee (Krum's).

    Args:
      algorithm: one whose server receives a mean.
      aggregator: the estimate in its place; the mean itself changes nothing.
      method: the algorithm's name in messages.

    Raises:
      JaxpflError: if the method's uploads are not summed and, when traced, are not floating-point numbers.
    """
    rule = aggregator.rule
    if rule is None:
        return algorithm
    if algorithm.reduction is not Reduction.SUM:
        raise JaxpflError(
            f"aggregate = {aggregator.name} stands for a mean of uploads: the server of {method} sees each of them"
        )
    return algorithm._replace(
        server=_server(algorithm.server, rule, aggregator.quorum),
        reduction=Reduction.STACK,
    )


def _server(inner: Server, rule: Rule, quorum: int) -> Server:
    def update(key: Key, hp: PyTree, ctx: ServerContext, state: PyTree, uploads: Stacked) -> tuple[PyTree, Metrics]:
        reduced, counts = _estimated(rule, uploads)
        state, metrics = inner.update(key, hp, ctx, state, reduced)
        if quorum > 1:
            short = jnp.stack([((count > 0) & (count < quorum)).any() for count in counts]).any()
            metrics |= {"below_quorum": short.astype(jnp.float32)}
        return state, metrics

    return wrapped_server(inner, init=inner.init, update=update, state=lambda state: state)


def _estimated(rule: Rule, uploads: Stacked) -> tuple[Reduced, list[Array]]:
    """The estimate as a sum of weight 1, and the number of clients behind each entry of the weight."""
    weights, structure = jax.tree.flatten(uploads.weight)
    increments = jax.vmap(trees.prefix_divide)(uploads.total, uploads.weight)
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(increments)):
        raise JaxpflError("a robust aggregate needs uploads of floating-point numbers")

    def one(part: PyTree, weight: Array) -> tuple[PyTree, Array]:
        present = uploads.valid & (weight > 0) & jax.vmap(trees.all_finite)(part)
        return rule(part, present), present.sum(dtype=jnp.int32)

    totals, counts = [], []
    for weight, part in zip(weights, structure.flatten_up_to(increments), strict=True):
        by_entry = one
        for _ in range(weight.ndim - 1):
            by_entry = jax.vmap(by_entry, in_axes=1)
        total, count = by_entry(part, weight)
        totals.append(total)
        counts.append(count)
    ones = [(count > 0).astype(weight.dtype) for count, weight in zip(counts, weights, strict=True)]
    total, weight = (jax.tree.unflatten(structure, leaves) for leaves in (totals, ones))
    return Reduced(total, weight, uploads.contributors), counts
