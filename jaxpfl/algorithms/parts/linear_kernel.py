"""Local SGD of linear models in two fast forms: a kernel for GPUs, and a loop for CPUs.

A model has F features and K outputs. The kernel takes all steps of a client. An iteration of the loop takes one step of
several clients.

A step of a small model takes less time than reading the client's examples from memory and launching the step's
operations. In the kernel (Pallas, lowered to Triton), one program instance trains one client, and the client's
parameters stay in registers during all steps. A full batch is read once and stays in registers as well; a mini-batch is
gathered by its drawn indices. Arrays in Triton have powers of two as sizes. Rows beyond the batch and columns beyond
the features are masked.

In the loop for CPUs, an iteration consists of few operations, each on all clients that are trained together. The
results of both forms differ from the results of the plain form of `local_work.sgd` only by the order of additions.
Neither form can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxpfl.core import trees
from jaxpfl.core.protocol import ClientContext
from jaxpfl.core.types import Array, ClientData, Metrics, PyTree, Scalar
from jaxpfl.data import batching
from jaxpfl.data.passes import size_classes, switch_length
from jaxpfl.models import Task, layers
from jaxpfl.models.base import Affine
from jaxpfl.models.metrics import LOGISTIC, SQUARED, cross_entropy
from jaxpfl.privacy.guarded import GuardedData

if TYPE_CHECKING:
    from jaxpfl.algorithms.parts.local_work import LocalWork

Form = Literal["kernel", "interpreted", "loop", "plain"]

MOST_BYTES = 64 * 1024
"""Largest size of a padded batch, which a program instance holds in registers."""
MOST_WEIGHTS = 4 * 1024
"""Largest size in bytes of the model's padded weight matrix; each warp has a copy in registers."""
MOST_OUTPUTS = 10
"""Largest number of outputs. The kernel contains the operations of each output; with 16, compiling takes minutes."""
_OF_WARP = 8 * 1024
"""Bytes of a batch for each warp: 64 registers of each thread."""
_SHORT, _NARROW = 16, 63
"""Largest numbers of examples and features for which a CPU sums gradients faster one by one than by a product."""

CALLS = "pallas_call", "_train_in_loop"
"""Names of the kernel and of the loop in traced programs."""

_form = jax.make_user_context("plain")


_Weights = list[tuple[Array, Array]]
"""Column of the model's weight matrix, [F], and bias, [], of each output."""
_Loss = Callable[[list[Array], list[Array]], tuple[Array, list[Array]]]
"""Function from the predictions of each output and the labels to the losses and their derivatives, all [b]."""


def form(of: Form) -> AbstractContextManager[Any]:
    """Return a context manager in which programs are traced with linear models trained in the form ``of``.

    "kernel" uses the Pallas kernel, and "loop" one loop over several clients' steps; training that the form does not
    support is traced as with "plain". "interpreted" runs the kernel's operations one by one on any device. "plain" is
    the default.
    """
    return _form(of)


def is_linear(task: Task) -> bool:
    """True for the model ``linear`` with the cross-entropy, the logistic or the squared loss."""
    return isinstance(task.model.apply, Affine) and any(task.loss is loss for loss in _LOSSES)


class _Clients(NamedTuple):
    """Inputs of local SGD for one client. For m clients, leaves have a leading axis, [m, ...], or [1, ...] if all
    clients have the same value.

    Attributes:
      counts: index of the client's first example among all examples, number of its examples, and of steps, [3] int32.
      coefficients: learning rate, weight decay and proximal coefficient, [3].
      params: weight matrix [F, K] and bias [K] before the first step.
      anchor: parameters of the proximal term; None for ``params``.
      indices: drawn positions of each step's batch, [steps, b]; None for full batches.
    """

    counts: Any
    coefficients: Any
    params: PyTree
    anchor: PyTree | None
    indices: Any


