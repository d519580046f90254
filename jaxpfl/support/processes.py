"""Processes that share one run: their number, exchanges of values, and arrays that are sharded over them.

After `distributed.start`, every process runs the same program with the same settings, and each device stores the data
and states of a part of the clients. A value that only one process decides or reads (a file, the time, a random seed,
the free memory) must reach the other processes before it affects the run: use `on_first`, `exchange` or `agree`. In a
run with a single process, these functions only call their argument or return it, without starting JAX.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, shown

T = TypeVar("T")
_SHORT = 2048
"""Largest number of bytes in a message that needs only one exchange; a longer message needs two."""
_BLOCK_BYTES = 2**26
"""Largest number of bytes in a message, and in a block of an array that is exchanged at once."""
_CODE_BYTES = 32

_key = b""
_messages = 0


class AgreedError(JaxpflError):
    """An error that every process raises."""


class _Refused(NamedTuple):
    """An error sent instead of a value; ``alone`` is true if only the sending process tried to compute the value."""

    said: str
    alone: bool


def several() -> bool:
    """Return True if other processes share this run."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def count() -> int:
    """Return the number of processes in the run."""
    return jax.process_count() if several() else 1


def index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index() if several() else 0


def is_first() -> bool:
    """Return True for the process that prints and writes files."""
    return not several() or jax.process_index() == 0


def secure(token: str) -> None:
    """Set the key that authenticates this run's messages, so that a sender must have the same token.

    Each run has a new key, so messages from earlier runs are refused.
    """
    global _key, _messages
    nonces = multihost_utils.process_allgather(np.frombuffer(os.urandom(_CODE_BYTES), np.uint8))
    _key, _messages = hmac.digest(os.fsencode(token), np.asarray(nonces).tobytes(), "sha256"), 0


def exchange(value: T) -> list[T]:
    """Return the values of all processes, in their order; every process must call this function.

    Args:
      value: JSON value; tuples are returned as lists.

    Raises:
      JaxpflError: if a message is not from this run.
      AgreedError: in every process, if a process sent an error instead of its value.
    """
    if not several():
        return [value]
    values = _all(value)
    refused = {number: v for number, v in enumerate(values) if isinstance(v, _Refused)}
    for number, error in refused.items():
        everyones = len(refused) == len(values) and len(set(refused.values())) == 1
        raise AgreedError(error.said if everyones or error.alone else f"process {number}: {error.said}")
    return values


def on_first(do: Callable[[], T]) -> T:
    """Call ``do`` in the first process only, and return its result (or raise its error) in every process.

    Raises:
      AgreedError: in the other processes, if ``do`` raises an exception. The message is the exception's message; the
        name of the exception's type precedes it, unless the type is `JaxpflError`. The first process raises the
        exception itself.
    """
    if not several():
        return do()
    return _exchange_result(do, alone=True)[0] if is_first() else exchange(cast(T, None))[0]


def together(do: Callable[[], T]) -> T:
    """Call ``do`` in every process, and return only if none of them fails.

    Raises:
      AgreedError: if ``do`` fails in another process, with the message of the first process that failed. A process in
        which ``do`` itself fails raises the original error.
    """
    if not several():
        return do()
    held: list[T] = []
    _exchange_result(lambda: held.append(do()))
    return held[0]


def agree(what: str, value: Any) -> None:
    """Check that a value is the same in all processes.

    Args:
      what: name of the value in the message.
      value: JSON value. For a (nested) mapping, the message names the first entry that differs.

    Raises:
      AgreedError: if two values differ.
    """
    first, *others = exchange(value)
    for number, other in enumerate(others, 1):
        if _equal(first, other):
            continue
        names = []
        while isinstance(first, Mapping) and isinstance(other, Mapping):
            names.append(next(n for n in {**first, **other} if not _equal(first.get(n), other.get(n))))
            first, other = first.get(names[-1]), other.get(names[-1])
        what = " ".join([what, ".".join(names)]) if names else what
        raise AgreedError(
            f"{what} must be the same in every process: process 0 has {shown(first)}, process {number} {shown(other)}"
        )


