"""The model axis: each client's parameters and states in parts, on several devices that work on it together.

An array lies in equal parts along its largest dimension that the number of devices divides, or whole on each of them if
it has none. A program is that of one device with these layouts as constraints; the compiler divides its operations and
inserts what they exchange (GSPMD, arXiv:2105.04663), so that results differ in the order of additions alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpfl.core.types import Array, PyTree
from jaxpfl.support.errors import JaxpflError

MODEL = "model"
"""The mesh axis over which one client's arrays are sharded."""


class ModelAxis(NamedTuple):
    """Devices that hold one client's arrays together.

    Attributes:
      mesh: all devices, with an axis `MODEL`.
    """

    mesh: Mesh

    def layout(self, tree: PyTree, *lead: str | None) -> PyTree:
        """The layout of every leaf, by its shape behind leading axes.

        Args:
          tree: arrays or shapes.
          lead: the mesh axis of each leading axis of all leaves, None for one that is not sharded.
        """
        count = self.mesh.shape[MODEL]
        return jax.tree.map(lambda a: NamedSharding(self.mesh, P(*lead, *_parts(a, count, len(lead)))), tree)

    def lay(self, tree: PyTree) -> PyTree:
        """The same arrays of one client or of the server, which the compiler is to hold in parts; within a program."""
        within = jax.sharding.get_abstract_mesh()  # in `shard_map`, where the axis of clients is not the compiler's
        mesh, count = self.mesh if within.empty else within, self.mesh.shape[MODEL]

        def lay(a: Array) -> Array:
            parts = _parts(a, count)
            if not any(parts):
                return a
            return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*parts)))

        return jax.tree.map(lay, tree)


def lay(axis: ModelAxis | None, tree: PyTree) -> PyTree:
    """`ModelAxis.lay`; without an axis the tree as it is."""
    return tree if axis is None else axis.lay(tree)


def bytes_of_part(shapes: PyTree, count: int) -> int:
    """Bytes on each of so many devices of a tree of one client.

    Raises:
      JaxpflError: if no array of it can be divided.
    """
    leaves = jax.tree.leaves(shapes)
    divided = [any(_parts(a, count)) for a in leaves]
    if not any(divided):
        raise JaxpflError(f"plan.model_shards = {count}: no array of the model has a dimension divisible by {count}")
    sizes = [math.prod(a.shape) * a.dtype.itemsize for a in leaves]
    return sum(size // count if parts else size for size, parts in zip(sizes, divided, strict=True))


def _parts(a: jax.ShapeDtypeStruct | Array, count: int, lead: int = 0) -> Sequence[str | None]:
    """The mesh axis of each dimension behind the leading ones: `MODEL` for one of them at most."""
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):  # keys
        return ()
    shape = a.shape[lead:]
    divisible = [(size, place) for place, size in enumerate(shape) if size and size % count == 0]
    if not divisible:
        return ()
    _, chosen = max(divisible)
    return [MODEL if place == chosen else None for place in range(len(shape))]