def local_sgd(
    work: LocalWork,
    task: Task,
    ctx: ClientContext,
    data: ClientData,
    params: PyTree,
    coefficients: tuple[Scalar, Scalar, Scalar],
    steps: int | None,
    anchor: PyTree | None,
    uploaded: bool,
) -> tuple[PyTree, Metrics] | None:
    """Run `local_work.sgd` in the chosen form; return None in the plain form, or if the form does not support the
    training.

    Both forms support plain SGD on tasks that satisfy `is_linear`, without clipping, noise in steps or augmentation.
    ``coefficients`` are the rate, the weight decay and ``prox``; the other arguments are as in `local_work.sgd`.
    """
    changed = not work.is_plain_sgd or work.keeps_optimizer or work.augment is not None
    private = isinstance(data, GuardedData) or (uploaded and work.step_noise is not None)
    if _form.value == "plain" or not is_linear(task) or changed or private:
        return None
    head, (x, y), loop = params["head"], data.examples[:2], _form.value == "loop"
    features, outputs = head["kernel"].shape
    labels, dtype = 1 if task.loss is cross_entropy else outputs, head["kernel"].dtype
    plan = work.batches(work.steps, work.own_steps) if steps is None else work.batches(steps)
    row = _power(features) * dtype.itemsize
    fits = _power(plan.batch_size) * row <= MOST_BYTES and outputs * row <= MOST_WEIGHTS
    # Triton's offsets are signed and, for arrays up to 4 GiB, 32 bits long.
    if not fits or outputs > (layers.NARROW if loop else MOST_OUTPUTS) or x.size >= 2**31 or y.size != labels * len(y):
        return None
    indices = None
    if not plan.full:
        indices, _ = batching.draw_batches(plan, ctx.batch_key, ctx.participations + ctx.idle_rounds, data.size)
    counts = jnp.stack([data.start, data.size, work.step_limit(steps, ctx, data)])
    numbers = jnp.stack([jnp.asarray(number, dtype) for number in coefficients])
    client = _Clients(counts, numbers, head, None if anchor is None else anchor["head"], indices)
    (loss_of,) = (of for loss, of in _LOSSES.items() if loss is task.loss)
    store = x.reshape(-1, features), y.reshape(-1, labels)

    def train(length: int) -> PyTree:
        of_form = _train_in_loop if loop else partial(_train, interpreted=_form.value == "interpreted")
        return _over_clients(partial(of_form, loss_of, length))(store, client)

    # A CPU saves work with shorter batches for clients with few examples.
    lengths = size_classes(work.sizes) if loop and plan.full else (plan.batch_size,)
    new, loss = switch_length(train, data.size, lengths)
    return {"head": new}, {"train_loss": loss}


def _over_clients(train: Callable[[int, PyTree, _Clients], PyTree]) -> Callable[[PyTree, _Clients], PyTree]:
    """Return a function of all clients' examples and one client; its ``vmap`` calls ``train`` once for m clients."""

    def alone(store: PyTree, client: _Clients) -> PyTree:
        of_one = train(1, store, jax.tree.map(lambda a: a[None], client))
        return jax.tree.map(lambda a: a[0], of_one)

    either = custom_vmap(alone)

    @either.def_vmap
    def together(number: int, mapped: Any, store: PyTree, clients: _Clients) -> tuple[PyTree, PyTree]:
        of_store, of_clients = mapped
        if any(jax.tree.leaves(of_store)):  # each client has its own store
            axes = jax.tree.map(lambda by_client: 0 if by_client else None, (of_store, of_clients))
            new = jax.vmap(alone, in_axes=axes)(store, clients)
        else:
            clients = jax.tree.map(lambda a, by_client: a if by_client else a[None], clients, of_clients)
            new = train(number, store, clients)
        return new, jax.tree.map(lambda _: True, new)

    return either


