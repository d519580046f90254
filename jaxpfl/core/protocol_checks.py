"""Checks of an algorithm's functions against the protocol, by shape and dtype.

The checks run while a program is traced and add nothing to the program. Without these checks, ``jnp.where`` and ``+``
would broadcast a leaf of a wrong shape, and the result would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jaxpfl.core.protocol import ALL_STEPS, Client, Message, Server, Stacked, Upload
from jaxpfl.core.types import Array, Metrics, PyTree, Scalar
from jaxpfl.support.errors import JaxpflError, shown


def call_update(client: Client, *given: Any) -> tuple[PyTree, Upload, Metrics]:
    """Call ``client.update(key, hp, ctx, message, state, splits)`` and check the result.

    Raises:
      JaxpflError: if the result is not (state, `Upload`, metrics), or the new state differs from the old state in
        structure, shape or dtype.
    """
    new, upload, metrics = _returned("client.update", client.update(*given), "state", "Upload", "metrics")
    if not isinstance(upload, Upload):
        raise JaxpflError(
            f"client.update must return (state, Upload, metrics), but the second value has type {type(upload).__name__}"
        )
    check_same("client.update: state", new, given[4], like="client.init's state")
    _check_upload(upload)
    return new, upload, metrics


def call_idle(client: Client, *given: Any) -> tuple[PyTree, Metrics]:
    """Call ``client.idle(key, hp, ctx, state, splits)`` and check the result.

    Raises:
      JaxpflError: if the result is not (state, metrics), or the new state differs from the old state in structure,
        shape or dtype.
    """
    assert client.idle is not None
    new, metrics = _returned("client.idle", client.idle(*given), "state", "metrics")
    check_same("client.idle: state", new, given[3], like="client.init's state")
    return new, metrics


def call_server(server: Server, *given: Any, shared: PyTree) -> tuple[PyTree, Metrics]:
    """Call ``server.update(key, hp, ctx, state, Reduced or Stacked)`` and check the result.

    Args:
      shared: `Message.shared`, the part of the message that all clients receive.

    Raises:
      JaxpflError: if the result is not (state, metrics), or the new state differs from the old state in structure,
        shape or dtype. If the call itself fails, and the uploads differ from ``shared`` in structure (or in shape, if
        uploads are summed), the error names this difference as the likely cause. Without a failure, such a difference
        is allowed, because a method may upload a tree that differs from the message.
    """
    try:
        result = server.update(*given)
    except (TypeError, ValueError) as error:
        uploads = given[4]
        try:
            if isinstance(uploads, Stacked):
                uploads, shared = jax.tree.map(lambda _: np.zeros(()), (uploads, shared))
            check_same("Upload.total", uploads.total, shared, like="Message.shared", dtypes=False)
        except JaxpflError as difference:
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise JaxpflError(f"server.update failed ({said}); {difference}") from error
        raise
    new, metrics = _returned("server.update", result, "state", "metrics")
    check_same("server.update: state", new, given[3], like="server.init's state")
    return new, metrics


def call_gradients(count: Callable[..., Scalar], limit: Scalar, *given: Any) -> Scalar:
    """Call a function of `protocol.Gradients` and check the count that it returns.

    Args:
      count: the function.
      limit: `ClientContext.step_limit`; the count can be checked only if the limit is static.
      given: further arguments of the function.

    Raises:
      JaxpflError: if the count is negative, or so large that `ALL_STEPS` was used as if it were a number of steps.
    """
    found = count(limit, *given)
    if isinstance(found, int) and not 0 <= found < ALL_STEPS:
        raise JaxpflError(
            f"Gradients counted {found} gradients in a round: count jnp.minimum(work.steps, limit), because limit is "
            f"{ALL_STEPS} if there is no limit, or use jaxpfl.algorithms.gradients"
        )
    return found


def check_message(message: Any, num_clients: int) -> None:
    """Check that a broadcast is a `Message`, and that its individual messages have a row for each client.

    Raises:
      JaxpflError: if the broadcast is not a `Message`, or a leaf has a different number of rows; the error names the
        leaf.
    """
    if not isinstance(message, Message):
        raise JaxpflError(f"server.broadcast must return a Message, got a {type(message).__name__}")
    _check_arrays("server.broadcast: Message.per_client", message.per_client)
    for path, leaf in jax.tree.leaves_with_path(message.per_client):
        if leaf.shape[:1] != (num_clients,):
            raise JaxpflError(
                f"server.broadcast: Message.per_client{keystr(path)} is {_typed(leaf)}, but must have a leading "
                f"axis of {num_clients} clients"
            )


def check_prediction(what: str, logits: Any, examples: int) -> None:
    """Check that a prediction, which errors call ``what``, is an array with a row for each example.

    Raises:
      JaxpflError: if the prediction is not such an array; the error gives the shape.
    """
    if getattr(logits, "shape", ())[:1] != (examples,):
        raise JaxpflError(f"{what} must have a row for each of {examples} examples, got {_typed(logits)}")


def check_metric(name: str, values: Any, *examples: int) -> None:
    """Check that a task's metric has the right shape.

    A metric of examples has one number for each example. It must not be a mean over the examples, because such a mean
    would include padding.

    Args:
      name: the metric's name, for the error.
      values: the metric's value.
      examples: expected shape, the number of examples; omit it for a metric that is one number for each client.

    Raises:
      JaxpflError: if the shape is wrong; the error gives the shape.
    """
    if not _is_number(values, examples):
        each = f"each of {examples[0]} examples" if examples else "a client"
        raise JaxpflError(f"the task's metric {name!r} must be one number for {each}, got {_typed(values)}")


def check_same(what: str, got: PyTree, want: PyTree, *, like: str, dtypes: bool = True) -> None:
    """Check that two trees have the same structure, shapes and (with ``dtypes``) dtypes.

    Args:
      what: name of the tree ``got`` in the error, such as ``"client.update: state"``.
      got: the tree to check.
      want: tree with the expected structure, shapes and dtypes.
      like: name of the tree ``want`` in the error.
      dtypes: whether dtypes are compared too.

    Raises:
      JaxpflError: if the trees differ; the error names the first leaf that differs.
    """
    _check_arrays(what, got)
    _check_arrays(like, want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise JaxpflError(f"{what} differs in structure from {like}: {_structures(got, want)}")
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            raise JaxpflError(f"{what}{keystr(path)} is {_typed(a)}, but {like}{keystr(path)} is {_typed(b)}")


def _check_upload(upload: Upload) -> None:
    """Check that an upload consists of arrays, and that its weight is a tree prefix of its total.

    Each leaf of the weight corresponds to one or several leaves of the total, whose shapes must begin with the shape of
    the weight's leaf.

    Raises:
      JaxpflError: if a check fails; the error names the part of the upload.
    """
    for name in ("total", "weight"):
        _check_arrays(f"client.update: Upload.{name}", getattr(upload, name))

    def check(path: tuple[Any, ...], weight: Array, part: PyTree) -> None:
        for leaf in jax.tree.leaves(part):
            if leaf.shape[: weight.ndim] != weight.shape:
                raise JaxpflError(
                    f"client.update: Upload.weight{keystr(path)} has shape {list(weight.shape)}, which must be a "
                    f"prefix of the shape of Upload.total, {list(leaf.shape)}"
                )

    try:
        jax.tree.map_with_path(check, upload.weight, upload.total)
    except (TypeError, ValueError) as error:
        raise JaxpflError(
            "client.update must return an Upload whose weight is a tree prefix of its total: "
            f"{_structures(upload.weight, upload.total)}"
        ) from error


def _returned(what: str, result: Any, *names: str) -> Any:
    """Return a method function's result after checking that it is a tuple with one value for each of ``names``.

    The last value, the metrics, must be a dict of scalars.
    """
    if not isinstance(result, tuple) or len(result) != len(names):
        kind = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise JaxpflError(f"{what} must return ({', '.join(names)}), got {kind}")
    *_, metrics = result
    if not isinstance(metrics, dict):
        raise JaxpflError(f"{what}: metrics must be a dict of scalars, got {shown(metrics)}")
    for name, value in metrics.items():
        if not _is_number(value):
            raise JaxpflError(f"{what}: metric {name!r} must be a scalar, got {_typed(value)}")
    return result


def _check_arrays(what: str, tree: PyTree) -> None:
    """Refuse a tree, which errors call ``what``, with a leaf that is not an array."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise JaxpflError(f"{what}{keystr(path)} must be an array, got {shown(leaf)}")


def _structures(got: PyTree, want: PyTree) -> str:
    """Describe the difference between two trees: the first leaf that only one tree has, or else the two structures."""
    own, other = ([keystr(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (got, want))
    for mine, theirs, said in ((own, other, "has a leaf"), (other, own, "lacks the leaf")):
        alone = [path for path in mine if path not in theirs]
        if alone and alone[0]:
            return f"it {said} {alone[0]}"
    first, second = (shown(jax.tree.structure(tree), 200) for tree in (got, want))
    return f"{first} for {second}"


def _is_number(value: Any, shape: tuple[int, ...] = ()) -> bool:
    """True for an array of this shape; a Python number has the shape ()."""
    return getattr(value, "shape", () if isinstance(value, Number) else None) == shape


def _typed(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else shown(leaf)