def _equal(a: Any, b: Any) -> bool:
    return a == b or repr(a) == repr(b)  # NaN equals NaN


def fetch(tree: Any) -> Any:
    """Return whole arrays as NumPy arrays in every process. If there are several processes, keys stay JAX arrays."""
    return jax.tree.map(_fetched if several() else np.asarray, tree)


def fetch_to_first(tree: Any) -> Any:
    """Move whole arrays to the host of the first process, block by block; the other processes get None."""
    leaves, structure = jax.tree.flatten(tree)
    found = [_fetched_to_first(leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, found) if is_first() else None


def put(value: Any, layout: Sharding) -> jax.Array:
    """Place an array on the devices with a given sharding."""
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(layout, value.ndim):
            return value
        if _is_key(value):
            return jax.random.wrap_key_data(put(jax.random.key_data(value), layout))
    host = _fetched(value)
    return jax.make_array_from_callback(host.shape, layout, lambda part: host[part])


def deal(tree: Any, shapes: Any, layouts: Any) -> Any:
    """Place arrays from the first process's host on the devices of all processes.

    Args:
      tree: NumPy arrays in the first process, None in the others.
      shapes: shapes and dtypes of the arrays (anything with ``shape`` and ``dtype``).
      layouts: shardings of the arrays.
    """
    given = jax.tree.leaves(tree) if tree is not None else None
    leaves, structure = jax.tree.flatten(shapes)
    made = [
        _dealt(None if given is None else given[i], leaf, layout)
        for i, (leaf, layout) in enumerate(zip(leaves, jax.tree.leaves(layouts), strict=True))
    ]
    return jax.tree.unflatten(structure, made)


def _exchange_result(do: Callable[[], T], *, alone: bool = False) -> list[T]:
    """Exchange the results of ``do``; ``alone`` is true if no other process calls ``do``."""
    try:
        value = do()
    except AgreedError:  # the other processes raise the same error themselves
        raise
    except Exception as error:  # any error except a `JaxpflError` is a defect, so the message shows its type
        kind = "" if isinstance(error, JaxpflError) or not str(error) else f"{type(error).__name__}: "
        with suppress(AgreedError):
            exchange(_Refused(f"{kind}{error}" or type(error).__name__, alone))
        raise
    return exchange(value)


def _all(value: Any) -> list[Any]:
    """Exchange values between all processes, in one exchange of bytes, or in two if a value is long."""
    own = json.dumps({"refused" if isinstance(value, _Refused) else "value": value}).encode()
    rows = _gathered(len(own).to_bytes(8, "little") + own[:_SHORT].ljust(_SHORT, b"\0"))
    lengths = [int.from_bytes(row[:8], "little") for row in rows]
    rows = [row[8:] for row in rows]
    if (longest := max(lengths)) > _BLOCK_BYTES:
        raise JaxpflError(f"a message between processes has {longest} bytes, but at most {_BLOCK_BYTES} are allowed")
    if longest > _SHORT:
        rows = _gathered(own.ljust(1 << (longest - 1).bit_length(), b"\0"))  # a power of two: few sizes to compile
    return [_parsed(number, row[:length]) for number, (row, length) in enumerate(zip(rows, lengths, strict=True))]


def _gathered(own: bytes) -> list[bytes]:
    """Gather equally many bytes from every process (``own`` from this one), and check each message's authentication
    code.
    """
    global _messages
    _messages += 1
    sent = np.frombuffer(own + _code(index(), own), np.uint8)
    found = [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(sent))]
    for number, row in enumerate(found):
        if not hmac.compare_digest(_code(number, row[:-_CODE_BYTES]), row[-_CODE_BYTES:]):
            raise JaxpflError(f"process {number} has a different token, or none: give the same one to every process")
    return [row[:-_CODE_BYTES] for row in found]


def _code(number: int, content: bytes) -> bytes:
    """Return the authentication code of one process's current message, valid for no other message or process."""
    return hmac.digest(_key, f"{_messages} {number} ".encode() + content, "sha256")