def _power(size: int) -> int:
    """Smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def _train(
    loss_of: _Loss, batch: int, number: int, store: PyTree, clients: _Clients, *, interpreted: bool
) -> tuple[PyTree, Array]:
    """Train ``number`` clients on batches of at most ``batch`` examples; return their parameters and mean losses."""
    from jax.experimental import pallas as pl  # only here, because the import takes time
    from jax.experimental.pallas import triton

    features, outputs = clients.params["kernel"].shape[1:]
    rows, columns = _power(batch), _power(features)

    def instance(store: PyTree, clients: _Clients, new: PyTree, mean_loss: Any) -> None:
        nth, (row, column) = pl.program_id(0), (jnp.arange(size, dtype=jnp.int32) for size in (rows, columns))
        inside = column < features

        def own(ref: Any, *place: Any) -> Any:
            return ref.at[(nth if ref.shape[0] > 1 else 0, *place)]

        def weights(of: PyTree) -> _Weights:
            columns = [triton.load(own(of["kernel"], column, k), mask=inside, other=0) for k in range(outputs)]
            return [(w, own(of["bias"], k)[...]) for k, w in enumerate(columns)]

        start, size, steps = (own(clients.counts, n)[...] for n in range(3))
        rate, decay, prox = (own(clients.coefficients, n)[...] for n in range(3))
        used = jnp.minimum(size, batch)
        valid, count = row < used, jnp.maximum(used, 1).astype(rate.dtype)

        def gathered(position: Array) -> tuple[Array, list[Array]]:
            x, y = store
            place = start + position
            mask = valid[:, None] & inside[None, :]
            block = triton.load(x.at[place[:, None], column[None, :]], mask=mask, other=0).astype(rate.dtype)
            return block, [triton.load(y.at[place, k], mask=valid, other=0) for k in range(y.shape[1])]

        first = weights(clients.params)
        anchor = first if clients.anchor is None else weights(clients.anchor)
        whole = gathered(row) if clients.indices is None else None

        def step(t: Array, carry: tuple[_Weights, Array]) -> tuple[_Weights, Array]:
            now, total = carry
            x, y = whole or gathered(triton.load(own(clients.indices, t, row), mask=valid, other=0))
            predictions = [(x * w[None, :]).sum(axis=1) + b for w, b in now]
            losses, slopes = loss_of(predictions, y)
            slopes = [jnp.where(valid, slope, 0) / count for slope in slopes]
            gradient = [((slope[:, None] * x).sum(axis=0), slope.sum()) for slope in slopes]

            def move(w: Array, g: Array, a: Array) -> Array:
                return w - rate * (g + prox * (w - a) + decay * w)

            return jax.tree.map(move, now, gradient, anchor), total + jnp.where(valid, losses, 0).sum() / count

        last, total = jax.lax.fori_loop(0, steps, step, (first, jnp.zeros_like(rate)))
        for k, (w, b) in enumerate(last):
            triton.store(new["kernel"].at[nth, column, k], w, mask=inside)
            new["bias"][nth, k] = b
        mean_loss[nth] = total / jnp.maximum(steps, 1).astype(rate.dtype)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((number, *a.shape[1:]), a.dtype), clients.params)
    dtype = clients.coefficients.dtype
    losses = jax.ShapeDtypeStruct((number,), dtype)
    warps = max(1, rows * columns * dtype.itemsize // _OF_WARP)
    options = {"compiler_params": triton.CompilerParams(num_warps=warps), "interpret": interpreted}
    return pl.pallas_call(instance, grid=(number,), out_shape=(shapes, losses), **options)(store, clients)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _train_in_loop(loss_of: _Loss, batch: int, number: int, store: PyTree, clients: _Clients) -> tuple[PyTree, Array]:
    """Train as `_train` does, with a loop over the steps of all clients.

    Sums over few elements are slow in XLA's programs for CPUs. Losses are therefore summed over the steps first, and
    the gradients of few examples are added one by one.
    """
    (start, size, steps), (rate, decay, prox) = clients.counts.T, clients.coefficients.T
    row, used = jnp.arange(batch, dtype=jnp.int32), jnp.minimum(size, batch)[:, None]
    valid, count = row < used, jnp.maximum(used, 1).astype(rate.dtype)

    def gathered(position: Array) -> tuple[Array, list[Array]]:
        place = start[:, None] + jnp.where(valid, position, 0)
        x, y = (a.at[place].get(mode="promise_in_bounds", wrap_negative_indices=False) for a in store)
        return trees.where_rows(valid, x.astype(rate.dtype)), list(jnp.moveaxis(y, -1, 0))

    def weights(of: PyTree) -> _Weights:
        columns = zip(jnp.moveaxis(of["kernel"], -1, 0), of["bias"].T, strict=True)
        return [(jnp.broadcast_to(w, (number, w.shape[1])), jnp.broadcast_to(b, (number,))) for w, b in columns]

    def summed(slope: Array, x: Array) -> Array:
        if batch > _SHORT or x.shape[2] > _NARROW:
            return jnp.einsum("mb,mbf->mf", slope, x)
        return reduce(jnp.add, [slope[:, n, None] * x[:, n] for n in range(batch)])

    first = weights(clients.params)
    anchor = first if clients.anchor is None else weights(clients.anchor)
    whole = gathered(row) if clients.indices is None else None

    def step(t: Array, carry: tuple[_Weights, Array]) -> tuple[_Weights, Array]:
        now, total = carry
        x, y = whole or gathered(clients.indices[:, t])
        losses, slopes = loss_of([jnp.einsum("mbf,mf->mb", x, w) + b[:, None] for w, b in now], y)
        slopes = [jnp.where(valid, slope / count, 0) for slope in slopes]
        gradient = [(summed(slope, x), slope.sum(axis=1)) for slope in slopes]

        def move(w: Array, g: Array, a: Array) -> Array:
            eta, decays, pull, going = (v.reshape(-1, *[1] * (w.ndim - 1)) for v in (rate, decay, prox, t < steps))
            return jnp.where(going, w - eta * (g + pull * (w - a) + decays * w), w)

        return jax.tree.map(move, now, gradient, anchor), jnp.where((t < steps)[:, None], total + losses, total)

    last, total = jax.lax.fori_loop(0, steps.max(), step, (first, jnp.zeros((number, batch), rate.dtype)))
    kernel, bias = (jnp.stack(leaves, axis=-1) for leaves in zip(*last, strict=True))
    mean_loss = jnp.where(valid, total / count, 0).sum(axis=1) / jnp.maximum(steps, 1)
    return {"kernel": kernel, "bias": bias}, mean_loss


def _softmax_loss(predictions: list[Array], labels: list[Array]) -> tuple[Array, list[Array]]:
    largest = reduce(jnp.maximum, predictions)
    exps = [jnp.exp(one - largest) for one in predictions]
    total = reduce(jnp.add, exps)
    right = [labels[0] == k for k in range(len(exps))]
    of_label = reduce(jnp.add, [jnp.where(yes, a, 0) for yes, a in zip(right, predictions, strict=True)])
    slopes = [exp / total - yes.astype(total.dtype) for yes, exp in zip(right, exps, strict=True)]
    return jnp.log(total) + largest - of_label, slopes


def _logistic_loss(predictions: list[Array], labels: list[Array]) -> tuple[Array, list[Array]]:
    pairs = [(a, y.astype(a.dtype)) for a, y in zip(predictions, labels, strict=True)]
    losses = [jnp.maximum(a, 0) + jnp.log(1 + jnp.exp(-jnp.abs(a))) - y * a for a, y in pairs]
    return reduce(jnp.add, losses), [1 / (1 + jnp.exp(-a)) - y for a, y in pairs]


def _squared_loss(predictions: list[Array], labels: list[Array]) -> tuple[Array, list[Array]]:
    residuals = [a - y.astype(a.dtype) for a, y in zip(predictions, labels, strict=True)]
    return reduce(jnp.add, [jnp.square(one) / 2 for one in residuals]), residuals


_LOSSES = {cross_entropy: _softmax_loss, LOGISTIC.function: _logistic_loss, SQUARED: _squared_loss}