def _parsed(number: int, message: bytes) -> Any:
    with expecting(f"the message of process {number}", "JSON of this run"):
        found = files.parse_json(message)
        return _Refused(*found["refused"]) if "refused" in found else found["value"]


def _fetched(value: Any) -> Any:
    if _is_key(value):
        return jax.random.wrap_key_data(_fetched(jax.random.key_data(value)))
    if _is_spread(value):
        value = jax.jit(_same, out_shardings=_everywhere(value.sharding))(value)
    return np.asarray(value)


def _same(a: jax.Array) -> jax.Array:  # a module-level function, so that each shape is compiled once
    return a


def _block(a: jax.Array, start: jax.Array, rows: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(a, start, rows, axis)


def _fetched_to_first(value: Any) -> np.ndarray | None:
    if not _is_spread(value):
        return np.asarray(value) if is_first() else None
    axis = _axis(value.sharding)
    rows = _rows_of_block(value, axis)
    cut = jax.jit(_block, static_argnums=(2, 3), out_shardings=_everywhere(value.sharding))
    whole = np.empty(value.shape, value.dtype) if is_first() else None
    for start in _starts(value.shape[axis], rows):
        part = np.asarray(cut(value, start, rows, axis))
        if whole is not None:
            whole[_along(axis, start, start + rows)] = part
    return whole


def _dealt(given: np.ndarray | None, shape: Any, layout: Sharding) -> jax.Array:
    """Send one array from the first process block by block; each process keeps only the rows for its own devices."""

    def sent(block: tuple[slice, ...], size: tuple[int, ...]) -> np.ndarray:
        part = np.zeros(size, shape.dtype) if given is None else np.ascontiguousarray(given[block])
        # Send bytes: the sum with the zeros of other processes would turn a negative float zero into a positive one.
        data = np.asarray(multihost_utils.broadcast_one_to_all(part.reshape(-1).view(np.uint8)))
        return data.view(shape.dtype).reshape(size)

    if layout.is_fully_replicated:
        return put(sent((), shape.shape), layout)
    axis = _axis(layout)
    every = shape.shape[axis]
    places = layout.addressable_devices_indices_map(shape.shape).values()
    own = [place[axis].indices(every) for place in places if place is not None]
    low, high = min(start for start, *_ in own), max(stop for _, stop, _ in own)
    held = np.empty(_resized(shape.shape, axis, high - low), shape.dtype)
    rows = _rows_of_block(shape, axis)
    for start in _starts(every, rows):
        block = sent(_along(axis, start, start + rows), _resized(shape.shape, axis, rows))
        first, last = max(low, start), min(high, start + rows)
        if first < last:
            held[_along(axis, first - low, last - low)] = block[_along(axis, first - start, last - start)]

    def part_of(place: tuple[slice, ...] | None) -> np.ndarray:
        assert place is not None
        start, stop, _ = place[axis].indices(every)
        return held[_along(axis, start - low, stop - low)]

    return jax.make_array_from_callback(shape.shape, layout, part_of)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_spread(value: Any) -> bool:
    """Return True if this process's devices store only a part of an array."""
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


def _everywhere(layout: Sharding) -> NamedSharding:
    assert isinstance(layout, NamedSharding)
    return NamedSharding(layout.mesh, P())


def _axis(layout: Sharding) -> int:
    """Return the only axis along which an array is sharded."""
    assert isinstance(layout, NamedSharding)
    return next(axis for axis, name in enumerate(layout.spec) if name is not None)


def _rows_of_block(like: Any, axis: int) -> int:
    """Return the number of rows in the largest block that is exchanged at once."""
    row = like.dtype.itemsize * int(np.prod(like.shape)) // max(like.shape[axis], 1)
    return max(1, min(like.shape[axis], _BLOCK_BYTES // max(row, 1)))


def _starts(every: int, rows: int) -> list[int]:
    """Return the first rows of blocks of ``rows`` rows that cover ``every`` rows; the last block may overlap."""
    return [min(start, every - rows) for start in range(0, every, rows)]


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def _resized(shape: tuple[int, ...], axis: int, rows: int) -> tuple[int, ...]:
    return (*shape[:axis], rows, *shape[axis + 1 :])
